"""Pages of scaling state and their rows: those that a graph takes, or that follow a write.

A weight that has no scale yet, or that something other than an optimizer has written, gets the scale of its own amax
(:meth:`Row.follow`). An optimizer moves a weight a little, and the scale of the steps before fits. ``load_state_dict``,
swapped averages or a merge replace it: with the old scale its copy would be clipped, in evaluation until the next step
of training, and in training once. Its history stays, which the next step updates as always. Where ranks reduce their
amaxes a scale that is there is not changed: all of them read one.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8graph.compat import autograd, checkpointing
from fp8graph.compat.distributed import largest_over, local, mesh_of
from fp8graph.compat.fakes import FakeTensor
from fp8graph.numerics import history
from fp8graph.numerics.formats import SCALE
from fp8graph.passes.connect_scales import PageLayout, is_parameter
from fp8graph.passes.connect_scales.saved import SavedRow, recipe_text, rescaled
from fp8graph.recipes import FLT_MAX, DelayedScaling, OperandName
from fp8graph.runtime.recomputation import Checkpointed
from fp8graph.runtime.staleness import optimizer_steps, signature


@dataclass(eq=False)
class RowOwner:
    """A parameter as the owner of rows. Unlike an id, it is never that of another parameter."""

    keys: list[RowKey] = field(default_factory=list["RowKey"])  # of its rows


@dataclass(frozen=True)
class RowKey:
    """The identity of a row: a tensor of a layer under a recipe. ``owner``: of the layer's weight."""

    owner: RowOwner
    site: str | None  # module of a matmul without a weight ("" at the root), whose owner only says which model it is in
    use: int
    operand: OperandName
    recipe: DelayedScaling  # under which it is recorded: a tensor may have several rows at once

    @property
    def of_tensor(self) -> tuple[RowOwner, str | None, int, OperandName]:
        """The part that is the same for all rows of one tensor."""
        return self.owner, self.site, self.use, self.operand


def row_name(place: str, key: RowKey, number: int | None = None) -> str:
    """Return the name of a row in a state dict.

    Args:
        place: the module of a matmul, or of the bound weight.
        number: which of the matmuls with that weight, or in that module; None: as ``key`` says.
    """
    which = key.use if number is None else number
    return f"{place}{f'#{which}' if which else ''}.{key.operand}|{recipe_text(key.recipe)}"


@dataclass(eq=False)
class Page:
    tensor: Tensor  # FP32 [rows, 4 + length]
    layout: PageLayout  # of the graph that it was made for
    moved: bool = False  # another page now holds some of the rows
    unset: bool = False  # some rows may have no scale yet

    @staticmethod
    def new(layout: PageLayout) -> Page:
        """Return a page before the first step."""
        return Page(layout.new_page(), layout, unset=layout.recipe.starts_from_own_amax)

    def look(self) -> bool:
        """Return whether some rows have no scale yet. Waits for the device until all have one."""
        self.unset = self.unset and bool(self.tensor[:, history.UNSET].any())
        return self.unset

    def fits(self, layout: PageLayout) -> bool:
        """Return whether a graph that wants ``layout`` can take it. It cannot after the model was moved to another
        device.
        """
        alike = self.layout.group == layout.group and self.tensor.device == layout.device
        return alike and self.layout.fp8_max == layout.fp8_max and self.tensor.shape[0] == len(layout.rows)

    def rows_for(self, layout: PageLayout, indices: Sequence[int]) -> Tensor:
        """Return a copy of the rows at ``indices`` for a page of ``layout``, whose device may have other FP8 types."""
        rows = self.tensor[list(indices)].to(layout.device)
        if self.layout.fp8_max != layout.fp8_max:
            history.write_scale(rows, rescaled(rows[:, SCALE], self.layout.fp8_max, layout.fp8_max))
        return rows


