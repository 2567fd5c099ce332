"""dynamo: sources, and what Dynamo gives up on, which it says nowhere but in logs and metrics."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.callback import callback_handler

import fp8graph
from fp8graph.backend import named_backend
from fp8graph.compat import dynamo
from helpers import ALL, MLP, eager_backend, first_fast


class Source:
    """As torch has it: ``name`` is a method up to 2.11."""

    def __init__(self, name: Any) -> None:
        self.name = name


@pytest.mark.parametrize(
    ("source", "name"), [(Source("L['x']"), "L['x']"), (Source(lambda: "L['x']"), "L['x']"), (None, "")]
)
def test_names_of_sources(source: Any, name: str) -> None:
    graph = fx.Graph()
    node, copied = graph.placeholder("x"), graph.placeholder("y")
    assert dynamo.source_name(node) == ""
    node._dynamo_source = source  # pyright: ignore[reportAttributeAccessIssue]
    dynamo.copy_source(node, copied)
    assert dynamo.source_name(copied) == name
    dynamo.describe_own_input(node)
    assert dynamo.source_name(node) == ""
    assert node.meta["tensor_dict"] == {"_dynamo_static_input_type": "unguarded"}


def test_copied_module_keeps_parameter_sources() -> None:
    module, copied = (fx.GraphModule(nn.Module(), fx.Graph()) for _ in range(2))
    dynamo.keep_parameter_sources(module, copied)
    assert not hasattr(copied, "_param_name_to_source")
    noted: Any = module
    noted._param_name_to_source = {"w": "L['w']"}
    dynamo.keep_parameter_sources(module, copied)
    assert copied._param_name_to_source == {"w": "L['w']"}


@pytest.mark.slow
@pytest.mark.usefixtures("empty_cache")
def test_a_float_that_varies_bounds_a_clamp() -> None:
    """``has_float_input`` can go once plain Inductor is right in all versions of torch that we run on."""

    def right(backend: Any) -> list[bool]:
        torch._dynamo.reset()
        x = torch.randn(64)
        compiled = torch.compile(lambda x, limit: x.clamp(max=limit) * limit, backend=backend)
        limits = (1.0, 0.5, 0.25)  # Dynamo makes an input of the second; the code of the second is found for the third
        return [torch.equal(compiled(x, limit), x.clamp(max=limit) * limit) for limit in limits]

    assert right("inductor") == [True, True, False] or not torch.__version__.startswith("2.13.")
    assert right(fp8graph.Backend(ALL)) == [True] * 3


def test_which_floats_are_inputs() -> None:
    found: list[bool] = []

    def backend(module: fx.GraphModule, _: Any) -> Any:
        found.append(dynamo.has_float_input(module))
        return module

    compiled = torch.compile(lambda x, y: x * y, backend=backend)
    for y in (1.0, 0.5, torch.ones(())):  # a constant, an input, a tensor
        compiled(torch.ones(3), y)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):  # torch computes with this one as it runs
        torch.compile(lambda x: x * x.sum().item(), backend=backend)(torch.ones(3))
    assert found == [False, True, False, False]


def test_a_backend_is_registered_once() -> None:
    dynamo.register_backend(named_backend, "fp8graph")
    names = torch._dynamo.list_backends(exclude_tags=())
    assert names.count("fp8graph") == 1


def test_frames_have_ids_while_they_compile() -> None:
    seen: list[str] = []

    def backend(module: fx.GraphModule, _: Any) -> Any:
        seen.append(dynamo.current_frame_id())
        return module.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert seen == ["0"]
    assert dynamo.current_frame_id() == ""


def test_who_answers_for_cuda_is_put_back() -> None:
    from torch._dynamo.device_interface import get_interface_for_device

    class Other(dynamo.cuda_interface()):
        pass

    before = get_interface_for_device("cuda")
    with dynamo.cuda_answered_by(Other):
        assert get_interface_for_device("cuda") is Other
    assert get_interface_for_device("cuda") is before


def test_autocast_works_called_from_code_that_dynamo_compiles_piecewise() -> None:
    """Without never_a_root_frame a TypeError; test_autocast.py has the whole story (a graph break in a region)."""
    assert hasattr(torch.compile(fp8graph.autocast, backend="eager")(enabled=False), "__enter__")


def at_the_recompile_limit(backend: Any, **kwargs: Any) -> Any:
    """A compiled function that Dynamo compiled twice, which is as often as it may."""
    linear = nn.Linear(16, 16)

    def scaled(x: Tensor, factor: int) -> Tensor:
        return linear(x) * factor

    compiled: Any = torch.compile(scaled, backend=backend, dynamic=False, **kwargs)
    for factor in range(2):
        compiled(torch.ones(4, 16), factor)
    return compiled


two_compiles = torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False)


@two_compiles
@first_fast("by_name", [False, True])
def test_strict_mode_raises_at_the_recompile_limit(by_name: bool) -> None:
    """At the call that would have run in eager: there may be no later one that a compiled graph is called in."""
    backend = "fp8graph" if by_name else eager_backend(strict=True)
    kwargs: dict[str, Any] = {"options": {"compiler": "eager", "strict": True}} if by_name else {}
    compiled = at_the_recompile_limit(backend, **kwargs)
    for factor in (2, 3):
        with pytest.raises(fp8graph.Fp8CoverageError, match="strict mode: frame 0: Dynamo's recompile limit"):
            compiled(torch.ones(4, 16), factor)
    compiled(torch.ones(4, 16), 0)  # what was compiled still runs


@pytest.mark.slow
@two_compiles
def test_without_strict_mode_the_report_says_what_met_the_recompile_limit() -> None:
    backend = eager_backend()
    compiled = at_the_recompile_limit(backend)
    for factor in (2, 3):
        compiled(torch.ones(4, 16), factor)
    (frame,) = backend.report.eager_frames
    assert "recompile limit is exceeded; new shapes or values run in eager" in frame
    assert backend.report.skipped_frames == []  # said once
    for n in range(70):  # more than Dynamo's metrics remember
        torch._dynamo.reset()
        other: Any = torch.compile(lambda x, n: x * n, backend="eager")
        other(torch.ones(2), n)
    assert backend.report.eager_frames == [frame]


@two_compiles
def test_the_recompile_limit_with_dynamos_warnings_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    backend = eager_backend(ALL, strict=True)
    compiled = at_the_recompile_limit(backend)
    with caplog.at_level(logging.ERROR, logger="torch._dynamo.convert_frame"):
        compiled(torch.ones(4, 16), 2)  # runs in eager, silently
        with pytest.raises(fp8graph.Fp8CoverageError, match="recompile limit"):
            compiled(torch.ones(4, 16), 0)
        assert len(backend.report.eager_frames) == 1


@two_compiles
def test_the_recompile_limit_of_another_model() -> None:
    strict = eager_backend(strict=True)
    compiled = at_the_recompile_limit(strict)
    torch._dynamo.reset()  # ids of frames start again
    other = at_the_recompile_limit(eager_backend())
    other(torch.ones(4, 16), 2)
    assert strict.report.eager_frames == []
    compiled(torch.ones(4, 16), 0)


def test_failures_of_other_models_are_not_ours() -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        other: Any = torch.compile(lambda x, n: x * n, backend="eager", dynamic=False)
        for n in range(3):
            other(torch.ones(2), n)
    torch._dynamo.reset()  # frame ids start again
    backend = eager_backend(ALL, strict=True)
    model = torch.compile(MLP(), backend=backend)
    for _ in range(2):
        model(torch.randn(8, 32))
    assert backend.report.eager_frames == []


def test_a_function_that_dynamo_cannot_trace_is_said() -> None:
    """Its own matmuls never reach a backend; the linear that it calls does."""

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(32, 32))
            self.inner = MLP()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                if x.sum() > -1e9:  # a branch on data in a loop
                    x = torch.nn.functional.linear(x, self.w)
            return self.inner(x)

    backend = eager_backend()
    torch.compile(Loop(), backend=backend)(torch.randn(16, 32))
    report = backend.report
    (frame,) = report.skipped_frames
    assert frame.startswith("forward (test_dynamo.py:")
    assert frame.endswith(": Data-dependent branching")
    assert f"runs in eager, with its own matmuls in high precision: {frame}" in str(report)
    assert report.to_dict()["skipped_frames"] == [frame]
    assert {g.fqn for g in report.gemms} == {"gate", "up", "down"}
    report.check()  # not an error by itself: a rule that names the matmul matches nothing


def test_a_static_tensor_is_marked_as_transformers_marks_its_caches() -> None:
    tensor = torch.zeros(())
    assert dynamo.mark_static(tensor) is tensor
    assert getattr(tensor, "_dynamo_static_input_type", None) is not None


def test_callback_before_a_frame_is_traced_outlives_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[tuple[Any, nn.Module]]()
    monkeypatch.setattr(callback_handler, "start_callbacks", callback_handler.start_callbacks)
    dynamo.before_tracing(lambda backend, module: found.append((backend, module)))
    model = nn.Linear(2, 2)

    def backend(graph: fx.GraphModule, _inputs: Any) -> Any:
        assert found  # it was not traced yet
        return graph.forward

    torch._dynamo.reset()
    torch.compile(lambda model, x: model(x), backend=backend)(model, torch.ones(1, 2))
    assert [(one.compiler_fn, module) for one, module in found] == [(backend, model)]


class Doubled(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * self.layer(x)


class Renewed(nn.Module):
    """Replaces a layer when it is called, as transformers' BigBird does."""

    def __init__(self) -> None:
        super().__init__()
        self.part: nn.Module = nn.Linear(32, 16, bias=False)

    @torch._dynamo.disable(recursive=False)
    def renew(self) -> None:
        if isinstance(self.part, nn.Linear):
            self.part = Doubled(self.part)

    def forward(self, x: Tensor) -> Tensor:
        self.renew()
        return self.part(x)


