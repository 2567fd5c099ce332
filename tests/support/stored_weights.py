"""Linears whose weight arrives quantized, in every form that a GEMM may take as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8graph.numerics import api
from fp8graph.recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

_RECIPES: dict[str, Any] = {
    "tensor": Float8CurrentScaling(),
    "row": Float8RowwiseScaling(power_2_scale=False, amax_epsilon=0.0),
    "block": Float8BlockScaling(power_2_scale=False),
    "block_e8m0": Float8BlockScaling(scale_format="ue8m0"),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_2d_quantization=True),
}
KINDS = tuple(_RECIPES)


class Stored(nn.Module):
    """``F.linear`` with a weight that arrives quantized.

    Args:
        quantized: the weight [N, K], as ``numerics.api.quantize`` returns it.
        buffers: scales are buffers, not parameters.
        settings: of ``stored_weight``; a float ``input_scale_inv`` is kept as a parameter.
    """

    def __init__(self, quantized: api.QuantizedTensor, *, buffers: bool = False, **settings: Any) -> None:
        super().__init__()
        tensors = {"scale_inv": quantized.scale_inv.reshape(quantized.scale_inv.shape or (1,))}
        if quantized.global_scale_inv is not None:
            tensors["global_scale_inv"] = quantized.global_scale_inv
        if "input_scale_inv" in settings:
            tensors["input_scale_inv"] = torch.tensor(settings.pop("input_scale_inv"))
            settings["activations"] = "static"
        self.weight = nn.Parameter(quantized.data, requires_grad=False)
        for name, x in tensors.items():
            if buffers:
                self.register_buffer(name, x)
            else:
                self.register_parameter(name, nn.Parameter(x, requires_grad=False))
        self.names, quantizer = list(tensors), quantized.quantizer
        self.settings = {"scaling": quantizer.scaling, "block": [*quantizer.block] if any(quantizer.block) else []}
        self.settings |= settings

    def high_precision(self, dtype: torch.dtype) -> Tensor:
        scale_inv, *more = (getattr(self, name) for name in self.names)
        kwargs = {**self.settings, **dict(zip(self.names[1:], more, strict=True))}
        return torch.ops.fp8graph.stored_weight(self.weight, scale_inv, dtype, **kwargs)

    def dequantized(self) -> Tensor:
        """The weight [N, K] in float64."""
        return self.high_precision(torch.float32).double()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.high_precision(x.dtype))


def stored(kind: str, n: int, k: int, *, buffers: bool = False, **settings: Any) -> Stored:
    """A linear [N, K] stored in one of ``KINDS``, with random numbers."""
    weight = torch.randn((n, k), generator=torch.Generator().manual_seed(n + k)) / 16
    return Stored(api.quantize(weight, _RECIPES[kind], "weight", "rowwise"), buffers=buffers, **settings)
