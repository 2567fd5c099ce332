"""Training under a policy that changes on the way, saved after some steps, and resumed by another process."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

import fp8graph
from fp8graph import Policy
from helpers import MLP


def train(
    policy: Policy, steps: range, folder: Path, saves: Collection[int] = (), *, load: bool = False
) -> list[float]:
    """The losses of ``steps``; saved before each of ``saves``, loaded before the first."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    model, backend = MLP(), fp8graph.Backend(policy, compiler="eager")
    backend.bind(model)
    model.compile(backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if load:
        saved = torch.load(folder / f"{steps[0]}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        backend.load_state_dict(saved["backend"])
        torch.set_rng_state(saved["generator"])
    losses: list[float] = []
    for step in steps:
        if step in saves:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            saved |= {"backend": dict(backend.state_dict()), "generator": torch.get_rng_state()}
            torch.save(saved, folder / f"{step}.pt")
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def resume(_rank: int, policy: Policy, steps: range, folder: Path) -> list[float]:
    """The losses of ``steps``, from what was saved before the first of them."""
    return train(policy, steps, folder, load=True)
