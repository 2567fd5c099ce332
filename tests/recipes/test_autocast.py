"""fp8graph.autocast: inside and outside compiled code, nested, sequential, disabled; backward inherits."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8graph
from fp8graph.recipes import autocast as regions
from helpers import ALL, MLP, NONE, eager_backend, same_bits, step

fp8graph.register_recipe("test_autocast_e4m3", fp8graph.Float8CurrentScaling(fp8_format=fp8graph.Format.E4M3))


class Three(nn.Module):
    """Three linears, run by ``body``, which opens regions around them."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def recipes(body: Callable[[Any, Tensor], Tensor], policy: Any = NONE) -> dict[str, set[str | None]]:
    """site -> the recipes of its three GEMMs, forward and backward."""
    model, backend = Three(body), eager_backend(policy)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    step(compiled, torch.randn(4, 32, requires_grad=True), parameters=model.parameters())
    found: dict[str, set[str | None]] = {}
    for gemm in backend.report.gemms:
        found.setdefault(gemm.fqn, set()).add(gemm.recipe)
    assert len(backend.report.gemms) == 9
    return found


def nested(m: Any, x: Tensor) -> Tensor:
    with fp8graph.autocast(recipe="tensorwise"):
        x = m.a(x).relu()
        with fp8graph.autocast(enabled=False):
            x = m.b(x).relu()
        return m.c(x)


def sequential(m: Any, x: Tensor) -> Tensor:
    with fp8graph.autocast():
        x = m.a(x).relu()
    with fp8graph.autocast(recipe="tensorwise"):
        x = m.b(x).relu()
    return m.c(x)


def disabled_then_policy(m: Any, x: Tensor) -> Tensor:
    with fp8graph.autocast(enabled=False):
        x = m.a(x).relu()
        with fp8graph.autocast(enabled=True):
            x = m.b(x).relu()
    return m.c(x)


@pytest.mark.parametrize(
    ("body", "policy", "expected"),
    [
        (nested, NONE, {"a": {"tensorwise"}, "b": {None}, "c": {"tensorwise"}}),
        (nested, ALL, {"a": {"tensorwise"}, "b": {None}, "c": {"tensorwise"}}),
        (sequential, NONE, {"a": {None}, "b": {"tensorwise"}, "c": {None}}),
        (disabled_then_policy, ALL, {"a": {None}, "b": {"tensorwise"}, "c": {"tensorwise"}}),
    ],
)
def test_regions_inside_compiled_code(body: Any, policy: Any, expected: dict[str, set[str | None]]) -> None:
    assert recipes(body, policy) == expected


def test_a_region_wins_over_a_rule_and_reaches_backward() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        with fp8graph.autocast(recipe="test_autocast_e4m3"):
            return m.c(m.b(m.a(x)))

    model, backend = Three(body), eager_backend(fp8graph.Policy([fp8graph.Rule("b", None)]))
    torch.compile(model, backend=backend)(torch.randn(4, 32, requires_grad=True))
    assert {g.dtypes[:2] for g in backend.report.gemms} == {("e4m3", "e4m3")}  # no E5M2 gradient
    assert {g.reason for g in backend.report.gemms} >= {"autocast(test_autocast_e4m3)"}


def test_regions_around_the_call_pick_a_variant_each() -> None:
    model, x = MLP(), torch.randn(4, 32, requires_grad=True)
    backend = eager_backend(ALL)
    compiled = torch.compile(model, backend=backend)

    def run() -> list[Tensor]:
        return step(compiled, x, parameters=model.parameters())

    policy = run()
    with fp8graph.autocast(enabled=False):
        high = run()
        with fp8graph.autocast(recipe=fp8graph.Float8CurrentScaling(power_2_scale=True)):
            power_2 = run()
        assert same_bits(high, run())
    assert same_bits(policy, run())
    assert not same_bits(policy, high)
    assert not same_bits(policy, power_2)
    assert len(backend.report.graphs) == 3
    assert [{g.recipe for g in view.gemms} for view in backend.report.graphs] == [
        {"tensorwise"}, {None}, {"tensorwise"},
    ]  # fmt: skip


def test_backward_may_run_outside_the_region() -> None:
    model, x = MLP(), torch.randn(4, 32, requires_grad=True)
    compiled = torch.compile(model, backend=eager_backend(ALL))
    with fp8graph.autocast(enabled=False):
        inside = step(compiled, x, parameters=model.parameters())
        out = compiled(x)
    x.grad = None
    weights = torch.linspace(-1.0, 1.0, out.numel()).reshape(out.shape)
    (out * weights).sum().backward()
    assert x.grad is not None
    assert same_bits([x.grad], [inside[1]])


def test_a_region_inside_wins_over_the_one_around() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        x = m.a(x)
        with fp8graph.autocast(recipe="tensorwise"):
            x = m.b(x)
        return m.c(x)

    with fp8graph.autocast(enabled=False):
        assert recipes(body, ALL) == {"a": {None}, "b": {"tensorwise"}, "c": {None}}


