"""The report on code that compiled nothing. On models that ``fp8graph.compile`` compiled: test_backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import fp8graph
from helpers import first_fast


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("how", ["by name", "with a backend"])
def test_nothing_compiled_is_said_in_the_second_call_of_what_nobody_watches(
    how: str, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """torch calls the backend for each graph, and then the graphs: in the second call all are known."""
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.LayerNorm(32)), torch.randn(16, 32)
    options: dict[str, Any] = {"compiler": "eager", "strict": strict}
    compiled = (
        torch.compile(model, backend="fp8graph", options=options)
        if how == "by name"
        else torch.compile(model, backend=fp8graph.Backend(**options))
    )
    with caplog.at_level(logging.WARNING, "fp8graph"):
        compiled(x)
        assert not caplog.records
        if strict:
            with pytest.raises(fp8graph.Fp8CoverageError, match="Compiled code was called, and no GEMM"):
                compiled(x)
            return
        compiled(x)
        compiled(x)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("Compiled code was called, and no GEMM of it was compiled: Dynamo made 1 graph(s)")


def test_attention_that_nobody_asked_for_hides_nothing() -> None:
    """The attention is in the report; in strict mode a model without a compiled GEMM is an error all the same."""

    up = nn.Linear(32, 32)
    outside: Any = torch.compiler.disable(lambda y: up(y))

    class Eager(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return outside(nn.functional.scaled_dot_product_attention(x, x, x))

    torch._dynamo.reset()
    backend = fp8graph.Backend(recipe="tensorwise", strict=True, compiler="eager")
    compiled, x = torch.compile(Eager(), backend=backend), torch.randn(2, 4, 16, 32)
    compiled(x)  # all graphs are known in the second call
    with pytest.raises(fp8graph.Fp8CoverageError, match="no GEMM of it was compiled"):
        compiled(x)
    assert len(backend.report.attention) == 1


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(x)


def helper(x: torch.Tensor) -> torch.Tensor:
    """Two graphs without a GEMM, which a forward calls several times."""
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


class Net(nn.Module):
    def __init__(self, *, helps: bool = False, convolves: bool = False) -> None:
        super().__init__()
        self.helps = helps
        self.stem = nn.Conv1d(32, 32, 1) if convolves else nn.Identity()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.t().unsqueeze(0)).squeeze(0).t() if isinstance(self.stem, nn.Conv1d) else x
        if self.helps:  # not in a loop: Dynamo gives up a frame whose graph breaks there
            x = helper(x)
            x = helper(x)
            x = helper(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


Call = Any  # of tensors


def _regions(backend: fp8graph.Backend) -> Call:
    return fp8graph.compile(Net(), backend=backend, regions="auto")


def _stem(backend: fp8graph.Backend) -> Call:
    """The first part that is compiled is a convolution."""
    return fp8graph.compile(Net(convolves=True), backend=backend, regions="auto")


def _blocks(backend: fp8graph.Backend) -> Call:
    backend.bind(model := Net())
    for layer in (*model.layers, model.head):
        cast(Any, layer).forward = torch.compile(layer.forward, backend=backend)
    return model


def _blocks_of_a_function(backend: fp8graph.Backend) -> Call:
    """No module's call is around those of the blocks."""
    model = _blocks(backend)

    def run(x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = layer(x)
        return model.head(x)

    return run


def _in_place(backend: fp8graph.Backend) -> Call:
    return fp8graph.compile(Net(helps=True), backend=backend)


def _wrapped(backend: fp8graph.Backend) -> Call:
    return torch.compile(Net(helps=True), backend=backend)


def _function(backend: fp8graph.Backend) -> Call:
    model = Net(helps=True)
    backend.bind(model)
    return torch.compile(lambda x: model(x), backend=backend)


WAYS = (_blocks_of_a_function, _regions, _stem, _blocks, _in_place, _wrapped, _function)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "fp8graph"]


def made(way: Callable[[fp8graph.Backend], Call], pattern: str, *, strict: bool) -> tuple[fp8graph.Backend, Call]:
    torch._dynamo.reset()
    policy = fp8graph.Policy([fp8graph.Rule(pattern, "tensorwise")], default="tensorwise", min_speedup=0)
    backend = fp8graph.Backend(policy, compiler="eager", strict=strict)
    return backend, way(backend)


