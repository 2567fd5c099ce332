"""Show people and dashboards what was measured on observed steps: of which layers, as records, as lines of JSON."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import json
import logging
import math
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from fp8graph.backend.policies import Schedule
from fp8graph.compat import distributed
from fp8graph.errors import ConfigError, did_you_mean
from fp8graph.ir.settings import choices
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.numerics.stats import QUANTIZED_STATISTICS, TENSOR_STATISTICS, Parts, finished
from fp8graph.passes.observe.measuring import Observed
from fp8graph.passes.observe.observation import Measured, Observation, Request
from fp8graph.recipes import RecipeLike, resolve_recipe
from fp8graph.recipes.rules import check_op
from fp8graph.records import StatisticRecord
from fp8graph.report import Report
from fp8graph.report.page import Losses
from fp8graph.report.tables import sites

_log = logging.getLogger("fp8graph")
_NAMES: Final = (*TENSOR_STATISTICS, *QUANTIZED_STATISTICS)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps that are observed: see ``Backend.observe``."""

    every: int
    start: int
    end: int | None
    call: str = "observe"  # for messages

    def __post_init__(self) -> None:
        for what, least in (("every", 1), ("start", 0), ("end", self.start)):
            value: Any = getattr(self, what)
            if what == "end" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{self.call}({what}={value!r}): expected a whole number of steps >= {least}.")

    def are_due(self, step: int) -> bool:
        """Whether ``step`` is one of them."""
        return step >= self.start and (self.end is None or step < self.end) and (step - self.start) % self.every == 0


def _tag(record: StatisticRecord) -> str:
    copy = "".join(f"/{part}" for part in (record.recipe, record.layout) if part)
    return f"{record.site}/{record.operand}_{record.stat}{copy}"


class Statistics:
    """The statistics of a backend's observed steps: iterate over them (:class:`~fp8graph.records.StatisticRecord`).

    Made by ``backend.observe()``. Reading waits for the GPU. The micro-batches of a step are merged; call
    :meth:`reduce` on all ranks to merge theirs, too.
    """

    def __init__(
        self,
        observation: Observation,
        request: Request,
        schedule: Schedule,
        names: Collection[str],
        report: Callable[[], Report],
    ) -> None:
        self._observation, self._request, self._schedule = observation, request, schedule
        self._names, self._report = names, report

    def __iter__(self) -> Iterator[StatisticRecord]:
        return records(self._observation.found(), self._request, self._names)

    def to_jsonl(self, path: str | Path) -> None:
        """Write one JSON object per line. What is no finite number (the sqnr of an exact copy) becomes ``null``."""
        Path(path).write_text("".join(map(json_line, self)), encoding="utf-8")

    def to_html(self, path: str | Path, *, losses: Losses | None = None) -> None:
        """Write the report's page (``report.to_html``) with these statistics as heat maps and curves.

        Args:
            losses: by step, or a list that begins with step 0; drawn above the statistics.
        """
        self._report().to_html(path, statistics=self, losses=losses)

    def to_tensorboard(self, writer: Any) -> None:
        """Give every number to a ``torch.utils.tensorboard.SummaryWriter``: "layer/input_underflows%/tensorwise"."""
        for record in self:
            writer.add_scalar(_tag(record), record.value, record.step)

    def to_wandb(self, run: Any = None) -> None:
        """Log every number to a run of Weights & Biases; None: the run that ``wandb.init()`` began.

        Raises:
            ConfigError: wandb is not installed, or there is no run.
        """
        if run is None:
            try:
                run = importlib.import_module("wandb").run
            except ImportError as error:
                raise ConfigError("to_wandb() needs wandb: pip install wandb, or give it a run") from error
            if run is None:
                raise ConfigError("to_wandb() found no run: call wandb.init() first, or give it a run")
        steps: dict[int, dict[str, float]] = {}
        for record in self:
            steps.setdefault(record.step, {})[_tag(record)] = record.value
        for step, values in sorted(steps.items()):
            run.log({**values, "fp8graph/step": step})

    def reduce(self, group: Any = None) -> None:
        """Merge what the ranks of a process group (None: all) measured in steps that are over. All of them call it.

        Weights are not merged: each rank has those that it began with.
        """
        self._observation.reduce(group)

    def step(self) -> None:
        """Count a step. Only needed where no optimizer of torch makes one: for inference, or one's own update."""
        self._schedule.count()

    def stop(self) -> None:
        """Observe no more steps. What was measured stays."""
        self._observation.stop(self._request)


def observe(
    observation: Observation,
    schedule: Schedule,
    steps: Steps,
    stats: str | Sequence[str],
    layers: str | Sequence[str],
    what_if: Sequence[RecipeLike],
    *,
    report: Callable[[], Report],
    known_layers: Callable[[], Collection[str]],
    owner: object,
    path: str | Path | None = None,
) -> Statistics:
    """See ``Backend.observe``.

    Args:
        report: what the backend reports now.
        known_layers: the layers of all graphs.
        path: of a file to append to.
        owner: the backend. What is left to write is written when it is gone, or when Python exits.
    """
    names = _NAMES if stats == "all" else texts("observe", "stats", stats)
    for name in names:
        if name not in _NAMES:
            raise ConfigError(f"observe() knows no statistic {name!r}{choices('Statistics', name, _NAMES)}")
    if isinstance(what_if, str) or not isinstance(what_if, Sequence):
        raise ConfigError(f"observe(what_if={what_if!r}): expected a list of recipes.")
    recipes = [recipe for one in what_if if (recipe := resolve_recipe(one)) is not None]
    for recipe in recipes:
        check_op("linear", recipe)
        if recipe.quantizer("input").scaling in [name for name, kind in SCALINGS.items() if kind.has_state]:
            raise ConfigError(
                f"observe(what_if=[{recipe.name!r}]): its scales come from earlier steps, which it has not seen."
            )
    copies = bool({*QUANTIZED_STATISTICS} & {*names})
    asked = Observed(
        layers=texts("observe", "layers", layers),
        copies=copies,
        block_size=32 if "max_blockwise_dynamic_range" in names else 0,
        what_if=tuple(recipes) if copies else (),
    )
    if path is not None and not isinstance(path, str | Path):
        raise ConfigError(f"observe(to_jsonl={path!r}): expected a path.")
    schedule.counts = True
    check = UnmatchedLayers("observe", asked.layers, known_layers)
    file = JsonLines(Path(path), names) if path is not None else None

    def when_over(now: int) -> None:
        check()
        if file is not None:
            file.write(observation, request, now)

    request = observation.start(asked, steps.are_due, schedule.step_of_call, when_over, keeps=file is None)
    if file is not None:
        weakref.finalize(owner, file.write, observation, request, None)
    return Statistics(observation, request, schedule, names, report)


