"""FSDP2: layers sharded and compiled one by one; a checkpoint with the scales in it; and a run that goes on from there.

torchrun --nproc-per-node 2 examples/fsdp2.py      on CPUs (gloo), or on as many GPUs (NCCL)
"""

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import fp8graph

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank = dist.get_rank()


def build() -> tuple[Any, torch.optim.Optimizer, fp8graph.Backend]:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2)).to(device)  # FP32: FSDP2 gathers it in bf16
    backend = fp8graph.Backend(recipe="delayed", compiler="inductor" if on_gpu else "eager")  # eager: starts at once
    backend.bind(model)  # layers that are compiled one by one keep their full names
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=precision)
        layer.compile(backend=backend)
    fully_shard(model, mp_policy=precision)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), backend


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    ids = (torch.arange(16, device=device) + 16 * rank).repeat(4, 1)  # each rank's own data
    for step in steps:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss  # a cache would tell the layers apart to Dynamo
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")


folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)  # rank 0's
model, optimizer, backend = build()
train(model, optimizer, range(4))
weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optim": moments, "fp8graph": backend}, checkpoint_id=folder[0])

model, optimizer, backend = build()  # as another process would, on as many ranks or on others
weights, moments = get_state_dict(model, optimizer)
parts = {"model": weights, "optim": moments, "fp8graph": backend}
dcp.load(parts, checkpoint_id=folder[0])
set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optim"])
train(model, optimizer, range(4, 8))
if rank == 0:
    print(f"loaded scales that nothing used: {backend.report.unused_state}")
    print(backend.report.summary())
dist.destroy_process_group()
