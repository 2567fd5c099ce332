"""The kinds of scaling: each has one file and one entry in the list here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from fp8graph.numerics.scalings.base import Scaling, Shared
from fp8graph.numerics.scalings.block import Block
from fp8graph.numerics.scalings.block_e8m0 import BlockE8M0
from fp8graph.numerics.scalings.delayed import Delayed
from fp8graph.numerics.scalings.mxfp8 import MXFP8
from fp8graph.numerics.scalings.nvfp4 import NVFP4
from fp8graph.numerics.scalings.row import Rowwise
from fp8graph.numerics.scalings.tensor import Tensorwise

SCALINGS: Final[Mapping[str, Scaling]] = MappingProxyType(
    {kind.name: kind for kind in (Tensorwise(), Delayed(), Rowwise(), Block(), BlockE8M0(), MXFP8(), NVFP4())}
)

__all__ = ["SCALINGS", "Scaling", "Shared"]
