"""Reduce amaxes over ranks: one all-reduce (MAX) of one packed tensor after each step, for all graphs of a backend.

With several ranks a graph only stages its amaxes: slot 0 of each history (``numerics/history.py``) keeps the largest
of the step. When the step is over, they are committed: reduced over the ranks and then recorded in scales and
histories. A step is over when an optimizer steps, or at the latest when the next forward begins after a backward. The
amaxes of forward and backward, of all layers and graphs and of weights are sent together.

Ranks need not have run the same layers or graphs. Amaxes are reduced by the names of their tensors, in an order that
all ranks agreed on. A rank on which a tensor did not occur sends 0; even if it never occurred there, the rank keeps its
state, for a layer that it may run later (unless the recipe has functions of the user, which are not sent). Histories
and scales are therefore the same on all ranks, if layers have names of their own (``backend.bind``). The packed tensor
begins with a number that says whether some rank has a name that is not in that order yet; if so, all ranks exchange
their names.

All ranks of the group must reach each commit: they run forward, backward and ``optimizer.step()`` in the same order.
One that runs a forward and backward more than the others meets them at the wrong commit, and amaxes of different steps
would be mixed without a word. So each rank sends the number of its step, too, twice: MAX over n and over -n gives the
largest and the smallest number. If they differ, all ranks raise, since all have the same numbers. The same is sent of
its loaded states, and of its backends.

These numbers are read together. Reading them waits for the GPU, so after the first steps they are read one step
later, when they have long been copied: amaxes of two steps are then mixed once before the error. On a CPU, and in the
first steps, when most such mistakes show, nothing is recorded.

A rank that is not at a commit may be in a collective of the trainer, which waits for the others. So commits have a
process group of their own (``rank_groups.Meeting``), and all of it have the same size: ranks that miss each other wait,
until the timeout, and those at a commit raise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8graph.compat import distributed, ops
from fp8graph.errors import StateError
from fp8graph.ir import collectives
from fp8graph.numerics import history
from fp8graph.passes.connect_scales import ONE_SCALE, PageLayout
from fp8graph.recipes import DelayedScaling, has_code
from fp8graph.records import CollectiveRecord
from fp8graph.runtime.contents import sent_to_host
from fp8graph.runtime.rank_groups import Meeting


class Marks(NamedTuple):
    """The numbers that must be the same on all ranks at a commit."""

    step: int
    loads: int  # states that were loaded so far
    lane: int  # which of the backends that reduce over these ranks


SYNCHRONOUS: Final = 16  # commits after which the numbers before the amaxes are read one step later
HEAD: Final = 1 + 2 * len(Marks._fields)  # these: whether there are new names; each mark's largest, minus its least
_APART: Final = (
    "Ranks that train on their own need a group of their own, fp8graph.autocast(amax_reduction_group=...), or "
    "DelayedScaling(reduce_amax=False)."
)
_LARGEST: Final = 1 << 24  # FP32 has all integers below


@dataclass(frozen=True, kw_only=True)
class StagedPage:
    """A page whose amaxes are to be reduced."""

    tensor: Tensor  # FP32 [rows, 4 + length]
    layout: PageLayout
    names: Sequence[tuple[str, ...]]  # names of each row: a tensor that is quantized for several layers has several


@dataclass
class Reduction:
    """The commits of one group of ranks."""

    group: str
    device: torch.device  # names of the tensors that are reduced
    earlier: Callable[[str, PageLayout], tuple[Tensor, Tensor] | None]  # scale and history for a new row, by its name
    order: dict[str, int] = field(default_factory=dict[str, int])  # name -> place in the packed tensor, after the head
    absent: dict[str, StagedPage] = field(default_factory=dict[str, StagedPage])  # tensors of other ranks
    commits: int = 0
    ranks: int = field(init=False)  # remembered: the group may be gone when a report is asked for
    _head: tuple[torch.Event, Tensor, Marks] | None = None  # of the last commit, on its way to the CPU, and its marks
    _meeting: Meeting | None = None  # where the ranks meet: from the first commit on
    _parent: Any = None  # the process group whose ranks meet there
    _lane: int = 0  # of this in the meeting
    _last_places: tuple[Any, Tensor, Tensor] | None = None  # the last result of ``_places``, and its arguments

    def __post_init__(self) -> None:
        self.ranks = len(collectives.ranks_of(self.group))

    def commit(self, pages: Sequence[StagedPage], step: int = 0, loads: int = 0) -> None:
        """Reduce the amaxes staged in ``pages`` over the ranks, and record them. This is a collective.

        Args:
            step: twice the number of the optimizer's steps so far, and one more at the end of one.
            loads: how many states were loaded so far.

        Raises:
            StateError: the ranks are at different steps, or some of them do not come.
        """
        with self._in_time(step):
            local, pages, meeting = pages, [*pages, *self.absent.values()], self._meet()
            marks = Marks(step % _LARGEST, loads, self._lane)
            if self._head is not None:
                (copied, head, before), self._head = self._head, None
                copied.synchronize()  # those of the previous step: they have long been copied
                if self._news(head, before):
                    pages = self._agree(local, meeting)
            packed = self._reduced(pages, marks, meeting)
            if packed.device.type == "cpu" or self.commits < SYNCHRONOUS:
                if self._news(packed[:HEAD], marks):
                    pages = self._agree(local, meeting)
                    packed = self._reduced(pages, marks, meeting)
            else:
                self._head = *sent_to_host(packed[:HEAD]), marks
        self.commits += 1
        self._record(pages, packed)

    def _meet(self) -> Meeting:
        parent = distributed.process_group(self.group)
        if self._meeting is None or parent is not self._parent:  # that of the last commits was destroyed
            self._parent, self._meeting = parent, Meeting.of(parent, self.device)
            self._lane = self._meeting.enter()
            self._meeting.size = max(self._meeting.size, HEAD + len(self.order))
        return self._meeting

    @contextlib.contextmanager
    def _in_time(self, step: int) -> Generator[None]:
        """A block that raises a StateError if the other ranks let it wait until the timeout."""
        try:
            yield
        except RuntimeError as error:  # of gloo, or of the store
            if not any(text in str(error).lower() for text in ("timed out", "timeout")):
                raise
            raise StateError(
                f"rank {dist.get_rank()} waited {_in_words(step)} for the other ranks of {self.ranks}, to reduce the "
                f"amaxes of delayed scaling, and not all of them came in time: {error}. All ranks have to call "
                "forward, backward and optimizer.step() equally often and in the same order, also outside of "
                "DistributedDataParallel, and set_policy() and load_state_dict() before the same step. If they do, one "
                f"of them hangs. {_APART}"
            ) from error

    def forget(self) -> None:
        """Forget tensors of other ranks and agree on all names again, after another state was loaded on all ranks."""
        self.order, self.absent, self.commits, self._head, self._last_places = {}, {}, 0, None, None

    def record(self) -> CollectiveRecord:
        """Return the collective of a commit, for the report."""
        count = max(HEAD + len(self.order), 0 if self._meeting is None else self._meeting.size)
        return CollectiveRecord(
            kind="all_reduce",
            direction="step",
            tensor="amaxes",
            dtype="float32",
            shape=(count,),
            ranks=self.ranks,
            bytes_sent=collectives.bytes_sent("all_reduce", 4 * count, self.ranks),
            reason=ONE_SCALE,
        )

    def _news(self, head: Tensor, marks: Marks) -> bool:
        """Return whether some rank has a name that is not in the order. Raises if not all ranks have ``marks``, like
        this.
        """
        news, *numbers = (int(number) for number in head.tolist())
        largest, least = Marks(*numbers[::2]), Marks(*(-number for number in numbers[1::2]))
        rank = dist.get_rank()
        if largest.lane != least.lane:
            raise StateError(
                f"the ranks are out of step: rank {rank} reduced the amaxes of delayed scaling of its {marks.lane}. "
                f"backend, but among {self.ranks} ranks some that of their {least.lane}. and some that of their "
                f"{largest.lane}. All ranks have to train the models of several backends in the same order. {_APART}"
            )
        if largest.loads != least.loads:
            raise StateError(
                f"the ranks have different scaling states: rank {rank} has loaded {marks.loads}, but among "
                f"{self.ranks} ranks some have loaded {least.loads} and some {largest.loads}. All of them have to call "
                f"load_state_dict() with the same state, before the same step. {_APART}"
            )
        if largest.step != least.step:
            raise StateError(
                f"the ranks are out of step: rank {rank} reduced the amaxes of delayed scaling "
                f"{_in_words(marks.step)}, but the first of {self.ranks} ranks {_in_words(least.step)} and the last "
                f"{_in_words(largest.step)}. Amaxes of different steps must not be mixed. All ranks have to call "
                f"forward, backward and optimizer.step() equally often and in the same order. {_APART}"
            )
        return bool(news)

    def _reduced(self, pages: Sequence[StagedPage], marks: Marks, meeting: Meeting) -> Tensor:
        """Return the packed tensor, [at least 7 + names that all ranks know]: see ``HEAD``, and the amaxes."""
        names = [name for page in pages for row in page.names for name in row]
        device = self.device
        packed = torch.zeros(meeting.size, device=device)
        ordered = [name for name in names if name in self.order]
        for place, number in enumerate([len(ordered) < len(names), *(n for mark in marks for n in (mark, -mark))]):
            packed[place] = number  # no copy from the host: it would wait for the device
        if ordered:
            staged = history.without_nan(torch.cat([page.tensor[:, history.HEADER].to(device) for page in pages]))
            rows, places = self._places(pages, device)
            packed.index_copy_(0, places, staged[rows])
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=meeting.group)
        return packed

    def _record(self, pages: Sequence[StagedPage], packed: Tensor) -> None:
        if not pages:
            return
        rows, places = self._places(pages, packed.device)
        amaxes = packed.new_zeros(sum(len(page.names) for page in pages))
        amaxes.scatter_reduce_(0, rows, packed[places], "amax")
        unknown = torch.ones_like(amaxes, dtype=torch.bool).index_fill_(0, rows, False)
        lengths = [len(page.names) for page in pages]
        alike: dict[Any, list[tuple[Tensor, Tensor, Tensor]]] = {}
        for page, part, wait in zip(pages, amaxes.split(lengths), unknown.split(lengths), strict=True):
            key = page.layout.recipe, page.layout.fp8_max, page.tensor.device
            alike.setdefault(key, []).append((page.tensor, part, wait))
        for (recipe, fp8_max, device), several in alike.items():
            tensors, parts, waits = (list(each) for each in zip(*several, strict=True))
            joined, amax = torch.cat(tensors), torch.cat(parts).to(device)
            # clear amaxes that were committed or overflowed; names that some rank does not know yet wait
            joined[:, history.HEADER].masked_fill_(~torch.cat(waits).to(device), 0.0)
            settings = (fp8_max, recipe.margin, recipe.amax_compute_algo, recipe.scaling_factor_compute_algo, recipe)
            new = history.updated_page(joined, [amax], *settings, packed=True)
            ops.copy_each(tensors, new.split([len(tensor) for tensor in tensors]))

    def _absent_page(self, name: str, recipe: DelayedScaling, fp8_max: float) -> StagedPage:
        layout = PageLayout(
            recipe=recipe, fp8_max=fp8_max, backward=False, device=self.device, rows=((),), group=self.group
        )
        page = history.new_page(recipe.amax_history_len, 1, self.device)
        if (state := self.earlier(name, layout)) is not None:
            history.write_row(page, 0, *state)
        return StagedPage(tensor=page, layout=layout, names=[(name,)])

    def _places(self, pages: Sequence[StagedPage], device: torch.device) -> tuple[Tensor, Tensor]:
        """Two [names in the order] tensors: the row among those of all pages, and the place in the packed tensor."""
        key = len(self.order), device, *(page.names for page in pages)  # not by id: ids of freed objects are used again
        if self._last_places is not None and self._last_places[0] == key:  # fast where they are the same objects
            return self._last_places[1:]
        rows: list[int] = []
        places: list[int] = []
        for row, names in enumerate(names for page in pages for names in page.names):
            for name in names:
                if name in self.order:
                    rows.append(row)
                    places.append(HEAD + self.order[name])
        self._last_places = key, torch.tensor(rows, device=device), torch.tensor(places, device=device)
        return self._last_places[1:]

    def _agree(self, pages: Sequence[StagedPage], meeting: Meeting) -> list[StagedPage]:
        """Put the names of all ranks into one order. Returns ``pages`` and the absent ones. This is a collective."""
        layouts = {name: page.layout for page in pages for row in page.names for name in row}
        # a function may have no name by which another process finds it
        own = {name: None if has_code(x.recipe) else (x.recipe, x.fp8_max) for name, x in layouts.items()}
        of_ranks: list[Any] = [None] * self.ranks
        dist.all_gather_object(of_ranks, own, group=meeting.group)
        kinds: dict[str, Any] = {name: kind for names in of_ranks for name, kind in names.items()}
        for name in sorted(kinds.keys() - self.order.keys()):
            self.order[name] = len(self.order)
            if name not in own and kinds[name] is not None:
                recipe, fp8_max = kinds[name]
                self.absent[name] = self._absent_page(name, recipe, fp8_max)
        meeting.size = max(meeting.size, HEAD + len(self.order))
        return [*pages, *self.absent.values()]


def _in_words(step: int) -> str:
    steps, ended = divmod(step, 2)
    return f"at the end of step {steps}" if ended else f"in the middle of step {steps + 1}"
