"""``StoredLinear``: a linear layer whose weight is in FP8 or FP4, from any checkpoint, without a library."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8graph.libraries.linear import StoredWeight, multiplied


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

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (its name in nn.Linear)
        stored = StoredWeight(
            data=self.weight,
            scale_inv=self.weight_scale_inv,
            scaling=self.scaling,
            block=self.block,
            global_scale_inv=self.weight_global_scale_inv,
            activations=self.activations,
            input_scale_inv=self.input_scale_inv,
        )
        return multiplied(input, stored, self.bias)

    def extra_repr(self) -> str:
        tiles = f" {self.block[0]}x{self.block[1]}" if self.block else ""
        bias = "" if self.bias is None else ", bias=True"
        return f"{self.in_features}, {self.out_features}, {self.scaling}{tiles}, activations={self.activations}{bias}"
