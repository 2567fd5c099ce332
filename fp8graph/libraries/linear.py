"""A linear layer of a library whose weight is quantized, multiplied in the words of the dialect."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
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
    """``F.linear`` with a frozen weight: nothing of ``weight`` gets a gradient, whatever it asks for."""
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
