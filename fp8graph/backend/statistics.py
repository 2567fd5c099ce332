"""What was measured on observed steps, for people and dashboards."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fp8graph.backend.observed_layers import UnmatchedLayers, texts
from fp8graph.backend.policies import Schedule
from fp8graph.backend.statistic_records import JsonLines, json_line, records
from fp8graph.errors import ConfigError
from fp8graph.ir.observed import Observed
from fp8graph.ir.settings import choices
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.numerics.stats import QUANTIZED_STATISTICS, TENSOR_STATISTICS
from fp8graph.recipes import RecipeLike, resolve_recipe
from fp8graph.recipes.rules import check_op
from fp8graph.records import StatisticRecord
from fp8graph.report import Report
from fp8graph.report.page import Losses
from fp8graph.runtime.observation import Observation, Request

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
