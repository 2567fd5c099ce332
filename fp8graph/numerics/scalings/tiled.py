"""One scale per tile, in FP32 or E8M0. A tile is (rows, elements along the contraction dim)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from fp8graph.numerics.formats import amax_of, biased_exponent, exp2_biased, inverse, overflow_as_nan, widened_columns
from fp8graph.numerics.hints import divide, materialize, saturating_cast
from fp8graph.numerics.scalings.base import Arguments, LayoutRequest, Scaling, Shared, fp8_scales
from fp8graph.numerics.tiles import join, ordered, pad_to_multiple, padding_needed, tiles_of, untile, with_padding
from fp8graph.recipes import FP8_MAX, Layout


class Tiled(Scaling):
    tiled = True

    @abstractmethod
    def scales(self, amax: Tensor, request: LayoutRequest) -> tuple[Tensor, Tensor]:
        """``(scale, scale_inv)`` of tiles with these amaxes."""

    def scales_of(self, tiles: Tensor, amax: Tensor, request: LayoutRequest) -> tuple[Tensor, Tensor]:
        """:meth:`scales` of these tiles [..., R, rows, C, columns], where they depend on more than the amaxes."""
        return self.scales(amax, request)

    def tiles_per_multiple(self, multiple: int, block: Sequence[int]) -> int:
        """Return the number of tiles of which the contraction dim is a multiple; missing tiles are zeros, made
        separately.
        """
        return 1

    def kept(self, scale: Tensor, scale_inv: Tensor) -> Tensor:
        """Return that of both from which :meth:`of_kept` computes both."""
        return scale

    def of_kept(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """``(scale, scale_inv)`` of tiles whose scales were kept, bit for bit."""
        return kept, inverse(kept)

    def outputs(self, layouts: Sequence[Layout], keep_scales: bool) -> list[str]:
        return [*super().outputs(layouts, keep_scales), *(["scales"] if keep_scales else [])]

    def shared(self, parts: Sequence[Tensor], arguments: Arguments) -> Shared:
        dim, block = arguments.dim, arguments.block
        if arguments.tile_scales is not None:
            sizes = [-(-part.shape[dim] // block[dim]) for part in parts]
            return Shared(of_tiles=arguments.tile_scales.split(sizes, dim))
        if not arguments.keep_scales:
            return Shared()
        request = LayoutRequest(parts=parts, axis=dim, multiples=(1, 1), arguments=arguments, shared=Shared())
        tiled = [tiles_of(pad_to_multiple(widened_columns(x, -1), *block), block) for x in parts]
        return Shared(of_tiles=[self.kept(*self.scales_of(x, amax_of(x, (-3, -1)), request)) for x in tiled])

    def shared_outputs(self, shared: Shared, arguments: Arguments) -> list[Tensor]:
        kept = cast(Sequence[Tensor], shared.of_tiles) if arguments.keep_scales else ()
        return [join([materialize(part) for part in kept], arguments.dim)] if kept else []

    def layout(self, request: LayoutRequest) -> tuple[Tensor, Tensor | None]:
        block, multiples = request.arguments.block, request.multiples
        per_multiple = self.tiles_per_multiple(multiples[1], block)
        parts = [pad_to_multiple(part, multiples[0], multiples[1] // per_multiple) for part in request.parts]
        exact = [widened_columns(x, -1) for x in parts]
        padded = [pad_to_multiple(x, *block) for x in exact]
        tiled = [tiles_of(x, block) for x in padded]
        if request.shared.of_tiles is not None:
            scales = list(map(self.of_kept, request.shared.of_tiles))
        else:
            amaxes = [amax_of(x, (-3, -1)) for x in tiled]  # [..., R / rows, C / columns]
            scales = [self.scales_of(*part, request) for part in zip(tiled, amaxes, strict=True)]
        inverses, axis = [inverse for _, inverse in scales], request.axis
        columns = sum(inverse.shape[-1] for inverse in (inverses if axis == -1 else inverses[:1]))
        padding = padding_needed(columns, per_multiple) if per_multiple > 1 else None  # in tiles
        if padding is not None:
            if axis == -2:
                inverses, axis = [ordered(inverses, "", axis)], -1
            zeros = inverses[0].new_zeros([*inverses[0].shape[:-1], padding])
            inverses.append(self.scales(zeros, request)[1])
        # in memory, as the scales: else a separate kernel would divide and join them
        scale_inv = ordered(inverses, request.order, axis, block[0])
        scaled = [overflow_as_nan(x) * s.unsqueeze(-2).unsqueeze(-1) for x, (s, _) in zip(tiled, scales, strict=True)]
        return self._data(replace(request, parts=parts), scaled, per_multiple, padding), scale_inv

    def _data(self, request: LayoutRequest, scaled: Sequence[Tensor], per_multiple: int, padding: int | None) -> Tensor:
        """Return the data of scaled tiles [..., R / rows, rows, C / columns, columns], of the sizes of its parts,
        joined.

        ``padding``: the number of tiles missing along the contraction dim to a multiple of ``per_multiple``.
        """
        *batch, rows, columns = request.parts[0].shape
        block, axis = request.arguments.block, request.axis
        data = [saturating_cast(x, request.arguments.dtype) for x in scaled]
        if padding_needed(rows, block[0]) is not None or padding_needed(columns, block[1]) is not None:
            joined = join([materialize(untile(x)[..., :rows, :columns].contiguous()) for x in data], axis)
            return joined if padding is None else with_padding(joined, (1, per_multiple * block[1]))
        # the padding is written beside these tiles, before any view: no copy
        joined = join([materialize(x.contiguous()) for x in data], -4 if axis == -2 else -2)
        if padding is not None:
            joined = torch.cat([joined, joined.new_zeros([*joined.shape[:-2], padding, block[1]])], -2)
        return joined.reshape(*batch, joined.shape[-4] * block[0], joined.shape[-2] * block[1])

    def decode(self, data: Tensor, scale_inv: Tensor, block: Sequence[int], global_scale_inv: Tensor | None) -> Tensor:
        values = self.values(data)
        *_, rows, columns = values.shape
        tiles = tiles_of(pad_to_multiple(values, *block), block)
        tiles = tiles * self.scale_values(scale_inv).unsqueeze(-2).unsqueeze(-1)
        values = untile(tiles)[..., :rows, :columns]
        return values if global_scale_inv is None else values * global_scale_inv

    def values(self, data: Tensor) -> Tensor:
        """Return the numbers of ``data`` in FP32, not scaled."""
        return data.to(torch.float32)


class Block(Tiled):
    """One FP32 scale per tile: 1x128 and 128x128 of Float8BlockScaling, or other sizes."""

    name = gemm = "block"
    gemm_title = "FP8 GEMM with one scale per tile"
    # Of small tensors, and behind functions that are fused; ``tile_casts`` reads large ones once for both layouts.
    reads, launches, rate = (0, 1), (1.0, 1.75), 0.8
    reads_apart = 0  # one kernel takes the amaxes of a large weight's tiles and casts them
    keeps_tiles = True

    def scales(self, amax: Tensor, request: LayoutRequest) -> tuple[Tensor, Tensor]:
        return fp8_scales(amax, request.arguments, largest=torch.finfo(request.arguments.x.dtype).max)

    def tiles_per_multiple(self, multiple: int, block: Sequence[int]) -> int:
        return multiple // block[1] if multiple % block[1] == 0 else 1


class _E8M0(Tiled):
    """One power of two per tile, in E8M0."""

    scale_dtype = torch.uint8
    takes_scale = False  # FP32

    @abstractmethod
    def exponents(self, amax: Tensor, arguments: Arguments) -> Tensor:
        """int32: the biased exponents of ``scale_inv``; 255 is NaN."""

    def scales(self, amax: Tensor, request: LayoutRequest) -> tuple[Tensor, Tensor]:
        return self._of_exponents(self.exponents(amax, request.arguments))

    def kept(self, scale: Tensor, scale_inv: Tensor) -> Tensor:
        return scale_inv

    def of_kept(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        return self._of_exponents(kept.to(torch.int32))

    def _of_exponents(self, exponent: Tensor) -> tuple[Tensor, Tensor]:
        scale = exp2_biased(torch.where(exponent == 255, exponent, 254 - exponent))  # 2 ** (127 - e)
        return scale, exponent.to(torch.uint8)

    def scale_values(self, scale_inv: Tensor) -> Tensor:
        return exp2_biased(scale_inv.to(torch.int32))

    def fits_bf16(self, power_2_scale: bool) -> bool:
        return True


class BlockE8M0(_E8M0, Block):
    """Tiles of any size, with a power of two each: Float8BlockScaling(scale_format="ue8m0").

    The scale is ``amax / fp8_max`` rounded up to a power of two, as in DeepGEMM's ``per_token_cast_to_fp8`` and
    ``per_block_cast_to_fp8`` (``use_ue8m0``) and in DeepSeek-V3.1's checkpoints (``scale_fmt: "ue8m0"``).
    """

    name = "block_e8m0"  # ``gemm`` is that of FP32 scales
    reads_apart = 1

    def exponents(self, amax: Tensor, arguments: Arguments) -> Tensor:
        amax = amax.clamp_min(arguments.amax_epsilon)  # NaN passes through
        return biased_exponent(divide(amax, torch.full_like(amax, FP8_MAX[arguments.dtype])), 1.0)  # one IEEE division

    def scales_for_gemm(self, scale_inv: Tensor) -> Tensor:
        return self.scale_values(scale_inv)


class MXFP8(_E8M0):
    """Tiles of 1x32, with a power of two each."""

    name = gemm = "mxfp8"
    gemm_title = "MXFP8 GEMM"
    reads, launches = (0, 1), (1.0, 1.75)
    reads_apart = 0  # each copy has tiles of its own: they are made apart anyway
    # one scale per tensor trains a dense Llama 3.1 405B 10 % faster on GB300 (1,048 against 952 tokens/s/GPU:
    # Megatron-Bridge's performance summary, whose two runs are sharded differently); this is the part due to GEMMs
    rate = 0.9

    def exponents(self, amax: Tensor, arguments: Arguments) -> Tensor:
        return biased_exponent(amax, FP8_MAX[arguments.dtype])