def test_a_region_leaves_attention_matmuls_to_the_policy() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        with fp8graph.autocast(recipe="tensorwise"):
            scores = m.a(x) @ m.b(x).T
            return scores @ m.c(x)

    model, backend = Three(body), eager_backend()
    torch.compile(model, backend=backend)(torch.randn(16, 32))
    assert {(g.op, g.recipe) for g in backend.report.gemms} == {("linear", "tensorwise"), ("matmul", None)}


def test_other_threads_do_not_see_the_region() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from fp8graph.recipes.autocast import current_region

    with fp8graph.autocast(enabled=False), ThreadPoolExecutor(1) as pool:
        assert pool.submit(current_region).result() is None
        assert current_region() is not None
    assert current_region() is None


def test_an_unknown_recipe() -> None:
    with pytest.raises(fp8graph.UnsupportedRecipeError, match="unknown recipe 'nosuch'"):
        fp8graph.autocast(recipe="nosuch")
    with pytest.raises(TypeError, match=r"write autocast\(recipe=...\)"):
        fp8graph.autocast("rowwise")  # pyright: ignore[reportArgumentType]

    def body(m: Any, x: Tensor) -> Tensor:
        with fp8graph.autocast(recipe="nosuch"):
            return m.a(x)

    with pytest.raises(fp8graph.UnsupportedRecipeError, match="a: autocast: unknown recipe 'nosuch'"):
        torch.compile(Three(body), backend=eager_backend())(torch.randn(4, 32))


def test_a_graph_break_inside_a_region_is_said() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        with fp8graph.autocast(recipe="tensorwise"):
            x = m.a(x)
            torch._dynamo.graph_break()
            return m.b(x)

    model, backend = Three(body), eager_backend(NONE)
    compiled = torch.compile(model, backend=backend)
    compiled(torch.randn(4, 32))
    report = backend.report
    assert "graph break inside an fp8graph.autocast region" in "".join(report.eager_frames)
    with pytest.raises(fp8graph.Fp8CoverageError, match="graph break inside an fp8graph.autocast"):
        report.check()


def test_an_amax_reduction_group_is_a_group_around_compiled_code() -> None:
    with pytest.raises(fp8graph.UnsupportedRecipeError, match="takes a ProcessGroup or a DeviceMesh, not str"):
        fp8graph.autocast(amax_reduction_group="dp")

    def inside(x: Tensor) -> Tensor:
        with fp8graph.autocast(amax_reduction_group="dp"):
            return x @ x

    with pytest.raises(Exception, match="can only surround compiled code, not be inside it"):
        torch.compile(inside, backend=eager_backend(), fullgraph=True)(torch.randn(4, 4))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("fp8_recipe", "'fp8_recipe'. Here it is recipe. Arguments: enabled, recipe, amax_reduction_group."),
        ("fp8_group", "'fp8_group'. Here it is amax_reduction_group."),
        ("calibrating", "'calibrating'. Amaxes are recorded by training in FP8; backend.observe() measures tensors."),
        ("enable", "'enable'. Did you mean 'enabled'?"),
        ("interval", "'interval'. Fields of a recipe go into the recipe."),
    ],
)
def test_an_argument_that_does_not_exist(name: str, hint: str) -> None:
    """Transformer Engine's names among them."""
    wrong: Any = {name: None}
    error = pytest.raises(TypeError, match="^" + re.escape(f"autocast has no argument {hint}"))
    with error:
        fp8graph.autocast(**wrong)

    def body(m: Any, x: Tensor) -> Tensor:
        with fp8graph.autocast(**wrong):
            return m.a(x)

    torch._dynamo.reset()
    with error:
        torch.compile(Three(body), backend=eager_backend())(torch.randn(4, 32))


def test_a_region_in_which_no_graph_is_called_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "_said", set())
    eager, compiled = nn.Linear(32, 32), torch.compile(nn.Linear(32, 32), backend=eager_backend(ALL))
    x = torch.randn(16, 32)
    with caplog.at_level(logging.WARNING, "fp8graph"):
        with fp8graph.autocast(recipe="rowwise"):
            compiled(x)
            with fp8graph.autocast(enabled=False):
                eager(x)
        with fp8graph.autocast(recipe="rowwise"):
            eager(x)
            compiled(x)  # prepared
        with pytest.raises(ZeroDivisionError), fp8graph.autocast(recipe="rowwise"):
            _ = 1 / 0
        assert not caplog.records
        for _ in range(2):
            with fp8graph.autocast(recipe="rowwise"):
                eager(x)
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith("fp8graph.autocast: no compiled code of fp8graph was called in a region")


def test_a_region_around_checkpointed_forwards_has_graphs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "_said", set())
    compiled = torch.compile(nn.Linear(32, 32), backend=eager_backend(ALL))
    with caplog.at_level(logging.WARNING, "fp8graph"):
        for _ in range(2):
            with fp8graph.autocast(recipe="rowwise"):
                y = checkpoint(compiled, torch.randn(16, 32), use_reentrant=False)
            y.sum().backward()
    assert not caplog.records
