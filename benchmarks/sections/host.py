"""``host``: what a call costs the host around the compiled code, against the number of layers, plain torch beside.

The compiled code is left out: in its place stands a function that returns tensors made before. What remains is what
Dynamo's guards, AOTAutograd's wrappers and fp8graph do for every call, on any machine, with or without a GPU.

On a CPU fp8graph reads the numbers of all weights in each call, on a GPU in one of 64, without waiting. The rows are
those of a GPU, with what a call does between two such looks; one more has the CPU's.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, cast
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._inductor.compile_fx import compile_fx

import fp8graph
from benchmarks.attention import CAUSAL, llama
from benchmarks.contenders import fresh
from benchmarks.records import Run
from fp8graph.runtime.contents import Watch

CPU: Final = torch.device("cpu")
ON_A_CPU: Final = "tensorwise, names bound, numbers read in each call"
NO_CACHES: Final = {"force_disable_caches": True}


def answer_only(module: fx.GraphModule, _inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """In place of Inductor: results of the right shapes that nothing computes."""
    output = module.graph.find_nodes(op="output")[0].args[0]
    values = [node.meta.get("val") if isinstance(node, fx.Node) else node for node in output]
    shapes = [(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for v in values]
    made: list[Any] = []

    def run(args: list[Any]) -> list[Any]:
        args.clear()  # boxed calling convention: the caller's references go
        if not made:  # not while compiling: they would be fake tensors
            made.extend(torch.zeros(v[0], dtype=v[1]) if isinstance(v, tuple) else v for v in shapes)
        # autograd takes each as a new tensor
        return [x.detach() if isinstance(x, Tensor) else x for x in made]

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


def thread_us(call: Callable[[], Any], calls: int = 20) -> float:
    """Microseconds of CPU time of one call, in this thread: other processes on the machine do not count."""
    start = time.thread_time()
    for _ in range(calls):
        call()
    return 1e6 * (time.thread_time() - start) / calls


def functions_of(call: Callable[[], Any]) -> int:
    """Functions that one call of ``call`` calls, in Python and, by name, in C: the same on every machine."""
    counted = 0

    def profile(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counted


class _OnItsWay:
    """The event of a look whose result has not arrived."""

    def query(self) -> bool:
        return False


class Glance(Watch):
    """In place of a CPU's look at all numbers: what a GPU's does in 63 of 64 calls."""

    def __init__(self, _pick: Any, _before: Sequence[Any]) -> None:
        super().__init__([], [None], lambda positions: None, None)
        self._waiting = cast(Any, (_OnItsWay(), None))


def as_on_a_gpu() -> contextlib.AbstractContextManager[Any]:
    """Inside a ``with``: calls are prepared as those of a model on a GPU."""
    return mock.patch("fp8graph.passes.hoist_weights.weight_cache.same_contents", Glance)


class CallsOnly(fp8graph.Backend):
    """fp8graph with :func:`answer_only` in place of a compiler."""

    @property
    def inner_compile(self) -> Callable[..., Any]:
        return answer_only


def plain(model: nn.Module) -> Any:
    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx(module, inputs, inner_compile=cast(Any, answer_only), config_patches=NO_CACHES)

    return torch.compile(model, backend=backend)


def rewritten(
    recipe: str | fp8graph.DelayedScaling | None, *, bind: bool = False, **settings: Any
) -> Callable[[nn.Module], Any]:
    def compile(model: nn.Module) -> Any:
        policy = fp8graph.Policy(default=recipe, min_speedup=0)
        backend = CallsOnly(policy, compiler="eager", target="cpu", **settings)
        if bind:
            backend.bind(model)
        return torch.compile(model, backend=backend)

    return compile


def host(run: Run) -> None:
    """CPU microseconds of a call, and how many more than plain torch's, round by round in one process."""
    contenders = {
        "plain": plain,
        "nothing in FP8": rewritten(None),
        "tensorwise": rewritten("tensorwise", cache_weights="update"),
        "tensorwise, names bound": rewritten("tensorwise", bind=True, cache_weights="update"),
        "tensorwise, default": rewritten("tensorwise"),
        # the graphs of all steps but the first: no backward runs here that would end it
        "delayed, names bound": rewritten(
            fp8graph.DelayedScaling(initial_scale="one"), bind=True, cache_weights="update"
        ),
    }
    contenders[ON_A_CPU] = rewritten("tensorwise", bind=True, cache_weights="update")
    if run.tiny:
        contenders = {name: contenders[name] for name in ("plain", "tensorwise, names bound")}
    for count in (1, 2) if run.tiny else (2, 8, 32):
        for training in (False, True):
            case = {"layers": count, "mode": "training forward" if training else "no_grad"}
            with fresh():
                rounds(run, case, contenders, training)


def rounds(run: Run, case: dict[str, Any], contenders: dict[str, Any], training: bool) -> None:
    x = torch.randn(1, 8, 128, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {}
    times: dict[str, list[float]] = {}
    for name, compile in contenders.items():
        if run.late():
            run.write("host", **case, contender=name, stopped="the section's time is over")
            continue
        with run.attempt("host", **case, contender=name), torch.set_grad_enabled(training):
            compiled = compile(llama(case["layers"], 128, CAUSAL, CPU))
            with contextlib.nullcontext() if name == ON_A_CPU else as_on_a_gpu():
                for _ in range(3):
                    compiled(x)
            calls[name], times[name] = (lambda compiled=compiled: compiled(x)), []
    with torch.set_grad_enabled(training):
        for _ in range(3 if run.tiny else 25):
            for name, call in calls.items():
                times[name].append(thread_us(call))
        functions = {name: functions_of(call) for name, call in calls.items()}
    least = {name: min(found) for name, found in times.items()}  # what disturbs a machine only makes it slower
    for name, us in least.items():
        more: dict[str, Any] = {"functions": functions[name]}
        if "plain" in least:
            more |= {"more_us": us - least["plain"], "times_plain": us / least["plain"]}
            more["more_functions"] = functions[name] - functions["plain"]
        run.write("host", **case, contender=name, us=us, **more)
