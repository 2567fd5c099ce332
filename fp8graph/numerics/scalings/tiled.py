"""The base of kinds with one scale per tile. A tile is (rows, elements along the contraction dim)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from fp8graph.numerics.formats import amax_of, overflow_as_nan, saturating_cast, widened_columns
from fp8graph.numerics.hints import stored
from fp8graph.numerics.scalings.base import Asked, Scaling, Shared
from fp8graph.numerics.tiles import join, missing, pad_to_multiple, tiles_of, untile, with_padding


class Tiled(Scaling):
    tiled = True

    @abstractmethod
    def scales(self, amax: Tensor, asked: Asked, shared: Shared) -> tuple[Tensor, Tensor]:
        """``(scale, scale_inv)`` of tiles with these amaxes."""

    def scales_of(self, tiles: Tensor, amax: Tensor, asked: Asked, shared: Shared) -> tuple[Tensor, Tensor]:
        """:meth:`scales` of these tiles [..., R, rows, C, columns], where they depend on more than the amaxes."""
        return self.scales(amax, asked, shared)

    def more_tiles(self, multiple: int, block: Sequence[int]) -> int:
        """The number of tiles of which the contraction dim is a multiple; missing tiles are zeros, made separately."""
        return 1

    def layout(
        self,
        parts: Sequence[Tensor],
        axis: int,
        multiples: Sequence[int],
        asked: Asked,
        shared: Shared,
    ) -> tuple[Tensor, Tensor | None]:
        block, whole = asked.block, self.more_tiles(multiples[1], asked.block)
        parts = [pad_to_multiple(part, multiples[0], multiples[1] // whole) for part in parts]
        exact = [widened_columns(x, -1) for x in parts]
        padded = [pad_to_multiple(x, *block) for x in exact]
        tiled = [tiles_of(x, block) for x in padded]
        amaxes = [amax_of(x, (-3, -1)) for x in tiled]  # [..., R / rows, C / columns]
        made = [self.scales_of(*of_part, asked, shared) for of_part in zip(tiled, amaxes, strict=True)]
        # stored, as the scales: else a kernel of its own would divide and join them
        scale_inv = join([stored(inverse) for _, inverse in made], axis)
        lacks = missing(scale_inv.shape[-1], whole) if whole > 1 else None
        if lacks is not None:
            zeros = scale_inv.new_zeros([*scale_inv.shape[:-1], lacks])
            scale_inv = torch.cat([scale_inv, self.scales(zeros, asked, shared)[1]], -1)
        scaled = [overflow_as_nan(x) * s.unsqueeze(-2).unsqueeze(-1) for x, (s, _) in zip(tiled, made, strict=True)]
        return self._data(parts, scaled, axis, asked, whole, lacks), scale_inv

    def _data(
        self,
        parts: Sequence[Tensor],
        scaled: Sequence[Tensor],
        axis: int,
        asked: Asked,
        whole: int,
        lacks: int | None,
    ) -> Tensor:
        """The data of scaled tiles [..., R / rows, rows, C / columns, columns], of the sizes of ``parts``, joined.

        ``lacks``: how many tiles are missing along the contraction dim to a multiple of ``whole``.
        """
        *batch, rows, columns = parts[0].shape
        block = asked.block
        data = [saturating_cast(x, asked.dtype) for x in scaled]
        if missing(rows, block[0]) is not None or missing(columns, block[1]) is not None:
            joined = join([stored(untile(x)[..., :rows, :columns].contiguous()) for x in data], axis)
            return joined if lacks is None else with_padding(joined, (1, whole * block[1]))
        # more tiles are written beside these, before any view: no copy
        joined = join([stored(x.contiguous()) for x in data], -4 if axis == -2 else -2)
        if lacks is not None:
            joined = torch.cat([joined, joined.new_zeros([*joined.shape[:-2], lacks, block[1]])], -2)
        return joined.reshape(*batch, joined.shape[-4] * block[0], joined.shape[-2] * block[1])

    def decode(self, data: Tensor, scale_inv: Tensor, block: Sequence[int], global_scale_inv: Tensor | None) -> Tensor:
        values = self.values(data)
        *_, rows, columns = values.shape
        tiles = tiles_of(pad_to_multiple(values, *block), block)
        tiles = tiles * self.scale_values(scale_inv).unsqueeze(-2).unsqueeze(-1)
        values = untile(tiles)[..., :rows, :columns]
        return values if global_scale_inv is None else values * global_scale_inv

    def values(self, data: Tensor) -> Tensor:
        """The numbers of ``data`` in FP32, not scaled."""
        return data.to(torch.float32)

    def scale_values(self, scale_inv: Tensor) -> Tensor:
        """The numbers of ``scale_inv`` in FP32."""
        return scale_inv.to(torch.float32)
