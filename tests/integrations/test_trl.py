"""TRL's own SFTTrainer and GRPOTrainer, with a model that was compiled before."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8graph
from fp8graph.integrations.transformers import ScalingStateCallback
from helpers import distance, same_bits
from tiny_models import causal_lm
from trainers_page import run_commands, wrong_set_ups

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # TRL's, of its own settings
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed: it brings data sets' libraries"),
]
BY_LAYER = {"rules": [{"pattern": "*layers.1.*", "recipe": "high_precision"}], "default": "delayed"}
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4, "bf16": True, "use_cpu": True, "learning_rate": 1e-3, "logging_steps": 1,
    "report_to": [], "disable_tqdm": True,
}  # fmt: skip


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(60)} | {"<eos>": 60, "<pad>": 61}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")


def model_of(fp8: dict[str, Any]) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = causal_lm("Llama")(2)
    if fp8:
        fp8graph.compile(model, **fp8)
    return model


def fine_tuned(folder: Path, fp8: dict[str, Any], *, resumed: bool = False, **settings: Any) -> Any:
    """The SFTTrainer after four steps: from the checkpoint of the second, if it is to resume."""
    from datasets import Dataset  # pyright: ignore
    from trl import SFTConfig, SFTTrainer  # pyright: ignore

    text = [" ".join(f"w{(i + j) % 60}" for j in range(16)) for i in range(32)]
    chosen: dict[str, Any] = {**SETTINGS, "max_steps": 4, "max_length": 32, "save_steps": 2, **settings}
    trainer: Any = SFTTrainer(
        model=model_of(fp8),
        args=SFTConfig(output_dir=str(folder), **chosen),
        train_dataset=Dataset.from_dict({"text": text}),
        processing_class=tokenizer(),
        callbacks=[ScalingStateCallback()] if fp8 else [],
    )
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resumed else None)
    return trainer


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_losses_of_generated_code_are_close_to_those_of_torch_compile(tmp_path: Path) -> None:
    own = losses(fine_tuned(tmp_path / "own", {}, torch_compile=True))
    found = losses(fine_tuned(tmp_path / "found", {"recipe": "tensorwise"}))
    assert len(found) == 4
    assert 0 < distance(found, own) < 0.0005  # 0.0003 measured


def test_fine_tuning_honours_a_policy_by_layer_and_resumes_bit_identically(tmp_path: Path) -> None:
    fp8 = {"policy": BY_LAYER, "compiler": "eager"}
    whole = fine_tuned(tmp_path, fp8)
    resumed = fine_tuned(tmp_path, fp8, resumed=True)
    assert losses(resumed) == losses(whole)
    state, expected = (
        (*t.model.state_dict().values(), *fp8graph.backend_of(t.model).state_dict().values()) for t in (resumed, whole)
    )
    assert same_bits(state, expected)
    recipes = {
        gemm.fqn: gemm.recipe for gemm in fp8graph.backend_of(whole.model).report.gemms if ".layers." in gemm.fqn
    }
    assert len(recipes) == 14
    assert all(recipe == ("delayed" if ".layers.0." in name else None) for name, recipe in recipes.items())


def reinforced(folder: Path, fp8: dict[str, Any], steps: int = 2) -> Any:
    """The GRPOTrainer after a few steps of four rollouts."""
    from datasets import Dataset  # pyright: ignore
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [sum(len(word) == 2 for word in text.split()) / 8 for text in completions]

    chosen: dict[str, Any] = {
        **SETTINGS, "max_steps": steps, "num_generations": 4, "max_completion_length": 8, "save_strategy": "no",
    }  # fmt: skip
    trainer: Any = GRPOTrainer(
        model=model_of(fp8),
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(folder), **chosen),
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(32)]}),
        processing_class=tokenizer(),
    )
    trainer.train()
    return trainer


def test_rollouts_and_training_of_grpo_run_the_same_layers(tmp_path: Path) -> None:
    policy = {**BY_LAYER, "default": "tensorwise"}
    found = reinforced(tmp_path, {"policy": policy, "regions": "auto", "compiler": "eager"})
    own = reinforced(tmp_path, {})
    rewards, norms = (
        [[log[name] for log in trainer.state.log_history[:2]] for trainer in (found, own)]
        for name in ("reward", "grad_norm")
    )
    assert rewards[0] == rewards[1]  # the same tokens
    assert 0 < distance(*norms) < 0.005  # 0.0034 measured
    report = fp8graph.backend_of(found.model).report
    in_fp8 = {gemm.fqn.partition(".layers.")[2].partition(".")[0] for gemm in report.gemms if gemm.recipe}
    assert in_fp8 == {"0", ""}  # "": the head
    assert "not compiled" not in report.summary()


def test_wrong_set_ups_have_the_messages_of_the_page(tmp_path: Path) -> None:
    named, whole = wrong_set_ups("TRL")
    with pytest.raises(ValueError, match=re.escape(named)):
        fine_tuned(tmp_path, {}, torch_compile_backend="fp8graph")
    with torch._dynamo.config.patch(recompile_limit=2):  # 8 by default, reached in the third step
        trainer = reinforced(tmp_path, {"recipe": "tensorwise", "compiler": "eager"}, steps=1)
    assert whole in fp8graph.backend_of(trainer.model).report.summary()


def test_the_page_shows_the_output_of_its_command() -> None:
    run_commands("TRL")
