"""backward_override: backward in high precision, from the numbers that fprop multiplied, or from the program's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8graph
from fp8graph import DelayedScaling, Float8CurrentScaling, Float8RowwiseScaling, Policy, Recipe, Rule, numerics
from fp8graph.compat.fsdp import Shard
from fp8graph.numerics import sqnr_db
from fp8graph.passes.gather_weights import GatheredWeight
from fp8graph.recipes import resolve_recipe
from helpers import (
    RECIPES,
    Checkpointed,
    Two,
    Weight,
    brief,
    compiled_step,
    eager_backend,
    first_fast,
    graph_text,
    mixtral,
    passed,
    same_bits,
    stage,
    step,
)
from ranks import run_each, run_ranks
from stored_weights import stored

DEQUANTIZED = Float8CurrentScaling(backward_override="dequantized")


def overridden(name: str, override: Any = "dequantized") -> Recipe:
    recipe = resolve_recipe(name)
    assert recipe is not None
    if isinstance(recipe, DelayedScaling):
        recipe = dataclasses.replace(recipe, initial_scale="one")
    return dataclasses.replace(recipe, backward_override=override)


def everywhere(recipe: Recipe, **gemms: Any) -> Policy:
    return Policy([Rule("*", recipe, **gemms)], default=None, min_speedup=0)


def decoded(x: Tensor, recipe: Recipe, operand: Any) -> Tensor:
    return numerics.dequantize(numerics.quantize(x.detach(), recipe, operand, "rowwise"))


def test_backward_reads_what_fprop_multiplies() -> None:
    module, x = Weight(lambda w, x: x @ w.t(), 48, 32), torch.randn(16, 32, requires_grad=True)
    text = brief(stage(module, x, after="dequantize_backward", policy=everywhere(DEQUANTIZED)))
    forward, _, backward = text.partition("# backward\n")
    assert "quantize_input: (e4m3[16, 32], f32[]) = fp8graph.quantize(primals_2, dtype=e4m3, rowwise=[1, 16]" in forward
    assert "fp8graph.dequantize" not in forward
    for line in (
        "decoded_input: f32[16, 32] = fp8graph.dequantize(input_rowwise, input_scale_inv, dtype=f32)",
        "decoded_weight: f32[48, 32] = fp8graph.dequantize(weight_rowwise, weight_scale_inv, dtype=f32)",
        "aten.mm(tangents_1, decoded_weight)",
    ):
        assert line in backward, backward
    assert "primals" not in backward


@first_fast("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
@first_fast("compiler", ["eager", "inductor"])
def test_gradients_are_those_of_eager_on_the_decoded_tensors(compiler: Any, recipe: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    own = overridden(recipe)
    module = nn.Linear(96, 80, bias=False, dtype=dtype)
    x, dy = torch.randn(48, 96, dtype=dtype, requires_grad=True), torch.randn(48, 80, dtype=dtype)
    backend = fp8graph.Backend(everywhere(own), compiler=compiler)
    torch.compile(module, backend=backend)(x).backward(dy)
    dx, dw = x.grad, module.weight.grad
    assert dx is not None
    assert dw is not None
    assert torch.equal(dx, dy @ decoded(module.weight, own, "weight"))
    assert torch.equal(dw, dy.t() @ decoded(x, own, "input"))
    assert [gemm.recipe for gemm in backend.report.gemms] == [own.name, None, None]


def saved_by(recipe: Any) -> set[tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors that are kept for backward of ``linear(x * 2)`` beside the weight."""
    saved: set[tuple[torch.dtype, tuple[int, ...]]] = set()
    module = Weight(lambda w, x: (x * 2) @ w.t(), 48, 32).bfloat16()

    def pack(tensor: Tensor) -> Tensor:
        if tensor is not module.w and tensor.numel() > 1:
            saved.add((tensor.dtype, tuple(tensor.shape)))
        return tensor

    compiled = torch.compile(module, backend=eager_backend(everywhere(recipe)))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        compiled(torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True))
    return saved


def test_fp8_is_saved() -> None:
    assert saved_by(DEQUANTIZED) == {(torch.float8_e4m3fn, (16, 32)), (torch.float8_e4m3fn, (48, 32))}
    assert saved_by(overridden("tensorwise", "high_precision")) == {(torch.bfloat16, (16, 32))}


@first_fast("recipe", RECIPES)
def test_high_precision_is_a_policy_without_dgrad_and_wgrad(recipe: str) -> None:
    torch.manual_seed(0)
    module, x = Two(), torch.randn(16, 32, requires_grad=True)
    plain = everywhere(overridden(recipe, None), dgrad=None, wgrad=None)
    backend = eager_backend(everywhere(overridden(recipe, "high_precision")))
    assert same_bits(compiled_step(module, x, backend), compiled_step(module, x, eager_backend(plain)))
    reason = f'rule "*": {recipe} with backward_override="high_precision" leaves dgrad in high precision'
    assert reason in {gemm.reason for gemm in backend.report.gemms}


