"""TRL's own SFTTrainer, with a model that was compiled before."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8graph
from tiny_models import causal_lm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # TRL's, of its own settings
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed: it brings data sets' libraries"),
]


def losses(folder: Path, recipe: str | None) -> list[float]:
    from datasets import Dataset  # pyright: ignore
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer  # pyright: ignore

    words = {f"w{i}": i for i in range(60)} | {"<unk>": 60, "<eos>": 61, "<pad>": 62}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore
    fast: Any = PreTrainedTokenizerFast
    text = [" ".join(f"w{(i + j) % 60}" for j in range(16)) for i in range(32)]
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = causal_lm("Llama")(1)
    if recipe is not None:
        fp8graph.compile(model, recipe=recipe, compiler="eager")
    settings: dict[str, Any] = {
        "max_steps": 4, "per_device_train_batch_size": 4, "bf16": True, "use_cpu": True, "learning_rate": 1e-3,
        "max_length": 32, "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    trainer: Any = SFTTrainer(
        model=model,
        args=SFTConfig(output_dir=str(folder), **settings),
        train_dataset=Dataset.from_dict({"text": text}),
        processing_class=fast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"),
    )
    trainer.train()
    if recipe is not None:
        report = fp8graph.backend_of(trainer.model).report
        assert {gemm.recipe for gemm in report.gemms if gemm.fqn != "lm_head"} == {recipe}
        assert {gemm.fqn.partition(".layers.")[0] for gemm in report.gemms if gemm.recipe} == {"model"}
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_supervised_fine_tuning_in_fp8_stays_close_to_bf16(tmp_path: Path) -> None:
    found, expected = losses(tmp_path, "tensorwise"), losses(tmp_path, None)
    assert len(found) == 4
    assert found != expected
    for loss, reference in zip(found, expected, strict=True):
        assert abs(loss / reference - 1) < 0.001
