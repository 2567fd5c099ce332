"""What a variant of a graph is asked to measure beside its GEMMs: see ``passes/observe.py``."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from fp8graph.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The statistics that a graph computes: of the operands and results of GEMMs, and of more.

    Args:
        layers: globs of the sites' names.
        copies: of the copies that the GEMMs read.
        block_size: of the blocks whose dynamic range is measured; 0: it is not.
        what_if: of copies that other recipes would make. None of these recipes has a state.
    """

    layers: tuple[str, ...] = ("*",)
    copies: bool = True
    block_size: int = 32
    what_if: tuple[Recipe, ...] = ()

    def takes(self, fqn: str) -> bool:
        """Whether the site called ``fqn`` is measured."""
        return any(fnmatch.fnmatchcase(fqn, pattern) for pattern in self.layers)
