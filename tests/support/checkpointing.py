"""Training that is saved with torch.distributed.checkpoint and goes on elsewhere: what the ranks run."""

from __future__ import annotations

import copy
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fp8graph
import parallelism
from fp8graph.passes.gather_weights.sent_weights import SentWeights

RECIPE = fp8graph.DelayedScaling(amax_history_len=4)
KINDS = ["ddp", "fsdp"]  # with delayed scaling; FSDP2 gathers its weights in FP8
WITHOUT_STATE = "fsdp, tensorwise"  # gathers in FP8 as well; this recipe keeps no state


class Run:
    """One training: its model, optimizer and backend, none of which has run yet."""

    def __init__(self, how: str, recipe: Any = RECIPE) -> None:
        """``how``: see ``parallelism.parallelize``; "alone" is one process without a process group."""
        if how == WITHOUT_STATE:
            how, recipe = "fsdp", "tensorwise"
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        model, _ = parallelism.model_and_data(1)
        self.backend = parallelism.backend_for(recipe)
        self.compiled: Any
        self.model: nn.Module
        if how == "alone":
            self.compiled, self.model = torch.compile(model, backend=self.backend), model
        else:
            self.compiled, self.model = parallelism.parallelize(how, model, self.backend)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def batch(self, step: int) -> Tensor:
        """This rank's rows of a batch that is the same for any number of ranks."""
        generator = torch.Generator().manual_seed(step)
        return torch.randn(16, parallelism.HIDDEN, generator=generator).chunk(self.ranks)[self.rank]

    def steps(self, steps: range) -> list[float]:
        """Losses of this rank."""
        losses: list[float] = []
        for step in steps:
            self.optimizer.zero_grad()
            loss = self.compiled(self.batch(step)).square().mean()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def evaluate(self) -> None:
        """Run without gradients: every layer finds its state, and none changes."""
        with torch.no_grad():
            self.compiled(self.batch(0))

    def parts(self) -> dict[str, Any]:
        """The state that is saved, or loaded into."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "fp8graph": self.backend}

    def save(self, path: str) -> None:
        dcp.save(self.parts(), checkpoint_id=path)

    def load(self, path: str) -> None:
        parts = self.parts()
        dcp.load(parts, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optim"])


def save(_rank: int, folder: str, kinds: list[str]) -> dict[str, Any]:
    """Train 3 steps, save, train 2 more."""
    found: dict[str, Any] = {}
    for how in kinds:
        run = Run(how)
        run.steps(range(3))
        state = copy.deepcopy(run.backend.state_dict())
        run.save(f"{folder}/{how}")
        found[how] = {"saved": state, "losses": run.steps(range(3, 5)), "after": run.backend.state_dict()}
        found[how]["sent"] = run.backend.store(SentWeights).quantized
    return found


def load(_rank: int, folder: str, kinds: list[str]) -> dict[str, Any]:
    """Load before anything was compiled, look at the state before and after it found its layers, train 2 steps."""
    return {how: resumed(Run(how), f"{folder}/{how}") for how in kinds}


def resumed(run: Run, path: str) -> dict[str, Any]:
    run.load(path)
    waiting = run.backend.state_dict()
    run.evaluate()
    placed = run.backend.state_dict()
    losses = run.steps(range(3, 5))
    after, unused = run.backend.state_dict(), run.backend.report.unused_state
    return {"waiting": waiting, "placed": placed, "losses": losses, "after": after, "unused": unused}


def refused(rank: int, folder: str) -> list[str]:
    """The error of a save when each rank has scales of its own, by the recipe or by the group."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    said: list[str] = []
    for recipe, group in ((fp8graph.DelayedScaling(reduce_amax=False), None), (RECIPE, alone[rank])):
        run = Run("ddp", recipe)
        with fp8graph.autocast(amax_reduction_group=group):
            run.steps(range(1))
        try:
            run.save(f"{folder}/refused")
        except dcp.CheckpointException as error:
            said.append(str(error))
    return said


def lose_a_rank(rank: int, folder: str, how: str, sent: signal.Signals) -> tuple[str, float]:
    """Train 3 steps and save; then rank 1 gets a signal in the middle of a step. What rank 0 sees, after how long."""
    run = Run(how)
    run.steps(range(3))
    run.save(f"{folder}/{how}")
    loss = run.compiled(run.batch(3)).square().mean()
    if rank == 1:
        os.kill(os.getpid(), sent)
    start = time.monotonic()
    try:
        loss.backward()
        run.steps(range(4, 5))
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", time.monotonic() - start
