"""Training as users do it, under every recipe: GradScaler, autocast, master weights, fused optimizers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import Policy
from fp8graph.recipes import RECIPE_NAMES
from helpers import MLP, eager_backend


def batch(step: int) -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(step))


def scaled_steps(module: nn.Module, model: Any) -> list[bool]:
    """Whether GradScaler skipped each of eight steps that start with gradients of 2^18: inf in fp16."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    skipped: list[bool] = []
    for step in range(8):
        before = [p.detach().clone() for p in module.parameters()]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(batch(step) * 0.01).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        skipped.append(scaler.get_scale() < scale)
        unchanged = all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
        assert unchanged == skipped[-1]
        assert all(torch.isfinite(p).all() for p in module.parameters())
    return skipped


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_grad_scaler_sees_an_overflow(recipe: str) -> None:
    """Gradients that overflow in fp16 reach the scaler through saturating casts: it skips what it skips without us."""
    torch.manual_seed(0)
    module = MLP()
    with torch.no_grad():  # small numbers: dy is what overflows, nothing else comes close
        for parameter in module.parameters():
            parameter *= 0.1
    plain = copy.deepcopy(module)
    expected = [True] * 3 + [False] * 5  # dy = 2^18, 2^17, 2^16, then 2^15
    assert scaled_steps(plain, plain) == expected
    assert scaled_steps(module, torch.compile(module, backend=eager_backend(Policy(default=recipe)))) == expected


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_gradient_is_not_hidden_in_any_layer(recipe: str, bad: float) -> None:
    """Without carrying overflow, dy = inf would give finite weight gradients."""
    module = MLP()
    model = torch.compile(module, backend=eager_backend(Policy(default=recipe)))
    out = model(batch(0))
    dy = torch.randn_like(out)
    dy[3, 7] = bad
    out.backward(dy)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert not torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("fused", [False, True])
def test_fp32_master_weights_under_autocast(recipe: str, fused: bool) -> None:
    torch.manual_seed(0)
    module = MLP()
    target = nn.Linear(32, 32)
    backend = eager_backend(Policy(default=recipe))
    model = torch.compile(module, backend=backend)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, fused=fused)
    losses: list[float] = []
    for step in range(20):
        x = batch(step % 4)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        loss = ((out.float() - target(x).detach()) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.dtype == torch.float32 and p.grad is not None for p in module.parameters())
    assert {gemm.dtypes[2] for gemm in backend.report.gemms} == {"bf16"}
    assert len(backend.report.graphs) == 1
    assert losses[-1] < 0.85 * losses[0]


def test_region_recipes_by_name_train_with_state() -> None:
    """autocast(recipe="delayed") in compiled code and around it, beside the policy's recipe."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            with fp8graph.autocast(recipe="delayed"):
                x = self.a(x)
            return self.b(x)

    module = Half()
    backend = eager_backend(Policy(default="mxfp8"))
    model = torch.compile(module, backend=backend)
    model(batch(0)).sum().backward()
    owners = lambda: {key.partition(".")[0] for key in backend.state_dict() if "|" in key}  # noqa: E731
    assert owners() == {"a"}
    with fp8graph.autocast(recipe="delayed"):
        model(batch(1)).sum().backward()
    assert owners() == {"a", "b"}
    kinds: dict[str, Any] = {g.fqn: g.recipe for g in backend.report.graphs[0].gemms}
    assert kinds == {"a": "delayed", "b": "mxfp8"}
