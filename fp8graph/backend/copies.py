"""The mark that ``fp8graph.compile`` leaves on the modules that it compiles, so that their copies are compiled, too.

torch drops the compiled code of a module that is copied or pickled (``Module.__getstate__``), and says nothing: a copy
for an average of weights, a model that ``torch.save`` wrote, ran in bf16.
"""

from __future__ import annotations

import copy
import logging
import pickle
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from fp8graph.backend import coverage
from fp8graph.backend.backend import Backend
from fp8graph.compat import dynamo, wrappers

_ATTRIBUTE: Final = "_fp8graph_compiled"
_EXPORTED: Final = "%s is exported as it was written, in high precision: %s leaves compiled code out."
_WITHIN: Final = (
    "%s is compiled again, by torch.compile(backend=%s), and runs in high precision there: the outer compilation "
    "decides. Leave it out: fp8graph.compile has compiled the model in place."
)
_TRANSFORMED: Final = (
    "%s is called by a transform of torch.func (vmap, grad, ...). torch does not compile there: the call runs in "
    "eager, in high precision. To transform it in FP8, compile the function that calls the transform."
)
_log = logging.getLogger("fp8graph")


def compile_in_place(
    module: nn.Module, backend: Backend, arguments: Mapping[str, Any] | None, *, named: bool = True
) -> None:
    """Compile ``module`` so that its copies are compiled, too.

    Args:
        arguments: of ``torch.compile``; None if only modules inside ``module`` are compiled.
        named: names of parameters are relative to ``module``, not to a model that it is a part of.
    """
    module.__dict__[_ATTRIBUTE] = Compiled.now(module, backend, arguments, named)


def check_within(backend: Backend, model: str) -> None:
    """While Dynamo traces ``model`` (a class) for another ``torch.compile`` call: warn if its backend is no fp8graph.

    Raises:
        Fp8CoverageError: in strict mode.
    """
    outer = dynamo.backend_of_frame()
    if wrappers.fp8graph_backends(outer) is None:
        name = getattr(outer, "compiler_name", None) or getattr(outer, "__name__", outer)
        coverage.say(backend, _WITHIN % (model, name))


def marks(model: nn.Module) -> list[Compiled]:
    """The marks of all modules of ``model``."""
    return [mark for module in model.modules() if (mark := module.__dict__.get(_ATTRIBUTE)) is not None]


def is_compiled(model: nn.Module) -> bool:
    """Whether fp8graph compiled ``model``: in place, its blocks for it, or by name."""
    mark: Compiled | None = model.__dict__.get(_ATTRIBUTE)
    in_place = mark is not None and mark.holds()
    return in_place or wrappers.fp8graph_backends(wrappers.orig_backend(model)) is not None


def uncompiled_copy(model: nn.Module, tensor: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """A copy of ``model`` that nothing has compiled, with ``tensor(x)`` for each of its parameters and buffers x."""
    memo: dict[int, Any] = dict.fromkeys(map(id, marks(model)))
    memo.update((id(x), tensor(x)) for x in (*model.parameters(), *model.buffers()))  # deepcopy takes what memo has
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        wrappers.undo_compile_in_place(module)
    return copied


class Compiled:
    """A mark in the ``__dict__`` of a module, which is copied with it.

    A copy gets a backend of its own, with the settings and the scaling state of the original, once for all modules
    that are copied together; so does what is loaded from a pickle.
    """

    def __init__(self, module: nn.Module, backend: Backend, arguments: Mapping[str, Any] | None, named: bool) -> None:
        self._module = weakref.ref(module)
        self._backend = backend
        self._arguments = arguments
        self._named = named

    @staticmethod
    def now(module: nn.Module, backend: Backend, arguments: Mapping[str, Any] | None, named: bool) -> Compiled:
        """Compile ``module`` (which may be an empty one, being copied) and return its mark."""
        if named:
            backend.names.bind_later(module)
        if arguments is not None:
            name, this = type(module).__name__, weakref.ref(module)
            wrappers.compile_in_place(
                module,
                lambda: coverage.check_compiled(backend, this()),
                lambda by: _log.warning(_EXPORTED, name, by),
                lambda: check_within(backend, name),
                lambda: coverage.say_once(backend, _TRANSFORMED % name),
                backend=backend,
                **arguments,
            )
        return Compiled(module, backend, arguments, named)

    def holds(self) -> bool:
        """Whether the module is compiled as it was: it may have got another backend, or none."""
        found = wrappers.orig_backend(self._module())
        return self._arguments is None or wrappers.fp8graph_backends(found) is self._backend

    def __deepcopy__(self, memo: dict[Any, Any]) -> Compiled | None:
        copied = memo.get(id(self._module()))  # known by now, and still empty: its state is being copied
        if copied is None or not self.holds():
            return None
        key = Compiled, id(self._backend)
        if key not in memo:
            memo[key] = Backend(**self._backend.arguments())
            memo[key].load_state_dict(self._backend.state_dict())
        return Compiled.now(copied, memo[key], self._arguments, self._named)

    def __reduce__(self) -> tuple[Any, ...]:
        module = self._module()
        if not self.holds():
            return type(None), ()
        try:
            pickle.dumps((self._backend, self._arguments))
        except Exception as error:  # of functions in a policy: any
            _log.warning(
                "%s is pickled without its compilation: %s. Call fp8graph.compile where it is loaded.",
                *(type(module).__name__, error),
            )
            return type(None), ()
        # A module's state is read after the module itself, so that the state may hold the module.
        return _unpickled, (), (module, self._backend, self._arguments, self._named)

    def __setstate__(self, state: tuple[nn.Module, Backend, Mapping[str, Any] | None, bool]) -> None:
        self.__dict__.update(vars(Compiled.now(*state)))


def _unpickled() -> Compiled:
    return object.__new__(Compiled)
