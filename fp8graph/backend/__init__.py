"""torch.compile's side: one call of the backend per Dynamo graph, one variant per decision.

Here is ``backend="fp8graph"``, torch's entry point: a backend by name and options, one for each model. A name may carry
a recipe, "fp8graph:blockwise", for libraries that pass a name to torch.compile, and no options. torch gives
models that were compiled with equal options one backend and, if they are of one class, one compiled graph. So the model
that a call belongs to is found at the call: by the first parameter among its arguments and, when that is new, by the
outermost module on the stack that contains it. All ranks of a job find the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

from torch import Tensor, fx, nn

from fp8graph.backend.backend import Backend
from fp8graph.backend.compiled_graph import CompiledGraph, Variants
from fp8graph.backend.dynamo_graph import DynamoGraph
from fp8graph.compat import dynamo, fakes, wrappers
from fp8graph.compat.anchors import remember_modules
from fp8graph.compat.fakes import FakeTensor
from fp8graph.errors import ConfigError, expect
from fp8graph.ir.settings import arguments_of
from fp8graph.recipes import RECIPE_NAMES
from fp8graph.runtime.parameters import ParameterTable


class NamedBackend:
    """``backend="fp8graph"``: one :class:`Backend` per model and distinct set of options.

    torch shares Dynamo's graphs between compile calls whose backend and options are equal, for instance those of two
    models of one class; :class:`ModelBackends` tells the models apart. torch's callable from ``torch.compile`` keeps
    it alive, so that it is freed with the last of these models or by ``torch._dynamo.reset()``, like a Backend that
    is passed as an object.
    """

    def __init__(self, name: str = "fp8graph", **given: Any) -> None:
        """``given``: the arguments of ``Backend`` that the name stands for."""
        self.__name__ = name
        self._given = given
        self._by_arguments: list[tuple[dict[str, Any], weakref.ref[ModelBackends]]] = []

    def __reduce__(self) -> tuple[Callable[[str], NamedBackend], tuple[str]]:
        return _of_name, (self.__name__,)

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        backends = self.backends_for(kwargs)
        wrappers.hold(wrappers.calling_wrapper() or self, backends)
        return backends(module, example_inputs)

    def reset(self) -> None:
        """``torch._dynamo.reset()`` calls this."""
        for _, reference in self._by_arguments:
            if (backends := reference()) is not None:
                backends.reset()

    def backends_for(self, kwargs: Mapping[str, Any]) -> ModelBackends:
        """Return the backends for ``torch.compile(..., mode=, options=)``."""
        for arguments, reference in self._by_arguments:
            if (backends := reference()) is not None and arguments == kwargs:
                return backends
        mode, options = kwargs.get("mode"), kwargs.get("options") or {}
        expect("torch.compile", "options", options, Mapping, "a dict of options")
        backends = ModelBackends(lambda: self.backend(arguments_of(mode, options)))
        self._by_arguments = [entry for entry in self._by_arguments if entry[1]() is not None]
        self._by_arguments.append((dict(kwargs), weakref.ref(backends)))
        return backends

    def backend(self, arguments: Mapping[str, Any]) -> Backend:
        """Return a new backend with the arguments of the name, and further ``arguments``.

        Raises:
            ConfigError: for an argument that the name gives, too.
        """
        for twice in self._given.keys() & arguments.keys():
            raise ConfigError(
                f"backend {self.__name__!r} already sets {twice}: leave out the argument {twice!r}, or write "
                'backend="fp8graph".'
            )
        return Backend(**self._given, **arguments)


named_backend: Final = NamedBackend()
# entry points: pyproject.toml
of_recipe: Final = SimpleNamespace(**{name: NamedBackend(f"fp8graph:{name}", recipe=name) for name in RECIPE_NAMES})
NAMED: Final[Mapping[str, NamedBackend]] = {each.__name__: each for each in (named_backend, *vars(of_recipe).values())}


def _of_name(name: str) -> NamedBackend:
    return NAMED[name]


class ModelBackends:
    """One :class:`Backend` per model, and one for calls without a module around them (compiled functions).

    Args:
        make: makes a new backend with the options.
    """

    def __init__(self, make: Callable[[], Backend]) -> None:
        self._make = make
        self._models: weakref.WeakKeyDictionary[nn.Module, Backend] = weakref.WeakKeyDictionary()
        self._of_functions: Backend | None = None

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one Dynamo graph."""
        if dynamo.compiles_backward():  # of any model: no backend keeps anything of it
            return (self.backends or [self._make()])[0](module, example_inputs)
        return SharedGraph(self, DynamoGraph(module, example_inputs), example_inputs)

    @property
    def backends(self) -> list[Backend]:
        """All of them so far."""
        return [*self._models.values(), *([self._of_functions] if self._of_functions is not None else [])]

    def reset(self) -> None:
        """``torch._dynamo.reset()`` calls this."""
        for backend in self.backends:
            backend.reset()

    def of_call(self, parameter: Tensor | None) -> Backend:
        """Return the backend of the model that is being called, to which ``parameter`` belongs."""
        if parameter is None:
            return self._backend_of_functions()
        running = [model for model in dynamo.modules_on_stack() if _contains(model, parameter)]
        models = [model for model in [*running, *self._models] if model in self._models]  # checkpointing runs layers
        model = next((model for model in models if _contains(model, parameter)), None)
        if model is not None:
            return self._models[model]
        return self._new(running[0]) if running else self._backend_of_functions()

    def of(self, compiled: Any) -> Backend:
        """Return the backend of a model that was compiled, or of one that compiled modules are part of.

        Raises:
            ConfigError: (a ``ValueError``) if parts of it belong to several models that were called one by one.
        """
        if not isinstance(compiled, nn.Module):
            return self._backend_of_functions()
        model = wrappers.original_module(compiled)
        around = next((backend for other, backend in self._models.items() if model in {*other.modules()}), None)
        if around is not None:
            return around
        inside = [backend for part in model.modules() if (backend := self._models.get(part)) is not None]
        if len(inside) > 1:
            raise ConfigError(
                f"{type(model).__name__} holds {len(inside)} models that were compiled by name and called one by one; "
                "each has a backend. Ask for them one by one, or compile them with one fp8graph.Backend."
            )
        return inside[0] if inside else self._new(model)

    def _new(self, model: nn.Module) -> Backend:
        backend = self._models[model] = self._make()
        backend.steps.adapters.watch(model)
        remember_modules(model)
        return backend

    def _backend_of_functions(self) -> Backend:
        if self._of_functions is None:
            self._of_functions = self._make()
        return self._of_functions


