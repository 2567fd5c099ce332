"""What weights that FSDP2 gathers in FP8 are quantized by, and what stands in their place."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any, Final

import torch
from torch import Tensor, fx

from fp8graph.compat import fsdp
from fp8graph.ir import ops
from fp8graph.ir.nodes import aten
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.numerics.arguments import QuantizeArguments
from fp8graph.numerics.scalings import SCALINGS

_CONVERT: Final = torch.ops.prims.convert_element_type.default


class Memory:
    """NaNs, one tensor for each dtype and device, which all parameters share that are not there in high precision."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def nan(self, size: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        known = self._known.get((dtype, device))
        if known is None or known.numel() < size.numel():
            known = self._known[dtype, device] = torch.full((size.numel(),), torch.nan, dtype=dtype, device=device)
        return fsdp.view_of(known, size)


def quantizes_rows(
    asked: QuantizeArguments[Any], dtypes: Sequence[torch.dtype], wanted: Sequence[str]
) -> fx.GraphModule:
    """A function that quantizes some rows of a weight as ``asked`` for all of it, rowwise.

    Its arguments: the rows, which are cast to ``dtypes`` one after the other; if the weight has one scale, that and its
    inverse, [1, 2]; and for each of the outputs ``wanted``, by name, the tensor that it is written to.
    """
    graph = fx.Graph()
    x = graph.placeholder("rows")
    scales = graph.placeholder("scales") if SCALINGS[asked.scaling].one_scale else None
    buffers = [graph.placeholder(name) for name in wanted]
    for dtype in dtypes:
        x = graph.call_function(_CONVERT, (x, dtype))
    args = (x, asked.dtype, asked.power_2_scale, asked.amax_epsilon, [1, 1], [])
    kwargs: dict[str, Any] = {"scaling": asked.scaling, "block": list(asked.block), "scales": scales}
    made = graph.call_function(ops.quantize, args, kwargs)
    names = QuantizeNode(made).names
    for name, buffer in zip(wanted, buffers, strict=True):
        result = graph.call_function(getitem, (made, names.index(name)))
        if name == "amax":
            result = graph.call_function(aten.amax.default, (result,))
        graph.call_function(aten.copy_.default, (buffer, result))
    graph.output(())
    return fx.GraphModule(torch.nn.Module(), graph)
