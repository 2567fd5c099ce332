"""load_checkpoint and update_weights: what fits, what does not, and what stays of the model then."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import fp8graph
from fp8_checkpoints import CONFIG
from fp8graph import CheckpointError
from fp8graph.libraries.stored_linear import StoredLinear
from helpers import first_fast, same_bits

N, K = 256, 384
HF: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(K)
        self.up = nn.Linear(K, N)
        self.down = nn.Linear(N, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)))


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(16, K), nn.Linear(K, 16, bias=False)
        self.last.weight = self.first.weight


def tensors() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for name, (n, k) in {"up": (N, K), "down": (K, N)}.items():
        found[f"{name}.weight"] = (torch.randn(n, k, generator=random) * 50).to(torch.float8_e4m3fn)
        found[f"{name}.weight_scale_inv"] = torch.rand(n // 128, k // 128, generator=random) / 1000 + 0.001
    found["up.bias"] = torch.randn(N, generator=random)
    found["norm.weight"], found["norm.bias"] = torch.randn(K, generator=random), torch.randn(K, generator=random)
    return found


def written(folder: Path, given: dict[str, Tensor] | None = None, config: Any = HF) -> Path:
    save_file(tensors() if given is None else given, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def test_bytes_and_scales_are_those_of_the_file(tmp_path: Path) -> None:
    sizes: list[int] = []
    model = fp8graph.load_checkpoint(Model().eval(), written(tmp_path), progress=sizes.append)
    assert isinstance(model.up, StoredLinear)
    assert not model.up.training
    file = load_file(tmp_path / "model.safetensors")
    state = model.state_dict()
    assert state.keys() == file.keys()
    assert same_bits([state[name] for name in file], list(file.values()))
    assert sum(sizes) == sum(x.nbytes for x in file.values())


def test_a_model_on_the_meta_device(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Model()
    fp8graph.load_checkpoint(model, written(tmp_path))
    assert {x.device.type for x in model.state_dict().values()} == {"cpu"}
    assert model.up.bias.requires_grad
    assert model(torch.randn(4, K)).isfinite().all()


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    one = {"first.weight": torch.randn(16, K)}
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Tied()
        fp8graph.load_checkpoint(model, written(tmp_path, tensors() | one))
        assert model.last.weight is model.first.weight
        assert torch.equal(model.last.weight, one["first.weight"])


def changed(**changes: Tensor | None) -> dict[str, Tensor]:
    found: dict[str, Any] = tensors() | {name.replace("__", "."): x for name, x in changes.items()}
    return {name: x for name, x in found.items() if x is not None}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (changed(norm__bias=None), "the checkpoint does not have norm.bias. With strict=False that is a warning."),
        (changed(more=torch.ones(1)), "the model has no place for more. With strict=False"),
        (changed(norm__weight=torch.ones(3)), r"'norm.weight' has shape \[3\], and that of the model has \[384\]"),
        (
            changed(
                up__weight=torch.ones(128, K).to(torch.float8_e4m3fn), up__weight_scale_inv=torch.ones(1, K // 128)
            ),
            r"'up.weight' is a weight \[128, 384\], and 'up' of the model has \[256, 384\]",
        ),
        (
            changed(norm__weight=torch.ones(128, 128).to(torch.float8_e4m3fn), norm__weight_scale_inv=torch.ones(1, 1)),
            r"layer 'norm' \(dynamic 128x128\) cannot be loaded: in the model it is a LayerNorm: only nn.Linear and",
        ),
        (
            changed(norm__weight=torch.ones(K, dtype=torch.int64)),
            "'norm.weight' is I64, and that of the model is torch.f",
        ),
        *(
            (
                changed(down__weight_scale_inv=torch.full((3, 2), value)),
                f"'down.weight_scale_inv' has 6 of 6 .* are {text}",
            )
            for value, text in ((float("nan"), "NaN"), (float("inf"), "infinite"), (-1.0, "negative"), (0.0, "zero"))
        ),
        (
            changed(
                nosuch__weight=torch.ones(128, 128).to(torch.float8_e4m3fn), nosuch__weight_scale_inv=torch.ones(1, 1)
            ),
            "layer 'nosuch' is quantized, and the model has no such layer. Was it made from the config",
        ),
    ],
)
def test_refused_checkpoint_changes_nothing(given: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    model = Model()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message) as raised:
        fp8graph.load_checkpoint(model, written(tmp_path, given))
    assert str(tmp_path) in str(raised.value)
    assert same_bits(list(model.state_dict().values()), list(before.values()))


def test_tensors_that_one_side_lacks_may_be_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = written(tmp_path, changed(norm__bias=None, up__k_scale=torch.ones(1)))
    with caplog.at_level(logging.WARNING, "fp8graph"):
        fp8graph.load_checkpoint(Model(), folder, strict=False)
    said = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert said == ["the checkpoint does not have norm.bias", "the model has no place for up.k_scale"]


def test_scales_of_a_cache_are_named_as_tensors_without_a_place(tmp_path: Path) -> None:
    scales = ("k_scale", "output_scale", "k_cache.scale", "kv_scale")
    folder = written(
        tmp_path, tensors() | {f"up.{name}": torch.ones(1) for name in scales}, HF | {"kv_cache_scheme": "static"}
    )
    with pytest.raises(
        CheckpointError, match=r"the model has no place for up\.k_cache\.scale, up\.k_scale, up\.kv_scale and"
    ):
        fp8graph.load_checkpoint(Model(), folder)
    assert isinstance(fp8graph.load_checkpoint(Model(), folder, strict=False).up, StoredLinear)


def test_tensors_left_on_meta_are_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Model()
        model.register_buffer("frequencies", torch.ones(3), persistent=False)
    with pytest.raises(CheckpointError, match="frequencies is on the meta device, and not in the checkpoint"):
        fp8graph.load_checkpoint(model, written(tmp_path))


@pytest.mark.parametrize(
    ("config", "make", "message"),
    [
        (HF | {"weight_block_size": [64, 128]}, lambda n, k: (n // 64, k // 128), "weights in tiles of 64x128"),
    ],
)
def test_forms_that_no_gemm_takes(
    config: Any, make: Callable[[int, int], tuple[int, int]], message: str, tmp_path: Path
) -> None:
    scales = {name: torch.ones(make(*size)) for name, size in {"up": (N, K), "down": (K, N)}.items()}
    given = tensors() | {f"{name}.weight_scale_inv": x for name, x in scales.items()}
    with pytest.raises(CheckpointError, match=message):
        fp8graph.load_checkpoint(Model(), written(tmp_path, given, config))


def test_a_llama_of_the_meta_device_says_what_is_missing(tmp_path: Path) -> None:
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(copy.deepcopy(CONFIG))
    with pytest.raises(CheckpointError, match="the model has no such layer. Was it made from the config"):
        fp8graph.load_checkpoint(model, written(tmp_path))


def test_a_damaged_shard_is_found_before_the_first_is_copied(tmp_path: Path) -> None:
    held = tensors()
    first = {name: x for name, x in held.items() if not name.startswith("down")}
    save_file(first, tmp_path / "a.safetensors")
    offsets = {"down.weight": ("F8_E4M3", [K, N], [0, K * N]), "down.weight_scale_inv": ("F32", [3, 2], [0, 24])}
    text = json.dumps({n: {"dtype": d, "shape": s, "data_offsets": o} for n, (d, s, o) in offsets.items()}).encode()
    (tmp_path / "b.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(K * N))
    files = {**dict.fromkeys(first, "a.safetensors"), **dict.fromkeys(offsets, "b.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": HF}))
    model = Model()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="b.safetensors: damaged .*down.weight"):
        fp8graph.load_checkpoint(model, tmp_path)
    assert same_bits(list(model.state_dict().values()), list(before.values()))
    assert type(model.up) is nn.Linear


@pytest.mark.parametrize("part", ["", "up"])
def test_names_are_those_of_the_model_that_torch_wraps(part: str, tmp_path: Path) -> None:
    folder, expected, model = written(tmp_path), Model(), Model()
    fp8graph.load_checkpoint(expected, folder)
    if part:
        model.set_submodule(part, torch.compile(model.get_submodule(part), backend="eager"))  # pyright: ignore
    given: Any = model if part else torch.compile(model, backend=fp8graph.Backend(compiler="eager"))
    assert fp8graph.load_checkpoint(given, folder) is given
    assert isinstance(model.up, StoredLinear)
    assert same_bits(model.state_dict().values(), expected.state_dict().values())


def other_tensors(**changes: Tensor | None) -> dict[str, Tensor]:
    """Those of another step, in the same form"""
    found: dict[str, Any] = {name: x.to(torch.float32) / 2 for name, x in tensors().items()}
    found = {name: x.to(tensors()[name].dtype) for name, x in found.items()}
    found |= {name.replace("__", "."): x for name, x in changes.items()}
    return {name: x for name, x in found.items() if x is not None}


@first_fast("compiled", [False, True])
def test_an_update_writes_into_the_tensors_that_are_there(compiled: bool, tmp_path: Path) -> None:
    model = fp8graph.load_checkpoint(Model(), written(tmp_path))
    x = torch.randn(4, K)
    backend = fp8graph.Backend(compiler="eager")
    if compiled:
        model.compile(backend=backend)
    with torch.no_grad():
        before = model(x)
    places = {name: (id(t), t.data_ptr()) for name, t in model.state_dict(keep_vars=True).items()}
    fp8graph.update_weights(model, iter(other_tensors().items()))
    state = model.state_dict(keep_vars=True)
    assert {name: (id(t), t.data_ptr()) for name, t in state.items()} == places
    assert same_bits([state[name].detach() for name in other_tensors()], list(other_tensors().values()))
    (other := tmp_path / "other").mkdir()
    expected = fp8graph.load_checkpoint(Model(), written(other, other_tensors()))
    if compiled:
        fp8graph.compile(expected, compiler="eager")
    with torch.no_grad():
        assert torch.equal(model(x), expected(x))
        assert not torch.equal(model(x), before)
    assert len(backend.report.graphs) == compiled  # nothing was compiled again


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (other_tensors(more=torch.ones(1)), "update: the model has no place for 'more'"),
        (other_tensors(norm__bias=None), "update: there is no tensor 'norm.bias', which the model has"),
        (other_tensors(up__weight_scale_inv=None), "there is no tensor 'up.weight_scale_inv'"),
        (other_tensors(norm__bias=torch.ones(3)), r"update: tensor 'norm.bias' has shape \[3\], and that of the model"),
        (other_tensors(norm__bias=torch.ones(K, dtype=torch.int64)), "'norm.bias' is int64, and that of the model"),
        (other_tensors(norm__weight=torch.ones(K).to(torch.float8_e4m3fn)), "the update quantizes other layers than"),
        (other_tensors(up__weight=torch.ones(N, K)), "'up.weight' is float32, not float8_e4m3fn"),
        (other_tensors(up__weight_scale_inv=torch.full((2, 3), torch.nan)), "'up.weight_scale_inv' has 6 of 6 .* NaN"),
        (
            other_tensors(
                up__weight=torch.ones(128, K).to(torch.float8_e4m3fn), up__weight_scale_inv=torch.ones(1, K // 128)
            ),
            r"layer 'up' has torch.float8_e4m3fn \[128, 384\] in the update, and torch.float8_e4m3fn \[256, 384\]",
        ),
    ],
)
def test_an_update_that_does_not_fit_is_refused(given: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    model = fp8graph.load_checkpoint(Model(), written(tmp_path))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        fp8graph.update_weights(model, given.items())
    assert {name: x.dtype for name, x in model.state_dict().items()} == {n: x.dtype for n, x in before.items()}
    if "'up" in message:  # a layer that does not fit stays whole
        names = ("up.weight", "up.weight_scale_inv")
        assert same_bits([model.state_dict()[name] for name in names], [before[name] for name in names])


def test_a_part_of_an_update_is_taken_if_asked(tmp_path: Path) -> None:
    model = fp8graph.load_checkpoint(Model(), written(tmp_path))
    part = {name: x for name, x in other_tensors().items() if name.startswith("down")}
    fp8graph.update_weights(model, part.items(), strict=False)
    assert same_bits([model.state_dict()[name] for name in tensors()], list((tensors() | part).values()))
    half = {"up.weight": other_tensors()["up.weight"]}
    with pytest.raises(CheckpointError, match="there is no tensor 'up.weight_scale_inv'"):
        fp8graph.update_weights(model, half.items(), strict=False)


def test_tied_weights_come_once_in_an_update(tmp_path: Path) -> None:
    one = {"first.weight": torch.randn(16, K)}
    model = fp8graph.load_checkpoint(Tied(), written(tmp_path, tensors() | one))
    new = other_tensors() | {"first.weight": one["first.weight"] * 2}
    fp8graph.update_weights(model, new.items())
    assert model.last.weight is model.first.weight
    assert torch.equal(model.last.weight, new["first.weight"])
    with pytest.raises(CheckpointError, match=r"there is no tensor '(first|last).weight'"):
        fp8graph.update_weights(model, other_tensors().items())


def test_a_model_in_high_precision_takes_no_quantized_update() -> None:
    with pytest.raises(CheckpointError, match="'up.weight' is torch.float8_e4m3fn, and that of the model is torch.f"):
        fp8graph.update_weights(Model(), tensors().items())
