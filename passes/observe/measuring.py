"""Insert the nodes that measure: for :func:`observe` and :func:`score`, which say what is measured.

    tensor_statistics(x, block_size, *, ...) -> [numbers]
    quantization_statistics(x, data, scale_inv, columnwise, *, ...) -> [numbers]
    what_if_statistics(x, dtype, power_2_scale, amax_epsilon, columnwise, *, ...) -> [numbers]
    gemm_error(a, b, reference, dtype_a, dtype_b, power_2_scales, amax_epsilons, scalings, ...) -> [numbers]

These are their ops (``ir/ops.py``); ``numerics/stats.py`` and ``numerics/gemm_error.py`` compute them.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import fx

from fp8graph.hardware import Hardware
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.decisions import Condition
from fp8graph.ir.edit import insert, set_direction
from fp8graph.ir.extra_inputs import ExtraInput, Rename
from fp8graph.ir.nodes import aten, is_backward, known_at_run_time_only, static_size, value
from fp8graph.ir.ops import define
from fp8graph.numerics import stats
from fp8graph.numerics.gemm_error import ERROR_PARTS, gemm_error, quantizers_of
from fp8graph.numerics.quantization import quantizer_args, quantizer_kwargs
from fp8graph.numerics.stats import QUANTIZED_PARTS, TENSOR_PARTS
from fp8graph.recipes import GemmName, Layout, OperandName, Quantizer, Recipe


def _shape_of_parts(names: Sequence[str]) -> Callable[..., Any]:
    def fake(x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return x.new_empty((len(names),), dtype=torch.float32)

    return fake


tensor_statistics = define(
    "tensor_statistics",
    reference=stats.of_tensor,
    fake=_shape_of_parts(TENSOR_PARTS),
    measures=True,
)
quantization_statistics = define(
    "quantization_statistics",
    '(Tensor x, Tensor data, Tensor scale_inv, bool columnwise, *, str scaling="tensor", int[] block=[],'
    " int? rotation=None, Tensor? global_scale_inv=None, Tensor[]? more=None, int dim=-1) -> Tensor",
    reference=stats.of_copy,
    fake=_shape_of_parts(QUANTIZED_PARTS),
    measures=True,
)
what_if_statistics = define(
    "what_if_statistics",
    "(Tensor x, ScalarType dtype, bool power_2_scale, float amax_epsilon, bool columnwise, *,"
    ' str scaling="tensor", int[] block=[], int? rotation=None, bool stochastic=False, str four_over_six="",'
    " float largest_scale=448.0, bool row_scaled=False, Tensor[]? more=None, int dim=-1) -> Tensor",
    reference=stats.of_other_copy,
    fake=_shape_of_parts(QUANTIZED_PARTS),
    measures=True,
)
error_of_gemm = define(
    "gemm_error",
    "(Tensor a, Tensor b, Tensor reference, ScalarType dtype_a, ScalarType dtype_b, bool[] power_2_scales,"
    " float[] amax_epsilons, str[] scalings, int[] block_a, int[] block_b, *, int[] rotations, bool[] stochastic,"
    " str[] four_over_six, float[] largest_scales, bool[] row_scaled) -> Tensor",
    reference=gemm_error,
    fake=_shape_of_parts(ERROR_PARTS),
    lowered=False,
)


Names = tuple[tuple[str, int], ...]  # (fqn, index) of sites


@dataclass(frozen=True, kw_only=True)
class Observed(Condition):
    """The statistics that a graph computes: of the operands and results of GEMMs, and of more.

    Args:
        layers: globs of the sites' names.
        copies: of the copies that the GEMMs read.
        block_size: of the blocks whose dynamic range is measured; 0: it is not.
        what_if: of copies that other recipes would make. None of these recipes has a state.
        candidates: recipes whose error in the result of each GEMM is measured, in place of all the above.
    """

    passes: ClassVar = True
    layers: tuple[str, ...] = ("*",)
    copies: bool = True
    block_size: int = 32
    what_if: tuple[Recipe, ...] = ()
    candidates: tuple[Recipe, ...] = ()

    def says_of(self, fqn: str) -> bool:
        return self.takes(fqn)

    @property
    def for_all(self) -> Hashable:
        return dataclasses.replace(self, layers=())

    def takes(self, fqn: str) -> bool:
        """Return whether the site called ``fqn`` is measured."""
        return any(fnmatch.fnmatchcase(fqn, pattern) for pattern in self.layers)


@dataclass(frozen=True, kw_only=True)
class ObservedTensor:
    """One vector of statistics in a :class:`StatisticsPage`."""

    names: tuple[tuple[str, int], ...]  # (fqn, index) of the sites that it belongs to
    tensor: str  # "input", "weight", "grad_output", or the result: "output", "dgrad", "wgrad"
    layout: str  # of the copy; "" for the tensor itself
    recipe: str  # "" for the tensor itself
    what_if: bool  # no GEMM reads the copy
    group: str = ""  # of an error: equal for sites that read one input
    parts: tuple[str, ...]  # what each number is


@dataclass(frozen=True, kw_only=True)
class StatisticsPage(ExtraInput):
    """A tensor [numbers] that an observed graph takes as an input, and fills: one in forward, one in backward."""

    store: ClassVar = "statistics"
    backward: bool
    device: torch.device
    tensors: tuple[ObservedTensor, ...]

    def stand_ins(self) -> list[torch.Tensor]:
        return [torch.empty(sum(len(tensor.parts) for tensor in self.tensors), device=self.device)]

    def titles(self, name: Callable[[int], str]) -> list[str]:
        return [f"statistics of {'backward' if self.backward else 'forward'}"]

    def renamed(self, rename: Rename) -> Self:
        tensors = (
            dataclasses.replace(tensor, names=tuple(rename(*name) for name in tensor.names)) for tensor in self.tensors
        )
        return dataclasses.replace(self, tensors=tuple(tensors))


class Measuring:
    """The nodes that measure, each behind the last of its inputs, and what each of them measures."""

    def __init__(self, graph: fx.Graph, condition: Observed) -> None:
        self._graph, self.condition = graph, condition
        self._order = {node: position for position, node in enumerate(graph.nodes)}
        self._seen: set[tuple[tuple[str, int], str]] = set()  # sites whose tensor is measured
        self.tensors: dict[fx.Node, ObservedTensor] = {}

    def tensor(self, x: fx.Node, names: Names, tensor: str, *, like: fx.Node, **joined: Any) -> None:
        """Measure a tensor itself, for those of ``names`` for which it is not measured yet."""
        new = tuple(name for name in names if (name, tensor) not in self._seen)
        self._seen.update((name, tensor) for name in new)
        what = ObservedTensor(names=new, tensor=tensor, layout="", recipe="", what_if=False, parts=TENSOR_PARTS)
        self._insert(tensor_statistics, (x, self.condition.block_size), joined, what, like)

    def is_measured(self, name: tuple[str, int], tensor: str) -> bool:
        """Return whether :meth:`tensor` was called for it."""
        return (name, tensor) in self._seen

    def copy(
        self,
        x: fx.Node,
        outputs: Mapping[str, fx.Node],
        names: Names,
        operand: OperandName,
        layout: Layout,
        recipe: str,
        *,
        like: fx.Node,
        **settings: Any,
    ) -> None:
        """Measure the copy of ``x`` that a quantize node makes. ``outputs``: those of them that are read."""
        data, scale_inv = outputs.get(layout), outputs.get("scale_inv") or outputs.get(f"{layout}_scale_inv")
        if not self.condition.copies or data is None or scale_inv is None:
            return
        if (global_scale_inv := outputs.get(f"{layout}_global_scale_inv")) is not None:
            settings["global_scale_inv"] = global_scale_inv
        args = (x, data, scale_inv, layout == "columnwise")
        self._insert(quantization_statistics, args, settings, _copy(names, operand, layout, recipe), like)

    def what_if(
        self,
        x: fx.Node,
        names: Names,
        operand: OperandName,
        layout: Layout,
        recipe: str,
        device: Hardware,
        *,
        like: fx.Node,
        **joined: Any,
    ) -> None:
        """Measure the copies of ``x`` that other recipes than ``recipe`` would make on ``device``."""
        for other in self.condition.what_if:
            if other.name != recipe:
                quantizer = device.quantizer(other, operand)
                args = (x, *quantizer_args(quantizer), layout == "columnwise")
                what = _copy(names, operand, layout, other.name, what_if=True)
                self._insert(what_if_statistics, args, {**quantizer_kwargs(quantizer), **joined}, what, like)

    def error(
        self,
        nodes: tuple[fx.Node, fx.Node, fx.Node],
        name: tuple[str, int],
        gemm: GemmName,
        candidate: int,
        quantizers: Sequence[Quantizer],
        group: str,
        *,
        like: fx.Node,
    ) -> None:
        """Measure how quantizing changes a GEMM's result. ``nodes``: a, b and the reference of ``gemm_error``."""
        args, further = quantizers_of(gemm, quantizers)
        what = ObservedTensor(
            names=(name,),
            tensor=gemm,
            layout="",
            recipe=str(candidate),  # two recipes may have one name
            what_if=True,
            group=group,
            parts=ERROR_PARTS,
        )
        self._insert(error_of_gemm, (*nodes, *args), further, what, like)

    def write(self, compilation: Compilation) -> None:
        """Write what was measured into inputs of the graph: one for forward, one for backward.

        With too few spare inputs the graph is not changed; it is traced again with enough of them.
        """
        pages = [page for backward in (False, True) if (page := self.page(backward=backward)) is not None]
        inputs = compilation.take(self._graph, [page for page, _ in pages])
        if inputs is None:
            return
        (output,) = self._graph.find_nodes(op="output")
        for placeholder, (page, vectors) in zip(inputs, pages, strict=True):
            tag = vectors[0].meta.get("partitioner_tag")
            with self._graph.inserting_before(output):
                first = functools.partial(insert, self._graph, like=vectors[0])
                whole = first(aten.cat.default, (vectors,), name="statistics")
                copy = first(aten.copy_.default, (placeholder, whole))
            set_direction(whole, tag)
            set_direction(copy, tag and ("must_be_in_backward" if page.backward else "must_be_in_forward"))

    def transposed(self, node: fx.Node) -> fx.Node:
        """``node`` [..., r, c] as [..., c, r]."""
        *batch, rows, columns = range(value(node).ndim)
        with self._graph.inserting_after(self._anchor(node)):
            args = node, [*batch, columns, rows]
            turned = insert(self._graph, aten.permute.default, args, like=node)
        set_direction(turned, "is_backward" if is_backward(node) else node.meta.get("partitioner_tag"))
        self._order[turned] = self._order[node]
        return turned

    def page(self, *, backward: bool) -> tuple[StatisticsPage, list[fx.Node]] | None:
        """Return the tensors that are measured in one direction, and the nodes that do."""
        tensors = {node: tensor for node, tensor in self.tensors.items() if is_backward(node) == backward}
        if not tensors:
            return None
        device = value(next(iter(tensors))).device
        return StatisticsPage(backward=backward, device=device, tensors=tuple(tensors.values())), [*tensors]

    def _insert(
        self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], what: ObservedTensor, like: fx.Node
    ) -> None:
        x, first = value(args[0]), next(iter(self.tensors), None)
        elsewhere = first is not None and value(first).device != x.device
        empty = any(static_size(size) == 0 or known_at_run_time_only(size) for size in x.shape)  # or may be
        described = x.ndim >= 2 and x.is_floating_point() and not empty
        if not what.names or elsewhere or not described:
            return
        inputs = [i for i in (*args, *kwargs.get("more", ()), *kwargs.values()) if isinstance(i, fx.Node)]
        last = max(inputs, key=lambda node: self._order[node])
        with self._graph.inserting_after(self._anchor(last)):
            node = insert(self._graph, target, args, like=like, kwargs=dict(kwargs))
        backward = any(map(is_backward, (like, *inputs)))
        set_direction(node, "is_backward" if backward else like.meta.get("partitioner_tag"))
        self.tensors[node] = what

    def _anchor(self, node: fx.Node) -> fx.Node:
        """Return the node behind which a reader of ``node`` may stand: no node may stand between placeholders."""
        return self._graph.find_nodes(op="placeholder")[-1] if node.op == "placeholder" else node


def _copy(names: Names, operand: str, layout: str, recipe: str, *, what_if: bool = False) -> ObservedTensor:
    return ObservedTensor(
        names=names, tensor=operand, layout=layout, recipe=recipe, what_if=what_if, parts=QUANTIZED_PARTS
    )
