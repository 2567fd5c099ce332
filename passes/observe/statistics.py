"""Show people and dashboards the statistics of observed steps: of chosen layers, as records, as lines of JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import importlib
import json
import logging
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import torch.distributed as dist

from fp8graph.compat import checkpointing, distributed
from fp8graph.errors import ConfigError, did_you_mean, expect_path, why_no_path
from fp8graph.files import obstacle, write_file
from fp8graph.ir.settings import choices
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.numerics.stats import QUANTIZED_STATISTICS, TENSOR_STATISTICS, Parts, finished
from fp8graph.passes.observe.measuring import Observed
from fp8graph.passes.observe.observation import Measured, Observation, Request
from fp8graph.recipes import Recipe, RecipeLike, resolve_recipe
from fp8graph.recipes.rules import check_op
from fp8graph.records import StatisticRecord
from fp8graph.report import GraphView, Report
from fp8graph.report.page import Losses
from fp8graph.report.tables import sites
from fp8graph.runtime.names import Names
from fp8graph.runtime.policies import Schedule
from fp8graph.runtime.stores import Services, Starter, Store

_log = logging.getLogger("fp8graph")
_NAMES: Final = (*TENSOR_STATISTICS, *QUANTIZED_STATISTICS)


@dataclass(frozen=True, kw_only=True)
class DueSteps:
    """The steps that are observed: see ``Backend.observe``."""

    every: int
    start: int
    end: int | None
    call: str  # for messages

    def __post_init__(self) -> None:
        for what, least in (("every", 1), ("start", 0), ("end", self.start)):
            value: Any = getattr(self, what)
            if what == "end" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{self.call}({what}={value!r}): expected a whole number of steps >= {least}.")

    @staticmethod
    def of(call: str, arguments: Mapping[str, Any]) -> DueSteps:
        """Return those that ``Backend.observe`` or ``Backend.guard`` was called with."""
        return DueSteps(call=call, **{name: arguments[name] for name in ("every", "start", "end")})

    def are_due(self, step: int) -> bool:
        """Return whether ``step`` is one of them."""
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
        return records(self._observation.measurements(), self._request, self._names)

    def to_jsonl(self, path: str | Path) -> None:
        """Write one JSON object per line. Numbers that are not finite (the sqnr of an exact copy) are ``null``."""
        expect_path("Statistics.to_jsonl", "path", path)
        write_file(path, "".join(map(json_line, self)), f"Statistics.to_jsonl(path={str(path)!r})")

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
        """Merge the statistics of the ranks of a process group (None: all), of steps that are over. All ranks call it.

        Weights are not merged: each rank has those that it began with.
        """
        self._observation.reduce(group)

    def step(self) -> None:
        """Count a step. Only needed where no optimizer of torch makes one: for inference, or one's own update."""
        self._schedule.count()

    def stop(self) -> None:
        """End the observation. The statistics so far stay."""
        self._observation.stop(self._request)


class Graph(Protocol):
    """A compiled graph, as a reader of statistics sees it."""

    @property
    def families(self) -> tuple[str, ...]:
        """The families of the models that it is of."""
        ...

    @property
    def views(self) -> Sequence[GraphView]:
        """The report's views of its variants."""
        ...


class Watched(Protocol):
    """The part of a backend that is watched."""

    @property
    def names(self) -> Names:
        """The names of the parameters of bound models."""
        ...

    @property
    def programs(self) -> Iterable[Graph]:
        """The graphs that are alive."""
        ...

    @property
    def report(self) -> Report:
        """The report on all graphs so far."""
        ...


