"""Lightning, under either of its names: ``lightning.pytorch`` and ``pytorch_lightning``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from fp8graph.backend.backend import Backend
from fp8graph.backend.entry import backend_of, compile
from fp8graph.errors import ConfigError
from fp8graph.integrations import load_state, state_to_save

__all__ = ["FP8Precision", "ScalingStateCallback"]

_KEY: Final = "fp8graph"
_LIBRARIES: Final = ("lightning.pytorch", "pytorch_lightning")

if TYPE_CHECKING:
    FP8Precision: type[Any]
    ScalingStateCallback: type[Any]


def _save(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    checkpoint[_KEY] = dict(state_to_save(module, "Lightning's checkpoint"))


def _load(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    load_state(backend_of(module), checkpoint.get(_KEY), "the checkpoint")


def _callback(library: str) -> type[Any]:
    base: type[Any] = importlib.import_module(library).Callback

    class ScalingStateCallback(base):
        """Puts the scaling state of a module compiled with fp8graph into Lightning's checkpoints, and resumes with it.

            trainer = Trainer(..., callbacks=[ScalingStateCallback()])
            trainer.fit(module, ckpt_path="last")

        It is the entry "fp8graph" of the checkpoint, a dict of tensors.

        Raises:
            ConfigError: the module was not compiled with fp8graph.
            StateError: the checkpoint's state is damaged or of other layers; it is missing (strict mode; else a
                warning); or, when a checkpoint is saved, the ranks have different states.
        """

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            _save(pl_module, checkpoint)

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            _load(pl_module, checkpoint)

    return ScalingStateCallback


def _precision(library: str) -> type[Any]:
    base: type[Any] = importlib.import_module(f"{library}.plugins.precision").MixedPrecision

    class FP8Precision(base):
        """Trains a LightningModule in FP8, and what is not in FP8 in bf16 as with ``precision="bf16-mixed"``.

            trainer = Trainer(plugins=[FP8Precision(recipe="tensorwise")])

        The modules that the LightningModule holds (``self.model = ...``) are compiled, each in place and under its name
        in the LightningModule, since ``training_step`` calls them. The scaling state is the entry "fp8graph" of the
        checkpoints: no :class:`ScalingStateCallback` is needed.

        Args:
            arguments: of :func:`fp8graph.compile`: ``recipe``, ``policy``, ``regions``, ``strict``, ...

        Raises:
            ConfigError: (a ``ValueError``) for arguments that cannot be used; when training starts, if the module was
                compiled with fp8graph already, or holds no module with parameters.
            StateError: as :class:`ScalingStateCallback`.
        """

        def __init__(self, **arguments: Any) -> None:
            super().__init__("bf16-mixed", "cpu")
            Backend(**{name: value for name, value in arguments.items() if name != "regions"})  # raises early
            self._arguments, self._module = arguments, nn.Module()

        def convert_module(self, module: nn.Module) -> nn.Module:
            if module is self._module:  # fit() again, or validate() after it
                return module
            kinds = {type(child).__name__ for child in module.children() if any(True for _ in child.parameters())}
            if not kinds:
                raise ConfigError(
                    f"FP8Precision: {type(module).__name__} holds no module with parameters when training starts. "
                    "Assign the model in __init__ or configure_model, or call fp8graph.compile on the LightningModule."
                )
            arguments: dict[str, Any] = {"regions": sorted(kinds), **self._arguments}
            compile(module, **arguments)
            self._module = module
            return module

        def forward_context(self) -> Any:
            self.device = next(self._module.parameters()).device.type
            return super().forward_context()

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            _save(self._module, checkpoint)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            _load(self._module, checkpoint)

    return FP8Precision


_MADE: Final[dict[str, Callable[[str], type[Any]]]] = {
    "FP8Precision": _precision,
    "ScalingStateCallback": _callback,
}


@functools.cache
def _made_for(library: str, name: str) -> type[Any]:
    made = _MADE[name](library)
    made.__module__, made.__qualname__ = __name__, name
    return made


def __getattr__(name: str) -> Any:
    """``ScalingStateCallback`` or ``FP8Precision``: a class of the Lightning in use, made on first use."""
    if name not in _MADE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    libraries = [library for library in _LIBRARIES if library in sys.modules]  # imported by the program
    libraries = libraries or [library for library in _LIBRARIES if importlib.util.find_spec(library.partition(".")[0])]
    return _made_for([*libraries, *_LIBRARIES][0], name)
