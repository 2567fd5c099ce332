"""The request for a quantization, and the base of all kinds of scaling, which answer it.

A kind says which elements share a scale, and all that follows from it.

``SCALINGS`` in ``__init__.py`` is the only list of the kinds. Code outside this folder and
``recipes`` never compares a kind's name: it asks for the property that it needs, or lets the kind do the work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from fp8graph.numerics.formats import SCALE, SCALE_INV, inverse, scale_from_amax
from fp8graph.numerics.hints import materialize
from fp8graph.numerics.tiles import in_rows, ordered_shape
from fp8graph.recipes import FLT_MAX, FP8_MAX, LAYOUTS, Layout

if TYPE_CHECKING:
    from fp8graph.numerics.experts import Span

T = TypeVar("T")  # a tensor, or the node that computes one


@dataclass(frozen=True)
class QuantizeArguments(Generic[T]):
    """A request for a quantization.

    Args:
        x: [..., rows, columns], any strides, bf16, fp16 or fp32. rowwise keeps the shape; columnwise is the
            transposed copy [..., columns, rows]. Both results are contiguous.
        dtype, power_2_scale, amax_epsilon, scaling, block: see :class:`fp8graph.recipes.Quantizer`. Each layout has
            scales of its own unless the tensor has one: "row" FP32 [..., rows, 1]; kinds with tiles
            [..., ceil(rows / block[0]), ceil(columns / block[1])] in ``Scaling.scale_dtype``. nvfp4's data are bytes
            [..., rows, columns / 2] with the columns padded to a multiple of 16.
        rowwise_order, columnwise_order: the order of the scales of tiles (``tiles.ordered``; ``group_blocks`` for
            ``offs`` and ``per_matrix``); "": that above.
        rowwise, columnwise: empty for "not needed", else two multiples to which the sizes of the *result* are
            padded with zeros (GEMMs need 16).
        scales, row: for "delayed": [tensors, 2 or more], a table of scales, and the row of this tensor; None is 1. Its
            ``scale_inv`` has shape [1], and one amax per row is returned. For other kinds with ``takes_scale``,
            ``scales`` replace those from amaxes: of all rows or tiles, or nvfp4's scale of the whole tensor.
        keep_scales: for "tensor": return ``scales`` as well, so that it can be quantized again without an amax; for
            square tiles: ``tile_scales``.
        tile_scales: of square tiles, [row tiles, column tiles]: what the same tensor was quantized with before. They
            replace those from amaxes.
        more, dim: the tensor is ``x`` and these, joined along rows (-2) or columns (-1); the sizes of each are
            multiples of the tiles and of the multiples for padding.
            offs, per_matrix: for an operand of a grouped matmul: the rows of ``x`` [t, c] fall into groups that end at
            ``offs`` [experts], int32; or ``x`` is [experts, rows, columns]. Scales of tensors are then one per expert:
            ``scale_inv`` [experts]; columnwise scales of rows in groups are [experts, c], columnwise data of groups
            [c, padded t], each group padded to ``columnwise[1]``.
        columnwise_from_rowwise, rotation, stochastic, four_over_six, largest_scale, row_scaled: see
            :class:`fp8graph.recipes.Quantizer`.
        matrix: of the transform, [16, 16] in x's dtype; None: it is made from ``rotation``.
        seed, draw: for stochastic rounding, int64 [1] and the number of this tensor among those that share the seed;
            None: a seed of 0.
    """

    x: T
    dtype: torch.dtype
    power_2_scale: bool
    amax_epsilon: float
    rowwise: Sequence[int]
    columnwise: Sequence[int]
    _: KW_ONLY
    scaling: str = "tensor"
    block: Sequence[int] = ()
    scales: T | None = None
    row: int = 0
    keep_scales: bool = False
    tile_scales: T | None = None
    more: Sequence[T] | None = None
    dim: int = -1
    offs: T | None = None
    per_matrix: bool = False
    columnwise_from_rowwise: bool = False
    rotation: int | None = None
    stochastic: bool = False
    four_over_six: str = ""
    largest_scale: float = 448.0
    row_scaled: bool = False
    matrix: T | None = None
    seed: T | None = None
    draw: int = 0
    rowwise_order: str = ""
    columnwise_order: str = ""

    @property
    def parts(self) -> list[T]:
        """The tensors that are joined and quantized as one."""
        return [self.x, *(self.more or ())]

    @property
    def has_square_tiles(self) -> bool:
        """Whether both layouts have the same tiles, with the same scales. Tiles of zeros may pad the columns."""
        rows, columns = self.block or (0, 1)
        return rows == columns and all(
            rows % high == 0 and (columns % wide == 0 or wide % columns == 0) for high, wide in self.layouts.values()
        )

    @property
    def layouts(self) -> dict[Layout, Sequence[int]]:
        """The requested layouts, with the multiples to which their sizes are padded."""
        both = dict(zip(LAYOUTS, (self.rowwise, self.columnwise), strict=True))
        return {layout: multiples for layout, multiples in both.items() if multiples}

    def order_of(self, layout: Layout) -> str:
        """Return the order of the scales of a layout; "": [row tiles, column tiles]."""
        return self.rowwise_order if layout == "rowwise" else self.columnwise_order


Arguments: TypeAlias = QuantizeArguments[Tensor]


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The scales with which both layouts of one tensor are quantized, all in FP32."""

    scale: Tensor | None = None  # [], [groups], or a shape that broadcasts with the tensor
    scale_inv: Tensor | None = None
    amax: Tensor | None = None
    global_scale: Tensor | None = None  # [], [groups], or [..., rows, 1]
    of_tiles: Sequence[Tensor] | None = None  # ``tile_scales`` of each part, [row tiles, column tiles]


