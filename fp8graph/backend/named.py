"""``backend="fp8graph"``: a backend by name and options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import fx

from fp8graph.backend.backend import Backend
from fp8graph.compat.inductor import options_of_mode
from fp8graph.errors import ConfigError
from fp8graph.ir.settings import Settings, choices

# Backend's arguments, and torch's own two under short names
_OPTIONS: Final = (
    *("policy", "recipe"),
    *(name for name in Settings.names() if name != "inductor_options"),
    *("mode", "inductor"),
)


class NamedBackend:
    """``backend="fp8graph"``: one :class:`Backend` per distinct set of options.

    torch shares compiled code between compile calls whose backend and options are equal, two models of one
    class for instance; they therefore share a Backend, and its report, too.
    """

    __name__ = "fp8graph"

    def __init__(self) -> None:
        self._backends: list[tuple[dict[str, Any], Backend]] = []

    def __reduce__(self) -> str:
        return "named_backend"

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        return self.backend_for(kwargs)(module, example_inputs)

    def backend_for(self, kwargs: Mapping[str, Any]) -> Backend:
        """The Backend for ``torch.compile(..., mode=, options=)``."""
        for known, backend in self._backends:
            if known == kwargs:
                return backend
        backend = self._make(kwargs.get("mode"), dict(kwargs.get("options") or {}))
        self._backends.append((dict(kwargs), backend))
        return backend

    def _make(self, mode: str | None, options: dict[str, Any]) -> Backend:
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
