"""Tensor and sequence parallel: each rank has a part of every weight, and between the layers a part of the sequence.

torchrun --nproc-per-node 2 examples/tensor_parallel.py      on CPUs (gloo), or on as many GPUs (NCCL)
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import fp8graph


class Block(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, hidden: int = 64, inner: int = 128, vocabulary: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.Sequential(*(Block(hidden, inner) for _ in range(2)))
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)  # a head: high precision

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.layers(self.embed(ids)))


on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank = dist.get_rank()
mesh = init_device_mesh(device.type, (dist.get_world_size(),))

torch.manual_seed(0)
model = Model().bfloat16().to(device)
sequence = Shard(1)  # of [batch, sequence, hidden]
embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence)
head = ColwiseParallel(input_layouts=sequence, output_layouts=Replicate())
parallelize_module(model, mesh, {"embed": embed, "lm_head": head})
for block in model.layers:
    up = ColwiseParallel(input_layouts=sequence)  # gathers the sequence
    down = RowwiseParallel(output_layouts=sequence)  # adds up, and scatters it again
    parallelize_module(block, mesh, {"norm": SequenceParallel(), "up": up, "down": down})

backend = fp8graph.Backend(recipe="tensorwise", compiler="inductor" if on_gpu else "eager")  # eager: starts at once
model.compile(backend=backend)  # the collectives are inside the compiled code

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.arange(16, device=device).repeat(4, 1)  # the same on every rank
for step in range(8):
    logits = model(ids)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.3f}")
if rank == 0:
    print(backend.report.summary())
dist.destroy_process_group()