class SharedGraph:
    """One Dynamo graph, compiled for each of the models that run it. They share the code, and nothing else."""

    def __init__(self, backends: ModelBackends, graph: DynamoGraph, example_inputs: Sequence[Any]) -> None:
        self._backends, self._graph = backends, graph
        self._first = graph.positions[0] if graph.positions else None
        # by the id of the first parameter, or 0
        self._graphs = ParameterTable[tuple[Backend, CompiledGraph]]()
        self._variants: Variants = []
        self._find(example_inputs, compiling=True)

    def __call__(self, *args: Any) -> Any:
        entry = self._graphs.get(0 if self._first is None else id(args[self._first]))
        _, compiled = entry or self._find(args)
        return compiled(*args)

    def _find(self, args: Sequence[Any], *, compiling: bool = False) -> tuple[Backend, CompiledGraph]:
        """Return the backend and the compiled graph of the model that ``args`` belong to."""
        parameter = None if self._first is None else args[self._first]
        backend = self._backends.of_call(parameter)
        compiled = next((each for other, each in self._graphs.values() if other is backend), None)
        if compiled is None:
            compiled = backend.compiled(self._graph, args if compiling else None, self._variants)
        key, parameters = (0, []) if parameter is None else (id(parameter), [parameter])
        return self._graphs.keep(key, (backend, compiled), parameters)


def _contains(model: nn.Module, parameter: Tensor) -> bool:
    """Return whether ``parameter``, or the one that a fake stands for (DDPOptimizer compiles with those), is of the
    model.
    """
    return any(
        own is parameter or (isinstance(parameter, FakeTensor) and fakes.is_fake_of(parameter, own))
        for own in model.parameters()
    )
