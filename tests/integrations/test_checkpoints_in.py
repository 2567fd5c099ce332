"""Every format, written by its own library, multiplied as it is stored: against that format's arithmetic in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

import fp8graph
from fp8_checkpoints import CONFIG, F32, FORMATS, IDS, LINEARS, load, model
from fp8graph.libraries.stored_linear import StoredLinear
from fp8graph.numerics import sqnr_db
from helpers import first_slow

Rounded = Callable[[Tensor], Tensor]


# What an engine does with the input of a linear: scales are FP32, and all else is in float64


def _cast(x: Tensor, scale_inv: Tensor) -> Tensor:
    scale_inv = scale_inv.float()
    return (x.float() * (1 / scale_inv)).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale_inv


def _scaled(x: Tensor, amax: Tensor) -> Tensor:
    return _cast(x, 1 / (448 / amax.float()))


def _amax(x: Tensor, columns: int) -> Tensor:
    """Of tiles of one token and so many elements, as wide as ``x``."""
    tiles = x.unflatten(-1, (-1, columns)).abs().amax(-1)
    return tiles.clamp_min(1e-30).repeat_interleave(columns, -1)


def _in_tiles(columns: int) -> Rounded:
    return lambda x: _scaled(x, _amax(x, columns))


def _in_tiles_of_exponents(columns: int) -> Rounded:
    return lambda x: _cast(x, torch.exp2(torch.ceil(torch.log2(_amax(x, columns) / 448))))


def _per_token(x: Tensor) -> Tensor:
    return _scaled(x, _amax(x, x.shape[-1]))


def _per_tensor(x: Tensor) -> Tensor:
    return _scaled(x, x.abs().amax())


def _e2m1(x: Tensor, whole: Tensor) -> Tensor:
    scale = (_amax(x, 16) / 6 / whole).clamp(max=448).to(torch.float8_e4m3fn).double() * whole
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.double)
    return grid[((x / scale).abs().clamp(max=6).unsqueeze(-1) - grid).abs().argmin(-1)] * x.sign() * scale


def _whole(x: Tensor) -> Tensor:
    return x


# by format: the recipe of fprop, and how it rounds its input; None: with the scale from the file
EXPECTED: dict[str, tuple[str | None, Rounded | None]] = {
    "hf-float": ("blockwise", _in_tiles(128)),
    "hf-ue8m0": ("blockwise", _in_tiles_of_exponents(128)),
    "hf-static": ("blockwise", None),
    "hf-tensor": ("rowwise", _per_token),
    "hf-mxfp8": ("mxfp8", _in_tiles_of_exponents(32)),
    "torchao-rowwise": ("rowwise", _per_token),
    "torchao-tensorwise": ("tensorwise", _per_tensor),
    "torchao-weight-only": (None, _whole),
    "torchao-mxfp8": ("mxfp8", _in_tiles_of_exponents(32)),
    "torchao-nvfp4-weight-only": (None, _whole),
    "compressed-tensors-fp8": ("tensorwise", None),
    "compressed-tensors-fp8-dynamic": ("rowwise", _per_token),
    "compressed-tensors-fp8-block": ("blockwise", _in_tiles(128)),
    "compressed-tensors-mxfp8": ("mxfp8", _in_tiles_of_exponents(32)),
    "compressed-tensors-nvfp4": ("nvfp4", None),
    "modelopt-fp8": ("tensorwise", None),
    "modelopt-fp8-channel": ("rowwise", _per_token),
    "modelopt-fp8-block": (None, _whole),
    "modelopt-nvfp4": ("nvfp4", None),
    "modelopt-mxfp8": ("mxfp8", _in_tiles_of_exponents(32)),
}


def test_every_format_is_here() -> None:
    assert EXPECTED.keys() == FORMATS.keys()


# What the tensors of a linear mean, in float64


def _numbers(data: Tensor) -> Tensor:
    if data.dtype != torch.uint8:
        return data.double()
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.double)
    return torch.stack([grid[(data & 15).long()], grid[(data >> 4).long()]], -1).flatten(-2)


def _exponents(scale: Tensor) -> Tensor:
    if scale.dtype in (torch.float8_e8m0fnu, torch.uint8):
        return torch.exp2(scale.view(torch.uint8).double() - 127)
    return scale.double()


def _unswizzled(scale: Tensor, n: int, columns: int) -> Tensor:
    """cuBLAS's order: in each 128 rows x 4, the scale of row i, column j is at (i % 32) * 16 + i // 32 * 4 + j."""
    found, flat = torch.empty(n, columns, dtype=scale.dtype), scale.flatten()
    i, j = torch.meshgrid(torch.arange(n), torch.arange(columns), indexing="ij")
    tile = (i // 128) * (columns // 4) + j // 4
    found.view(torch.uint8)[i, j] = flat.view(torch.uint8)[tile * 512 + (i % 32) * 16 + i % 128 // 32 * 4 + j % 4]
    return found


def _decoded(file: dict[str, Tensor], layer: str) -> Tensor:
    own = {name.removeprefix(f"{layer}."): x for name, x in file.items() if name.startswith(f"{layer}.")}
    data = next(own[name] for name in ("weight", "weight_packed", "_weight_qdata") if name in own)
    scale = next(own[name] for name in ("weight_scale_inv", "weight_scale", "_weight_scale") if name in own)
    numbers = _numbers(data)
    n, k = numbers.shape
    if "_weight_qdata" in own and scale.numel() > n:
        scale = _unswizzled(scale, n, scale.numel() // n)
    scale = _exponents(scale)
    if "weight_scale_2" in own:
        scale = scale * own["weight_scale_2"].double()
    if "_weight_per_tensor_scale" in own:
        scale = scale * own["_weight_per_tensor_scale"].double()
    if "weight_global_scale" in own:
        scale = scale / own["weight_global_scale"].double()
    if scale.numel() == 1:
        return numbers * scale.flatten()
    scale = scale[:, 0, :, 0] if scale.ndim == 4 else scale.reshape(len(scale), -1)
    return numbers * scale.repeat_interleave(n // scale.shape[0], 0).repeat_interleave(k // scale.shape[1], 1)


def _static(name: str, file: dict[str, Tensor], layer: str) -> Rounded:
    one = next(
        file[f"{layer}.{key}"].double().reshape(())
        for key in ("input_scale", "activation_scale", "input_global_scale")
        if f"{layer}.{key}" in file
    )
    one = 1 / one if "compressed-tensors-nvfp4" in name else one
    return (lambda x: _e2m1(x, one)) if "nvfp4" in name else (lambda x: _cast(x, one))


def _scatter(llama: Any) -> None:
    """Let embeddings be any numbers: ratios of bf16 numbers often fall between two FP8 numbers, exactly."""
    weight = llama.model.embed_tokens.weight
    noise = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) / 100
    weight.data += weight.data * noise.to(weight.dtype)


def _agrees(name: str, folder: Path, logits: Tensor) -> None:
    """With the format's arithmetic in float64: as far as few numbers fall on the other side of a step in FP32."""
    expected, unrounded = reference(name, folder)
    assert sqnr_db(expected, logits) > 40
    if EXPECTED[name][1] is not _whole:
        assert sqnr_db(unrounded, logits) < 30  # inputs that are not rounded give other logits


def reference(name: str, folder: Path) -> tuple[Tensor, Tensor]:
    """The logits in float64, and those of inputs that are not rounded."""
    file = load_file(folder / "model.safetensors")
    llama: Any = LlamaForCausalLM(copy.deepcopy(CONFIG)).double().eval()  # model()'s frequencies of RoPE are in bf16
    llama.load_state_dict(model().state_dict())
    _scatter(llama)
    hooks: list[Any] = []
    for number in range(CONFIG.num_hidden_layers):
        for linear in LINEARS:
            layer = f"model.layers.{number}.{linear}"
            module, rounded = llama.get_submodule(layer), EXPECTED[name][1]
            module.weight.data = _decoded(file, layer)
            rounded = rounded if rounded is not None else _static(name, file, layer)
            hooks.append(module.register_forward_pre_hook(lambda _, args, rounded=rounded: rounded(args[0])))
    with torch.no_grad():
        logits = llama(input_ids=IDS, use_cache=False).logits
        for hook in hooks:
            hook.remove()
        return logits, llama(input_ids=IDS, use_cache=False).logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Each folder is written once."""
    written: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in written:
            path = tmp_path_factory.mktemp(name)
            FORMATS[name].write(path)
            written[name] = path
        return written[name]

    return of


def _logits(llama: Any, recipe: str | None) -> Tensor:
    """Of a model with all linears but the head in ``recipe``, and no weight that is quantized or decoded again."""
    fp8graph.compile(llama, compiler="eager", fullgraph=True)
    with torch.no_grad():
        logits = llama(input_ids=IDS, use_cache=False).logits
    report = fp8graph.backend_of(llama).report
    assert [gemm.recipe for gemm in report.gemms if gemm.fqn != "lm_head"] == [recipe] * 14
    (view,) = report.graphs
    assert "quantize_weight" not in view.after
    assert ("stored_weight" in view.after) == (recipe is None)  # else what a CPU emulates decodes the bytes
    return logits


SLOW = {"hf-static", "modelopt-nvfp4", "compressed-tensors-fp8-block", "torchao-rowwise"}  # one of each library


def formats(names: Sequence[str], *, fast: int) -> pytest.MarkDecorator:
    """The first ``fast`` of ``names`` fast, those in ``SLOW`` slow, and the others before a release."""
    marks = [() if i < fast else pytest.mark.slow if x in SLOW else pytest.mark.release for i, x in enumerate(names)]
    return pytest.mark.parametrize("name", [pytest.param(x, marks=m) for x, m in zip(names, marks, strict=True)])


@formats([name for name in FORMATS if not name.startswith("torchao")], fast=1)
def test_load_checkpoint(name: str, folder: Callable[[str], Path]) -> None:
    """In FP32 nothing else is rounded, so that few numbers fall on the other side of a step than in float64."""
    llama: Any = LlamaForCausalLM(copy.deepcopy(CONFIG)).eval()
    fp8graph.load_checkpoint(llama, folder(name))
    file = load_file(folder(name) / "model.safetensors")
    for path, module in llama.named_modules():
        if isinstance(module, StoredLinear):
            data = file.get(f"{path}.weight", file.get(f"{path}.weight_packed"))
            assert data is not None
            assert torch.equal(module.weight.view(torch.uint8), data.view(torch.uint8))
    _scatter(llama)
    _agrees(name, folder(name), _logits(llama, EXPECTED[name][0]))


@formats([name for name, one in FORMATS.items() if one.loads], fast=0)
def test_as_its_library_loads_it(name: str, folder: Callable[[str], Path]) -> None:
    llama = load(folder(name), F32).eval()
    _scatter(llama)
    _agrees(name, folder(name), _logits(llama, EXPECTED[name][0]))


# transformers has no kernels for a CPU, nor has torchao for MXFP8; compressed-tensors cannot run NVFP4 in FP32, and in
# bf16 it rounds otherwise between the linears
IN_FP32 = [
    *("torchao-rowwise", "torchao-tensorwise"),
    *("compressed-tensors-fp8", "compressed-tensors-fp8-dynamic", "compressed-tensors-fp8-block"),
]


def _scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **_: Any) -> Tensor:
    """torch's, as it is on most CPUs: others add in another order, and one last bit becomes one FP8 code further on."""
    return (a.float() * scale_a) @ (b.float() * scale_b)


@first_slow("name", IN_FP32)
def test_its_library_computes_the_same(
    name: str, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", _scaled_mm)
    llama, own = (load(folder(name), F32).eval() for _ in range(2))
    _scatter(llama)
    _scatter(own)
    with torch.no_grad():
        expected = own(input_ids=IDS, use_cache=False).logits
    assert sqnr_db(expected, _logits(llama, EXPECTED[name][0])) > 60


@first_slow("name", ["torchao-weight-only", "torchao-nvfp4-weight-only", "compressed-tensors-mxfp8"])
def test_its_library_computes_the_same_in_bf16(name: str, folder: Callable[[str], Path]) -> None:
    with torch.no_grad():
        expected = load(folder(name)).eval()(input_ids=IDS, use_cache=False).logits
    assert torch.equal(expected, _logits(load(folder(name)).eval(), EXPECTED[name][0]))
