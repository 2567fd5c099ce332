"""Pages of scaling state: which rows they hold, and which of them a graph takes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fp8graph.ir.extra_inputs import PageLayout
from fp8graph.recipes import DelayedScaling, OperandName
from fp8graph.runtime.state_dict import SavedRow, recipe_text, rescaled


@dataclass(frozen=True)
class RowKey:
    """The identity of a row: a tensor of a layer under a recipe. ``owner`` is the token of the layer's weight."""

    owner: int
    site: str | None  # module of a matmul without a weight ("" at the root), whose owner only says which model it is in
    use: int
    operand: OperandName
    recipe: DelayedScaling


def row_name(place: str, key: RowKey, number: int | None = None) -> str:
    """The name of a row in a state dict.

    Args:
        place: the module of a matmul, or of the bound weight.
        number: which of the matmuls with that weight, or in that module; None: as ``key`` says.
    """
    which = key.use if number is None else number
    return f"{place}{f'#{which}' if which else ''}.{key.operand}|{recipe_text(key.recipe)}"


class Tokens:
    """A number for each parameter. Unlike an id, a token is never used again.

    Args:
        gone: called with the token of a parameter that was freed.
    """

    def __init__(self, gone: Callable[[int], None]) -> None:
        self._gone = gone
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by id
        self._created = 0

    def of(self, parameter: Tensor) -> int:
        known, key, gone = self._known, id(parameter), self._gone
        reference, token = known.get(key, (None, 0))
        if reference is None or reference() is not parameter:
            self._created = new = self._created + 1

            def forget(reference: weakref.ref[Tensor]) -> None:
                if known.get(key, (None, 0))[0] is reference:  # else its heir's
                    del known[key]
                gone(new)

            known[key] = weakref.ref(parameter, forget), new
            return new
        return token

    def known(self, parameter: Tensor) -> int | None:
        """Its token; None if nothing has asked for one."""
        reference, token = self._known.get(id(parameter), (None, None))
        return token if reference is not None and reference() is parameter else None

    def alive(self) -> set[int]:
        return {token for _, token in list(self._known.values())}

    def parameters(self) -> list[tuple[int, Tensor]]:
        """The parameters that are alive, each after its token."""
        known = [(token, reference()) for reference, token in list(self._known.values())]
        return [(token, parameter) for token, parameter in known if parameter is not None]


@dataclass(eq=False)
class Page:
    tensor: Tensor  # FP32 [rows, 2 + length]
    layout: PageLayout  # of the graph that it was made for
    moved: bool = False  # another page now holds some of the rows

    def fits(self, layout: PageLayout) -> bool:
        """Whether a graph that wants ``layout`` can take it. It cannot after the model was moved to another device."""
        alike = self.layout.group == layout.group and self.tensor.device == layout.device
        return alike and self.layout.fp8_max == layout.fp8_max and self.tensor.shape[0] == len(layout.rows)

    def rows_for(self, layout: PageLayout, taken: Sequence[int]) -> Tensor:
        """A copy of the rows ``taken`` for a page of ``layout``, whose device may have other FP8 types."""
        rows = self.tensor[list(taken)].to(layout.device)
        if self.layout.fp8_max != layout.fp8_max:
            rows[:, 0] = rescaled(rows[:, 0], self.layout.fp8_max, layout.fp8_max)
            rows[:, 1] = rows[:, 0].reciprocal()
        return rows


@dataclass
class Row:
    page: Page
    index: int
    name: str  # in a state dict
    seen: Any = None  # the weight that it is of, when it was last looked at: see runtime/written.py

    def saved(self) -> SavedRow:
        """A copy of its state, without the amax that a step has staged which is not over."""
        saved = SavedRow.of(self.page.tensor[self.index], self.page.layout.fp8_max)
        if self.page.layout.group is not None:
            saved.amax_history[0] = 0.0
        return saved


@dataclass
class FoundPages:
    """The pages of one graph for one set of parameters."""

    asked: Sequence[Any]  # kept alive, so that its id is not used again
    owners: Sequence[weakref.ref[Tensor]]
    pages: list[Page]
    keys: Sequence[Sequence[RowKey]] = ()  # of the rows of each page: one of the names of each
    weights: Sequence[Any] = ()  # WeightRow: the rows that are the state of parameters themselves
    turn: int = 0  # grows with each look-up of the backend

    def holds(self, owners: Sequence[Tensor]) -> bool:
        return not any(page.moved for page in self.pages) and all(
            reference() is owner for reference, owner in zip(self.owners, owners, strict=True)
        )
