"""Dynamo: sources of inputs, frames and how they fail, its settings, devices and backends by name; torch's trace."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import types
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, ParamSpec, TypeVar, cast

import torch
import torch._dynamo
from torch import fx
from torch._dynamo import compiled_autograd, device_interface
from torch._dynamo.callback import callback_handler
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code, skip_code
from torch._dynamo.exc import BackendCompilerFailed, TensorifyScalarRestartAnalysis, TorchRuntimeError
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import get_compilation_metrics
from torch._guards import CompileContext
from torch._logging import trace_structured
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fp8graph.compat.wrappers import innermost_backend, original_module

_CALLS: Final = str(cast(Any, torch._dynamo).eval_frame.__file__)  # has the function that torch.compile makes of one
_DYNAMO_LOG: Final = logging.getLogger("torch._dynamo.convert_frame")  # of recompiles and their limit
# what the code of a model raises for inputs that it cannot take: by itself, and in a graph on fake tensors
ERRORS_OF_MODELS: Final = (TypeError, TorchRuntimeError)
NOT_TRACED: Final = BackendCompilerFailed  # by a backend that only traces: an op without a backward, or without a fake
P = ParamSpec("P")
R = TypeVar("R")

SET_GRAD_ENABLED: Final[Any] = torch._C._set_grad_enabled  # the op for ``torch.no_grad`` in Dynamo's graph


def source_name(node: fx.Node) -> str:
    """Dynamo's name of a graph input, like ``L['self']._parameters['w']``.

    ``Source.name`` is a method up to torch 2.11 and a property after.
    """
    name: Any = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return cast(str, name() if callable(name) else name)


def is_part_of_parameter(source: str) -> bool:
    """Return whether a source is an attribute of a parameter: a tensor that a tensor subclass wraps."""
    return re.search(r"\._parameters\['[^']+'\]\.\w+$", source) is not None


def is_buffer(source: str) -> bool:
    """Return whether a source is a buffer of a module."""
    return re.search(r"""\b_buffers(?:['"]\])?\[(['"]).+?\1\]$""", source) is not None


def copy_source(node: fx.Node, copy: fx.Node) -> None:
    """Give a copied node of a graph the source of the original, if that has one.

    Dynamo's description of the input is left out, as it is of the original at the end: it refers weakly to the input,
    whose contents torch then refuses to swap.
    """
    copy.meta.pop("grapharg", None)
    if hasattr(node, "_dynamo_source"):
        copy._dynamo_source = node._dynamo_source  # pyright: ignore


def has_float_input(module: fx.GraphModule) -> bool:
    """Return whether a Python float that varies from call to call is an input: torch must not keep the code of such a
    graph.

    AOTAutograd cannot give every op a tensor instead: the bound of a ``clamp`` is the value that was traced. The guard
    on it is missing in torch's compile cache, where the entry is found for every other value (pytorch#194976, wrong in
    torch 2.13; ``tests/compat/test_dynamo.py`` watches it). Compiled again, the graph has its guard.
    """
    values = (node.meta.get("example_value") for node in module.graph.nodes)
    return any(isinstance(value, torch.SymFloat) and not free_unbacked_symbols(value) for value in values)


def mark_static(tensor: torch.Tensor) -> torch.Tensor:
    """Mark ``tensor`` as one whose address stays, as transformers' caches do: CUDA graphs then write it in place."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)
    return tensor


def describe_own_input(placeholder: fx.Node) -> None:
    """Mark an input that Dynamo does not know: it has no source, and its tensor keeps its address.

    A CUDA graph does not copy such a tensor, nor a parameter.
    """
    placeholder._dynamo_source = None  # pyright: ignore[reportAttributeAccessIssue]
    placeholder.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


def keep_parameter_sources(module: fx.GraphModule, copy: fx.GraphModule) -> None:
    """Let AOTAutograd know of a copied graph that Dynamo made it.

    Dynamo sets a mark on the module itself, not in ``meta``. Without the mark AOTAutograd mistakes the graph for an
    exported one: no input is then static, and CUDA graphs copy every parameter at each replay (torch 2.11 to 2.15).
    """
    if (sources := getattr(module, "_param_name_to_source", None)) is not None:
        copy._param_name_to_source = sources  # pyright: ignore[reportAttributeAccessIssue]


def as_if_called_first() -> contextlib.AbstractContextManager[None]:
    """Compile code whatever it was called with before: other sizes do not make them dynamic, and count for no limit."""
    config = cast(Any, torch._dynamo).config
    changes = {"automatic_dynamic_shapes": False, "recompile_limit": 1 << 30, "accumulated_recompile_limit": 1 << 30}
    return cast("contextlib.AbstractContextManager[None]", config.patch(changes))


@contextlib.contextmanager
def forgetting_compiled_code() -> Generator[None]:
    """Let torch forget at the end what it compiled meanwhile, which counts for the recompile limit of later calls.

    Code that the program itself has compiled before keeps all that was compiled of it.
    """
    codes: dict[types.CodeType, bool] = {}

    def note(code: types.CodeType, new_code: types.CodeType) -> None:
        codes.setdefault(code, bool(_debug_get_cache_entry_list(code)))

    handle = register_bytecode_hook(note)
    try:
        yield
    finally:
        handle.remove()
        for code, before in codes.items():
            if not before:
                reset_code(code)


def failed_frames(frame_ids: set[str], since: int) -> list[str]:
    """Frames that Dynamo gave up on and runs in eager, silently; from its compilation metrics (the last 64).

    Args:
        frame_ids: the frames that the caller compiled. Such a frame falls back to eager when it reaches the
            recompile limit. It is looked for here only if :func:`on_recompile_limit`, which is exact, cannot see it
            because Dynamo's warnings are off. A frame whose autocast region contains a graph break never reaches a
            backend; it is recognized by Dynamo's message.
        since: time in microseconds; older failures belong to other models, whose frame ids may be the same.
    """
    failures: list[str] = []
    unseen = not _DYNAMO_LOG.isEnabledFor(logging.WARNING)
    for metrics in get_compilation_metrics():
        if metrics.fail_type is None or (metrics.start_time_us or 0) < since:
            continue
        reason = (metrics.fail_reason or "").splitlines()[0]
        frame = (metrics.compile_id or "").split("/")[0]
        if "fx.traceback.annotate" in reason:
            failures.append(
                f"{metrics.co_name}: a graph break inside an fp8graph.autocast region; the frame runs in eager"
            )
        elif unseen and frame in frame_ids and "recompile" in reason:
            failures.append(_at_recompile_limit(frame))
    return failures


def skipped_frames(since: int) -> list[str]:
    """Functions that Dynamo could not trace and runs in eager, with its reason. The functions they call are compiled.

    From the last 64 compilations after ``since`` (time in microseconds), which may be another model's.
    """
    frames: list[str] = []
    for metrics in get_compilation_metrics():
        at_limit = "recompile limit" in (metrics.fail_reason or "")  # in the report by on_recompile_limit
        if metrics.fail_type == "Unsupported" and not at_limit and (metrics.start_time_us or 0) >= since:
            name = re.sub(r"^torch_dynamo_resume_in_(\w+)_at_\d+$", r"\1", metrics.co_name or "")
            place = f"{Path(metrics.co_filename or '').name}:{metrics.co_firstlineno}"
            frames.append(f"{name} ({place}): {(metrics.fail_reason or '').splitlines()[0].rstrip('.')}")
    return list(dict.fromkeys(frames))


def switched_off(model: torch.nn.Module) -> Iterator[str]:
    """Settings of Dynamo that keep it from tracing ``model``, and what they are called."""
    config: Any = torch._dynamo.config
    if config.disable:
        yield "torch.compile is off (TORCHDYNAMO_DISABLE=1, or torch._dynamo.config.disable)"
    if cast(Any, torch._dynamo).eval_frame._stance.stance == "force_eager":
        yield 'torch.compiler.set_stance("force_eager") is in force'
    if not config.allow_rnn and any(isinstance(module, torch.nn.RNNBase) for module in model.modules()):
        yield "Dynamo traces nn.RNN, nn.GRU and nn.LSTM only if torch._dynamo.config.allow_rnn is True"


def on_recompile_limit(owner: object, callback: Callable[[Any, str], None]) -> None:
    """Call ``callback(backend, text)`` when a frame reaches Dynamo's recompile limit, as long as ``owner`` is alive.

    From then on Dynamo runs that frame in eager for new shapes and values, and calls no backend. It says so only in
    its log, so this is a filter of that log (with warnings off, :func:`failed_frames` finds the frame later). An
    exception from ``callback`` reaches the user in the same way as the error of
    ``config.fail_on_recompile_limit_hit``, which is a switch for all models. The frame's backend is a variable of the
    function that logs; frame ids cannot identify it, since they start again after ``torch._dynamo.reset()``.
    """

    def watch(record: logging.LogRecord) -> bool:
        if "torch._dynamo hit config" in str(record.msg):
            frame: Any = sys._getframe()
            while frame is not None and "compiler_fn" not in frame.f_locals:
                frame = frame.f_back
            if frame is not None:
                callback(innermost_backend(frame.f_locals["compiler_fn"]), _at_recompile_limit(current_frame_id()))
        return True

    _DYNAMO_LOG.addFilter(watch)
    weakref.finalize(owner, _DYNAMO_LOG.removeFilter, watch)


def _at_recompile_limit(frame: str) -> str:
    return f"frame {frame}: Dynamo's recompile limit is exceeded; new shapes or values run in eager"


def never_a_root_frame(function: Callable[P, R]) -> Callable[P, R]:
    """Let Dynamo inline ``function`` into the code that calls it, but never compile it on its own.

    When a frame falls back to eager, Dynamo compiles the functions that it calls one by one. A function that
    returns a ``torch.fx.traceback.annotate`` context cannot be compiled so: Dynamo then hands back the function
    ``annotate`` in place of the context (torch 2.11 to 2.15).
    """
    skip_code(function.__code__)  # pyright: ignore[reportFunctionMemberAccess]
    return function


def current_frame_id() -> str:
    """Return the id of the frame that Dynamo is compiling, "" outside a compile."""
    compile_id = CompileContext.current_compile_id()
    return str(compile_id).split("/")[0] if compile_id is not None else ""


def compiles_backward() -> bool:
    """Return whether the graph that Dynamo compiles now is a backward that compiled autograd traced.

    Gradients are on where such a backward computes a checkpointed forward again.
    """
    return compiled_autograd.in_compiled_autograd_region and not torch.is_grad_enabled()


def modules_of_frame() -> Iterator[tuple[torch.nn.Module, bool]]:
    """Yield the modules among the variables of the frame that Dynamo is compiling, each with whether it is the module
    whose call is compiled: "self" up to torch 2.13; from 2.15 on a method of it, "fn".
    """
    try:
        variables = dict(InstructionTranslator.current_tx().output.local_scope)
    except AttributeError:  # outside a compile
        return
    yield from _modules_among(variables)


def _modules_among(variables: Mapping[str, Any]) -> Iterator[tuple[torch.nn.Module, bool]]:
    """Yield those that exist: ``self`` of an ``__init__``, a frame of its own if a call makes modules,
    holds none yet.
    """
    for name, value in variables.items():
        owner = getattr(value, "__self__", None) if name == "fn" else value
        if isinstance(owner, torch.nn.Module) and hasattr(owner, "_modules"):
            yield owner, name in ("self", "fn")


def before_tracing(callback: Callable[[Any, torch.nn.Module], None]) -> None:
    """Call ``callback(backend, module)`` before Dynamo traces a frame, for each module among its variables.

    A backend is called once a frame is traced: too late for what cannot be traced. Dynamo's start callbacks get neither
    backend nor frame, which are variables of the function that compiles it. ``torch._dynamo.reset()`` clears them all,
    but not these.
    """

    def started(_: Any) -> None:
        frame: Any = sys._getframe()
        while frame is not None and not {"compiler_fn", "code", "locals", "globals"} <= {*frame.f_code.co_varnames}:
            frame = frame.f_back
        if frame is None:
            return
        of_frame = frame.f_locals
        of_module = {name: of_frame["globals"].get(name) for name in of_frame["code"].co_names}
        for variables in (of_frame["locals"], of_module):
            for module, _called in _modules_among(variables):
                callback(innermost_backend(of_frame["compiler_fn"]), module)

    others = callback_handler.start_callbacks
    kept = [*(others.kept if isinstance(others, _StartCallbacks) else ()), started]
    callback_handler.start_callbacks = _StartCallbacks([*others, started], kept)


class _StartCallbacks(list[Callable[[Any], None]]):
    """Dynamo's list of start callbacks, of which those in ``kept`` outlive ``torch._dynamo.reset()``."""

    def __init__(self, callbacks: Sequence[Callable[[Any], None]], kept: Sequence[Callable[[Any], None]]) -> None:
        super().__init__(callbacks)
        self.kept = kept

    def clear(self) -> None:
        self[:] = self.kept


def modules_on_stack() -> list[torch.nn.Module]:
    """Return the modules whose methods are running in this thread, the outermost first, each once.

    torch passes the module that is called neither to a backend nor to the code that it compiled.
    """
    modules: list[torch.nn.Module] = []
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",) and isinstance(
            owner := frame.f_locals.get("self"), torch.nn.Module
        ):
            modules.append(owner)
        frame = frame.f_back
    return list(dict.fromkeys(original_module(owner) for owner in reversed(modules)))


