"""``backend="fp8graph"``: a backend by name and options."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import fx

from fp8graph.backend.backend import Backend
from fp8graph.backend.model_backends import ModelBackends
from fp8graph.compat import wrappers
from fp8graph.compat.inductor import options_of_mode
from fp8graph.errors import ConfigError, expect
from fp8graph.ir.settings import Settings, choices

# Backend's arguments, and two of torch's own under short names
_OPTIONS: Final = (
    *("policy", "recipe", "observe", "guard"),
    *(name for name in Settings.names() if name != "inductor_options"),
    *("mode", "inductor"),
)


class NamedBackend:
    """``backend="fp8graph"``: one :class:`Backend` per model and distinct set of options.

    torch shares Dynamo's graphs between compile calls whose backend and options are equal, for instance those of two
    models of one class; :class:`ModelBackends` tells the models apart. torch's callable from ``torch.compile`` keeps
    it alive, so that it is freed with the last of these models or by ``torch._dynamo.reset()``, like a Backend that
    is passed as an object.
    """

    __name__ = "fp8graph"

    def __init__(self) -> None:
        self._known: list[tuple[dict[str, Any], weakref.ref[ModelBackends]]] = []

    def __reduce__(self) -> str:
        return "named_backend"

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        backends = self.backends_for(kwargs)
        wrappers.hold(wrappers.calling_wrapper() or self, backends)
        return backends(module, example_inputs)

    def reset(self) -> None:
        """``torch._dynamo.reset()`` calls this."""
        for _, reference in self._known:
            if (backends := reference()) is not None:
                backends.reset()

    def backends_for(self, kwargs: Mapping[str, Any]) -> ModelBackends:
        """The backends for ``torch.compile(..., mode=, options=)``."""
        for known, reference in self._known:
            if (backends := reference()) is not None and known == kwargs:
                return backends
        mode, options = kwargs.get("mode"), kwargs.get("options") or {}
        expect("torch.compile", "options", options, Mapping, "a dict of options")
        backends = ModelBackends(lambda: self.make(mode, dict(options)))
        self._known = [(known, reference) for known, reference in self._known if reference() is not None]
        self._known.append((dict(kwargs), weakref.ref(backends)))
        return backends

    def make(self, mode: str | None, options: dict[str, Any]) -> Backend:
        options |= Settings.taken_from(options)
        if unknown := sorted(options.keys() - set(_OPTIONS)):
            raise ConfigError(
                f"fp8graph has no option {unknown[0]!r}{choices('Options', unknown[0], _OPTIONS)} "
                'Inductor\'s own options go into a dict: options={"inductor": {...}}.'
            )
        mode = options.pop("mode", mode)
        inductor = options.pop("inductor", None) or {}
        if not isinstance(inductor, Mapping):
            raise ConfigError(f"option 'inductor' must be a dict of Inductor options, not {inductor!r}.")
        if mode is not None:
            expect("torch.compile", "mode", mode, str, "the name of a mode")
            try:
                inductor = {**options_of_mode(mode), **inductor}
            except KeyError as error:
                raise ConfigError(f"mode must be one of {error.args[0]}, not {mode!r}.") from None
        return Backend(**options, inductor_options=inductor)


named_backend: Final = NamedBackend()
