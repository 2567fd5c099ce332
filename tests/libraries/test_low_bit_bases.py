"""Bases of adapters in 8 and 4 bits, by the libraries' own code: rows in both directions, bytes that stay, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8_checkpoints import IDS, load
from fp8_checkpoints import _compressed_tensors as write_compressed
from fp8graph.numerics import sqnr_db
from fp8graph.passes.split_decoding import _FEW
from fp8graph.records import ProductRecord
from helpers import ALL, NONE, Checkpointed, eager_backend, first_fast


class Adapted(nn.Module):
    """A frozen base and a LoRA pair beside it, as PEFT has them."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(64, 16, bias=False).bfloat16(), nn.Linear(16, 96, bias=False).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def adapted(base: nn.Module) -> nn.Module:
    """Behind a linear that trains, so that the base has a dgrad."""
    return nn.Sequential(nn.Linear(64, 64, bias=False).bfloat16(), Adapted(base))


def four_bits(dtype: torch.dtype = torch.bfloat16, *, bias: bool = False, **settings: Any) -> nn.Module:
    """bitsandbytes' ``Linear4bit``."""
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    settings = {"quant_type": "nf4", "compress_statistics": True} | settings
    linear = library.nn.Linear4bit(64, 96, bias=bias, compute_dtype=dtype, **settings)
    weight = nn.Linear(64, 96).bfloat16().weight.data
    linear.weight = library.nn.Params4bit(weight, requires_grad=False, **settings)
    return linear.to("cpu")


def trained(model: nn.Module, policy: Any, **settings: Any) -> tuple[list[Tensor], list[Tensor], Any]:
    """``[output, *gradients]`` of one step in eager and of one compiled, and the report."""
    x, dy = torch.randn(4, 8, 64).bfloat16(), torch.randn(4, 8, 96).bfloat16()
    backend = eager_backend(policy, **settings)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    return stepped(model, model, x, dy), stepped(compiled, model, x, dy), backend.report


