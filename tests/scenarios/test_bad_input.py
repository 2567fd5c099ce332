"""Inputs of a bad day: inf, nothing, one row, weights that move or change: right results or a clear error."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import Policy
from fp8graph.numerics import sqnr_db
from fp8graph.recipes import RECIPE_NAMES
from helpers import (
    ALL,
    MLP,
    compiled_step,
    eager_backend,
    first_fast,
    rounding_to_nearest,
    same_bits,
    step,
)
from tiny_models import causal_lm


def compiled(module: nn.Module, **kwargs: Any) -> tuple[Any, fp8graph.Backend]:
    backend = eager_backend(ALL, cache_weights="update", **kwargs)
    return torch.compile(module, backend=backend), backend


@first_fast("recipe", RECIPE_NAMES)
def test_nonfinite_values_reach_every_result(recipe: str) -> None:
    """An inf or NaN of any operand in every result that has it in high precision; in the other rows nothing changes.

    The step after is, bit for bit, the one before.
    """
    torch.manual_seed(0)
    module, good = nn.Linear(32, 48), {"input": torch.randn(16, 32), "grad_output": torch.randn(16, 48)}
    good["weight"] = module.weight.detach().clone()
    model = torch.compile(
        module, backend=eager_backend(Policy(default=rounding_to_nearest(recipe)), cache_weights=True)
    )

    def results(model: Any, given: dict[str, Tensor]) -> list[Tensor]:
        with torch.no_grad():
            module.weight.copy_(given["weight"])
        module.zero_grad()
        x = given["input"].clone().requires_grad_()
        out = model(x)
        out.backward(given["grad_output"])
        assert x.grad is not None
        assert module.weight.grad is not None
        return [out.detach(), x.grad, module.weight.grad]

    results(model, good)  # under delayed scaling the first step has no scale yet
    before = results(model, good)
    for operand, bad in itertools.product(good, (math.inf, -math.inf, math.nan)):
        given = good | {operand: good[operand].clone()}
        given[operand][3, 7] = bad
        for exact, got, usual in zip(results(module, given), results(model, given), before, strict=True):
            lost = ~exact.isfinite()
            if operand == "weight" and recipe == "nvfp4":  # the weight's tile, 16 by 16
                lost = lost.unflatten(-1, (-1, 16)).any(-1, keepdim=True).expand(-1, -1, 16).flatten(-2)
            elif recipe == "nvfp4" and exact.shape == (48, 32):  # 16 tokens are transformed into 16 others
                assert not got[lost].isfinite().any()
                continue
            assert torch.equal(~got.isfinite(), lost)
            if lost.any() and not lost.all():
                assert sqnr_db(usual[~lost], got[~lost]) > 15
        assert same_bits(before, results(model, good)), (operand, bad)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32), (0, 5, 32)])
@pytest.mark.parametrize("first", ["empty", "full"])
def test_no_rows_at_all(shape: tuple[int, ...], first: str) -> None:
    module = MLP(bias=True)
    model, _ = compiled(module)
    full = torch.randn(4, *shape[1:-1], 32) if 0 not in shape[1:] else torch.randn(*shape[:-2], 3, 32)
    inputs = {"empty": torch.randn(shape), "full": full}
    for name in (first, *({"empty", "full"} - {first}), first):
        x = inputs[name].requires_grad_()
        expected = step(module, x, parameters=module.parameters())
        got = step(model, x, parameters=module.parameters())
        assert [g.shape for g in got] == [e.shape for e in expected]
        if name == "empty":
            assert not any(g.any() for g in got[1:])  # gradients of nothing are zero
        else:
            assert all(sqnr_db(e, g) > 15 for e, g in zip(expected, got, strict=True))


def test_an_empty_batch_says_why_it_is_not_in_fp8() -> None:
    model, backend = compiled(MLP())
    model(torch.randn(0, 32))
    assert {g.recipe for g in backend.report.gemms} == {None}
    assert all("an operand is empty: [0, " in g.reason for g in backend.report.gemms if g.gemm == "fprop")


@first_fast(
    ("recipe", "compiler"),
    [
        *((name, "eager") for name in ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")),
        ("rowwise", "inductor"),  # whose kernel's meta function asks whether there is one row
    ],
)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_rows_whose_number_the_data_decide(recipe: str, compiler: Any) -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 16)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layer(x[mask]).relu()

    module, backend = Chosen(), fp8graph.Backend(Policy(default=recipe), compiler=compiler)
    model, x = torch.compile(module, backend=backend, fullgraph=True), torch.randn(16, 32, requires_grad=True)
    for rows in (5, 0, 1):
        mask = torch.arange(16) < rows
        expected = step(module, x, mask, parameters=module.parameters())
        got = step(model, x, mask, parameters=module.parameters())
        for e, g in zip(expected, got, strict=True):
            torch.testing.assert_close(g, e)
    (graph,) = backend.report.graphs
    assert [gemm.recipe for gemm in graph.gemms] == [None] * 3
    assert all("a size is known at run time only, and may be 0: [" in gemm.reason for gemm in graph.gemms)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2])
def test_a_sequence_of_length_one(length: int) -> None:
    torch.manual_seed(0)
    model = causal_lm("Llama")(1).bfloat16()
    ids = torch.randint(0, 256, (1, length))
    backend = eager_backend(None)
    out = torch.compile(model, backend=backend)(input_ids=ids).logits
    assert sqnr_db(model(input_ids=ids).logits, out) > 24
    out.float().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert {g.recipe for g in backend.report.gemms if g.fqn.endswith("up_proj")} == {"tensorwise"}


@pytest.mark.slow
def test_parameters_on_meta() -> None:
    """Weights that were never loaded: an error that says so, not zeros. explain() needs no weights."""
    with torch.device("meta"):
        module = MLP()
    model, _ = compiled(module)
    with pytest.raises(RuntimeError, match="meta"):
        model(torch.randn(4, 32))
    x = torch.randn(4, 32, device="meta")
    assert model(x).device.type == "meta"
    assert all(g.recipe for g in fp8graph.explain(module, x, policy=ALL).gemms)
    module.to_empty(device="cpu")
    reference = MLP()
    module.load_state_dict(reference.state_dict())
    expected = compiled_step(reference, y := torch.randn(4, 32), eager_backend(ALL))
    assert same_bits(expected, step(model, y, parameters=module.parameters()))


def half_then_back(module: nn.Module) -> None:
    module.to(torch.bfloat16).to(torch.float32)


def assign(module: nn.Module) -> None:
    module.load_state_dict({k: v * 2 for k, v in module.state_dict().items()}, assign=True)


def set_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.clone() * 2


def new_layer(module: nn.Module) -> None:
    module.up = nn.Linear(32, 64, bias=False)


def swap(module: nn.Module) -> None:
    module.gate, module.up = module.up, module.gate


CHANGES: dict[str, Callable[[Any], Any]] = {
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "float16": lambda m: m.half(),
    "half and back": half_then_back,
    "load_state_dict(assign=True)": assign,
    "new data": set_data,
    "a new layer": new_layer,
    "two layers swapped": swap,
    "frozen": lambda m: m.up.requires_grad_(False),
    "tied": lambda m: setattr(m.up, "weight", m.gate.weight),
    "share_memory": lambda m: m.share_memory(),
}


@first_fast("how", CHANGES)
def test_weights_that_move_or_change_between_steps(how: str) -> None:
    """Bit for bit what a backend computes that never saw the old ones."""
    torch.manual_seed(0)
    module = MLP()
    model, backend = compiled(module)
    for _ in range(2):
        step(model, torch.randn(16, 32), parameters=module.parameters())
    assert backend.weights.quantized == 3
    CHANGES[how](module)
    x = torch.randn(16, 32, dtype=module.gate.weight.dtype, requires_grad=True)
    got = step(model, x, parameters=module.parameters())
    fresh = copy.deepcopy(module)
    assert same_bits(compiled_step(fresh, x, eager_backend(ALL)), got)


def test_wrong_shapes_and_dtypes_are_torchs_own_errors() -> None:
    model, _ = compiled(MLP())
    with pytest.raises(Exception, match="(?s)mat1|shape|size"):
        model(torch.randn(4, 31))
    with pytest.raises(Exception, match="(?s)dtype|same type"):
        model(torch.randn(4, 32).bfloat16())


def test_integers_and_complex_numbers_are_left_alone() -> None:
    weight = nn.Parameter(torch.randn(32, 48, dtype=torch.complex64))

    def multiply(x: Tensor) -> Tensor:
        return x @ weight

    backend = eager_backend(ALL)
    x = torch.randn(4, 32, dtype=torch.complex64)
    assert torch.allclose(torch.compile(multiply, backend=backend)(x), x @ weight)
    assert {g.recipe for g in backend.report.gemms} == {None}
