"""Linear layers whose weight is in FP8 or FP4: those of libraries, as ops of the dialect, and our own.

``StoredLinear`` takes weights from any checkpoint, without a library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(kw_only=True)
class StoredWeight:
    """The tensors of one weight, as the dialect's ``stored_weight`` takes them."""

    data: Tensor  # [N, K], or bytes [N, K/2] of two E2M1 numbers; of experts [experts, N, K]
    scale_inv: Tensor  # it multiplies
    scaling: str
    block: Sequence[int] = ()
    global_scale_inv: Tensor | None = None
    activations: str = "dynamic"
    input_scale_inv: Tensor | None = None


def one_scale(data: Tensor, scale_inv: Tensor, *, per_token: bool, **inputs: Any) -> StoredWeight:
    """A weight with one scale. ``per_token``: its input has one per token, so the weight's stands for each row's."""
    scale_inv = scale_inv.detach().to(torch.float32).reshape(())
    if per_token:
        return StoredWeight(data=data, scale_inv=scale_inv.expand(data.shape[0], 1).clone(), scaling="row", **inputs)
    return StoredWeight(data=data, scale_inv=scale_inv, scaling="tensor", **inputs)


def multiplied(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """``F.linear`` with a frozen weight: no tensor of ``weight`` gets a gradient, even if it requires one."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return functional.linear(x, high_precision(weight, dtype), bias)


def high_precision(weight: StoredWeight, dtype: torch.dtype) -> Tensor:
    """The dialect's ``stored_weight``."""
    return torch.ops.fp8graph.stored_weight(
        weight.data.detach(),
        weight.scale_inv.detach(),
        dtype,
        scaling=weight.scaling,
        block=[*weight.block],
        global_scale_inv=None if weight.global_scale_inv is None else weight.global_scale_inv.detach(),
        activations=weight.activations,
        input_scale_inv=None if weight.input_scale_inv is None else weight.input_scale_inv.detach(),
    )


@functools.cache  # Dynamo guards a forward by its identity: layers that share it share compiled code
def forward_of(read: Callable[[Any], StoredWeight], in_eager: bool) -> Callable[[Any, Tensor], Tensor]:
    """The ``forward`` of layers that ``read`` reads.

    Args:
        in_eager: it runs in eager, too; else the library's does.
    """

    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002  (its name in nn.Linear)
        if in_eager or torch.compiler.is_compiling():
            return multiplied(input, read(self), self.bias)
        return type(self).forward(self, input)

    return forward


class StoredLinear(nn.Linear):  # PEFT adapts what is an nn.Linear
    """``nn.Linear`` with a frozen weight that is kept as it is stored.

    Compiled with fp8graph, its bytes and scales are multiplied as they are, forward and backward. In eager, and by
    other compilers, the weight is dequantized for each call. The parameter is ``weight``: FP8 [N, K], or bytes
    [N, K / 2] of two E2M1 numbers. The buffers are ``weight_scale_inv`` and, where the format has them,
    ``weight_global_scale_inv`` and ``input_scale_inv``; all multiply.
    """

    weight_scale_inv: Tensor
    weight_global_scale_inv: Tensor | None
    input_scale_inv: Tensor | None

    def __init__(self, stored: StoredWeight, bias: nn.Parameter | None = None) -> None:
        nn.Module.__init__(self)  # nn.Linear's would make a weight in high precision
        self.out_features, packed = stored.data.shape
        self.in_features = packed * (2 if stored.data.dtype == torch.uint8 else 1)
        self.scaling, self.block, self.activations = stored.scaling, [*stored.block], stored.activations
        self.weight = nn.Parameter(stored.data, requires_grad=False)
        self.register_parameter("bias", bias)
        self.register_buffer("weight_scale_inv", stored.scale_inv)
        self.register_buffer("weight_global_scale_inv", stored.global_scale_inv)
        self.register_buffer("input_scale_inv", stored.input_scale_inv)

    def stored(self) -> StoredWeight:
        """Its tensors, as they are."""
        return StoredWeight(
            data=self.weight,
            scale_inv=self.weight_scale_inv,
            scaling=self.scaling,
            block=self.block,
            global_scale_inv=self.weight_global_scale_inv,
            activations=self.activations,
            input_scale_inv=self.input_scale_inv,
        )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (its name in nn.Linear)
        return multiplied(input, self.stored(), self.bias)

    def extra_repr(self) -> str:
        tiles = f" {self.block[0]}x{self.block[1]}" if self.block else ""
        bias = "" if self.bias is None else ", bias=True"
        return f"{self.in_features}, {self.out_features}, {self.scaling}{tiles}, activations={self.activations}{bias}"
