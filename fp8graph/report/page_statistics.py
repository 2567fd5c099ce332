"""Statistics as plain data for the page: one matrix, layers x steps, per tensor, copy and statistic."""

from __future__ import annotations

import array
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fp8graph.errors import ConfigError
from fp8graph.records import StatisticRecord
from fp8graph.report.page_graph import packed

Losses = Sequence[float] | Mapping[int, float]  # by step


def statistics_data(records: Iterable[StatisticRecord], losses: Losses | None) -> dict[str, Any]:
    """The steps, the layers, the loss of each step if it is known, and the matrices, as packed 32-bit floats."""
    steps: set[int] = set()
    sites: dict[str, int] = {}
    found: dict[tuple[str, str, str, bool, str], dict[tuple[int, int], float]] = {}
    for record in records:
        steps.add(record.step)
        key = record.operand, record.layout, record.recipe, record.what_if, record.stat
        row = sites.setdefault(record.site, len(sites))
        found.setdefault(key, {})[row, record.step] = record.value
    columns = {step: column for column, step in enumerate(sorted(steps))}
    return {
        "steps": list(columns),
        "sites": list(sites),
        "losses": _losses(losses),
        "planes": [
            {
                "operand": operand,
                "layout": layout,
                "recipe": recipe,
                "what_if": what_if,
                "stat": stat,
                "values": _matrix(values, columns, len(sites)),
            }
            for (operand, layout, recipe, what_if, stat), values in found.items()
        ],
    }


def _losses(losses: Losses | None) -> list[tuple[int, float]] | None:
    if losses is None:
        return None
    try:
        pairs = losses.items() if isinstance(losses, Mapping) else enumerate(losses)
        known = sorted((int(step), float(loss)) for step, loss in pairs)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"losses={type(losses).__name__}: {error}. Give one number per step, or a mapping from step to loss."
        ) from None
    return [(step, loss) for step, loss in known if math.isfinite(loss)]


def _matrix(values: Mapping[tuple[int, int], float], columns: Mapping[int, int], rows: int) -> str:
    """[layers, steps] row-major, little-endian; NaN where nothing was measured."""
    matrix = array.array("f", [math.nan]) * (rows * len(columns))
    for (row, step), value in values.items():
        finite = not math.isfinite(value) or abs(value) < 3.4e38
        matrix[row * len(columns) + columns[step]] = value if finite else math.copysign(math.inf, value)
    if sys.byteorder == "big":
        matrix.byteswap()
    return packed(matrix.tobytes())
