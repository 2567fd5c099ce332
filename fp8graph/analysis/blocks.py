"""Which layers belong to the last blocks of a model, by their names: "model.layers.30.mlp.up_proj" is in block 30."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

from fp8graph.recipes.rules import Resolution

_DIGITS: Final = frozenset("0123456789")


class Blocks:
    """The stacks of blocks in a graph: the layers of a stack have one prefix before the first number in their names."""

    def __init__(self, names: Iterable[str]) -> None:
        self._stacks: dict[str, set[int]] = {}
        for name in names:
            if (place := _place(name)) is not None:
                self._stacks.setdefault(place[0], set()).add(place[1])

    def last(self, name: str, share: float) -> int:
        """How many blocks are the last ``share`` of the stack of layer ``name``, if it is in one of them; else 0.

        ``share`` is rounded to the nearest number of blocks: 15 % are none of 3, 1 of 4 to 9, and 5 of 32.
        """
        if (place := _place(name)) is None:
            return 0
        prefix, index = place
        count = int(share * self._size(name) + 0.5)
        return count if count and index in sorted(self._stacks[prefix])[-count:] else 0

    def _size(self, name: str) -> int:
        """How many blocks the stack of layer ``name`` has."""
        place = _place(name)
        return 0 if place is None else len(self._stacks.get(place[0], ()))

    def without_the_last(self, name: str, resolution: Resolution) -> Resolution:
        """The default policy's ``resolution`` for layer ``name``, in high precision where its recipe wants that.

        What a rule or a region asked for is not changed.
        """
        if resolution.source != "default":
            return resolution
        recipes = {gemm: recipe for gemm, recipe in resolution.recipes.items() if recipe is not None}
        counts = {gemm: self.last(name, recipe.last_blocks) for gemm, recipe in recipes.items() if recipe.last_blocks}
        kept = [gemm for gemm, count in counts.items() if count]
        if not kept:
            return resolution
        count = counts[kept[0]]
        blocks = self._size(name)
        which = f"the last of {blocks} blocks" if count == 1 else f"one of the last {count} of {blocks} blocks"
        source = f"{which} in this graph: {recipes[kept[0]].name} needs more precision there"
        return dataclasses.replace(resolution, recipes={**resolution.recipes, **dict.fromkeys(kept)}, source=source)


def _place(name: str) -> tuple[str, int] | None:
    """The prefix before the first number of ``name``, and the number."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part and _DIGITS.issuperset(part):
            return ".".join(parts[:position]), int(part)
    return None