def stepped(call: Any, model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = call(x)
    y.backward(dy)
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def of_base(report: Any, name: str = "1.base_layer") -> dict[str, tuple[str | None, str]]:
    """Recipe and execution of the GEMMs of the base, and of the other products that it has."""
    rows = {gemm.gemm: (gemm.recipe, gemm.execution) for gemm in report.gemms if gemm.fqn == name}
    others = (row for row in report.others if isinstance(row, ProductRecord) and row.fqn == name)
    return rows | {f"{row.op}, {row.direction}": (row.recipe, row.execution) for row in others}


def saved(model: Any, x: Tensor) -> list[Tensor]:
    """The tensors that forward keeps for backward."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        model(x)
    return kept


def noise(eager: list[Tensor], compiled: list[Tensor]) -> float:
    """The smallest SQNR in dB."""
    return min(sqnr_db(expected, got) for expected, got in zip(eager, compiled, strict=True))


def only_base(recipe: str = "tensorwise") -> fp8graph.Policy:
    """Every other layer stays in high precision, so that the noise is that of two GEMMs."""
    return fp8graph.Policy([fp8graph.Rule("*base_layer", recipe)], default=None, min_speedup=0)


IN_FP8 = {"fprop": ("tensorwise", "native"), "dgrad": ("tensorwise", "native")}
LEFT = {"bitsandbytes.gemm_4bit, forward": (None, "low precision"), "dgrad": (None, "high precision")}


@first_fast(
    "settings",
    [
        {},
        {"compress_statistics": False, "bias": True},
        {"quant_type": "fp4"},
        {"dtype": torch.float32},
        {"dtype": torch.float32, "compress_statistics": False, "bias": True},
    ],
    ids=str,
)
def test_a_base_in_4_bits_multiplies_in_fp8_both_ways(settings: dict[str, Any]) -> None:
    model = adapted(four_bits(**settings))
    weight: Any = model.get_submodule("1.base_layer").weight
    before = weight.data.clone(), weight.quant_state.absmax.clone()
    eager, compiled, report = trained(model, only_base())
    assert of_base(report) == IN_FP8
    assert 24 < noise(eager, compiled) < 40
    assert torch.equal(weight.data, before[0])
    assert torch.equal(weight.quant_state.absmax, before[1])
    assert weight.dtype == torch.uint8


@first_fast("recipe", ["delayed", "rowwise", "blockwise", "mxfp8"])
def test_any_recipe_multiplies_a_base_in_4_bits(recipe: str) -> None:
    model = adapted(four_bits())
    eager, compiled, report = trained(model, only_base(recipe))
    assert {row[0] for row in of_base(report).values()} == {recipe}
    assert [*of_base(report)] == ["fprop", "dgrad"]
    assert noise(eager, compiled) > 24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_decoded_weight_is_not_kept_for_backward(dtype: torch.dtype) -> None:
    model = adapted(four_bits(dtype))
    of_fprop = fp8graph.Policy([fp8graph.Rule("1.base_layer", "tensorwise", dgrad=None)], default=None)
    for policy in (ALL, of_fprop, NONE):
        compiled = torch.compile(model, backend=eager_backend(policy), fullgraph=True)
        kept = saved(compiled, torch.randn(4, 8, 64).bfloat16())
        sizes = {x.numel() for x in kept}
        assert 64 * 96 // 2 in sizes, "the codes"
        assert 64 * 96 not in sizes, "the weight, decoded or in FP8"


def test_a_rule_leaves_it_to_the_library_bit_for_bit() -> None:
    model = adapted(four_bits(bias=True))
    policy = fp8graph.Policy([fp8graph.Rule("1.base_layer", None)], default="tensorwise", min_speedup=0)
    _, _, report = trained(model, policy)
    assert of_base(report) == LEFT
    (row,) = (row for row in report.others if row.fqn == "1.base_layer")
    assert row.reason == 'the program multiplies uint8 itself; rule "1.base_layer" -> high precision'
    report.check()
    eager, compiled, report = trained(model, NONE)
    assert of_base(report) == LEFT
    assert all(map(torch.equal, eager, compiled))


def test_a_change_of_policy_compiles_again() -> None:
    base = four_bits()
    backend = eager_backend(NONE)
    compiled = torch.compile(base, backend=backend, fullgraph=True)
    x = torch.randn(32, 64).bfloat16()
    with torch.no_grad():
        left = compiled(x)
        backend.set_policy(ALL)
        in_fp8 = compiled(x)
        backend.set_policy(NONE)
        assert torch.equal(left, compiled(x))
    assert not torch.equal(left, in_fp8)
    assert sqnr_db(left, in_fp8) > 24


def test_few_rows_are_left_to_the_kernel_of_the_library() -> None:
    model = adapted(four_bits())
    for rows, op in ((4, "bitsandbytes.gemm_4bit, forward"), (5, "fprop")):
        backend = eager_backend(ALL)
        with torch.no_grad():
            torch.compile(model, backend=backend, fullgraph=True)(torch.randn(1, rows, 64).bfloat16())
        assert [*of_base(backend.report)] == [op]
        assert all("for up to 4 rows the library has a kernel" in row.reason for row in backend.report.others)
        backend.report.check()


@pytest.mark.slow
def test_sizes_may_be_dynamic() -> None:
    model = adapted(four_bits())
    compiled = torch.compile(model, backend=(backend := eager_backend(only_base())), fullgraph=True, dynamic=True)
    for tokens in (8, 24):
        x = torch.randn(2, tokens, 64).bfloat16()
        assert sqnr_db(model(x), compiled(x)) > 24
    assert of_base(backend.report) == IN_FP8


@pytest.mark.slow
def test_generated_code_computes_the_same() -> None:
    model = adapted(four_bits())
    x, dy = torch.randn(4, 8, 64).bfloat16(), torch.randn(4, 8, 96).bfloat16()
    by_node = stepped(torch.compile(model, backend=eager_backend(only_base())), model, x, dy)
    torch.compiler.reset()
    generated = torch.compile(model, backend=fp8graph.Backend(only_base()), fullgraph=True)
    assert noise(by_node, stepped(generated, model, x, dy)) > 40
    assert 64 * 96 not in {kept.numel() for kept in saved(generated, x)}


@pytest.mark.slow
def test_a_checkpointed_base_decodes_again() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False).bfloat16(), Checkpointed(Adapted(four_bits())))
    eager, compiled, report = trained(model, only_base())
    assert of_base(report, "1.module.base_layer") == IN_FP8
    assert noise(eager, compiled) > 24


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = four_bits(), nn.Linear(96, 64, bias=False).bfloat16()
        self.is_loaded_in_4bit = True  # as transformers says it, and PEFT reads it

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.q_proj(x))


def test_an_adapter_of_peft_on_a_base_in_4_bits() -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")
    model = peft.get_peft_model(Projections(), peft.LoraConfig(r=16, target_modules=["q_proj", "o_proj"]))
    model = nn.Sequential(nn.Linear(64, 64, bias=False).bfloat16(), model)
    layer = model.get_submodule("1.base_model.model.q_proj")
    assert type(layer).__name__ == "Linear4bit"
    assert type(layer).__module__.startswith("peft.")
    fp8graph.compile(model, policy=only_base(), compiler="eager", fullgraph=True)
    x = torch.randn(4, 8, 64).bfloat16()
    model(x).sum().backward()
    report = fp8graph.backend_of(model).report
    assert of_base(report, "1.base_model.model.q_proj.base_layer") == IN_FP8
    assert not {row.fqn for row in report.gemms if row.recipe} - {
        f"1.base_model.model.{name}_proj.base_layer" for name in "qo"
    }


def weight_only(name: str) -> nn.Module:
    """A linear whose weight torchao quantized."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed: pip install torchao")
    model = nn.Sequential(nn.Linear(64, 96, bias=False).bfloat16())
    quantization.quantize_(model, getattr(quantization, name)())
    return model[0].requires_grad_(False)


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_a_base_of_torchao_multiplies_in_fp8_both_ways(name: str) -> None:
    """A rule names the layer, and not the tensors that its weight wraps."""
    model = adapted(weight_only(name))
    weight: Any = model.get_submodule("1.base_layer").weight
    before = weight.qdata.clone()
    x, dy = torch.randn(4, 8, 64).bfloat16(), torch.randn(4, 8, 96).bfloat16()
    eager = stepped(model, model, x, dy)
    fp8graph.compile(model, policy=only_base(), compiler="eager", cache_weights=False, fullgraph=True)
    assert noise(eager, stepped(model, model, x, dy)) > 24
    report = fp8graph.backend_of(model).report
    assert of_base(report) == IN_FP8
    report.check()
    assert torch.equal(weight.qdata.view(torch.uint8), before.view(torch.uint8))
    if name.startswith("Int8"):
        kept = [each for each in saved(model, x) if each.numel() == 64 * 96]
        assert {each.dtype for each in kept} == {torch.int8}, "the codes, and no copy of the weight"


