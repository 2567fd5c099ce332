"""Lightning, under either of its names: ``lightning.pytorch`` and ``pytorch_lightning``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any, Final

from fp8graph.backend.entry import backend_of
from fp8graph.integrations import missing, state_to_save

__all__ = ["ScalingStateCallback"]

_KEY: Final = "fp8graph"
_LIBRARIES: Final = ("lightning.pytorch", "pytorch_lightning")

if TYPE_CHECKING:
    ScalingStateCallback: type[Any]


@functools.cache
def _made_for(library: str) -> type[Any]:
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
            checkpoint[_KEY] = dict(state_to_save(pl_module, "Lightning's checkpoint"))

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            backend = backend_of(pl_module)
            if _KEY in checkpoint:
                backend.load_state_dict(checkpoint[_KEY])
            else:
                missing(backend, "the checkpoint")

    ScalingStateCallback.__module__, ScalingStateCallback.__qualname__ = __name__, ScalingStateCallback.__name__
    return ScalingStateCallback


def __getattr__(name: str) -> Any:
    """``ScalingStateCallback``: a subclass of the ``Callback`` of the Lightning in use, made on first use."""
    if name != "ScalingStateCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    known = [library for library in _LIBRARIES if library in sys.modules]  # imported by the program
    known = known or [library for library in _LIBRARIES if importlib.util.find_spec(library.partition(".")[0])]
    return _made_for([*known, *_LIBRARIES][0])
