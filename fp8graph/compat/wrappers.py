"""The wrappers of ``torch.compile`` around modules and functions: made in place, undone, and the backend behind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, Final, cast

import torch
from torch._dynamo.external_utils import wrap_inline

from fp8graph.compat import autograd

_WRAPPED: Final = ("_orig_mod", "_checkpoint_wrapped_module")  # what wrappers call the module in them


def compile_in_place(
    module: torch.nn.Module,
    after_call: Callable[[], bool],
    at_export: Callable[[str], None],
    within: Callable[[], None],
    in_transform: Callable[[], None],
    codes: dict[object, CodeType] | None = None,
    **kwargs: Any,
) -> None:
    """``module.compile(...)``, also of modules of torch.nn.

    Dynamo does not compile code of torch.nn that is called first: ``nn.Linear(...).compile()`` silently runs in
    eager. ``torch.compile(module)`` wraps the call for that reason, and so does this function. The wrapper has a code
    object of its own: Dynamo counts recompiles per code object, and all modules of torch.nn would share one. Modules
    that are alike may share it, and with it the compiled code.

    Args:
        after_call: called after each call of the module, until it returns True or raises.
        at_export: called with "torch.export" or "torch.jit.script", which read the module and leave compiled code out.
        within: called when Dynamo traces the module as what another ``torch.compile`` wraps.
        in_transform: called when a transform of torch.func calls the module, which then runs in eager.
        codes: the code objects of wrappers by the structure of their modules, which this function adds to; None: the
            module shares no code.
    """
    function: Any = module._call_impl
    if type(module).__module__.startswith("torch.nn."):
        function = wrap_inline(function)
        code = function.__code__.replace()  # a copy
        function.__code__ = code if codes is None else codes.setdefault(_structure(module), code)
    call = torch.compile(function, **kwargs)
    watches = True
    within = torch.compiler.assume_constant_result(within)  # Dynamo calls it, and does not trace it

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal watches
        result = call(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():  # this is a part of a larger graph
            within()
        elif torch.compiler.is_exporting():  # second: to Dynamo of torch 2.11 every trace is an export
            at_export("torch.export")
        elif autograd.in_transform():
            in_transform()
        elif watches:
            watches = False  # it may raise
            watches = not after_call()
        return result

    def scripted() -> Any:  # torch.jit.script calls this of each function that it finds on a module
        at_export("torch.jit.script")
        return watched

    watched._fp8graph_call = call  # pyright: ignore[reportFunctionMemberAccess]
    watched.__prepare_scriptable__ = scripted  # pyright: ignore[reportFunctionMemberAccess]
    module._compiled_call_impl = watched  # pyright: ignore[reportAttributeAccessIssue]


_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _structure(module: torch.nn.Module) -> object:
    """Equal for modules whose code is the same. Dynamo does not look whether hooks are: with some, it is like none."""
    for inner in module.modules():
        if "forward" in vars(inner) or any(getattr(inner, hooks) for hooks in _HOOKS):
            return object()
    modules = tuple((name, type(inner), inner.extra_repr()) for name, inner in module.named_modules())
    return modules, tuple((name, parameter.shape) for name, parameter in module.named_parameters())


def before_calls(module: torch.nn.Module, act: Callable[[], bool]) -> None:
    """Call ``act`` before each call of ``module``, which :func:`compile_in_place` compiled, until it returns True."""
    call: Any = module._compiled_call_impl
    if call is None:
        return

    def early(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() and act() and module._compiled_call_impl is early:
            module._compiled_call_impl = call  # pyright: ignore[reportAttributeAccessIssue]
        return call(*args, **kwargs)

    early.__dict__.update(vars(call))
    module._compiled_call_impl = early  # pyright: ignore[reportAttributeAccessIssue]


def original_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that ``torch.compile(module)`` wraps; any other as it is."""
    return cast(torch.nn.Module, getattr(module, "_orig_mod", module))


def submodule(module: torch.nn.Module, fqn: str) -> torch.nn.Module:
    """Return the module called ``fqn`` under ``module``. Wrappers of ``torch.compile`` on the way, and its own, are
    skipped.

    Raises:
        AttributeError: there is none.
    """
    current = original_module(module)
    for name in fqn.split(".") if fqn else ():
        current = original_module(current.get_submodule(name))
    return current


def name_in_original(fqn: str) -> str:
    """Return a name without the parts of wrappers: of ``torch.compile``, and of ``checkpoint_wrapper`` (torchtitan's
    way).
    """
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPED)


def undo_compile_in_place(module: torch.nn.Module) -> None:
    """Undo ``module.compile()`` for calls of the module itself (not of modules in it)."""
    module._compiled_call_impl = None


def orig_backend(compiled: Any) -> Any:
    """Return the backend callable behind a compiled module or function, or None.

    torch keeps it in a chain of wrappers: OptimizedModule -> context -> callback -> ... -> backend.
    """
    if isinstance(compiled, torch.nn.Module):
        context = getattr(compiled, "dynamo_ctx", None)  # torch.compile(module)
        implementation = getattr(compiled, "_compiled_call_impl", None)  # module.compile()
        implementation = getattr(implementation, "_fp8graph_call", implementation)
        if context is None and implementation is None:
            implementation = compiled.forward  # module.forward = torch.compile(module.forward)
        candidates: list[Any] = [getattr(context, "callback", None), *_closure(implementation)]
    else:
        candidates = list(_closure(compiled))
    for candidate in candidates:
        if hasattr(candidate, "_torchdynamo_orig_backend"):
            return innermost_backend(candidate)
    return None


def innermost_backend(wrapper: Any) -> Any:
    """Return the backend in a chain of Dynamo's wrappers."""
    while hasattr(wrapper, "_torchdynamo_orig_backend"):
        wrapper = wrapper._torchdynamo_orig_backend
    return wrapper


def is_fp8graph(backend: Any) -> bool:
    """Return whether a backend, by name or not, as Dynamo's wrappers hold it is one of fp8graph's."""
    return hasattr(getattr(backend, "compiler_fn", backend), "backends_for")


def fp8graph_backends(wrapper: Any) -> Any:
    """Return the Backend (or ModelBackends) behind a callable of torch, which wraps names and callables; or None."""
    choose = getattr(getattr(wrapper, "compiler_fn", wrapper), "backends_for", None)
    if choose is None:
        return None
    backends = choose(getattr(wrapper, "kwargs", {}))
    hold(wrapper, backends)
    return backends


def calling_wrapper() -> Any:
    """Return the callable that ``torch.compile`` made for a backend by name, if it called the caller's caller; else
    None.

    Two calls of ``torch.compile(backend="fp8graph")`` differ in nothing else: the backend gets only the options.
    """
    caller = sys._getframe(2).f_locals.get("self")
    return caller if isinstance(caller, torch._TorchCompileWrapper) else None


class _Held:
    """A reference that is not pickled or copied with its owner."""

    def __init__(self, value: object = None) -> None:
        self.value = value

    def __reduce__(self) -> tuple[type[_Held], tuple[()]]:
        return _Held, ()


def hold(owner: Any, value: object) -> None:
    """Let ``value`` live as long as ``owner``."""
    if value is not owner:
        owner._fp8graph_held = _Held(value)


def _closure(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        yield cell.cell_contents
