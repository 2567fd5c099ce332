"""Give a weight that something other than an optimizer has written its own scale (delayed scaling).

An optimizer moves a weight a little, and the scale of the steps before fits. ``load_state_dict``, swapped averages or a
merge replace it: with the old scale its copy would be clipped, in evaluation until the next step of training, and in
training once. The scale is then that of the weight's amax. Its history stays, which the next step updates as always.
Where ranks reduce their amaxes nothing is changed: all of them read one scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8graph.compat import autograd, checkpointing
from fp8graph.compat.distributed import local
from fp8graph.compat.fakes import FakeTensor
from fp8graph.ir.extra_inputs import PageLayout
from fp8graph.numerics import history
from fp8graph.runtime.contents import contents_of
from fp8graph.runtime.pages import Row
from fp8graph.runtime.staleness import optimizer_steps, version


@dataclass(frozen=True)
class WeightRow:
    """A row of a page that is the state of parameters themselves.

    ``owners``: the positions of the parameters among a graph's inputs.
    """

    row: Row
    layout: PageLayout
    owners: tuple[int, ...]

    @staticmethod
    def among(layout: PageLayout, rows: Sequence[Row]) -> list[WeightRow]:
        """Those of one page, whose ``rows`` are in order."""
        found: list[WeightRow] = []
        for row, names in zip(rows, layout.rows, strict=True):
            if layout.group is None and all(name.is_weight for name in names):  # else ranks agree on the scale
                owners = {name.parameter: None for name in names if name.parameter is not None}
                found.append(WeightRow(row, layout, tuple(owners)))
        return found

    def follow(self, args: Sequence[Any]) -> None:
        """Take the scale of the weight's amax if it was written since the last call by other than an optimizer."""
        owners = [args[index] for index in self.owners]
        if any(local(x) is not x or isinstance(x, FakeTensor) for x in owners):
            return  # the amax of a shard is not that of the weight
        seen, steps = _state(owners), [*map(optimizer_steps().of, owners)]
        before, self.row.seen = self.row.seen, (seen, steps)
        if before is not None and before[0] != seen and before[1] == steps:
            page = self.row.page.tensor
            with (
                torch.inference_mode(False), torch.no_grad(),
                checkpointing.without_modes(), autograd.unnoticed_writes(page),
            ):  # fmt: skip
                amax = torch.stack([x.detach().abs().amax().float() for x in owners]).amax().to(page.device)
                old, recipe = page[self.row.index, 0], self.layout.recipe
                scale = history.delayed_scale(amax, old, self.layout.fp8_max, recipe.margin)
                page[self.row.index, : history.HEADER] = torch.stack([scale, scale.reciprocal()])


def _state(owners: Sequence[Tensor]) -> Any:
    """It changes with what is written; without a version or an address only where the numbers can be looked at."""
    signals = [(version(x), x.data_ptr()) for x in owners]
    return signals, contents_of(owners) if all(x.is_cpu for x in owners) else None
