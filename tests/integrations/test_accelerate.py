"""accelerate's checkpoints take the backend itself: a resumed run is bit-identical."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fp8graph
from fp8graph.errors import StateError
from helpers import MLP, same_bits

DELAYED = fp8graph.Policy(default=fp8graph.DelayedScaling(amax_history_len=4), min_speedup=0)
DATA = torch.randn(8, 16, 32, generator=torch.Generator().manual_seed(1))


def backend() -> fp8graph.Backend:
    return fp8graph.Backend(DELAYED, compiler="eager")


def fresh_model() -> MLP:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return MLP()


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    return [*model.state_dict().values(), *fp8graph.backend_of(model).state_dict().values()]


def accelerated(folder: Path, steps: range, *, load: bool, save: bool) -> tuple[nn.Module, list[float]]:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), fresh_model()
    model.compile(backend=backend())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(fp8graph.backend_of(model))
    if load:
        accelerator.load_state(str(folder))
    losses: list[float] = []
    for step in steps:
        loss = (model(DATA[step]) - DATA[step]).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if save:
        accelerator.save_state(str(folder))
    return model, losses


def test_accelerate_resumes_bit_identically(tmp_path: Path) -> None:
    whole, losses = accelerated(tmp_path, range(4), load=False, save=False)
    _, first = accelerated(tmp_path, range(2), load=False, save=True)
    resumed, second = accelerated(tmp_path, range(2, 4), load=True, save=False)
    assert first + second == losses
    assert same_bits(tensors_of(resumed), tensors_of(whole))

    saved = torch.load(tmp_path / "custom_checkpoint_0.pkl", weights_only=True)
    saved.popitem()
    torch.save(saved, tmp_path / "custom_checkpoint_0.pkl")
    with pytest.raises(StateError, match="it is truncated"):
        accelerated(tmp_path, range(0), load=True, save=False)