def test_weights_only_in_fp8_stay_in_high_precision_unless_a_rule_names_them() -> None:
    model = adapted(weight_only("Float8WeightOnlyConfig"))
    fp8graph.compile(model, compiler="eager", fullgraph=True)
    model(torch.randn(4, 8, 64).bfloat16()).sum().backward()
    rows = [row for row in fp8graph.backend_of(model).report.gemms if row.fqn == "1.base_layer"]
    assert [(row.gemm, row.recipe) for row in rows] == [("fprop", None), ("dgrad", None)]
    assert {row.reason for row in rows} == {"the checkpoint quantizes weights only: they are dequantized"}


@first_fast("preset", ["W4A16", "W8A16"])
def test_a_base_of_compressed_tensors_multiplies_in_fp8_both_ways(preset: str, tmp_path: Path) -> None:
    write_compressed(preset)(tmp_path)
    reference, model = load(tmp_path), load(tmp_path)
    with torch.no_grad():
        reference(input_ids=IDS)  # decompresses itself
    weight = reference.model.layers[0].mlp.down_proj.weight.double()
    linear = fp8graph.adopt(model).model.layers[0].mlp.down_proj
    before = linear.weight_packed.clone()
    x = torch.randn(64, 512).bfloat16().requires_grad_()
    assert sqnr_db(x.detach().double() @ weight.t(), linear(x)) > 40  # in eager, where the library's forward fails
    backend = eager_backend(ALL)
    compiled = torch.compile(linear, backend=backend, fullgraph=True)
    kept = saved(compiled, x)
    assert not [each for each in kept if each.numel() == weight.numel()], "the weight, decoded or in FP8"
    y = compiled(x)
    y.backward(dy := torch.randn_like(y))
    assert [(row.gemm, row.recipe) for row in backend.report.gemms] == [(gemm, "tensorwise") for gemm in IN_FP8]
    assert sqnr_db(x.detach().double() @ weight.t(), y) > 25
    assert x.grad is not None
    assert sqnr_db(dy.double() @ weight, x.grad) > 24
    assert torch.equal(linear.weight_packed, before)