class _Running:
    """The trace function of a call's frame, as whose it lives while the call runs. It calls the one before it."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, *event: Any) -> _Running:
        if self._before is not None:
            self._before = self._before(*event)
        return self


def outermost_call() -> Callable[[], object]:
    """Return a function whose result is not None while the outermost call around the present one, of a method of a
    module or of compiled code, still runs. None from the beginning: there is no such call.

    Nothing can refer weakly to a frame, and a frame that is kept keeps its variables, those of its callers too.
    """
    frame: Any = sys._getframe()
    outermost = None
    while frame is not None:
        code = frame.f_code
        of_module = code.co_varnames[:1] == ("self",) and isinstance(frame.f_locals.get("self"), torch.nn.Module)
        if of_module or (code.co_name == "compile_wrapper" and code.co_filename == _CALLS):
            outermost = frame
        frame = frame.f_back
    if outermost is None:
        return lambda: None
    if not isinstance(outermost.f_trace, _Running):
        outermost.f_trace = _Running(outermost.f_trace)
    return weakref.ref(outermost.f_trace)


def trace_again(reason: str) -> NoReturn:
    """From a backend: let Dynamo trace the frame that it is compiling once more, as its modules have changed.

    Of the exceptions that restart its analysis, it lets this one pass from a backend (torch 2.11 to 2.15).
    """
    InstructionTranslator.current_tx().speculation_log.clear()  # where graphs broke: they may not any more
    raise TensorifyScalarRestartAnalysis(restart_reason=reason)


def backend_of_frame() -> Any:
    """Return the backend for which Dynamo is tracing a frame."""
    return innermost_backend(InstructionTranslator.current_tx().output.compiler_fn)


def register_backend(backend: Any, name: str) -> None:
    """Let ``torch.compile`` find ``backend`` by name in a bare checkout, which lacks an installation's entry point."""
    if name not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(backend, name=name)


def cuda_interface() -> Any:
    """Give the interface through which torch's compilers query CUDA devices: a class, with a class ``Worker`` in it."""
    return device_interface.CudaInterface


@contextlib.contextmanager
def cuda_answered_by(interface: Any) -> Generator[None]:
    """Let ``interface``, a kind of :func:`cuda_interface`, answer torch's compilers inside a ``with``."""
    device_interface.get_interface_for_device("cuda")  # first, let torch do its lazy registration
    interfaces = {name: device_interface.device_interfaces.get(name) for name in ("cuda", "cuda:0")}
    try:
        for name in interfaces:
            device_interface.register_interface_for_device(name, interface)
        yield
    finally:
        for name, original in interfaces.items():
            if original is None:
                device_interface.device_interfaces.pop(name, None)
            else:
                device_interface.register_interface_for_device(name, original)


def trace_artifact(name: str, text: str) -> None:
    """Add a text to the structured trace of the current compile, which tlparse renders, if ``TORCH_TRACE`` is set."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)
