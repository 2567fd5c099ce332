"""The base of all devices: which low-precision GEMMs they have, and how torch's kernels are called. And the CPU.

One file per vendor of GPUs (``nvidia.py``, ``amd.py``) describes its devices; ``__init__.py`` lists the vendors. A kind
of scaling is identified by the name of its GEMM (``Scaling.gemm``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Self, cast

import torch
from torch import Tensor

from fp8graph import words
from fp8graph.compat import ops, torch_build
from fp8graph.hardware.speed import Speed
from fp8graph.numerics import group_blocks, matmul
from fp8graph.numerics.experts import padded_offsets
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.numerics.tiles import ordered
from fp8graph.recipes import OperandName, Quantizer, Recipe

NO_FP8: Final = "is a GPU without any FP8 GEMM"
Product = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
Rule = Callable[[Quantizer, Quantizer, torch.dtype], str | None]  # of a, b and the result: why not, or None


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device: its low-precision GEMMs and its speed. This base class is a device without any such GEMM."""

    name: str  # "cpu", "sm_90", "gfx942", or the device type
    scalings: frozenset[str] = frozenset()  # kinds whose GEMMs torch._scaled_mm, or fp8graph itself, has for it
    grouped: frozenset[str] = frozenset()  # kinds whose GEMMs torch._scaled_grouped_mm has for it
    speed: Speed | None = None  # None: not known, or nothing to gain (a CPU)

    examples: ClassVar[tuple[str, ...]] = ()  # names of the vendor's devices, for texts and ``fp8graph doctor``
    alignments: ClassVar[Mapping[str, tuple[int, int, int]]] = {}  # by GEMM of torch._scaled_mm: see ``alignment``
    is_gpu: ClassVar[bool] = False
    multiplies_groups: ClassVar[bool] = False  # whether torch._scaled_grouped_mm has any kernel for the vendor

    @classmethod
    def from_target(cls, target: str, device_name: str = "") -> Self | None:
        """Return the vendor's device that is called ``target``; None if the vendor has no device of that name."""
        return None

    @classmethod
    def of_device(cls, device: torch.device) -> Self:
        """Return the hardware behind a torch device on which the vendor's kernels run."""
        return cls(name=f"device {device.type!r}")

    @classmethod
    def runs(cls, device: torch.device) -> bool:
        """Return whether the vendor's kernels run on ``device``. Meta tensors stand for those of a GPU."""
        return False

    # Decisions for a device.

    @property
    def fixes_order(self) -> bool:
        """Whether fp8graph has products for it that add up a row alike in any batch (``numerics/invariant.py``)."""
        return False

    @property
    def default_recipe(self) -> str:
        """The recipe to use if the user names none."""
        return "tensorwise"

    def multiplies(self, scaling: str) -> bool:
        """Return whether it has a GEMM for operands of a kind of scaling, of some types and sizes."""
        return SCALINGS[scaling].gemm in self.scalings

    def device_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type that the device uses in place of one that recipes name."""
        return dtype

    def quantizer(self, recipe: Recipe, operand: OperandName) -> Quantizer:
        """Return the quantizer of ``operand`` under ``recipe`` on this device.

        If the device has a GEMM for that kind of scaling, the operand gets the device's own type. Otherwise it is
        decoded before the GEMM, and gets the recipe's type.
        """
        quantizer = recipe.quantizer(operand)
        own = self.device_dtype(quantizer.dtype)
        changes = own != quantizer.dtype and self.multiplies(quantizer.scaling)
        return replace(quantizer, dtype=own) if changes else quantizer

    def alignment(self, a: Quantizer, b: Quantizer) -> tuple[int, int, int]:
        """Return the multiples to which m, n and k of a native GEMM [m, k] @ [k, n] are padded, with zeros."""
        return self.alignments.get(SCALINGS[a.scaling].gemm, (1, 1, 1))

    def obstacle(self, a: Quantizer, b: Quantizer, out_dtype: torch.dtype, *, grouped: bool = False) -> str | None:
        """Return the reason for which the device cannot multiply ``a @ b`` natively; None if it can."""
        kind = SCALINGS[a.scaling]
        if self.is_gpu and not self.scalings and not grouped:
            return f"{self.name} {NO_FP8}"
        if kind.gemm not in (self.grouped if grouped else self.scalings):
            why = f": {reason}" if grouped and (reason := self.why_not_grouped(kind.gemm)) else ""
            return f"{self.name} has no {'grouped ' if grouped else ''}{kind.gemm_title}{why}"
        rule = self.grouped_rules.get(kind.gemm) if grouped else self.rules.get(kind.gemm)
        return rule(a, b, out_dtype) if rule is not None else None

    @property
    def rules(self) -> Mapping[str, Rule]:
        """Further conditions of torch's kernels on operands and result, by GEMM, beside the kind of scaling."""
        return {}

    def why_not_grouped(self, gemm: str) -> str | None:
        """Return the reason why torch has no grouped kernel for it, if that is known."""
        return None

    def evidence_without_device(self, gemm: str, *, grouped: bool = False) -> str:
        """Give the evidence for a kernel of the device, where we have run it on no such device; "": none is needed."""
        return ""

    @property
    def grouped_rules(self) -> Mapping[str, Rule]:
        """The same for grouped GEMMs."""
        return {}

    def emulation_dtype(self, operands: Sequence[Quantizer], out_dtype: torch.dtype) -> torch.dtype:
        """Give the dtype in which decoded ``operands`` are multiplied; the result is rounded once, to ``out_dtype``."""
        return torch.float32

    def most_rows_of_small_tiles(self, scaling: str) -> int:
        """Return the number of rows up to which smaller tiles, of another form of the operands, are faster; 0: none
        are.
        """
        return 0

    # The multiplication.

    @classmethod
    def adds(cls, gemm: str) -> bool:
        """Return whether that kernel can add its result to an FP32 tensor."""
        return False

    @classmethod
    def custom_gemm(cls, gemm: str, out_dtype: torch.dtype) -> Product | None:
        """Return an op of fp8graph's own that multiplies such operands fastest: of a, b, both scales and the bias."""
        return None

    @classmethod
    def order_of_groups(cls, gemm: str) -> str:
        """Return the order in which that grouped kernel reads the scales of tiles (``group_blocks``); "": one for each
        row.
        """
        return ""

    @classmethod
    def scale_order(cls, gemm: str, block: Sequence[int]) -> str:
        """Return the order in which torch._scaled_mm reads the scales of tiles (``numerics.tiles.ordered``)."""
        return ""

    @classmethod
    def operand(cls, data: Tensor, scale_inv: Tensor, gemm: str, block: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Data and scales of one operand as torch._scaled_mm reads them; scales in the order of ``scale_order``."""
        return data, scale_inv

    @classmethod
    def scaled_mm(
        cls,
        a: Tensor,
        b: Tensor,
        scale_inv_a: Tensor,
        scale_inv_b: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
        *,
        scaling: str = "tensor",
        block_a: Sequence[int] = (),
        block_b: Sequence[int] = (),
        global_scale_inv_a: Tensor | None = None,
        global_scale_inv_b: Tensor | None = None,
        addend: Tensor | None = None,
        order_a: str = "",
        order_b: str = "",
        custom_ops: bool = True,
    ) -> Tensor:
        """``(a * scale_inv_a) @ (b * scale_inv_b).T + bias``, FP32 accumulation, rounded once to ``out_dtype``.

        If the vendor has no kernel, operands are decoded first (``numerics.matmul``). A CPU always does that; other
        devices do it only to look at another device's graph.

        Args:
            a: [m, k] FP8, row-major.  b: [n, k] FP8, row-major: both contiguous along k ("TN", all that Hopper has).
            scale_inv_a, scale_inv_b: as ``quantize_layouts`` returns them.
            bias: [n] in ``out_dtype`` (bf16 or fp16), or None.
            scaling, block_a, block_b: see :class:`fp8graph.recipes.Quantizer`.
            global_scale_inv_a, global_scale_inv_b: nvfp4's FP32 scalars, or one per row, [m, 1] and [n, 1].
            addend: FP32 [m, n], added to an FP32 result; there is no bias then.
            order_a, order_b: of the scales, see ``QuantizeArguments``; a kernel's must be that of ``scale_order``.
            custom_ops: whether fp8graph's ops may multiply; False: torch's alone, for code that runs without fp8graph.
        """
        kind = SCALINGS[scaling]
        gemm = kind.gemm
        if custom_ops and addend is None and (product := cls.custom_gemm(gemm, out_dtype)) is not None:
            return product(a, b, scale_inv_a, scale_inv_b, bias)
        if gemm not in cls.alignments:  # no device of the vendor has a kernel
            result = matmul.scaled_mm(
                *(a, b, scale_inv_a, scale_inv_b, bias, out_dtype),
                scaling=scaling, block_a=block_a, block_b=block_b, order_a=order_a, order_b=order_b,
                global_scale_inv_a=global_scale_inv_a, global_scale_inv_b=global_scale_inv_b,
            )  # fmt: skip
            return result if addend is None else addend + result
        (data_a, scales_a), (data_b, scales_b) = (
            cls.operand(data, cls._in_order(kind.scales_for_gemm(scale_inv), gemm, block, order), gemm, block)
            for data, scale_inv, block, order in (
                (a, scale_inv_a, block_a, order_a),
                (b, scale_inv_b, block_b, order_b),
            )
        )
        scales_b = scales_b.t() if scales_b.ndim == 2 else scales_b
        if scales_a.ndim != scales_b.ndim:  # [] (own amax) and [1] (table): Inductor's templates want one shape
            scales_a, scales_b = scales_a.reshape(1), scales_b.reshape(1)
        if addend is not None and cls.adds(gemm):
            return ops.scaled_addmm(addend, data_a, data_b.t(), scales_a, scales_b, use_fast_accum=use_fast_accum)
        two_levels = global_scale_inv_a is not None and global_scale_inv_b is not None
        result = ops.scaled_mm(
            data_a,  # [m, k] row-major
            data_b.t(),  # [k, n] column-major: no copy
            scales_a,
            scales_b,
            bias=None if two_levels else bias,
            out_dtype=torch.float32 if two_levels else out_dtype,
            use_fast_accum=use_fast_accum,
        )
        if two_levels:  # v1 of torch's op has no place for the global scales
            of_rows, of_columns = cast(Tensor, global_scale_inv_a), cast(Tensor, global_scale_inv_b)
            result = result * (of_rows * (of_columns.t() if of_columns.ndim == 2 else of_columns))
            result = (result if bias is None else result + bias).to(out_dtype)
        return result if addend is None else addend + result

    @classmethod
    def _in_order(cls, scale_inv: Tensor, gemm: str, block: Sequence[int], order: str) -> Tensor:
        wanted = cls.scale_order(gemm, block)
        return scale_inv if order == wanted else ordered([scale_inv], wanted, rows=block[0])

    @classmethod
    def scaled_grouped_mm(
        cls,
        a: Tensor,
        b: Tensor,
        scale_inv_a: Tensor,
        scale_inv_b: Tensor,
        offs: Tensor,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
        native: bool,
        *,
        scaling: str = "tensor",
        block_a: Sequence[int] = (),
        block_b: Sequence[int] = (),
        global_scale_inv_a: Tensor | None = None,
        global_scale_inv_b: Tensor | None = None,
        multiple: int = 1,
        order_a: str = "",
        order_b: str = "",
    ) -> Tensor:
        """:meth:`scaled_mm` for each group: a [t, k] and b [experts, n, k] -> [t, n], or a [m, t] and b [n, t] ->
        [experts, m, n]. FP32 accumulation, rounded once to ``out_dtype``; if emulated, rows of no group are zero.

        ``scale_inv_a``, ``scale_inv_b``: as ``quantize_layouts`` returns them for ``offs`` and ``per_matrix``, in
        these orders, and so are the global scales, FP32 [experts]. ``multiple``: groups of columns are padded to it.
        ``native``: a kernel multiplies, with one scale per row, or those of tiles in the order that it reads.
        """
        if not (native and cls.multiplies_groups):
            return matmul.scaled_grouped_mm(
                *(a, b, scale_inv_a, scale_inv_b, offs, out_dtype),
                scaling=scaling, block_a=block_a, block_b=block_b, order_a=order_a, order_b=order_b, multiple=multiple,
                global_scale_inv_a=global_scale_inv_a, global_scale_inv_b=global_scale_inv_b,
            )  # fmt: skip
        kind, ragged_k = SCALINGS[scaling], b.ndim == 2
        if (order := cls.order_of_groups(kind.gemm)) != "":
            ends = padded_offsets(offs, multiple) if ragged_k else offs
            scales: list[Tensor] = []
            for data, scale_inv, block, given in (
                (a, scale_inv_a, block_a, order_a),
                (b, scale_inv_b, block_b, order_b),
            ):
                if given != order:
                    of_rows = (offs if data.ndim == 2 else None, None)  # None: of matrices
                    groups = group_blocks.ends_of_columns(offs, multiple, block[1]) if ragged_k else of_rows
                    scale_inv = group_blocks.ordered(scale_inv, groups[0], in_blocks=groups[1], rows=block[0])
                scales.append(scale_inv)
            scales_a, scales_b = scales
            if global_scale_inv_a is not None and global_scale_inv_b is not None:
                return ops.grouped_mm_of_fp4(a, b, scales_a, scales_b, global_scale_inv_a, global_scale_inv_b, ends)
            scales_a, scales_b = (scale_inv.view(torch.float8_e8m0fnu) for scale_inv in scales)
            return ops.grouped_mm_of_blocks(a, b.transpose(-2, -1), scales_a, scales_b, ends)
        return ops.scaled_grouped_mm(
            a,  # [t, k] or [m, t], row-major
            b.transpose(-2, -1),  # column-major: no copy
            kind.scale_per_row(a, scale_inv_a, offs, ragged_k),
            kind.scale_per_row(b, scale_inv_b, offs, ragged_k),
            padded_offsets(offs, multiple) if ragged_k else offs,
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
        )


_GEMMS_OF_CPUS: Final = frozenset({"tensor", "row"})


@dataclass(frozen=True, kw_only=True)
class CPU(Hardware):
    """A CPU multiplies FP8 operands with scales per tensor and per row as bf16 numbers, which is exact.

    It takes OCP and fnuz types. Results in other types than bf16, and all of a CPU without a bf16 GEMM, are products of
    the decoded operands in FP32. torch's ``_scaled_mm`` is never called: on some CPUs it does the same, but on those
    with AMX it refuses fnuz types, and computes results in other types than bf16 in a reference loop (48 s for 256 x
    1600 x 1024).
    """

    examples = ("cpu",)

    @classmethod
    def from_target(cls, target: str, device_name: str = "") -> Self | None:
        return cls.of_device(torch.device("cpu")) if target in words.CPU.names else None

    @classmethod
    def of_device(cls, device: torch.device) -> Self:
        return cls(name="cpu", scalings=_GEMMS_OF_CPUS)

    @classmethod
    def runs(cls, device: torch.device) -> bool:
        return device.type == "cpu"

    @property
    def fixes_order(self) -> bool:
        return True

    def alignment(self, a: Quantizer, b: Quantizer) -> tuple[int, int, int]:
        return 1, 16, 16  # as GPUs have it

    def emulation_dtype(self, operands: Sequence[Quantizer], out_dtype: torch.dtype) -> torch.dtype:
        exact = out_dtype == torch.bfloat16 and torch_build.multiplies_bf16_on_cpu()
        if exact and all(SCALINGS[q.scaling].fits_bf16(q.power_2_scale) for q in operands):
            return torch.bfloat16  # accumulated in FP32, and half as long as a GEMM in FP32
        return torch.float32

    @classmethod
    def custom_gemm(cls, gemm: str, out_dtype: torch.dtype) -> Product | None:
        exact = gemm in _GEMMS_OF_CPUS and out_dtype == torch.bfloat16 and torch_build.multiplies_bf16_on_cpu()
        return matmul.bf16_product if exact else None
