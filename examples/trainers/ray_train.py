"""Ray Train in FP8: each worker compiles by the backend's name, and checkpoints hold the scales.

python examples/trainers/ray_train.py
"""

import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig, get_checkpoint, get_context, report
from ray.train.torch import TorchTrainer, prepare_model
from transformers import LlamaConfig, LlamaForCausalLM

import fp8graph

POLICY = {"rules": [{"pattern": "*layers.1.*", "recipe": "high_precision"}], "default": "delayed"}


def train(config: dict[str, Any]) -> None:
    """The loop of each worker: other processes, which import fp8graph."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
    model = prepare_model(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2)))
    compiler = "inductor" if torch.cuda.is_available() else "eager"  # eager: no code generation, starts at once
    model = torch.compile(model, backend="fp8graph", options={"policy": POLICY, "compiler": compiler})
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    if checkpoint := get_checkpoint():  # a run of the same name goes on
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"))
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        fp8graph.backend_of(model).load_state_dict(saved["fp8graph"])
        losses = saved["losses"]
    rank = get_context().get_world_rank()
    ids = (torch.arange(16) + 16 * rank).repeat(4, 1).to(model.device)  # each worker's own data
    for _ in range(len(losses), config["steps"]):
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    backend = fp8graph.backend_of(model)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "fp8graph": backend.state_dict()}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state | {"losses": losses}, Path(folder, "state.pt"))
        found = {"losses": losses, "summary": backend.report.summary()}
        report(found, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


ray.init(log_to_driver=False)
with tempfile.TemporaryDirectory() as storage:
    for steps in (2, 4):  # the second run goes on where the first one stopped
        workers = ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available())
        run = RunConfig(storage_path=storage, name="fp8")
        found = (
            TorchTrainer(train, train_loop_config={"steps": steps}, scaling_config=workers, run_config=run)
            .fit()
            .metrics
        )
for step, loss in enumerate(found["losses"]):
    print(f"step {step}: loss {loss:.2f}")
print(found["summary"])
