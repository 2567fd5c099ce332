"""A small model trained on ranks whose gradients go in FP8 or in high precision."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fp8graph.errors import Fp8GraphError
from fp8graph.extras.gradients import send_gradients_in_fp8
from parallelism import Net


def gradients(rank: int, how: str, dtype: torch.dtype | None, scale: float = 1.0) -> dict[str, Any]:
    """Of one step of a small model, and the bytes that this rank sent in FP8. ``dtype`` None: in high precision."""
    torch.manual_seed(0)
    model: nn.Module = Net(30, 70)  # sizes that are not multiples of 128
    if how == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in (*model.layers, model):  # pyright: ignore
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    wire = None if dtype is None else send_gradients_in_fp8(model, dtype=dtype)
    x = torch.randn(16, 30, generator=torch.Generator().manual_seed(rank))
    (model(x).square().mean() * scale).backward()
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        found[name.removeprefix("module.")] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
    sizes = [p.numel() for p in model.parameters()]
    return {"gradients": found, "bytes": 0 if wire is None else wire.bytes_sent, "sizes": sizes}


def divided(rank: int) -> str:
    """The error if FSDP2 divides by another factor."""
    model: Any = nn.Linear(8, 8)
    fully_shard(model)
    model.set_gradient_divide_factor(3.0)
    send_gradients_in_fp8(model)
    try:
        model(torch.ones(2, 8)).sum().backward()
    except (Fp8GraphError, RuntimeError) as error:
        return str(error)
    finally:
        dist.barrier()
    return ""
