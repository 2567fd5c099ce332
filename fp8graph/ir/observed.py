"""What a variant of a graph is asked to measure beside its GEMMs: see ``passes/observe.py``."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
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
        candidates: recipes whose error in the result of each GEMM is measured, in place of all the above.
    """

    layers: tuple[str, ...] = ("*",)
    copies: bool = True
    block_size: int = 32
    what_if: tuple[Recipe, ...] = ()
    candidates: tuple[Recipe, ...] = ()

    def takes(self, fqn: str) -> bool:
        """Whether the site called ``fqn`` is measured."""
        return any(fnmatch.fnmatchcase(fqn, pattern) for pattern in self.layers)


def together(several: Sequence[Observed]) -> Observed | None:
    """All that several readers ask for, in one variant; None: nobody asks."""
    if not several:
        return None
    return Observed(
        layers=tuple(dict.fromkeys(pattern for each in several for pattern in each.layers)),
        copies=any(each.copies for each in several),
        block_size=max(each.block_size for each in several),
        what_if=tuple(dict.fromkeys(recipe for each in several for recipe in each.what_if)),
        candidates=tuple(recipe for each in several for recipe in each.candidates),
    )