class Observing(Store):
    """Starts the statistics of a backend: see ``Backend.observe``."""

    name: ClassVar = "observe"

    def __init__(self, services: Services) -> None:
        self._observation, self._schedule, self._epoch = services.store(Observation), services.schedule, services.epoch
        self._statistics: list[Statistics] = []
        self._layers: list[Layers] = []

    @property
    def started(self) -> Sequence[Statistics]:
        return self._statistics

    def check_layers(self, backend: Watched) -> None:
        for each in self._layers:
            each.check(backend.names)

    def start(self, backend: Watched, arguments: Mapping[str, Any]) -> Statistics:
        layers = Layers("observe", arguments["layers"], backend.programs)
        layers.check(backend.names)
        steps, names = DueSteps.of("observe", arguments), _names(arguments["stats"])
        recipes, to_jsonl = _recipes(arguments["what_if"]), arguments["to_jsonl"]
        copies = bool({*QUANTIZED_STATISTICS} & {*names})
        condition = Observed(
            layers=layers.patterns,
            copies=copies,
            block_size=32 if "max_blockwise_dynamic_range" in names else 0,
            what_if=tuple(recipes) if copies else (),
        )
        if to_jsonl is not None and not isinstance(to_jsonl, str | Path):
            raise ConfigError(f"observe(to_jsonl={to_jsonl!r}): expected a path.")
        file = JsonLines(Path(to_jsonl), names) if to_jsonl is not None else None

        def when_over(now: int) -> None:
            layers.warn()
            if file is not None:
                file.write(self._observation, request, now)

        request = self._observation.measure(condition, steps.are_due, when_over, keeps=file is None)
        if file is not None:  # what is left is written when the backend is gone, or when Python exits
            weakref.finalize(backend, file.write, self._observation, request, None)
        self._epoch.advance()
        reference = weakref.ref(backend)  # its statistics must not keep a backend alive

        def report() -> Report:
            if (alive := reference()) is None:
                raise ConfigError("the page is of a backend's report, and this backend is gone: keep the model alive.")
            return alive.report

        statistics = Statistics(self._observation, request, self._schedule, names, report)
        self._statistics.append(statistics)
        self._layers.append(layers)
        return statistics


class ObserveMethods(Starter):
    """The part of a backend that its users observe with."""

    @property
    def statistics(self) -> Statistics | None:
        """The statistics that the policy file, the option ``observe`` or the last call of :meth:`observe` wants."""
        return next(reversed(self.started("observe")), None)

    def observe(
        self,
        *,
        every: int = 100,
        stats: str | Sequence[str] = "all",
        layers: str | Sequence[str] = "*",
        start: int = 0,
        end: int | None = None,
        what_if: Sequence[RecipeLike] = (),
        to_jsonl: str | Path | None = None,
    ) -> Statistics:
        """Measure on some steps, from the next call on, what is in each tensor and what quantization does to it.

        A second variant of each graph is compiled for these steps; all others run the code that they ran. Further
        calls, and guards, ask for more: one variant measures for all of them, and each gets its own steps and layers.

        Args:
            every, start, end: the steps ``start``, ``start + every``, ... before ``end`` (None: no end). A step is one
                of the optimizers'.
            stats: names of statistics, or "all": see ``docs/statistics.md``.
            layers: globs of the layers' names. One that matches no layer of a bound model (:meth:`bind`,
                ``fp8graph.compile``) is an error; if no model is bound, a warning after the first observed step.
            what_if: recipes. What they would make of each tensor is measured, too.
            to_jsonl: a file to which each observed step is appended when the next one begins.

        Raises:
            ConfigError: for arguments that cannot be used.
        """
        return self.start(
            "observe", every=every, stats=stats, layers=layers, start=start, end=end, what_if=what_if, to_jsonl=to_jsonl
        )


