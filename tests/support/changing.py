"""Training under a policy that changes on the way, saved after some steps, and resumed by another process."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp8graph
from fp8graph import Policy
from helpers import MLP


def train(
    policy: Policy,
    steps: range,
    folder: Path,
    saves: Collection[int] = (),
    *,
    load: bool = False,
    compiler: Any = "eager",
    checkpointed: bool = False,
) -> list[float]:
    """The losses of ``steps``; saved before each of ``saves``, loaded before the first. On all ranks, if there are."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True, parents=True)
    model, backend = MLP(), fp8graph.Backend(policy, compiler=compiler)
    backend.bind(model)
    model.compile(backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if load:
        saved = torch.load(folder / f"{steps[0]}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        backend.load_state_dict(saved["backend"])
        torch.set_rng_state(saved["generator"])
    ranks = dist.is_initialized() and dist.get_world_size() > 1
    called: nn.Module = DistributedDataParallel(model) if ranks else model
    losses: list[float] = []
    for step in steps:
        if step in saves:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            saved |= {"backend": dict(backend.state_dict()), "generator": torch.get_rng_state()}
            torch.save(saved, folder / f"{step}.pt")
        seed = 2 * step + (dist.get_rank() if ranks else 0)
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
        y = checkpoint(called, x, use_reentrant=False) if checkpointed else called(x)
        loss = (y - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def resume(_rank: int, policy: Policy, steps: range, folder: Path) -> list[float]:
    """The losses of ``steps``, from what was saved before the first of them."""
    return train(policy, steps, folder, load=True)


def change_and_continue(rank: int, change: int, late: Policy, after: Policy, folder: Path, **how: Any) -> list[Any]:
    """The losses from ``change`` on: of a run under ``late``, and of one that begins there under ``after``."""
    folder = folder / str(rank)
    whole = train(late, range(change + 3), folder, saves=(change,), **how)
    return [whole[change:], train(after, range(change, change + 3), folder, load=True, **how)]
