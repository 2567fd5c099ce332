"""``backend="fp8graph"``: a backend by name and options."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import fx

from fp8graph.backend.backend import Backend
from fp8graph.compat import wrappers
from fp8graph.compat.inductor import options_of_mode
from fp8graph.errors import ConfigError
from fp8graph.ir.settings import Settings, choices

# Backend's arguments, and two of torch's own under short names
_OPTIONS: Final = (
    *("policy", "recipe"),
    *(name for name in Settings.names() if name != "inductor_options"),
    *("mode", "inductor"),
)


class NamedBackend:
    """``backend="fp8graph"``: one :class:`Backend` per distinct set of options.

    torch shares compiled code between compile calls whose backend and options are equal, for instance those of two
    models of one class; such models therefore share a Backend and its report, too. torch's callable from
    ``torch.compile`` keeps the Backend alive, so it is freed with the last of these models or by
    ``torch._dynamo.reset()``, like a Backend that is passed as an object.
    """

    __name__ = "fp8graph"

    def __init__(self) -> None:
        self._backends: list[tuple[dict[str, Any], weakref.ref[Backend]]] = []

    def __reduce__(self) -> str:
        return "named_backend"

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        backend = self.backend_for(kwargs)
        wrappers.hold(wrappers.calling_wrapper() or self, backend)
        return backend(module, example_inputs)

    def reset(self) -> None:
        """``torch._dynamo.reset()`` calls this."""
        for _, reference in self._backends:
            if (backend := reference()) is not None:
                backend.reset()

    def backend_for(self, kwargs: Mapping[str, Any]) -> Backend:
        """The Backend for ``torch.compile(..., mode=, options=)``."""
        for known, reference in self._backends:
            if (backend := reference()) is not None and known == kwargs:
                return backend
        backend = self._make(kwargs.get("mode"), dict(kwargs.get("options") or {}))
        self._backends = [(known, reference) for known, reference in self._backends if reference() is not None]
        self._backends.append((dict(kwargs), weakref.ref(backend)))
        return backend

    def _make(self, mode: str | None, options: dict[str, Any]) -> Backend:
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
            try:
                inductor = {**options_of_mode(mode), **inductor}
            except KeyError as error:
                raise ConfigError(f"mode must be one of {error.args[0]}, not {mode!r}.") from None
        return Backend(**options, inductor_options=inductor)


named_backend: Final = NamedBackend()
