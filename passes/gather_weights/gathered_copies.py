"""The FP8 copies of a weight that graphs take, made from the gathered bytes: see ``sent_weights.py``.

Each rank quantizes its rows before they are gathered (:func:`quantizes_rows`). The whole parameter, which is not there
in high precision, has NaN in its place (:class:`Memory`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import getitem
from typing import Any, Final

import torch
from torch import Tensor, fx

from fp8graph.compat import autograd, fsdp
from fp8graph.ir import ops
from fp8graph.ir.nodes import CONVERT, aten, nodes
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.weight_graphs import WeightGraph
from fp8graph.numerics.formats import SCALE_INV
from fp8graph.numerics.scalings import SCALINGS, QuantizeArguments, Scaling
from fp8graph.recipes import LAYOUTS


class GatheredCopies:
    """The copies of one weight. The tensors stay the same; FSDP2 frees their memory with the whole parameters.

    fprop reads what was gathered; dgrad reads its transpose, which is made where backward runs, or may run before the
    next gather. If the two hold different numbers, each gather brings one of them.

    Args:
        weight: as a graph takes it.
        sizes: the rows of each of the parameters that it is joined of.
        device: of the copies.
    """

    def __init__(self, weight: WeightGraph, sizes: Sequence[int], device: torch.device) -> None:
        (node,) = nodes(weight.quantizing, (ops.quantize,))
        self._kind: Final = QuantizeNode(node).kind
        self._arguments: Final = QuantizeNode(node).arguments
        self._differ = QuantizeNode(node).columnwise_differs
        self._weight, self._sizes, self._device = weight, sizes, device
        self.tensors: Final[dict[str, Tensor]] = {}  # by output name

    @torch.no_grad()
    def receive(
        self, part: int, outs: Sequence[Tensor], scales: Tensor | None, *, backward: bool, fetched: bool = False
    ) -> None:
        """Take what was gathered of one part: fprop's rows.

        Args:
            outs: bytes [rows, columns], and the scales of rows or tiles if the weight has them.
            scales: else a table of one row.
            backward: make dgrad's copy, too.
            fetched: not by FSDP2, into memory of their own.
        """
        data, alone = outs[0].view(self._arguments.dtype), len(self._sizes) == 1 and not fetched
        if alone:
            self.tensors.setdefault("rowwise", data)  # FSDP2 gathers into the same memory each time
        self._allocate({"rowwise", "columnwise"} if backward and not self._differ else {"rowwise"})
        start = sum(self._sizes[:part])
        rows = slice(start, start + data.shape[0])
        writes = [] if alone else [(self.tensors["rowwise"][rows], data)]
        if self._kind.one_scale:
            assert scales is not None
            writes.append((self.tensors["scale_inv"], scales[0, SCALE_INV].reshape(self.tensors["scale_inv"].shape)))
        else:
            first = start // (self._arguments.block[0] if self._kind.tiled else 1)
            writes.append((self.tensors["rowwise_scale_inv"][first : first + outs[1].shape[0]], outs[1]))
        self._write(writes)
        if not alone:
            fsdp.free(data)  # it is in the joined copy now
        self._transpose(rows, backward)

    @torch.no_grad()
    def receive_columns(self, part: int, outs: Sequence[Tensor], scales: Tensor | None) -> None:
        """Take what was gathered of one part: dgrad's numbers, if they are not those of fprop.

        Args:
            outs: bytes [rows, columns], quantized along the rows, and the scales of tiles [tiles of rows, columns].
            scales: [1, 2, columns, 1], where a scale is that of all rows of a column.
        """
        data, start = outs[0].view(self._arguments.dtype), sum(self._sizes[:part])
        if len(self._sizes) == 1:
            self.tensors.setdefault("rowwise", data)  # FSDP2 gathers both into the same memory
        self._allocate({"columnwise"})
        target = self.tensors["columnwise_scale_inv"]
        writes = [(self.tensors["columnwise"][:, start : start + data.shape[0]], data.t())]
        if self._kind.tiled:
            first = start // self._arguments.block[1]
            writes.append((target[:, first : first + outs[1].shape[0]], outs[1].t()))
        else:
            assert scales is not None
            writes.append((target, scales[0, SCALE_INV]))
        self._write(writes)
        fsdp.free(data)

    @torch.no_grad()
    def widen(self, weight: WeightGraph, *, backward: bool) -> None:
        """Make the copies that ``weight`` has in addition, now and after each gather."""
        (node,) = nodes(weight.quantizing, (ops.quantize,))
        self._weight, self._differ = weight, QuantizeNode(node).columnwise_differs
        backward = backward and not self._differ
        self._allocate({"columnwise"} if backward else {*()})
        self._transpose(slice(None), backward)

    def kept(self, layouts: Collection[str]) -> list[Tensor]:
        """Return the copies of ``layouts``, which need memory until FSDP2 frees it; the others' is freed now."""
        copies = {name: self.tensors[name] for name in LAYOUTS if name in self.tensors}
        for name in copies.keys() - {*layouts}:
            fsdp.free(copies.pop(name))
        return list(copies.values())

    def _allocate(self, layouts: Collection[str]) -> None:
        """Give memory to the copies of ``layouts``, and to all scales."""
        for name, like in self._weight.made_outputs().items():
            if name not in self.tensors:
                self.tensors[name] = torch.empty(like.shape, dtype=like.dtype, device=self._device)
            if name in layouts or name not in LAYOUTS:
                fsdp.allocate(self.tensors[name])

    def _transpose(self, rows: slice, backward: bool) -> None:
        """Make dgrad's copy of some rows, if ``backward``, and its scales of tiles."""
        writes: list[tuple[Tensor, Tensor]] = []
        if "columnwise" in self.tensors and backward and not self._differ:
            writes.append((self.tensors["columnwise"][:, rows], self.tensors["rowwise"][rows].t()))
        if "columnwise_scale_inv" in self.tensors and not self._differ:
            writes.append((self.tensors["columnwise_scale_inv"], self.tensors["rowwise_scale_inv"].t()))
        self._write(writes)

    def _write(self, writes: Sequence[tuple[Tensor, Tensor]]) -> None:
        with autograd.unnoticed_writes([*self.tensors.values()]):  # backward reads what was gathered again
            for target, source in writes:
                _bytes(target).copy_(_bytes(source))


