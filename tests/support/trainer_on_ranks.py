"""Hugging Face Trainer on several ranks: started by torchrun; each rank writes what it saw into the folder named."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

import fp8graph
from tiny_models import causal_lm

STEPS = 4


def trained(backend: fp8graph.Backend | None, folder: str) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = causal_lm("Llama")(1)
    if backend is not None:
        model.compile(backend=backend)
    data = [{"input_ids": ids, "labels": ids} for ids in (torch.arange(i, i + 16) % 64 + 3 for i in range(64))]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        bf16=True,
        use_cpu=True,
        ddp_backend="gloo",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        learning_rate=1e-3,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    found: dict[str, Any] = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "wrapped": type(trainer.model_wrapped).__name__,
        "ranks": arguments.world_size,
    }
    if backend is not None:
        found["gemms"] = [(g.fqn, g.gemm, g.recipe is not None) for g in backend.report.gemms]
        found["quantized"] = backend.weights.quantized
        found["state"] = {name: value.tolist() for name, value in backend.state_dict().items()}
    return found


def main(folder: str) -> None:
    found = {
        "bf16": trained(None, folder),
        "delayed": trained(fp8graph.Backend(recipe="delayed", compiler="eager", cache_weights="update"), folder),
    }
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
