"""The FP8 copies of a weight that graphs take, made of what FSDP2 has gathered: see ``sent_weights.py``.

Each rank quantizes its rows before they are gathered (:func:`quantizes_rows`). The whole parameter, which is not there
in high precision, has NaN in its place (:class:`Memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any, Final

import torch
from torch import Tensor, fx

from fp8graph.compat import autograd, fsdp
from fp8graph.ir import ops
from fp8graph.ir.nodes import aten, nodes
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.weight_graphs import WeightGraph
from fp8graph.numerics.scalings import SCALINGS, QuantizeArguments

_CONVERT: Final = torch.ops.prims.convert_element_type.default


class GatheredCopies:
    """The copies of one weight. The tensors stay the same; FSDP2 frees their memory with the whole parameters.

    fprop reads what was gathered; dgrad reads its transpose, which is made where backward runs, or may run before the
    next gather.

    Args:
        weight: as a graph takes it.
        sizes: the rows of each of the parameters that it is joined of.
        device: of the copies.
    """

    def __init__(self, weight: WeightGraph, sizes: Sequence[int], device: torch.device) -> None:
        (node,) = nodes(weight.quantizing, (ops.quantize,))
        self._kind: Final = QuantizeNode(node).kind
        self._asked: Final = QuantizeNode(node).asked
        self._weight, self._sizes, self._device = weight, sizes, device
        self.tensors: Final[dict[str, Tensor]] = {}  # by output name

    @torch.no_grad()
    def receive(self, part: int, outs: Sequence[Tensor], scales: Tensor | None, *, backward: bool) -> None:
        """Take what was gathered of one part.

        Args:
            outs: bytes [rows, columns], and the scales of tiles if the weight has them.
            scales: else [1, 2], scale and scale_inv.
            backward: make dgrad's copy, too.
        """
        data, alone = outs[0].view(self._asked.dtype), len(self._sizes) == 1
        if alone:
            self.tensors.setdefault("rowwise", data)  # FSDP2 gathers into the same memory each time
        self._allocate(backward)
        start = sum(self._sizes[:part])
        rows = slice(start, start + data.shape[0])
        writes = [] if alone else [(self.tensors["rowwise"][rows], data)]
        if self._kind.one_scale:
            assert scales is not None
            writes.append((self.tensors["scale_inv"], scales[0, 1].reshape(self.tensors["scale_inv"].shape)))
        else:
            first = start // self._asked.block[0]
            writes.append((self.tensors["rowwise_scale_inv"][first : first + outs[1].shape[0]], outs[1]))
        self._write(writes)
        if not alone:
            fsdp.free(data)  # it is in the joined copy now
        self._transpose(rows, backward)

    @torch.no_grad()
    def widen(self, weight: WeightGraph, *, backward: bool) -> None:
        """Make the copies that ``weight`` has in addition, now and after each gather."""
        self._weight = weight
        self._allocate(backward)
        self._transpose(slice(None), backward)

    def kept(self, *, backward: bool) -> list[Tensor]:
        """The copies that need memory until FSDP2 frees it; the others' is freed now."""
        found = {name: self.tensors[name] for name in ("rowwise", "columnwise") if name in self.tensors}
        if not backward and "columnwise" in found:
            fsdp.free(found.pop("columnwise"))
        return list(found.values())

    def _allocate(self, backward: bool) -> None:
        for name, like in self._weight.made_outputs().items():
            if name not in self.tensors:
                self.tensors[name] = torch.empty(like.shape, dtype=like.dtype, device=self._device)
            if name != "columnwise" or backward:
                fsdp.allocate(self.tensors[name])

    def _transpose(self, rows: slice, backward: bool) -> None:
        """Make dgrad's copy of some rows, if ``backward``, and its scales of tiles."""
        writes: list[tuple[Tensor, Tensor]] = []
        if "columnwise" in self.tensors and backward:
            writes.append((self.tensors["columnwise"][:, rows], self.tensors["rowwise"][rows].t()))
        if "columnwise_scale_inv" in self.tensors:
            writes.append((self.tensors["columnwise_scale_inv"], self.tensors["rowwise_scale_inv"].t()))
        self._write(writes)

    def _write(self, writes: Sequence[tuple[Tensor, Tensor]]) -> None:
        with autograd.unnoticed_writes([*self.tensors.values()]):  # backward reads what was gathered again
            for target, source in writes:
                _bytes(target).copy_(_bytes(source))


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.itemsize == 1 else x


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