@dataclass
class Row:
    page: Page
    index: int
    name: str  # in a state dict
    seen: Any = None  # the weight that it is of, when it was last looked at: see follow()

    def write(self, scale: Tensor, amaxes: Tensor) -> None:
        """Give it another state: a scale [1] and an amax history."""
        begins = self.page.layout.recipe.starts_from_own_amax
        self.page.unset |= begins
        history.write_row(self.page.tensor, self.index, scale, amaxes, unset=begins)

    def has_no_scale(self) -> bool:
        """Return whether it is yet to come from the tensor's own amax. Waits for the device."""
        return bool(self.page.tensor[self.index, history.UNSET])

    def saved(self) -> SavedRow:
        """Return a copy of its state, without the amax that a step has staged which is not over."""
        layout = self.page.layout
        saved = SavedRow.of(self.page.tensor[self.index], layout.fp8_max, reduced=layout.recipe.reduce_amax)
        if layout.group is not None:
            saved.amax_history[0] = 0.0
        return saved

    def follow(self, parameters: Sequence[Tensor]) -> None:
        """Take the scale of the amax of ``parameters``, if it has none, or if other than an optimizer wrote them."""
        owners, page = [*map(local, parameters)], self.page
        # ranks agree on the scale of a step; and the amax of a shard is not that of the weight
        apart = page.layout.group is not None or any(x is not y for x, y in zip(owners, parameters, strict=True))
        if any(isinstance(x, FakeTensor) for x in owners) or (apart and not page.unset):
            return
        seen = signature(owners, storages=False, contents=not apart), [*map(optimizer_steps().of, owners)]
        before, self.seen = self.seen, seen
        written = before is not None and before[0] != seen[0] and before[1] == seen[1] and not apart
        if written or (page.unset and before != seen):
            self.begin(owners, again=written)

    def begin(self, parameters: Sequence[Tensor], *, again: bool = False) -> None:
        """Take the scale of their amax, if it has none or ``again``. A collective, if they are shards."""
        page, layout = self.page.tensor, self.page.layout
        with (
            torch.inference_mode(False), torch.no_grad(),
            checkpointing.without_modes(), autograd.unnoticed_writes(page),
        ):  # fmt: skip
            amax = torch.stack([_amax_of_all(x.detach()) for x in parameters]).amax().to(page.device)
            row = page[self.index]
            scale = history.delayed_scale(amax, row[SCALE], layout.fp8_max, layout.recipe.margin)
            history.write_scale(row, scale if again else torch.where(row[history.UNSET] > 0.0, scale, row[SCALE]))
            row[history.UNSET] *= ~((amax > 0.0) & (amax <= FLT_MAX))  # as long as it is 0, the row has none


def rows_of_weights(layout: PageLayout, rows: Sequence[Row]) -> list[tuple[Row, tuple[int, ...]]]:
    """Return those ``rows`` of a page that are the state of parameters themselves, with these as positions of graph
    inputs.
    """
    if layout.group is not None and not layout.recipe.starts_from_own_amax:
        return []
    weights = [(row, uses) for row, uses in zip(rows, layout.rows, strict=True) if is_parameter(uses)]
    return [(row, tuple({use.parameter: 0 for use in uses if use.parameter is not None})) for row, uses in weights]


def _amax_of_all(parameter: Tensor) -> Tensor:
    """[] FP32: of all shards of a parameter."""
    amax, mesh = local(parameter).abs().amax().float(), mesh_of(parameter)
    return amax if mesh is None else largest_over(amax, mesh)


@dataclass(kw_only=True)
class GraphPages:
    """The pages of one graph for one set of parameters."""

    requests: Sequence[Any]  # kept alive, so that its id is not used again
    pages: list[Page]
    names: Sequence[Sequence[Sequence[RowKey]]]  # of the rows of each page: all names of each
    weights: Sequence[tuple[Row, Sequence[int]]]  # see rows_of_weights()
    phase: int  # of the policy: see Phases
    turn: int = 0  # grows with each look-up of the backend
    records: bool = False  # a call that records has asked for them
    follows: bool = True  # some rows are copies of others, for evaluation


def keep_scales(call: Checkpointed, layouts: Sequence[PageLayout], pages: Sequence[Tensor]) -> None:
    """Note the scales that a call in a checkpointed forward is about to read, for its repetition."""
    if call.kept is not None:
        with checkpointing.without_modes():
            for layout, page in zip(layouts, pages, strict=True):
                if not layout.backward:
                    first = _first_scales(call, page)
                    call.kept.noted.append((page, page[:, : history.HEADER].clone() if first is None else first))


def _first_scales(call: Checkpointed, page: Tensor) -> Tensor | None:
    """[rows, 4]: what the call that this one repeats has read."""
    noted = call.first.noted if call.first is not None else []
    return next((scales for other, scales in noted if other is page), None)


@contextmanager
def as_first(
    call: Checkpointed, layouts: Sequence[PageLayout], pages: Sequence[Tensor], *, records: bool
) -> Generator[list[Tensor]]:
    """The pages to run a repeated call with: those of forward with the scales that the first call read.

    Where the first call has recorded its amaxes, the pages are copies, and what is recorded again is dropped.
    """
    read, before = list(pages), list[tuple[Tensor, Tensor, Tensor]]()
    if call.first is None:
        yield read
        return
    with checkpointing.without_modes():
        for index, (layout, page) in enumerate(zip(layouts, pages, strict=True)):
            if layout.backward:
                continue
            scales = _first_scales(call, page)
            if not records or call.first.records:
                read[index] = page.clone() if scales is None else torch.cat([scales, page[:, history.HEADER :]], dim=1)
            elif scales is not None:
                before.append((page, page.clone(), scales))
                _write(page, scales)
    try:
        yield read
    finally:
        with checkpointing.without_modes():
            for page, old, scales in before:
                head = page[:, : history.HEADER]
                recorded = (page[:, history.HEADER :] != old[:, history.HEADER :]).any(1) | (head != scales).any(1)
                _write(page, torch.where(recorded.unsqueeze(1), head, old[:, : history.HEADER]))


def _write(page: Tensor, scales: Tensor) -> None:
    """Give a page other scales [rows, 4], which backwards that hold it read, too."""
    with torch.no_grad(), autograd.unnoticed_writes(page):
        page[:, : history.HEADER] = scales
