"""``fp8graph lint FOLDER``: faults of public threads and more in a folder are found, and correct folders pass."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fp8_checkpoints
import fp8graph
from fp8graph.checkpoints import Checkpoint, QuantizedWeight, dequantize
from fp8graph.checkpoints.compressed_tensors import layer_format
from fp8graph.cli import main
from fp8graph.tools import lint_checkpoint as lint
from fp8graph.tools import lint_layers
from fp8graph.tools.export import export_folder
from fp8graph.tools.lint_checkpoint import CheckpointLint, lint_checkpoint
from helpers import first_slow
from tiny_models import TINY, model_and_inputs

ROOT = Path(__file__).parent.parent.parent
Tensors = dict[str, Tensor]
Fault = Callable[[Tensors, dict[str, Any]], object]


def llama(folder: Path, **changes: Any) -> Path:
    """Four blocks in bf16, in which v is 30 times as large as k."""
    settings: dict[str, Any] = {
        "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 64, "architectures": ["LlamaForCausalLM"], "dtype": torch.bfloat16,
        "tie_word_embeddings": False,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(LlamaConfig(**settings | changes))
        model.to(torch.bfloat16)
        with torch.no_grad():
            for block in model.model.layers:
                block.self_attn.v_proj.weight.mul_(30.0)
        model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("high_precision"))


@pytest.fixture(scope="module")
def exports(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The exported folder of a recipe."""
    made: dict[str, Path] = {}

    def export(name: str) -> Path:
        if name not in made:
            recipe = fp8graph.Float8BlockScaling(power_2_scale=False) if name == "FP32 scales" else name
            made[name] = export_folder(source, tmp_path_factory.mktemp("exported") / "folder", recipe=recipe)
        return made[name]

    return export


def changed(folder: Path, new: Path, fault: Fault) -> CheckpointLint:
    """The findings in a copy of a folder with a fault."""
    shutil.copytree(folder, new)
    file, config_file = new / "model.safetensors", new / "config.json"
    tensors, config = load_file(file), json.loads(config_file.read_text())
    fault(tensors, config)
    save_file({name: x.contiguous() for name, x in tensors.items()}, file)
    config_file.write_text(json.dumps(config))
    return lint_checkpoint(new)


BLOCK, UP = "model.layers.1", "model.layers.1.mlp.up_proj"
Q, K, V = (f"{BLOCK}.self_attn.{x}_proj" for x in "qkv")
SCALE = "weight_scale_inv"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def scales(function: Callable[[Tensor], Tensor], layers: str = UP) -> Fault:
    """A fault of the scales of the layers whose names begin so."""

    def fault(tensors: Tensors, _: dict[str, Any]) -> None:
        for name, x in tensors.items():
            if name.startswith(layers) and name.endswith(SCALE):
                tensors[name] = function(x)

    return fault