@first_fast(("way", "gradients"), [(way, gradients) for way in WAYS for gradients in (True, False)])
def test_strict_mode_takes_a_model_whose_graphs_run_several_times_in_a_step(
    way: Callable[[fp8graph.Backend], Call], gradients: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The rule is for the layer that comes last: each graph before it runs three times in the first step."""
    backend, call = made(way, "head", strict=True)
    with torch.set_grad_enabled(gradients), caplog.at_level(logging.WARNING, "fp8graph"):
        for _ in range(3):
            result = call(torch.randn(16, 32)).sum()
            if gradients:
                result.backward()
    assert not said(caplog)
    backend.report.check()


@first_fast("way", WAYS)
def test_a_rule_that_matches_nothing_is_an_error_from_the_second_step_on(
    way: Callable[[fp8graph.Backend], Call],
) -> None:
    _, call = made(way, "haed", strict=True)
    with torch.no_grad():
        call(torch.randn(16, 32))
        for _ in range(3):
            with pytest.raises(fp8graph.Fp8CoverageError, match='rule "haed" -> tensorwise matched nothing'):
                call(torch.randn(16, 32))


@first_fast("way", WAYS)
def test_a_rule_that_matches_nothing_is_said_once_after_the_first_step(
    way: Callable[[fp8graph.Backend], Call], caplog: pytest.LogCaptureFixture
) -> None:
    _, call = made(way, "haed", strict=False)
    with caplog.at_level(logging.WARNING, "fp8graph"):
        call(torch.randn(16, 32)).sum().backward()
        assert not said(caplog)
        for _ in range(3):
            call(torch.randn(16, 32)).sum().backward()
    (text,) = said(caplog)
    assert 'rule "haed" -> tensorwise matched nothing. Sites: ' in text


def test_a_part_without_a_gemm_that_comes_first_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Parts that all have none are said once the step is over."""
    for last in (nn.Linear(32, 32), nn.LayerNorm(32)):
        torch._dynamo.reset()
        model = nn.Sequential(nn.LayerNorm(32), last)
        fp8graph.compile(model, compiler="eager", regions=["LayerNorm", type(last).__name__])
        with torch.no_grad(), caplog.at_level(logging.WARNING, "fp8graph"):
            model(torch.randn(16, 32))
            assert not said(caplog)
            model(torch.randn(16, 32))
            model(torch.randn(16, 32))
    (text,) = said(caplog)
    assert "no GEMM of it was compiled: Dynamo made 2 graph(s) without a matmul" in text


def test_a_false_start_uses_up_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A helper that runs several times says nothing, and code without a GEMM is still said after it."""

    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return helper(helper(x))

    torch._dynamo.reset()
    compiled = torch.compile(Nothing(), backend=fp8graph.Backend(compiler="eager"))
    with caplog.at_level(logging.WARNING, "fp8graph"):
        compiled(torch.randn(16, 32))
        assert not said(caplog)
        compiled(torch.randn(16, 32))
        compiled(torch.randn(16, 32))
    (text,) = said(caplog)
    assert "no GEMM of it was compiled" in text


def test_a_method_that_trains_is_checked_after_the_first_step_of_an_optimizer() -> None:
    """The outermost call of a module goes on until the training is over."""

    class Trains(Net):
        def fit(self, steps: int) -> None:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            for self.step in range(steps):
                self(torch.randn(16, 32)).sum().backward()
                optimizer.step()

    torch._dynamo.reset()
    model = Trains()
    backend = fp8graph.Backend(fp8graph.Policy([fp8graph.Rule("haed", None)]), compiler="eager", strict=True)
    fp8graph.compile(model, backend=backend, regions="auto")
    with pytest.raises(fp8graph.Fp8CoverageError, match="matched nothing"):
        model.fit(3)
    assert model.step == 1


BYPASSED: dict[str, Callable[[Net], Call]] = {
    "forward": lambda model: model.forward,
    "a method": lambda model: model.encode,
    "a module in it": lambda model: model.head,
    "another backend": lambda model: torch.compile(lambda x: nn.Sequential(model)(x), backend="eager"),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("how", BYPASSED)
def test_a_compiled_model_that_is_trained_and_not_called_is_said(
    how: str, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    model = fp8graph.compile(Net(), compiler="eager", strict=strict)
    call, optimizer = BYPASSED[how](cast(Net, model)), torch.optim.AdamW(model.parameters())
    with caplog.at_level(logging.WARNING, "fp8graph"):
        for _ in range(3):
            call(torch.randn(16, 32)).sum().backward()
            if strict:
                with pytest.raises(fp8graph.Fp8CoverageError, match="no graph of it has run"):
                    optimizer.step()
            else:
                optimizer.step()
    if not strict:
        (text,) = said(caplog)
        assert text.startswith("Net was compiled by fp8graph.compile, AdamW.step() has updated it, and no graph")


def test_a_step_that_updates_nothing_of_the_model_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Of another model, with a rate of 0 (torch makes the state of an optimizer so), or without gradients."""
    torch._dynamo.reset()
    model, other = fp8graph.compile(Net(), compiler="eager", strict=True), nn.Linear(32, 32)
    other(torch.randn(4, 32)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    optimizer.step()
    cast(Net, model).encode(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    with caplog.at_level(logging.WARNING, "fp8graph"):
        torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 32)).sum().backward()
        torch.optim.AdamW(model.parameters()).step()
    assert not said(caplog)


@pytest.mark.parametrize("container", [nn.ModuleList([nn.Linear(4, 4)]), nn.ModuleDict({"a": nn.Linear(4, 4)})])
def test_a_module_without_a_forward_is_refused(container: nn.Module) -> None:
    with pytest.raises(fp8graph.ConfigError, match=f"{type(container).__name__} has no forward: nothing calls it"):
        fp8graph.compile(container)
    assert not hasattr(container, "_fp8graph_compiled")