def of_each_gemm(policy: Any, module: nn.Module | None = None, x: Tensor | None = None) -> tuple[Any, list[Tensor]]:
    backend = eager_backend(policy)
    x = torch.randn(16, 32, requires_grad=True) if x is None else x
    results = compiled_step(module or Weight(lambda w, x: x @ w.t(), 48, 32), x, backend)
    return {gemm.gemm: (gemm.recipe, gemm.reason) for gemm in backend.report.gemms}, results


def test_one_gemm_of_a_rule_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(
        """
        default = "high_precision"
        min_speedup = 0
        [[rules]]
        pattern = "*"
        recipe = "rowwise"
        wgrad = { type = "Float8CurrentScaling", backward_override = "dequantized" }
        """
    )
    policy = Policy.load(file)
    assert Policy.from_dict(policy.to_dict()) == policy
    torch.manual_seed(0)
    module, x = Weight(lambda w, x: x @ w.t(), 48, 32), torch.randn(16, 32, requires_grad=True)
    found, (_, dx, dw) = of_each_gemm(policy, module, x)
    assert found["wgrad"] == (
        None,
        'rule "*": tensorwise with backward_override="dequantized" reads the FP8 numbers of fprop, decoded',
    )
    assert [found[gemm][0] for gemm in ("fprop", "dgrad")] == ["rowwise", "rowwise"]
    dy = torch.linspace(-1.0, 1.0, 16 * 48).reshape(16, 48)
    assert torch.equal(dw, dy.t() @ decoded(x, Float8RowwiseScaling(), "input"))  # as fprop's recipe quantized it
    assert not torch.equal(dx, dy @ decoded(module.w, Float8RowwiseScaling(), "weight"))


def test_nothing_is_decoded_where_fprop_is_in_high_precision() -> None:
    torch.manual_seed(0)
    module, x = Weight(lambda w, x: x @ w.t(), 48, 32), torch.randn(16, 32, requires_grad=True)
    found, results = of_each_gemm(everywhere(DEQUANTIZED, fprop=None), module, x)
    assert found["dgrad"][1].startswith("fprop is in high precision, and so is what it multiplies (")
    assert same_bits(results, step(module, x, parameters=module.parameters()))


def test_a_region_says_it() -> None:
    def run(w: Tensor, x: Tensor) -> Tensor:
        with fp8graph.autocast(recipe="dequantized for a test"):
            return x @ w.t()

    fp8graph.register_recipe("dequantized for a test", DEQUANTIZED)
    found, _ = of_each_gemm(Policy(default=None, min_speedup=0), Weight(run, 48, 32))
    assert found["dgrad"][1].startswith("autocast(dequantized for a test): tensorwise with backward_override=")


@pytest.mark.slow
def test_experts_read_their_own_tensors_and_strict_mode_knows() -> None:
    torch.manual_seed(0)
    policy = Policy([Rule("*", DEQUANTIZED, op="grouped_mm")], default=None, min_speedup=0)
    backend = eager_backend(policy)
    model = mixtral()
    torch.compile(model, backend=backend)(torch.arange(16)[None]).logits.sum().backward()
    reasons = {gemm.reason for gemm in backend.report.gemms if gemm.op == "grouped_mm" and gemm.gemm != "fprop"}
    assert len(reasons) == 1
    assert next(iter(reasons)).startswith("experts have scales per group of rows, which no decoding reads")
    with pytest.raises(fp8graph.Fp8CoverageError, match="experts have scales per group of rows"):
        backend.report.check()


@pytest.mark.parametrize(
    ("recipe", "fields", "message"),
    [
        (Float8CurrentScaling, {"backward_override": "bf16"}, 'None, "high_precision" or "dequantized"'),
        (
            Float8RowwiseScaling,
            {"backward_override": "high_precision", "attention_backward": True},
            "which quantizes backward",
        ),
    ],
)
def test_a_contradiction_is_an_error(recipe: Any, fields: Any, message: str) -> None:
    with pytest.raises(fp8graph.UnsupportedRecipeError, match=message):
        recipe(**fields)


def test_rowwise_with_gw_hp_keeps_its_wgrad() -> None:
    torch.manual_seed(0)
    module, x = Weight(lambda w, x: x @ w.t(), 48, 32), torch.randn(16, 32, requires_grad=True)
    own = Float8RowwiseScaling(high_precision_wgrad=True, backward_override="dequantized")
    _, (_, dx, dw) = of_each_gemm(everywhere(own), module, x)
    dy = torch.linspace(-1.0, 1.0, 16 * 48).reshape(16, 48)
    assert torch.equal(dx, dy @ decoded(module.w, own, "weight"))
    assert torch.equal(dw, dy.t() @ x)