def data(function: Callable[[Tensor, Tensor], Tensor], layer: str = UP) -> Fault:
    """A fault of the bytes of a layer: of the decoded weight in FP32, and the scale of each of its numbers."""

    def fault(tensors: Tensors, _: dict[str, Any]) -> None:
        scale = tensors[f"{layer}.{SCALE}"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        tensors[f"{layer}.weight"] = function(tensors[f"{layer}.weight"].float() * scale, scale)

    return fault


def exchanged(a: str, b: str, what: str) -> Fault:
    def fault(tensors: Tensors, _: dict[str, Any]) -> None:
        a_name, b_name = f"{a}.{what}", f"{b}.{what}"
        tensors[a_name], tensors[b_name] = tensors[b_name], tensors[a_name]

    return fault


def element(name: str, value: float) -> Fault:
    def fault(tensors: Tensors, _: dict[str, Any]) -> None:
        tensors[name].view(-1)[0] = value

    return fault


def put(name: str, tensor: Tensor) -> Fault:
    return lambda tensors, _: tensors.__setitem__(name, tensor)


def high_precision(*layers: str) -> Fault:
    """Layers that were left in bf16, and not listed."""

    def fault(tensors: Tensors, _: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(f".{SCALE}") and any(x in name for x in layers)]:
            layer = name.removesuffix(f".{SCALE}")
            tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"].bfloat16()
            del tensors[name]

    return fault


def config(**changes: Any) -> Fault:
    return lambda _, values: values.update(changes)


def of_quantization(**changes: Any) -> Fault:
    return lambda _, values: values["quantization_config"].update(changes)


def renamed(name: str, new: str) -> Fault:
    return lambda tensors, _: tensors.update({new: tensors.pop(name)})


NAN = math.nan
# of docs: the 17 faults of 2026's threads that `inspect` was tried with, and more
FAULTS: dict[str, tuple[Fault, str, str]] = {
    # of form: `inspect` sees them, too
    "a scale is missing": (lambda t, _: t.pop(f"{UP}.{SCALE}"), "form", "is missing"),
    "E5M2 bytes": (lambda t, _: t.update({f"{UP}.weight": t[f"{UP}.weight"].float().to(E5M2)}), "form", "F8_E5M2"),
    "a scale is inf": (element(f"{UP}.{SCALE}", math.inf), "scale", "infinite"),
    "a scale is zero": (element(f"{UP}.{SCALE}", 0.0), "scale", "zero"),
    "a scale is negative": (element(f"{UP}.{SCALE}", -1.0), "scale", "negative"),
    "one scale for all tiles": (put(f"{UP}.{SCALE}", torch.tensor(0.1)), "form", "has shape []"),
    "a scale without a layer": (put(f"lost.{SCALE}", torch.ones(4, 4)), "form", "without a quantized layer"),
    "NaN in the bytes": (element(f"{UP}.weight", NAN), "nan", "1 of its numbers are NaN"),
    # of meaning
    "scales of a layer are inverted": (scales(lambda x: 1 / x), "decoded-size", "its scales are inverted"),
    "all scales are inverted": (scales(lambda x: 1 / x, "model"), "decoded-size", "its scales are inverted"),
    "cast without a scale": (data(lambda w, _: w.to(E4M3)), "unscaled", "was cast without a scale"),
    "scales of two layers are exchanged": (exchanged(K, V, SCALE), "decoded-size", f"it has the scales of {V!r}"),
    "scales are squared": (scales(lambda x: x * x), "decoded-size", "its scales are squared"),
    "scales of no power of two under ue8m0": (of_quantization(scale_fmt="ue8m0"), "not-ue8m0", "no powers of two"),
    "attention in bf16 that is not listed": (high_precision("self_attn"), "not-listed", "its weight is BF16"),
    "a scale of keys is inf": (
        lambda t, _: t.update({f"{BLOCK}.self_attn.{x}_scale": torch.tensor(math.inf) for x in "kv"}),
        "cache-scale", "1 of its 1 numbers are no scale: inf",
    ),
    # eleven more
    "a scale under another name": (renamed(f"{UP}.{SCALE}", f"{UP}.weight_scale"), "scale-name", "weight_scale': "),
    "all scales under another name": (
        lambda t, _: t.update({x.replace(SCALE, "weight_scale"): t.pop(x) for x in [*t] if x.endswith(SCALE)}),
        "scale-name", "'weight_scale', as are 27 more: loaders",
    ),
    "scales of two layers are exchanged that differ by 4": (
        lambda t, v: (scales(lambda x: 4 * x, K)(t, v), scales(lambda x: x / 4, Q)(t, v)),
        "exchanged", "each may have the other's scales",
    ),
    "tiles of a quarter of the range": (data(lambda w, s: (w / s / 4).to(E4M3)), "range", "no code reaches 224"),
    "a config without quantization": (config(quantization_config=None), "no-config", "28 tensors are in FP8, like"),
    # more
    "scales are ones": (scales(torch.ones_like), "decoded-size", "its scales are 1"),
    "one layer in bf16 that is not listed": (high_precision(UP), "not-listed", "its weight is BF16"),
    "cast by twice the scale": (data(lambda w, s: (w / s * 16).clamp(-448, 448).to(E4M3)), "clipped", "largest code"),
    "the bytes are E5M2's": (
        data(lambda w, s: (w / s * 128).to(E5M2).view(torch.uint8).view(E4M3)), "other-type", "its bytes are E5M2"
    ),
    "the bytes of another block": (
        lambda t, _: t.update({f"{UP}.weight": t["model.layers.0.mlp.up_proj.weight"].clone()}),
        "same-bytes", "it has the bytes of 'model.layers.0.mlp.up_proj'",
    ),
    "a layer of zeros": (data(lambda w, _: torch.zeros_like(w).to(E4M3)), "zeros", "all of its numbers are zero"),
    "keys have a scale, values none": (put(f"{BLOCK}.self_attn.k_scale", torch.ones(())), "cache-scale", "there is no"),
    "a norm with NaN": (element("model.norm.weight", NAN), "not-finite", "1 of 512 numbers"),
    "a renamed norm": (renamed("model.norm.weight", "model.ln.weight"), "names", "'model.norm.weight'"),
    "another hidden size": (config(intermediate_size=768), "shape", "and by config.json ["),
    "a head that is tied by the config": (config(tie_word_embeddings=True), "tied", "its numbers are others"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, exports: Callable[[str], Path], tmp_path: Path) -> None:
    fault, rule, text = FAULTS[name]
    result = changed(exports("FP32 scales"), tmp_path / "faulty", fault)
    first = [each for each in result.findings if each.rule == rule]
    assert first, str(result)
    assert text in f"{first[0].what}: {first[0].why}"
    assert bool(result) == all(each.severity != "error" for each in result.findings)
    more = {"decoded-size"} if rule == "unscaled" else {"names"} if rule == "form" else set[str]()
    assert {each.rule for each in result.findings} <= {rule, *more}


def test_inputs_that_were_not_calibrated(tmp_path: Path) -> None:
    fp8_checkpoints.FORMATS["hf-static"].write(tmp_path / "static")

    def ones(tensors: Tensors, _: dict[str, Any]) -> None:
        tensors.update({name: torch.ones_like(x) for name, x in tensors.items() if name.endswith("activation_scale")})

    (finding,) = changed(tmp_path / "static", tmp_path / "ones", ones).findings
    assert (finding.rule, finding.severity) == ("input-scale", "warning")
    assert finding.what == "the scales of the inputs of all 14 layers are 1"


@pytest.mark.parametrize(
    ("layer", "scale", "text"),
    [
        (Q, 0.2, "have other scales for it, k_proj 0.05, q_proj 0.2, v_proj 0.05"),
        (UP, 1e30, "the scale of its input is 1e+30: inverted, or memory that was never written"),
        (UP, 1e-35, "the scale of its input is 1e-35"),
    ],
)
def test_an_input_with_a_scale_of_its_own(layer: str, scale: float, text: str, tmp_path: Path) -> None:
    fp8_checkpoints.FORMATS["hf-static"].write(tmp_path / "static")
    fault = element(f"{layer}.activation_scale", scale)
    (finding,) = changed(tmp_path / "static", tmp_path / "faulty", fault).findings
    assert (finding.rule, finding.severity, finding.where) == ("input-scale", "error", layer)
    assert text in f"{finding.what}: {finding.why}"


def cache(**tensors: Tensor) -> Fault:
    """Tensors of the attention of a block, with dots for each ``__``."""
    return lambda t, _: t.update(
        {f"{BLOCK}.self_attn.{name.replace('__', '.')}": x.clone() for name, x in tensors.items()}
    )


ONE = torch.tensor(0.5)


@pytest.mark.parametrize(
    "fault",
    [
        cache(k_scale=ONE, v_scale=ONE, q_scale=ONE),
        cache(k_proj__k_scale=ONE, v_proj__v_scale=ONE),  # ModelOpt's names
        cache(k_proj__output_scale=ONE, v_proj__output_scale=ONE),
        cache(k_scale=torch.rand(64) - 0.5),  # a parameter of attention that normalizes keys
        cache(mask=torch.full((4, 4), -math.inf)),
    ],
)
def test_scales_of_caches_and_other_tensors_of_attention(
    fault: Fault, exports: Callable[[str], Path], tmp_path: Path
) -> None:
    result = changed(exports("FP32 scales"), tmp_path / "changed", fault)
    assert {each.rule for each in result.findings} <= {"names"}


def test_a_cache_scale_per_channel(exports: Callable[[str], Path], tmp_path: Path) -> None:
    def fault(tensors: Tensors, values: dict[str, Any]) -> None:
        cache(k_scale=torch.ones(64), v_scale=ONE)(tensors, values)
        values["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}

    (finding,) = changed(exports("FP32 scales"), tmp_path / "changed", fault).findings
    assert (finding.rule, finding.severity) == ("cache-scale", "warning")
    assert finding.what == "it has 64 numbers, and by the config the tensor has one scale"


def test_linears_that_nobody_quantizes_need_no_list(exports: Callable[[str], Path], tmp_path: Path) -> None:
    fault = put("model.layers.4.eh_proj.weight", torch.ones(8, 16, dtype=torch.bfloat16))  # DeepSeek-V3's
    result = changed(exports("FP32 scales"), tmp_path / "changed", fault)
    assert {each.rule for each in result.findings} == {"names"}


def test_ternary_weights_are_not_clipped(exports: Callable[[str], Path], tmp_path: Path) -> None:
    fault = data(lambda w, _: (w.sign() * (w.abs() > 0.02) * 448).to(E4M3))
    assert changed(exports("FP32 scales"), tmp_path / "ternary", fault).findings == ()


def test_damaged_files(exports: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(exports("FP32 scales"), tmp_path / "damaged")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    (finding,) = lint_checkpoint(folder).findings
    assert (finding.rule, finding.severity, finding.where) == ("damaged", "error", str(folder))
    assert "It is truncated" in finding.what
    assert main(["lint", str(folder)]) == 1


def test_high_precision_is_not_judged(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(source)]) == 2
    assert "is not in FP8" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["FP32 scales", "rowwise", "tensorwise", "mxfp8"])
def test_sizes_from_some_of_the_numbers(
    recipe: str, exports: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(exports(recipe))
    for most, within in ((1 << 12, 0.3), (1 << 22, 0.05)):  # far from the factor of ten that is an error
        monkeypatch.setattr(lint_layers, "_MOST", most)
        for name in [UP, V, K]:
            weight = checkpoint.weight(name)
            layer = lint_layers.read_layer(name, checkpoint.layers[name], weight)
            assert layer.rms == pytest.approx(float(dequantize(weight).square().mean().sqrt()), rel=within)
            codes = weight.data.float()
            assert layer.code_rms == pytest.approx(float(codes.square().mean().sqrt()), rel=within)
            assert float(layer.tops.max()) == float(codes.abs().max())
            assert (layer.tops.numel(), layer.nan) == (weight.scale_inv.numel(), 0)


def test_an_input_scale_multiplies_however_it_is_stored() -> None:
    """compressed-tensors' FP4 stores a divisor, ModelOpt's a factor."""
    codes = {"data": torch.full((4, 16), 0x17, dtype=torch.uint8), "scale_inv": torch.ones(4, 2).to(E4M3)}
    for given in ({"input_scale": torch.tensor(500.0)}, {"input_scale_inv": torch.tensor(0.002)}):
        weight = QuantizedWeight(**codes, block=(1, 16), **given)
        layer = lint_layers.read_layer("a", layer_format("NVFP4"), weight)
        assert layer.input_scale == pytest.approx(0.002)
        assert (layer.top, layer.saturated, layer.kinds) == (6.0, 0.5, 2)  # 0x17: 6 and 0.5


def test_one_small_tile_counts_that_sizes_do_not_come_from(
    exports: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lint_layers, "_MOST", 1 << 12)  # one row of 64

    def fault(tensors: Tensors, _: dict[str, Any]) -> None:
        scale = tensors[f"{UP}.weight_scale"].view(torch.uint8)
        scale[5, 3] = 254 - scale[5, 3]  # of E8M0: inverted

    (finding,) = changed(exports("mxfp8"), tmp_path / "faulty", fault).findings
    assert (finding.rule, finding.where) == ("decoded-size", UP)


def test_every_byte_is_looked_at(exports: Callable[[str], Path], tmp_path: Path) -> None:
    for at in (1, 777, 131_071, 262_143):
        result = changed(
            exports("FP32 scales"), tmp_path / str(at), lambda t, _, at=at: t[f"{UP}.weight"].view(-1)[at].fill_(NAN)
        )
        assert [each.what[:24] for each in result.findings] == ["1 of its numbers are NaN"]


@pytest.mark.slow
@pytest.mark.parametrize("power", [-1, 3])
def test_the_divisor_of_fp4(power: int, tmp_path: Path) -> None:
    fp8_checkpoints.FORMATS["compressed-tensors-nvfp4"].write(tmp_path / "written")

    def fault(tensors: Tensors, _: dict[str, Any]) -> None:
        tensors[f"{UP}.weight_global_scale"] **= power

    (finding,) = changed(tmp_path / "written", tmp_path / "faulty", fault).findings
    assert (finding.rule, finding.where) == ("decoded-size", UP)


# those of transformers with linears in a layout that exports have
FAMILIES = [name for name, one in TINY.items() if one.library == "transformers" and name != "gpt2"]


@first_slow("family", FAMILIES)
def test_an_export_of_each_family_has_no_findings(family: str, tmp_path: Path) -> None:
    model, _ = model_and_inputs(family)
    model.save_pretrained(tmp_path / "source")
    result = lint_checkpoint(export_folder(tmp_path / "source", tmp_path / "exported"))
    assert (result.findings, result.layers > 0) == ((), True)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["FP32 scales", "blockwise", "tensorwise", "rowwise", "mxfp8"])
def test_an_inverted_scale_is_found_in_every_layer(recipe: str, exports: Callable[[str], Path], tmp_path: Path) -> None:
    names = [*Checkpoint(exports(recipe)).layers]
    for i, name in enumerate(names):

        def fault(tensors: Tensors, _: dict[str, Any], name: str = name) -> None:
            (scale,) = (each for each in tensors if each.startswith(f"{name}.weight_scale"))
            x = tensors[scale]
            tensors[scale] = (254 - x.view(torch.uint8)).view(x.dtype) if x.element_size() == 1 else 1 / x

        result = changed(exports(recipe), tmp_path / str(i), fault)
        assert [(each.rule, each.where) for each in result.findings] == [("decoded-size", name)]
        shutil.rmtree(tmp_path / str(i))


@pytest.mark.parametrize("recipe", ["FP32 scales", "blockwise", "tensorwise", "rowwise", "mxfp8"])
def test_an_export_has_no_findings(recipe: str, exports: Callable[[str], Path]) -> None:
    result = lint_checkpoint(exports(recipe))
    assert result.findings == ()
    assert result.layers == 28
    assert "LlamaForCausalLM" in result.compared


READ = [name for name in fp8_checkpoints.FORMATS if not name.startswith("torchao")]


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_the_folder_of_a_library_has_no_findings(name: str, tmp_path: Path) -> None:
    fp8_checkpoints.FORMATS[name].write(tmp_path / "written")
    assert lint_checkpoint(tmp_path / "written").findings == ()


def test_experts_and_small_layers_of_one_family(tmp_path: Path) -> None:
    """Of two siblings nobody knows which one is wrong, but by the sizes that trained weights have."""
    folder = export_folder(llama(tmp_path / "two", num_hidden_layers=2), tmp_path / "exported")
    result = changed(folder, tmp_path / "faulty", scales(lambda x: 1 / x))
    assert [each.where for each in result.errors] == [UP]


def test_tables_of_older_rotary_embeddings_are_left_out(exports: Callable[[str], Path], tmp_path: Path) -> None:
    fault = put("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(64))
    assert changed(exports("FP32 scales"), tmp_path / "older", fault).findings == ()


def test_the_command(exports: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(exports("FP32 scales"), tmp_path / "faulty", scales(lambda x: 1 / x))
    assert main(["lint", str(exports("FP32 scales"))]) == 0
    assert "28 quantized layers, nothing is wrong" in capsys.readouterr().out
    assert main(["lint", str(tmp_path / "faulty"), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed.keys() == {"version", "folder", "layers", "compared", "findings"}
    (finding,) = printed["findings"]
    assert finding.keys() == {"rule", "severity", "where", "what", "why", "todo"}
    assert main(["lint", str(tmp_path / "nosuch")]) == 2


def test_the_limits_of_the_page() -> None:
    text = " ".join((ROOT / "docs" / "lint.md").read_text(encoding="utf-8").split())
    assert lint._SIBLINGS == 10.0
    assert "a tenth or ten times of it is an error" in text
    assert lint._GAIN == (3e-3, 1e3)
    assert "between 0.003 and 1000 / sqrt(K)" in text
    assert lint._UNSCALED[False] == 8.0
    assert "stay below 8 (a warning" in text
    largest = torch.tensor(torch.finfo(E5M2).max).to(E5M2).view(torch.uint8).view(E4M3).float()
    assert largest == lint._E5M2_TOP
    assert f"{largest:.0f} are the bytes of E5M2" in text


def test_every_rule_has_a_fault_and_is_on_the_page() -> None:
    source = Path(lint.__file__).read_text(encoding="utf-8")
    rules = {*re.findall(r'rule="([\w-]+)"', source)}
    assert rules == {rule for _, rule, _ in FAULTS.values()} | {"input-scale", "damaged"}
    page = (ROOT / "docs" / "lint.md").read_text(encoding="utf-8")
    assert [rule for rule in rules if f"`{rule}`" not in page] == []


def test_the_sample_of_the_page(exports: Callable[[str], Path], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def faults(tensors: Tensors, values: dict[str, Any]) -> None:
        scales(lambda x: 1 / x)(tensors, values)
        high_precision("layers.3.mlp.down_proj")(tensors, values)

    changed(exports("FP32 scales"), tmp_path / "my-model-FP8", faults)
    monkeypatch.chdir(tmp_path)
    assert main(["lint", "my-model-FP8"]) == 1
    text = (ROOT / "docs" / "lint.md").read_text(encoding="utf-8")
    assert text.split("$ fp8graph lint my-model-FP8\n")[1].split("```")[0] == capsys.readouterr().out
