"""LlamaFactory's ``fp8: true`` with ``fp8_backend: fp8graph``: its own functions around Trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fp8graph
from accelerate_on_ranks import forget_accelerators
from fp8graph.integrations.accelerate import _connect, install
from tiny_models import causal_lm

utils: Any = pytest.importorskip("llamafactory.train.fp8_utils")
OPTIONS = SimpleNamespace(fp8=True, fp8_backend="fp8graph", fp8_enable_fsdp_float8_all_gather=False)


@pytest.fixture(autouse=True)
def _start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("ACCELERATE_MIXED_PRECISION", "FP8_BACKEND"):  # LlamaFactory sets them
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    forget_accelerators()
    torch._dynamo.reset()
    yield
    _connect().default = None
    for name in ("ACCELERATE_MIXED_PRECISION", "FP8_BACKEND"):
        os.environ.pop(name, None)
    forget_accelerators()


def trained(folder: Path, said: list[str]) -> Any:
    """Train as its workflows do: the environment, then Trainer, then the status."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    data = [{"input_ids": torch.arange(16) + i, "labels": torch.arange(16) + i} for i in range(8)]
    arguments = TrainingArguments(str(folder), max_steps=2, report_to="none", use_cpu=True, bf16=True, logging_steps=1)
    utils.configure_fp8_environment(OPTIONS)
    trainer = Trainer(model=causal_lm("Llama")(1), args=arguments, train_dataset=data)
    trainer.train()
    utils.verify_fp8_status(trainer.accelerator, OPTIONS)
    return trainer


def test_its_option_trains_in_fp8_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(utils.logger, "info_rank0", said.append, raising=False)
    install("tensorwise", compiler="eager")
    trainer = trained(tmp_path, said)
    assert {gemm.recipe for gemm in fp8graph.backend_of(trainer.model).report.gemms} >= {"tensorwise"}
    assert "Accelerate FP8 status - enabled: True, backend: FP8GRAPH" in said


def test_without_our_module_its_option_is_torchaos_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(utils.logger, "info_rank0", said.append, raising=False)
    trainer = trained(tmp_path, said)
    assert str(trainer.accelerator.fp8_backend) != "FP8GRAPH"
    assert not any("FP8GRAPH" in line for line in said)
