"""A Llama cut into the stages of a pipeline, one per rank, trained with 1F1B: each stage has its own FP8 scales.

torchrun --nproc-per-node 2 examples/pipeline.py      on CPUs (gloo), or on as many GPUs (NCCL)
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import LlamaConfig, LlamaForCausalLM

import fp8graph

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


class Stage(nn.Module):
    """Some layers; the first stage has the embedding, the last one the head. Names stay those of the whole model."""

    def __init__(self, whole: Any, first: bool, last: bool, layers: range) -> None:
        super().__init__()
        self.embed_tokens = whole.model.embed_tokens if first else None
        self.layers = nn.ModuleDict({str(i): whole.model.layers[i] for i in layers})
        self.rotary_emb = whole.model.rotary_emb
        self.norm, self.lm_head = (whole.model.norm, whole.lm_head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        angles = self.rotary_emb(x, positions)
        for layer in self.layers.values():
            x = layer(x, position_embeddings=angles, position_ids=positions)
        return x if self.norm is None or self.lm_head is None else self.lm_head(self.norm(x))


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
torch.manual_seed(0)
whole = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2 * ranks)).bfloat16()
stage = Stage(whole, rank == 0, rank == ranks - 1, range(2 * rank, 2 * rank + 2)).to(device)
backend = fp8graph.Backend(recipe="delayed", compiler="inductor" if on_gpu else "eager")  # eager: starts at once
stage.compile(backend=backend)
schedule = Schedule1F1B(PipelineStage(stage, rank, ranks, device), n_microbatches=4, loss_fn=loss_of)
optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)

ids = torch.arange(16, device=device).repeat(8, 1)  # two sequences per micro-batch
for step in range(8):
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(ids)
    elif rank == ranks - 1:
        schedule.step(target=ids, losses=losses)
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
    if losses:
        print(f"step {step}: loss {torch.stack(losses).mean().item():.3f}")
if rank == ranks - 1:
    print(backend.report.summary())
dist.destroy_process_group()