FORMS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], Any]] = {  # weight, x, where the matrices are in w and x
    "padded": (lambda w, x: x @ w.t(), (41, 27), (13, 27), None),
    "in and out": (lambda w, x: x @ w, (32, 48), (16, 32), None),
    "weight on the left": (lambda w, x: w @ x, (48, 32), (32, 16), None),
    "of tokens": (lambda w, x: nn.functional.linear(x, w), (48, 32), (2, 8, 32), None),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_way_to_write_a_linear(form: str) -> None:
    """One scale per tensor: the decoded numbers do not depend on the way, and eager runs the same program on them."""
    torch.manual_seed(0)
    body, of_weight, of_input, _ = FORMS[form]
    module, x = Weight(body, *of_weight), torch.randn(of_input, requires_grad=True)
    _, (_, dx, dw) = of_each_gemm(everywhere(DEQUANTIZED), module, x)
    w, x = (decoded(each, DEQUANTIZED, "input").requires_grad_() for each in (module.w, x))
    _, expected_dx, expected_dw = step(lambda x: body(w, x), x, parameters=[w])
    assert sqnr_db(dx, expected_dx) > 110
    assert sqnr_db(dw, expected_dw) > 110


def test_matmuls_of_activations_too() -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(3, *shape, requires_grad=True) for shape in ((16, 32), (32, 24)))
    policy = Policy([Rule("*", overridden("rowwise"), op="*")], default=None, min_speedup=0)
    got = step(torch.compile(torch.bmm, backend=eager_backend(policy)), a, b)
    qa = decoded(a, overridden("rowwise"), "input").requires_grad_()
    qb = decoded(b.mT, overridden("rowwise"), "weight").mT.requires_grad_()
    expected = step(torch.bmm, qa, qb)
    assert all(sqnr_db(x, y) > 110 for x, y in zip(got[1:], expected[1:], strict=True))


