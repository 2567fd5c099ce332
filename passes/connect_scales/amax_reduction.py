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
largest and the smallest number. If they differ, all ranks raise, since all have the same numbers.

These three numbers are read together. Reading them waits for the GPU, so after the first steps they are read one step
later, when they have long been copied: amaxes of two steps are then mixed once before the error. On a CPU, and in the
first steps, when most such mistakes show, nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

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

SYNCHRONOUS: Final = 16  # commits after which the numbers before the amaxes are read one step later
HEAD: Final = 3  # these numbers: whether there are new names, the largest step, minus the smallest
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
    take_loaded: Callable[[str, float], tuple[Tensor, Tensor] | None]  # scale, history of a name under an FP8 maximum
    order: dict[str, int] = field(default_factory=dict[str, int])  # name -> place in the packed tensor, after the head
    absent: dict[str, StagedPage] = field(default_factory=dict[str, StagedPage])  # tensors of other ranks
    commits: int = 0
    ranks: int = field(init=False)  # remembered: the group may be gone when a report is asked for
    _head: tuple[torch.Event, Tensor, int] | None = None  # of the last commit, on its way to the CPU, and its step
    _found: tuple[Any, Tensor, Tensor] | None = None  # the last result of ``_places``, and its arguments

    def __post_init__(self) -> None:
        self.ranks = len(collectives.ranks_of(self.group))

    def commit(self, pages: Sequence[StagedPage], step: int = 0) -> None:
        """Reduce the amaxes staged in ``pages`` over the ranks, and record them. This is a collective.

        Args:
            step: twice the number of the optimizer's steps so far, and one more at the end of one.

        Raises:
            StateError: the ranks are at different steps.
        """
        local, pages, step = pages, [*pages, *self.absent.values()], step % _LARGEST
        if self._head is not None:
            (copied, head, before), self._head = self._head, None
            copied.synchronize()  # those of the previous step: they have long been copied
            if self._news(head, before):
                pages = self._agree(local)
        packed = self._reduced(pages, step)
        if packed.device.type == "cpu" or self.commits < SYNCHRONOUS:
            if self._news(packed[:HEAD], step):
                pages = self._agree(local)
                packed = self._reduced(pages, step)
        else:
            self._head = *sent_to_host(packed[:HEAD]), step
        self.commits += 1
        self._record(pages, packed)

    def forget(self) -> None:
        """Forget tensors of other ranks and agree on all names again, after another state was loaded on all ranks."""
        self.order, self.absent, self.commits, self._head, self._found = {}, {}, 0, None, None

    def record(self) -> CollectiveRecord:
        """The collective of a commit, for the report."""
        count = HEAD + len(self.order)
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

    def _news(self, head: Tensor, step: int) -> bool:
        """Whether some rank has a name that is not in the order. Raises if not all ranks are at ``step``, like this."""
        news, last, first = (int(number) for number in head.tolist())
        if last != -first:
            raise StateError(
                f"the ranks are out of step: rank {dist.get_rank()} reduced the amaxes of delayed scaling "
                f"{_in_words(step)}, but the first of {self.ranks} ranks {_in_words(-first)} and the last "
                f"{_in_words(last)}. Amaxes of different steps must not be mixed. All ranks have to call forward, "
                "backward and optimizer.step() equally often and in the same order. Ranks that train on their own need "
                "a group of their own, fp8graph.autocast(amax_reduction_group=...), or "
                "DelayedScaling(reduce_amax=False)."
            )
        return bool(news)

    def _reduced(self, pages: Sequence[StagedPage], step: int) -> Tensor:
        """The packed tensor, [3 + names that all ranks know]: see ``HEAD``, and the amaxes."""
        names = [name for page in pages for row in page.names for name in row]
        device = self.device
        packed = torch.zeros(HEAD + len(self.order), device=device)
        known = [name for name in names if name in self.order]
        packed[0], packed[1], packed[2] = float(len(known) < len(names)), step, -step
        if known:
            staged = history.without_nan(torch.cat([page.tensor[:, history.HEADER].to(device) for page in pages]))
            rows, places = self._places(pages, device)
            packed.index_copy_(0, places, staged[rows])
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=distributed.process_group(self.group))
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
        if (loaded := self.take_loaded(name, fp8_max)) is not None:
            history.write_row(page, 0, *loaded)
        return StagedPage(tensor=page, layout=layout, names=[(name,)])

    def _places(self, pages: Sequence[StagedPage], device: torch.device) -> tuple[Tensor, Tensor]:
        """Two [known names] tensors: the row among those of all pages, and the place in the packed tensor."""
        key = len(self.order), device, *(page.names for page in pages)  # not by id: ids of freed objects are used again
        if self._found is not None and self._found[0] == key:  # fast where they are the same objects
            return self._found[1:]
        rows: list[int] = []
        places: list[int] = []
        for row, names in enumerate(names for page in pages for names in page.names):
            for name in names:
                if name in self.order:
                    rows.append(row)
                    places.append(HEAD + self.order[name])
        self._found = key, torch.tensor(rows, device=device), torch.tensor(places, device=device)
        return self._found[1:]

    def _agree(self, pages: Sequence[StagedPage]) -> list[StagedPage]:
        """Put the names of all ranks into one order. Returns ``pages`` and the absent ones. This is a collective."""
        group = distributed.process_group(self.group)
        layouts = {name: page.layout for page in pages for row in page.names for name in row}
        # a function may have no name by which another process finds it
        own = {name: None if has_code(x.recipe) else (x.recipe, x.fp8_max) for name, x in layouts.items()}
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, own, group=group)
        known: dict[str, Any] = {name: kind for names in found for name, kind in names.items()}
        for name in sorted(known.keys() - self.order.keys()):
            self.order[name] = len(self.order)
            if name not in own and known[name] is not None:
                recipe, fp8_max = known[name]
                self.absent[name] = self._absent_page(name, recipe, fp8_max)
        return [*pages, *self.absent.values()]


def _in_words(step: int) -> str:
    steps, ended = divmod(step, 2)
    return f"at the end of step {steps}" if ended else f"in the middle of step {steps + 1}"
