"""Hugging Face Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, cast

from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from fp8graph.backend.entry import backend_of, find_backend
from fp8graph.integrations import from_text, load_state, state_to_save, to_text

__all__ = ["ScalingStateCallback"]

_KEY: Final = "scaling_state"


class ScalingStateCallback(TrainerCallback, ExportableState):
    """Puts the scaling state of a model compiled with fp8graph into Trainer's checkpoints, and resumes with it.

        trainer = Trainer(model=model, ..., callbacks=[ScalingStateCallback()])
        trainer.train(resume_from_checkpoint=True)

    The state is text in ``trainer_state.json``, so that it goes wherever the checkpoint does: another folder, a trial
    of a search, the Hub. ``load_best_model_at_end`` brings back the scales of the best checkpoint, too.

    Raises:
        ConfigError: (when training begins) the model was not compiled with fp8graph.
        StateError: the checkpoint's state is damaged or of other layers; it is missing (strict mode; else a warning);
            or, when a checkpoint is saved, the ranks have different states.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None

    def state(self) -> dict[str, Any]:
        """Return the entry in ``trainer_state.json`` for Trainer; ``scaling_state`` is empty before training begins."""
        text = "" if self._model is None else to_text(state_to_save(self._model, "Trainer's checkpoint"))
        return {"args": {}, "attributes": {_KEY: text}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._model = model = cast(nn.Module, kwargs["model"])
        if state.global_step:
            self._load(model, state.stateful_callbacks, f"the checkpoint of step {state.global_step}")
        # Trainer writes where this entry is: it has none after a checkpoint without this callback
        state.stateful_callbacks.setdefault(type(self).__name__, {})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        best = state.best_model_checkpoint
        if args.load_best_model_at_end and best is not None and self._model is not None:
            file = Path(best, "trainer_state.json")
            if file.exists():  # load_best_model_at_end does without
                saved = json.loads(file.read_text(encoding="utf-8"))
                self._load(self._model, saved.get("stateful_callbacks") or {}, str(best))

    def _load(self, model: nn.Module, callbacks: Any, checkpoint: str) -> None:
        backend, entry = backend_of(model), callbacks.get(type(self).__name__)
        entry = entry[0] if isinstance(entry, list) and entry else entry
        text = entry.get("attributes", {}).get(_KEY) if isinstance(entry, dict) else None
        load_state(backend, from_text(text, checkpoint) if text else None, checkpoint)


class ScalingStateIfCompiled(ScalingStateCallback):
    """The same for whatever Trainer trains: a model that fp8graph did not compile has no state."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if find_backend(cast(nn.Module, kwargs["model"])) is not None:
            super().on_train_begin(args, state, control, **kwargs)