@dataclass(frozen=True, kw_only=True)
class LayoutRequest:
    """A request for one layout of a tensor, [..., rows, elements along the contraction dim].

    ``parts`` are joined along ``axis``; the sizes of the data are padded to ``multiples``. ``order``: of its scales.
    """

    parts: Sequence[Tensor]
    axis: int
    multiples: Sequence[int]
    arguments: Arguments
    shared: Shared
    order: str = ""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The groups of the rows [t, c] of a layout: row i is in group ``of_rows[i]`` of ``count``.

    ``transposed``: the layout is that of the columns of rows [padded t, c], whose groups are multiples of
    ``multiples[1]`` rows.
    """

    of_rows: Tensor
    count: int
    transposed: bool


class Scaling(ABC):
    """A kind of scaling."""

    name: ClassVar[str]  # in ``Quantizer.scaling`` and in the dialect
    gemm: ClassVar[str]  # the kind whose GEMM multiplies it; hardware knows these
    gemm_title: ClassVar[str]  # that GEMM, in the words of reports
    scale_dtype: ClassVar[torch.dtype] = torch.float32
    packed: ClassVar[int] = 1  # numbers per element of the data
    tiled: ClassVar[bool] = False  # one scale per tile of ``QuantizeArguments.block``
    one_scale: ClassVar[bool] = False  # for a whole tensor: columnwise data are the rowwise data, transposed
    has_state: ClassVar[bool] = False  # the scale comes from earlier steps
    scale_of_layout: ClassVar[bool] = False  # each layout also has one scale, beside those of its tiles
    keeps_tiles: ClassVar[bool] = False  # ``tile_scales`` may replace the scales of square tiles
    takes_scale: ClassVar[bool] = True  # ``QuantizeArguments.scales`` may replace the scales from an amax
    columns_again: ClassVar[bool] = False  # the columnwise copy reads the tensor once more, at no better place
    not_sent: ClassVar[str | None] = None  # why no collective sends such tensors quantized
    columns_not_sent: ClassVar[str | None] = None  # why none sends them if the columnwise layout is needed

    # What it costs (``hardware.speed``): for a tensor that is needed rowwise, and for one that is needed columnwise
    # (too), how often it is read once more before it can be cast. Scales of the whole tensor, or of all of a column,
    # need that; tiles that lie along columns are cast in a separate pass. Counted in generated code.
    reads: ClassVar[tuple[int, int]]
    # How often it is read once more where its copies are made apart: the rowwise one of a weight in forward, and the
    # columnwise one in backward.
    reads_apart: ClassVar[int] = 1
    # The kernels of the same, producers that nothing fuses into (attention) and the update of amax histories included:
    # those that a Llama-3-8B layer has more than in bf16, by the 4 tensors that it quantizes in inference (3 kernels in
    # bf16, with 8 rows 5 delayed, 7 with any other scaling) and 8 in training (7, 27 tensorwise, 17 delayed, 24
    # rowwise, 21 mxfp8, 16 blockwise, of which 8 tensors were 21 before ``tile_casts``: codegen/test_kernels.py).
    launches: ClassVar[tuple[float, float]]
    launches_of_few: ClassVar[float | None] = None  # rowwise, hints.FEW elements at most; None: as many
    gemm_launches: ClassVar[int] = 1  # 2: another kernel multiplies the result by scales of whole tensors
    # The share of the per-tensor FP8 rate (FP4 if packed) that its GEMMs reach; TE and DeepGEMM name some.
    rate: ClassVar[float]

    @property
    def own_scale(self) -> bool:
        """Whether the one scale comes from the tensor's own amax."""
        return self.one_scale and not self.has_state

    # The results of a quantize node: the data of each layout, the scales of each, and tensors that belong to both.

    def outputs(self, layouts: Sequence[Layout], keep_scales: bool) -> list[str]:
        """Return the names of the results, in order."""
        return [*layouts, *(f"{layout}_scale_inv" for layout in layouts)]

    def data_shape(self, rows: int, columns: int, block: Sequence[int]) -> list[int]:
        """Return the shape of the data of one layout [rows, columns] with padded sizes."""
        return [rows, columns]

    def scale_shape(self, rows: int, columns: int, block: Sequence[int], groups: int = 0) -> list[int] | None:
        """Return the shape of the scales of one layout [rows, columns] with padded sizes; None if it has no separate
        scales.

        ``groups``: the number of groups that the columns fall into; 0: there are no groups.
        """
        return [-(-rows // block[0]), -(-columns // block[1])]

    def shared_shapes(self, rows: Sequence[int], units: int | None, given: bool, keep_scales: bool) -> list[list[int]]:
        """Return the shapes of the FP32 tensors that belong to both layouts.

        ``rows``: all sizes of the tensor but the last. ``units``: how many groups or matrices have a scale each.
        ``given``: the scales are inputs.
        """
        return []

    # The arithmetic.

    def shared(self, parts: Sequence[Tensor], arguments: Arguments) -> Shared:
        """Return the scales of both layouts of the tensor that ``parts`` form when they are joined."""
        return Shared()

    def shared_of_groups(self, group: Tensor, groups: int, arguments: Arguments) -> Shared:
        """Return the same for a tensor [t, c] whose row i is in ``group[i]``; rows of group ``groups`` are in none."""
        return Shared()

    @abstractmethod
    def layout(self, request: LayoutRequest) -> tuple[Tensor, Tensor | None]:
        """``(data, scale_inv)`` of one layout."""

    def layout_of_groups(self, request: LayoutRequest, groups: Groups) -> tuple[Tensor, Tensor | None]:
        """:meth:`layout` of rows in groups, the one part of ``request``."""
        (rows,) = request.parts
        return self.layout(replace(request, parts=[rows.t()]) if groups.transposed else request)

    def layout_scales(self, shared: Sequence[Shared], arguments: Arguments) -> list[Tensor]:
        """Return the scales of whole layouts, after their other scales; ``shared``: one for each layout."""
        return []

    def shared_outputs(self, shared: Shared, arguments: Arguments) -> list[Tensor]:
        """Return the results after those of the layouts."""
        return []

    def decode(self, data: Tensor, scale_inv: Tensor, block: Sequence[int], global_scale_inv: Tensor | None) -> Tensor:
        """Return the decoded numbers, ``data * scale_inv``, in FP32."""
        return data.to(torch.float32) * scale_inv

    def fits_bf16(self, power_2_scale: bool) -> bool:
        """Return whether bf16 holds every decoded number exactly: an FP8 number times a power of two."""
        return power_2_scale

    # Operands of GEMMs. Tiles' scales may have an order (``tiles.ordered``).

    def ordered_shape(self, shape: Sequence[int], order: str, block: Sequence[int]) -> list[int]:
        """Return the shape of the scales [R, C] (``shape``) of one layout in an order."""
        return ordered_shape(shape, order, block[0]) if order else [*shape]

    def in_rows(self, data: Tensor, scale_inv: Tensor, order: str, block: Sequence[int]) -> Tensor:
        """Return the scales of ``data`` as ``layout`` returns them without an order."""
        rows, columns = data.shape
        shape = self.scale_shape(rows, columns * self.packed, block)
        return in_rows(scale_inv, order, shape, block[0]) if order and shape is not None else scale_inv

    def scale_values(self, scale_inv: Tensor) -> Tensor:
        """Return the numbers of ``scale_inv`` in FP32."""
        return scale_inv.to(torch.float32)

    def scales_for_gemm(self, scale_inv: Tensor) -> Tensor:
        """Return the scales as the GEMM of ``gemm`` takes them."""
        return scale_inv

    def scale_of_group(self, scale_inv: Tensor, span: Span, index: int | slice) -> Tensor:
        """Return the scales of one group or matrix; ``index``: where it is along the first dim of the data."""
        return scale_inv[index]

    def scale_of_columns(self, scale_inv: Tensor, span: Span, block: Sequence[int]) -> Tensor:
        """Return the scales of one group of columns."""
        tiles = slice(span.columns.start // block[1], span.columns.stop // block[1])
        return scale_inv[:, tiles]

    def scale_per_row(self, data: Tensor, scale_inv: Tensor, offs: Tensor, ragged_k: bool) -> Tensor:
        """Return one scale for each row, as ``torch._scaled_grouped_mm`` takes them: [t], [experts, n] or [experts *
        m].
        """
        raise NotImplementedError(f"no grouped GEMM takes the scales of {self.name!r}")


def fp8_scales(amax: Tensor, arguments: Arguments, *, largest: float = FLT_MAX) -> tuple[Tensor, Tensor]:
    """``(scale, scale_inv)`` in FP32 for these amaxes; see :func:`formats.scale_from_amax`.

    Given scales (``QuantizeArguments.scales``) replace them: the same for every amax.
    """
    if arguments.scales is not None:
        scale, scale_inv = (arguments.scales[arguments.row, i].expand(amax.shape) for i in (SCALE, SCALE_INV))
        return scale, scale_inv.clone()
    scale = scale_from_amax(
        amax,
        FP8_MAX[arguments.dtype],
        power_2_scale=arguments.power_2_scale,
        amax_epsilon=arguments.amax_epsilon,
        largest=largest,
    )
    scale = materialize(scale)  # else every thread that casts with it would divide
    return scale, inverse(scale)