@first_fast("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_fused_linears_decode_their_part_of_the_joined_weight(recipe: str) -> None:
    torch.manual_seed(0)
    own, module = overridden(recipe), Two(up=128).bfloat16()
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    backend = eager_backend(everywhere(own))
    _, dx, *dws = compiled_step(module, x, backend)
    native = backend.report.gemms[0].execution == "native"
    assert ("one GEMM with" in backend.report.gemms[0].reason) == native
    dy = torch.linspace(-1.0, 1.0, 16 * 192).reshape(16, 192).bfloat16()
    parts = [module.gate.weight, module.up.weight]
    weights = decoded(torch.cat(parts), own, "weight").split([64, 128]) if native else None
    weights = weights or [decoded(w, own, "weight") for w in parts]
    gate, up = (d @ w for d, w in zip(dy.split([64, 128], 1), weights, strict=True))
    assert torch.equal(dx, up + gate)
    assert torch.equal(torch.cat(dws), dy.t() @ decoded(x, own, "input"))


@pytest.mark.parametrize("settings", [{"save": "memory"}, {"cache_weights": "update"}, {"accumulate_wgrad": True}])
def test_settings_change_no_number(settings: Any) -> None:
    torch.manual_seed(0)
    module, x = Two(), torch.randn(16, 32, requires_grad=True)
    plain = compiled_step(module, x, eager_backend(everywhere(DEQUANTIZED)))
    assert same_bits(compiled_step(module, x, eager_backend(everywhere(DEQUANTIZED), **settings)), plain)


@first_fast("recipe", RECIPES)
def test_checkpointing_changes_no_number(recipe: str) -> None:
    torch.manual_seed(0)
    module, x = Two(), torch.randn(16, 32, requires_grad=True)
    plain = compiled_step(module, x, eager_backend(everywhere(overridden(recipe))))
    again = compiled_step(Checkpointed(module), x, eager_backend(everywhere(overridden(recipe))))
    assert same_bits(again, plain)


def on_ranks(rank: int, recipe: Recipe) -> Any:
    """dx and dw of two steps under FSDP2; and both of eager, from the rows of all ranks."""
    torch.manual_seed(0)
    module = Weight(lambda w, x: x @ w.t(), 256, 128)
    weight, rows = module.w.detach().bfloat16(), torch.randn(2, 16, 128).bfloat16()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(module, mp_policy=precision)
    module.compile(backend=fp8graph.Backend(everywhere(recipe), compiler="eager"))
    x, dy = rows[rank].clone().requires_grad_(), torch.linspace(-1.0, 1.0, 16 * 256).reshape(16, 256).bfloat16()
    for _ in range(2):  # of the second on, weights may be gathered in FP8
        module.zero_grad()
        x.grad = None
        module(x).backward(dy)
    each = [dy.t() @ decoded(one, recipe, "input") for one in rows]
    dw: Any = module.w.grad
    return (x.grad, dw.full_tensor()), (dy @ decoded(weight, recipe, "weight"), (each[0].float() + each[1].float()) / 2)


@pytest.mark.slow
def test_gradients_on_two_ranks_are_those_of_eager_on_the_decoded_tensors(tmp_path: Path) -> None:
    calls = {name: (on_ranks, (overridden(name),)) for name in ("tensorwise", "rowwise", "blockwise", "mxfp8")}
    for rank in run_ranks(run_each, 2, tmp_path, calls):
        for name, (found, expected) in rank.items():
            assert same_bits(found, expected), name


def test_sizes_that_change() -> None:
    torch.manual_seed(0)
    module = nn.Linear(27, 41, bias=False)
    compiled = torch.compile(module, backend=eager_backend(everywhere(DEQUANTIZED)), dynamic=True)
    for rows in (13, 29):
        x = torch.randn(rows, 27, requires_grad=True)
        _, dx, dw = step(compiled, x, parameters=module.parameters())
        dy = torch.linspace(-1.0, 1.0, rows * 41).reshape(rows, 41)
        assert sqnr_db(dx, dy @ decoded(module.weight, DEQUANTIZED, "weight")) > 110
        assert sqnr_db(dw, dy.t() @ decoded(x, DEQUANTIZED, "input")) > 110


def test_masters_under_autocast() -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(32, 48, bias=False), torch.randn(16, 32, requires_grad=True)
    compiled = torch.compile(module, backend=eager_backend(everywhere(DEQUANTIZED)))

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return compiled(x)

    _, dx, dw = step(run, x, parameters=module.parameters())
    dy = torch.linspace(-1.0, 1.0, 16 * 48).reshape(16, 48).bfloat16()
    assert torch.equal(dx, (dy @ decoded(module.weight.bfloat16(), DEQUANTIZED, "weight")).float())
    assert torch.equal(dw, (dy.t() @ decoded(x.bfloat16(), DEQUANTIZED, "input")).float())


def test_delayed_scaling_keeps_no_state_of_gradients() -> None:
    backend, module = eager_backend(everywhere(overridden("delayed"))), Two()
    compiled = torch.compile(module, backend=backend)
    for _ in range(2):
        step(compiled, torch.randn(16, 32, requires_grad=True), parameters=module.parameters())
    kept = {name.partition("|")[0].rpartition(".")[2] for name in backend.state_dict() if "|" in name}
    assert kept == {"input", "weight"}


@pytest.mark.parametrize("kind", ["block", "row"])
def test_a_weight_that_arrives_quantized_is_decoded(kind: str) -> None:
    """The base of an adapter: its own bytes, whatever the recipe that has the override."""
    torch.manual_seed(0)
    module, x = stored(kind, 256, 384), torch.randn(16, 384, dtype=torch.bfloat16, requires_grad=True)
    backend = eager_backend(Policy(default=DEQUANTIZED, min_speedup=0))
    _, dx = step(torch.compile(module, backend=backend), x)
    fprop, dgrad = backend.report.gemms
    assert dgrad.reason.endswith('with backward_override="dequantized" reads the FP8 numbers of fprop, decoded')
    assert fprop.recipe is not None
    dy = torch.linspace(-1.0, 1.0, 16 * 256).reshape(16, 256).bfloat16()
    assert torch.equal(dx, dy @ module.high_precision(torch.bfloat16))


def test_a_gathered_weight_is_quantized_again() -> None:
    """FSDP2 gathers it anew for backward: no copy of the whole weight is kept until then."""
    module = Weight(lambda w, x: x @ w.t(), 48, 32)
    x, policy = torch.randn(16, 32, requires_grad=True), everywhere(DEQUANTIZED)
    sharded = {GatheredWeight.store: {0: Shard(24, "for a test")}}
    for gathered in (frozenset[int](), frozenset({0})):
        known: dict[str, Any] = {"gathered": gathered, "parameter_facts": sharded, "training": True}
        graph, _ = passed(module, x, last="save_for_backward", policy=policy, **known)
        text = graph_text(graph)
        backward = text.partition("# backward\n")[2]
        assert ("quantize_weight" in backward) == bool(gathered), text
        (decoding,) = [line for line in backward.splitlines() if line.startswith("decoded_weight")]
        read = decoding.partition("dequantize(")[2].split(",")[0]
        assert (f"{read}:" in backward) == bool(gathered)
