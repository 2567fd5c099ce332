"""Trainer's checkpoints: a run that was interrupted ends with the bytes of one that was not."""

from __future__ import annotations

import base64
import json
import logging
import shutil
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import fp8graph
from fp8graph.errors import ConfigError, StateError
from fp8graph.integrations import from_text
from fp8graph.integrations.transformers import ScalingStateCallback
from helpers import same_bits
from tiny_models import causal_lm

# transformers, of the names that PEFT still types
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning")

DATA = [{"input_ids": ids, "labels": ids} for ids in (torch.arange(i, i + 16) % 64 + 3 for i in range(64))]
DELAYED = fp8graph.DelayedScaling(amax_history_len=4)
STATE = "trainer_state.json"


class StopAt(TrainerCallback):
    """As if the machine had gone after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


def trainer_for(folder: Path, *callbacks: Any, backend: Any = None, wrap: Any = None, **settings: Any) -> Any:
    """Nothing of an earlier run: another model, another backend."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = causal_lm("Llama")(1)
    model.compile(backend=backend or fp8graph.Backend(recipe=DELAYED, compiler="eager"))
    arguments: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 4, "bf16": True, "use_cpu": True,
        "logging_steps": 1, "report_to": [], "save_steps": 1, "learning_rate": 1e-2, "disable_tqdm": True,
    }  # fmt: skip
    return Trainer(
        model=wrap(model) if wrap else model,
        args=TrainingArguments(**arguments | settings),
        train_dataset=DATA,  # pyright: ignore[reportArgumentType]
        eval_dataset=DATA[:4],  # pyright: ignore[reportArgumentType]
        callbacks=[ScalingStateCallback(), *callbacks],
    )


def found(trainer: Any) -> tuple[list[float], list[torch.Tensor]]:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    state = fp8graph.backend_of(trainer.model).state_dict()
    return losses, [*trainer.model.state_dict().values(), *state.values()]


@pytest.mark.slow
def test_a_resumed_run_is_bit_identical(tmp_path: Path) -> None:
    whole = trainer_for(tmp_path / "whole")
    whole.train()
    trainer_for(tmp_path / "parts", StopAt(2)).train()
    assert sorted(p.name for p in (tmp_path / "parts").iterdir()) == ["checkpoint-1", "checkpoint-2"]
    resumed = trainer_for(tmp_path / "parts")
    resumed.train(resume_from_checkpoint=True)
    losses, tensors = found(whole)
    assert len(losses) == 4
    assert found(resumed)[0] == losses
    assert same_bits(found(resumed)[1], tensors)

    (tmp_path / "parts" / "checkpoint-1").rename(tmp_path / "elsewhere")
    moved = trainer_for(tmp_path / "new", restore_callback_states_from_checkpoint=True)
    moved.train(resume_from_checkpoint=str(tmp_path / "elsewhere"))
    assert same_bits(found(moved)[1], tensors)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    trainer_for(folder, StopAt(1)).train()
    return folder


def changed(folder: Path, change: Any, tmp_path: Path) -> str:
    """A copy of the checkpoint, its trainer_state.json changed."""
    copy = tmp_path / "changed"
    shutil.copytree(folder / "checkpoint-1", copy)
    state = json.loads((copy / STATE).read_text(encoding="utf-8"))
    change(state["stateful_callbacks"])
    (copy / STATE).write_text(json.dumps(state), encoding="utf-8")
    return str(copy)


def forget(callbacks: dict[str, Any]) -> None:
    del callbacks["ScalingStateCallback"]


@pytest.mark.slow
def test_a_checkpoint_without_state(stopped: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copy = changed(stopped, forget, tmp_path)
    trainer = trainer_for(tmp_path, max_steps=2)
    with caplog.at_level(logging.WARNING, logger="fp8graph"):
        trainer.train(resume_from_checkpoint=copy)
    assert "the checkpoint of step 1 has no scaling state of fp8graph" in caplog.text
    saved = json.loads((tmp_path / "checkpoint-2" / STATE).read_text(encoding="utf-8"))
    assert saved["stateful_callbacks"]["ScalingStateCallback"]["attributes"]["scaling_state"]  # from now on

    strict = trainer_for(tmp_path, backend=fp8graph.Backend(recipe=DELAYED, compiler="eager", strict=True))
    with pytest.raises(StateError, match="strict mode: the checkpoint of step 1 has no scaling state"):
        strict.train(resume_from_checkpoint=copy)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["AAAA", "not base64", 5, "cut"])
def test_a_damaged_state(damage: Any, stopped: Path, tmp_path: Path) -> None:
    def spoil(callbacks: dict[str, Any]) -> None:
        attributes = callbacks["ScalingStateCallback"]["attributes"]
        attributes["scaling_state"] = attributes["scaling_state"][:-8] if damage == "cut" else damage

    trainer = trainer_for(tmp_path)
    with pytest.raises(StateError, match="scaling state of fp8graph in the checkpoint of step 1 is damaged"):
        trainer.train(resume_from_checkpoint=changed(stopped, spoil, tmp_path))


@pytest.mark.slow
def test_the_best_model_has_its_scales(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "greater_is_better": True}
    trainer = trainer_for(tmp_path, metric_for_best_model="eval_loss", **settings)  # the first: its loss is the largest
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name != "checkpoint-4"
    saved = json.loads((best / STATE).read_text(encoding="utf-8"))["stateful_callbacks"]["ScalingStateCallback"]
    expected = from_text(saved["attributes"]["scaling_state"], "the best checkpoint")
    now = fp8graph.backend_of(trainer.model).state_dict()
    assert now.keys() == expected.keys()
    assert same_bits(now.values(), expected.values())


@pytest.mark.slow
def test_through_wrappers(tmp_path: Path) -> None:
    """PEFT's, with the model in it compiled."""
    from peft import LoraConfig, get_peft_model

    def adapted(model: Any) -> Any:
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))

    trainer = trainer_for(tmp_path, wrap=adapted, max_steps=1)
    trainer.train()
    assert (tmp_path / "checkpoint-1" / STATE).read_text().count("scaling_state") == 1


@pytest.mark.slow
def test_a_model_of_another_backend(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, backend="eager")
    with pytest.raises(ConfigError, match="was not compiled with the fp8graph backend"):
        trainer.train()


def test_trainer_knows_no_backend_of_this_name(tmp_path: Path) -> None:
    """The reason for model.compile before Trainer; `fp8graph doctor` says so too."""
    with pytest.raises(ValueError, match="'FP8GRAPH' is not a valid DynamoBackend"):
        trainer_for(tmp_path, torch_compile_backend="fp8graph")


def test_a_state_is_not_inflated_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few KiB of text can stand for gigabytes."""
    monkeypatch.setattr("fp8graph.integrations._LARGEST", 1 << 20)
    text = base64.b64encode(zlib.compress(bytes(1 << 24))).decode()
    tracemalloc.start()
    with pytest.raises(StateError, match="damaged .ValueError: it is cut off, or larger than 1 MiB"):
        from_text(text, "a file")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 23
