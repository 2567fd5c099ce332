"""Delayed scaling once more, written another way: Python floats, one tensor at a time, eager autograd.

What it shares with the product is the GEMM of FP8 numbers; codes, scales and histories come from ``oracle``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import oracle
from fp8graph import DelayedScaling, hardware

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class History:
    """The scale and the amax history of one tensor, oldest first, and the amax of the step that runs."""

    def __init__(self, dtype: torch.dtype, recipe: DelayedScaling) -> None:
        self.dtype, self.recipe = dtype, recipe
        self.scale = 1.0
        self.past: list[float] = [0.0] * (recipe.amax_history_len - 1)
        self.now = 0.0

    def quantize(self, x: Tensor) -> Tensor:
        values = x.detach().float().numpy()
        self.now = float(np.abs(values).max())
        codes = oracle.cast((values * np.float32(self.scale)).astype(np.float64), self.dtype)
        return torch.from_numpy(np.where(codes == 255, 127, codes)).view(self.dtype)

    @property
    def scale_inv(self) -> Tensor:
        return torch.tensor(oracle.round_to_float32(1.0 / self.scale))

    def end_of_step(self) -> None:
        if not 0 < self.now < math.inf:  # also nan
            return
        largest = self.now if self.recipe.amax_compute_algo == "most_recent" else max([*self.past, self.now])
        top = oracle.fp8_max(self.dtype) * 2.0**-self.recipe.margin
        self.scale = min(oracle.round_to_float32(top / largest), oracle.FLT_MAX)
        if self.past:
            self.past = [*self.past[1:], self.now]
        self.now = 0.0

    def slots(self) -> list[float]:
        """The history as Transformer Engine stores it: the staging slot, then the oldest to the newest."""
        return [0.0, *self.past]


class Layer(nn.Module):
    """A linear with delayed scaling."""

    def __init__(self, linear: nn.Linear, recipe: DelayedScaling) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        gradient = E5M2 if recipe.fp8_format.name == "HYBRID" else E4M3
        self.input, self.w, self.grad_output = (History(dtype, recipe) for dtype in (E4M3, E4M3, gradient))

    def forward(self, x: Tensor) -> Tensor:
        return _Linear.apply(x, self.weight, self.bias, self)

    def histories(self) -> dict[str, History]:
        return {"input": self.input, "weight": self.w, "grad_output": self.grad_output}


def _multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return hardware.scaled_mm(a.contiguous(), b.contiguous(), scale_a, scale_b, None, torch.float32, False)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
        qx, qw = layer.input.quantize(x), layer.w.quantize(weight)
        ctx.saved, ctx.layer = (qx, qw, layer.input.scale_inv, layer.w.scale_inv), layer
        y = _multiply(qx, qw, layer.input.scale_inv, layer.w.scale_inv)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        qx, qw, x_inv, w_inv = ctx.saved
        history = ctx.layer.grad_output
        qdy = history.quantize(dy)
        dx = _multiply(qdy, qw.t(), history.scale_inv, w_inv)
        dw = _multiply(qdy.t(), qx.t(), history.scale_inv, x_inv)
        return dx, dw, dy.sum(0) if ctx.needs_input_grad[2] else None, None


def end_of_forward(layers: Iterable[Layer]) -> None:
    for layer in layers:
        layer.input.end_of_step()
        layer.w.end_of_step()


def end_of_backward(layers: Iterable[Layer]) -> None:
    for layer in layers:
        layer.grad_output.end_of_step()
