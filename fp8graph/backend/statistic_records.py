"""The records of observed steps: what a reader asked for, out of what was measured, and lines of JSON of it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch.distributed as dist

from fp8graph.compat import distributed
from fp8graph.errors import ConfigError
from fp8graph.numerics.stats import QUANTIZED_STATISTICS, Parts, finished
from fp8graph.records import StatisticRecord
from fp8graph.runtime.observation import Measured, Observation, Request


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