def records(found: Mapping[Measured, Parts], request: Request, names: Collection[str]) -> Iterator[StatisticRecord]:
    """The statistics called ``names`` of whatever was measured for one reader."""
    for key, parts in found.items():
        if not request.takes(key):
            continue
        if key.layout:
            tensor = found.get(dataclasses.replace(key, layout="", recipe="", what_if=False))
            values = finished(tensor, parts) if tensor is not None else {}
            values = {name: value for name, value in values.items() if name in QUANTIZED_STATISTICS}
        else:
            values = finished(parts)
        of = {name: value for name, value in dataclasses.asdict(key).items() if name != "group"}
        for stat, value in values.items():
            if stat in names:
                yield StatisticRecord(**of, stat=stat, value=value)


def json_line(record: StatisticRecord) -> str:
    """One record as a line of JSON. What is no finite number becomes ``null``."""
    values = dataclasses.asdict(record)
    values["value"] = record.value if math.isfinite(record.value) else None
    return json.dumps(values) + "\n"


class JsonLines:
    """A file to which each observed step is appended when the next one begins.

    Writing waits for the device, so it waits once per observed step. Steps that were written are not kept in memory.
    With several ranks each writes a file of its own: "statistics.rank1.jsonl".

    Raises:
        ConfigError: no file can be written there. (The first step to write may be hours away.)
    """

    def __init__(self, path: Path, names: Collection[str]) -> None:
        self._path, self._names = path, names
        self._rank: int | None = None  # of several; remembered, since the process group may be gone at exit
        if why := "it is a folder" if path.is_dir() else _obstacle(self._own_path()):
            raise ConfigError(f"observe(to_jsonl={str(path)!r}): {why}. Give the path of a file to append to.")

    def write(self, observation: Observation, request: Request, now: int | None) -> None:
        """Append the steps that are over; ``now``: the step that is not (None: all of them are)."""
        new = observation.unread(request, now)
        lines = [*map(json_line, records(observation.found(new), request, self._names))]
        observation.forget_steps(new)
        if not lines:
            return
        path = self._own_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(lines)

    def _own_path(self) -> Path:
        if self._rank is None and distributed.number_of_ranks(None) > 1:
            self._rank = dist.get_rank()
        own = "" if self._rank is None else f".rank{self._rank}"
        return self._path.with_name(f"{self._path.stem}{own}{self._path.suffix}")


def _obstacle(path: Path) -> str:
    """Return why no file can be written at ``path``, whose folders may be missing; "" if one can."""
    if path.is_dir():
        return f"{path} is a folder"
    found = next(place for place in (path, *path.parents) if place.exists())
    if found != path and not found.is_dir():
        return f"{found} is a file, not a folder"
    return "" if os.access(found, os.W_OK) else f"{found} cannot be written"


def texts(call: str, name: str, value: str | Sequence[str]) -> tuple[str, ...]:
    """The strings of an argument that is one string or a list of them."""
    given: Any = (value,) if isinstance(value, str) else value
    if not isinstance(given, Sequence) or not given or not all(isinstance(text, str) for text in given):
        raise ConfigError(f"{call}({name}={value!r}): expected a string or a list of strings.")
    return tuple(given)


def check_globs(call: str, patterns: Sequence[str], known: Collection[str]) -> None:
    """Raise for a glob that matches none of the layers of the bound models.

    Args:
        known: the names of all their modules; none if no model is bound.

    Raises:
        ConfigError: with the globs or names that may have been meant.
    """
    names = sorted(filter(None, known))
    for pattern in patterns if names else ():
        if not fnmatch.filter(known, pattern):
            anywhere = f"*.{pattern}"
            hint = did_you_mean(pattern, [anywhere] if fnmatch.filter(names, anywhere) else names)
            raise ConfigError(
                f"{call}(layers=[{pattern!r}]) matches no layer of the model.{hint} Its modules: {sites(names)}."
            )


class UnmatchedLayers:
    """Says once, after the first observed step, which globs match no layer.

    Args:
        known: the layers of all graphs.
    """

    def __init__(self, call: str, patterns: Sequence[str], known: Callable[[], Collection[str]]) -> None:
        self._call, self._patterns, self._known = call, patterns, known
        self._checked = False

    def __call__(self) -> None:
        if self._checked:
            return
        self._checked = True
        known = sorted(self._known())
        for pattern in self._patterns:
            if not fnmatch.filter(known, pattern):
                _log.warning(
                    "%s(layers=[%r]) matches no layer, so nothing is measured for it. Layers: %s.",
                    self._call, pattern, sites(known) or "none",
                )  # fmt: skip
