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
their names. Reading the number waits for the GPU, so after the first steps it is read one step later.

All ranks of the group must reach each commit: they run forward, backward and ``optimizer.step()`` in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from fp8graph.compat import distributed, ops
from fp8graph.ir import collectives
from fp8graph.ir.extra_inputs import PageLayout
from fp8graph.numerics import history
from fp8graph.recipes import DelayedScaling, has_code
from fp8graph.records import CollectiveRecord

SYNCHRONOUS: Final = 16  # commits after which the flag for new names is read one step later


@dataclass(frozen=True, kw_only=True)
class StagedPage:
    """A page whose amaxes are to be reduced."""

    tensor: Tensor  # FP32 [rows, 2 + length]
    layout: PageLayout
    names: Sequence[tuple[str, ...]]  # names of each row: a tensor that is quantized for several layers has several


@dataclass
class Reduction:
    """The commits of one group of ranks."""

    group: str
    device: torch.device  # names of the tensors that are reduced
    take_loaded: Callable[[str, float], tuple[Tensor, Tensor] | None]  # scale, history of a name under an FP8 maximum
    order: dict[str, int] = field(default_factory=dict[str, int])  # name -> place in the packed tensor, after the flag
    absent: dict[str, StagedPage] = field(default_factory=dict[str, StagedPage])  # tensors of other ranks
    commits: int = 0
    ranks: int = field(init=False)  # remembered: the group may be gone when a report is asked for
    _flag: tuple[Tensor, torch.cuda.Event] | None = None  # flag of the last commit, on its way to the CPU
    _found: tuple[Any, Tensor, Tensor] | None = None  # the last result of ``_places``, and its arguments

    def __post_init__(self) -> None:
        self.ranks = len(collectives.ranks_of(self.group))

    def commit(self, pages: Sequence[StagedPage]) -> None:
        """Reduce the amaxes staged in ``pages`` over the ranks, and record them. This is a collective."""
        local, pages = pages, [*pages, *self.absent.values()]
        if self._flag is not None:
            (flag, copied), self._flag = self._flag, None
            copied.synchronize()  # flag of the previous step: it has long been copied
            if flag.item():
                pages = self._agree(local)
        packed = self._reduced(pages)
        if packed.device.type == "cpu" or self.commits < SYNCHRONOUS:
            if packed[0].item():
                pages = self._agree(local)
                packed = self._reduced(pages)
        else:
            flag, copied = torch.empty((), pin_memory=True), torch.cuda.Event()
            flag.copy_(packed[0], non_blocking=True)
            copied.record()
            self._flag = flag, copied
        self.commits += 1
        self._record(pages, packed)

    def forget(self) -> None:
        """Forget tensors of other ranks and agree on all names again, after another state was loaded on all ranks."""
        self.order, self.absent, self.commits, self._flag, self._found = {}, {}, 0, None, None

    def record(self) -> CollectiveRecord:
        """The collective of a commit, for the report."""
        count = 1 + len(self.order)
        return CollectiveRecord(
            kind="all_reduce",
            direction="step",
            tensor="amaxes",
            dtype="float32",
            shape=(count,),
            ranks=self.ranks,
            bytes_sent=collectives.bytes_sent("all_reduce", 4 * count, self.ranks),
            reason="delayed scaling has one scale on all ranks",
        )

    def _reduced(self, pages: Sequence[StagedPage]) -> Tensor:
        """The packed tensor, [1 + names that all ranks know]: whether there are more names, and the amaxes."""
        names = [name for page in pages for row in page.names for name in row]
        device = self.device
        packed = torch.zeros(1 + len(self.order), device=device)
        known = [name for name in names if name in self.order]
        packed[0] = float(len(known) < len(names))
        if known:
            staged = torch.cat([page.tensor[:, history.HEADER].to(device) for page in pages])
            # NaN becomes inf, which survives any reduction: a step that overflowed on one rank is recorded on none
            staged = torch.where(staged <= torch.finfo(torch.float32).max, staged, torch.inf)
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
                    places.append(1 + self.order[name])
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