def test_integers_whose_inputs_are_quantized_are_left_to_the_library(tmp_path: Path) -> None:
    """Its hook decompresses the model in the first call."""
    write_compressed("W8A8")(tmp_path)
    model = fp8graph.adopt(load(tmp_path))
    with torch.no_grad():
        model(input_ids=IDS)
    assert model.model.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16


def test_a_base_in_8_bits_of_bitsandbytes_has_rows_both_ways() -> None:
    """On a CPU the library decodes; its backward does so with nodes of its own."""
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    base = library.nn.Linear8bitLt(64, 96, bias=False, has_fp16_weights=False)
    base.load_state_dict(nn.Linear(64, 96, bias=False).bfloat16().state_dict())
    base.to("cpu")
    assert [gemm.gemm for gemm in fp8graph.explain(base, torch.randn(16, 64).bfloat16()).gemms] == ["fprop"]
    model = adapted(base)
    eager, compiled, report = trained(model, only_base())
    assert of_base(report) == {"fprop": ("tensorwise", "native"), "dgrad": (None, "high precision")}
    assert noise(eager, compiled) > 24
    assert base.weight.dtype == torch.int8


def test_the_page_has_a_row_for_each_of_these_bases() -> None:
    page = (Path(__file__).parents[2] / "docs" / "fine_tuning.md").read_text(encoding="utf-8")
    _, section = page.split("## QLoRA")
    for name in ("Linear4bit", "Linear8bitLt", "Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "W4A16 and W8A16"):
        assert f"{name}" in section
    assert f"up to {_FEW} rows" in section
    assert "the checkpoint quantizes weights only" in section


@torch.no_grad()
def test_inference_decodes_4_bits_in_each_call() -> None:
    model = adapted(four_bits())
    fp8graph.compile(model, policy=only_base(), compiler="eager", fullgraph=True)
    model(torch.randn(4, 8, 64).bfloat16())
    backend = fp8graph.backend_of(model)
    assert backend.weights.bytes == 0
    (refusal,) = backend.report.refusals
    assert (refusal.what, refusal.fqn) == ("kept weight", "1.base_layer")
    assert refusal.reason.startswith("it is decoded from 4 bits per number")


@torch.no_grad()
def test_inference_keeps_a_copy_of_packed_integers_unless_it_shall_not(tmp_path: Path) -> None:
    write_compressed("W4A16")(tmp_path)
    for cache_weights in (True, False):
        linear: Any = fp8graph.adopt(load(tmp_path)).model.layers[0].mlp.down_proj
        fp8graph.compile(linear, policy=ALL, compiler="eager", cache_weights=cache_weights, fullgraph=True)
        linear(torch.randn(32, 512).bfloat16())
        kept = fp8graph.backend_of(linear).weights.bytes
        assert (kept >= 256 * 512) == cache_weights


def test_explain_traces_a_base_in_4_bits_for_a_gpu_that_is_absent() -> None:
    report = fp8graph.explain(
        adapted(four_bits()), torch.randn(4, 8, 64).bfloat16(), policy=only_base(), target="sm_90"
    )
    assert of_base(report) == IN_FP8