def test_a_module_that_a_call_makes_is_compiled() -> None:
    """Dynamo compiles ``__init__`` as a frame of its own, whose module has no attributes yet."""
    torch._dynamo.reset()
    model, x = Renewed(), torch.randn(32, 32)
    backend = eager_backend()
    with torch.no_grad():
        expected = 2.0 * model.part(x)
        found = torch.compile(model, backend=backend)(x)
    assert 0.03 < float((found - expected).norm() / expected.norm()) < 0.045  # FP8's
    assert [gemm.fqn for gemm in backend.report.gemms] == ["part.layer"]


class Outer(nn.Module):
    def forward(self, call: Any) -> Any:
        return call(), call()


def test_an_outermost_call_is_known_until_it_returns() -> None:
    """Also where a tracer has a function for its frame, which it still calls; and it keeps no variable alive."""
    first, second = Outer()(dynamo.outermost_call)
    assert first is second
    assert first() is None
    assert Outer()(lambda: dynamo.outermost_call()() is not None) == (True, True)
    assert dynamo.outermost_call()() is None  # there is none
    run: Any = Outer()(lambda: torch.compile(lambda: None, backend="eager") and dynamo.outermost_call())[0]
    assert run() is None


def test_an_outermost_call_leaves_tracers_alone() -> None:
    lines: list[str] = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is Outer.forward.__code__:
            lines.append(event)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        ((alive, _),) = [Outer.forward(Outer(), lambda: dynamo.outermost_call()() is not None)]
    finally:
        sys.settrace(before)
    assert alive
    assert lines == ["call", "line", "return"]