def scales_are_given(kind: Scaling, layout: str) -> bool:
    """Return whether a layout of some rows has scales that are those of other rows, too."""
    return kind.one_scale or (layout == "columnwise" and not kind.tiled)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.itemsize == 1 else x


class Memory:
    """NaNs, one tensor for each dtype and device, which all parameters share that are not there in high precision."""

    def __init__(self) -> None:
        self._nans: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def nan(self, size: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        nans = self._nans.get((dtype, device))
        if nans is None or nans.numel() < size.numel():
            nans = self._nans[dtype, device] = torch.full((size.numel(),), torch.nan, dtype=dtype, device=device)
        return fsdp.view_of(nans, size)


def quantizes_rows(
    arguments: QuantizeArguments[Any], dtypes: Sequence[torch.dtype], wanted: Sequence[str]
) -> fx.GraphModule:
    """Return a function that quantizes some rows of a weight by ``arguments``, which are those of all of it.

    It takes the rows, which are cast to ``dtypes`` one after the other; the scales that are those of other rows,
    too, if the weight has such: [1, 2], or [1, 2, columns, 1] of columns; and for each of the outputs ``wanted``, by
    name, the tensor that it is written to. Those of columns are written as rows: [rows, columns].
    """
    graph, kind = fx.Graph(), SCALINGS[arguments.scaling]
    x = graph.placeholder("rows")
    scaled = [layout for layout in LAYOUTS if layout in wanted and scales_are_given(kind, layout)]
    scales = graph.placeholder("scales") if scaled else None
    buffers = [graph.placeholder(name) for name in wanted]
    for dtype in dtypes:
        x = graph.call_function(CONVERT, (x, dtype))
    outputs: dict[str, fx.Node] = {}
    for layout, multiples in (("rowwise", ([1, 1], [])), ("columnwise", ([], [1, 1]))):
        if layout in wanted:
            args = (x, arguments.dtype, arguments.power_2_scale, arguments.amax_epsilon, *multiples)
            kwargs: dict[str, Any] = {"scaling": arguments.scaling, "block": list(arguments.block)}
            kwargs["scales"] = scales if layout in scaled else None
            made = graph.call_function(ops.quantize, args, kwargs)
            names = QuantizeNode(made).names
            outputs |= {name: graph.call_function(getitem, (made, place)) for place, name in enumerate(names)}
    for name, buffer in zip(wanted, buffers, strict=True):
        result = outputs[name]
        if name == "amax":
            result = graph.call_function(aten.amax.default, (result,))
        if name.startswith("columnwise"):
            result = graph.call_function(aten.permute.default, (result, [1, 0]))
        graph.call_function(aten.copy_.default, (buffer, result))
    graph.output(())
    return fx.GraphModule(torch.nn.Module(), graph)
