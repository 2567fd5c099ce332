"""The kinds of scaling: each is a class, and one entry in the list here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from fp8graph.numerics.scalings.base import Groups, LayoutRequest, QuantizeArguments, Scaling, Shared
from fp8graph.numerics.scalings.nvfp4 import NVFP4
from fp8graph.numerics.scalings.tiled import MXFP8, Block, BlockE8M0
from fp8graph.numerics.scalings.untiled import Delayed, Rowwise, Tensorwise

SCALINGS: Final[Mapping[str, Scaling]] = MappingProxyType(
    {kind.name: kind for kind in (Tensorwise(), Delayed(), Rowwise(), Block(), BlockE8M0(), MXFP8(), NVFP4())}
)

__all__ = ["SCALINGS", "Groups", "LayoutRequest", "QuantizeArguments", "Scaling", "Shared"]