def _names(stats: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of the statistics that a user asks for."""
    names = _NAMES if stats == "all" else texts("observe", "stats", stats)
    for name in names:
        if name not in _NAMES:
            raise ConfigError(
                f"observe(stats={stats!r:.100}) knows no statistic {name!r}{choices('Statistics', name, _NAMES)}"
            )
    return names


def _recipes(what_if: Sequence[RecipeLike]) -> list[Recipe]:
    """Return the recipes that a user wants to try out. None of them has a state."""
    if isinstance(what_if, str) or not isinstance(what_if, Sequence):
        raise ConfigError(f"observe(what_if={what_if!r}): expected a list of recipes.")
    recipes = [recipe for one in what_if if (recipe := resolve_recipe(one)) is not None]
    for recipe in recipes:
        check_op("linear", recipe)
        if recipe.quantizer("input").scaling in [name for name, kind in SCALINGS.items() if kind.has_state]:
            raise ConfigError(
                f"observe(what_if=[{recipe.name!r}]): its scales come from earlier steps, which it has not seen."
            )
    return recipes


def records(
    measurements: Mapping[Measured, Parts], request: Request, names: Collection[str]
) -> Iterator[StatisticRecord]:
    """Yield the statistics called ``names`` of whatever was measured for one reader."""
    for key, parts in measurements.items():
        if not request.takes(key):
            continue
        if key.layout:
            tensor = measurements.get(dataclasses.replace(key, layout="", recipe="", what_if=False))
            values = finished(tensor, parts) if tensor is not None else {}
            values = {name: value for name, value in values.items() if name in QUANTIZED_STATISTICS}
        else:
            values = finished(parts)
        of = {name: value for name, value in dataclasses.asdict(key).items() if name != "group"}
        for stat, value in values.items():
            if stat in names:
                yield StatisticRecord(**of, stat=stat, value=value)


def json_line(record: StatisticRecord) -> str:
    """Return one record as a line of JSON. A number that is not finite becomes ``null``."""
    values = dataclasses.asdict(record)
    values["value"] = record.value if math.isfinite(record.value) else None
    return json.dumps(values) + "\n"


class JsonLines:
    """A file to which each observed step is appended when the next one begins.

    Writing waits for the device, so it waits once per observed step. Steps that were written are not kept in memory.
    With several ranks each writes a file of its own: "statistics.rank1.jsonl".

    A step that cannot be written, as the disk is full, is lost: training goes on, and the first is a warning.

    Raises:
        ConfigError: no file can be written there. (The first step to write may be hours away.)
    """

    def __init__(self, path: Path, names: Collection[str]) -> None:
        self._path, self._names = path, names
        self._warned = False
        self._rank: int | None = None  # of several; remembered, since the process group may be gone at exit
        bad = why_no_path(str(path))
        if why := f"it {bad}" if bad else "it is a folder" if path.is_dir() else obstacle(self._own_path()):
            raise ConfigError(f"observe(to_jsonl={str(path)!r}): {why}. Give the path of a file to append to.")

    def write(self, observation: Observation, request: Request, now: int | None) -> None:
        """Append the steps that are over; ``now``: the step that is not (None: all of them are)."""
        with checkpointing.without_modes():  # a backend may be collected while torch traces another model
            new = observation.unread(request, now)
            lines = [*map(json_line, records(observation.measurements(new), request, self._names))]
        observation.forget_steps(new)
        if not lines:
            return
        path = self._own_path()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _append(path, "".join(lines).encode("utf-8"))
        except OSError as error:
            if not self._warned:
                _log.warning(
                    "observe(to_jsonl=%r): step %d cannot be written (%s): its statistics are lost. Training goes on.",
                    str(self._path), new[0], error.strerror or error,
                )  # fmt: skip
            self._warned = True

    def _own_path(self) -> Path:
        if self._rank is None and distributed.number_of_ranks(None) > 1:
            self._rank = dist.get_rank()
        own = "" if self._rank is None else f".rank{self._rank}"
        return self._path.with_name(f"{self._path.stem}{own}{self._path.suffix}")


def _append(path: Path, lines: bytes) -> None:
    """Append all of ``lines``, or none: what follows half a line could not be read."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        left = memoryview(lines)
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):  # a device has no size
                file.truncate(size)
            raise


def texts(call: str, name: str, value: str | Sequence[str]) -> tuple[str, ...]:
    """Return the strings of an argument that is one string or a list of them."""
    given: Any = (value,) if isinstance(value, str) else value
    if not isinstance(given, Sequence) or not given or not all(isinstance(text, str) for text in given):
        raise ConfigError(f"{call}({name}={value!r}): expected a string or a list of strings.")
    return tuple(given)


class Layers:
    """The layers that ``observe`` or ``guard`` is for, as globs of their names, which may match none.

    Args:
        patterns: as the user gives them.
        graphs: all of the backend's.
    """

    def __init__(self, call: str, patterns: str | Sequence[str], graphs: Iterable[Graph]) -> None:
        self._call, self._graphs = call, graphs
        self.patterns = texts(call, "layers", patterns)
        self._warned = False

    def check(self, names: Names) -> None:
        """Raise for a glob that matches no layer of the bound models, if there is one.

        Raises:
            ConfigError: with the globs or names that may have been meant.
        """
        modules = names.modules()
        for pattern in self._unmatched(modules | self._of_graphs()) if modules else ():
            fqns, anywhere = sorted(filter(None, modules | self._of_graphs())), f"*.{pattern}"
            hint = did_you_mean(pattern, [anywhere] if fnmatch.filter(fqns, anywhere) else fqns)
            raise ConfigError(
                f"{self._call}(layers=[{pattern!r}]) matches no layer of the model.{hint} Its modules: {sites(fqns)}."
            )

    def warn(self) -> None:
        """Say once, after the first observed step, which globs match no layer."""
        fqns, self._warned, warned = self._of_graphs(), True, self._warned
        for pattern in () if warned else self._unmatched(fqns):
            _log.warning(
                "%s(layers=[%r]) matches no layer, so nothing is measured for it. Layers: %s.",
                self._call, pattern, sites(sorted(fqns)) or "none",
            )  # fmt: skip

    def _of_graphs(self) -> set[str]:
        return {gemm.fqn for graph in self._graphs for view in graph.views for gemm in view.gemms}

    def _unmatched(self, fqns: Collection[str]) -> list[str]:
        return [pattern for pattern in self.patterns if not fnmatch.filter(fqns, pattern)]
