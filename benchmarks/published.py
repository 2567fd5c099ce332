"""Which run each published figure comes from: a row is of one run, which has all that it is compared with.

A run is named by its file. A run of a changed tree is never published: no commit reproduces it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

Line = Mapping[str, Any]

BF16: Final = "bf16"
TENSORWISE: Final = "tensorwise"
SAVING: Final = "tensorwise, save memory"
TORCHAO: Final = "torchao tensorwise"
CHOSEN: Final = "tensorwise, where it pays"
GRAPHS: Final = ", CUDA graphs"
LLAMA: Final = "llama-3-8b"  # the model of rows that name none
# What tells the cases of a section apart. Contenders are compared within a case.
CASES: Final[Mapping[str, tuple[str, ...]]] = {
    "linears": (),
    "layers": (),
    "table": ("model",),
    "decode": ("batch", "cuda_graphs"),
    "smallest": ("tokens", "hidden"),
    "sweep": ("tokens", "inputs", "outputs"),
}
LIMIT: Final = "GEMMs alone"  # how the lines begin that only R is made of
NO_NUMBER: Final = frozenset({"failed", "stopped", "skipped", "section_s"})


@dataclass(frozen=True, kw_only=True)
class Run:
    """One file of lines, and the machine that they were measured on."""

    file: str
    machine: Line
    lines: Sequence[Line]

    @property
    def clean(self) -> bool:
        """Return whether a commit has the code that ran."""
        commit = self.machine.get("commit") or ""
        return bool(commit) and not commit.endswith("-dirty")

    @property
    def gpu(self) -> str | None:
        return self.machine.get("gpu")

    def of(self, section: str) -> list[Line]:
        """Return the lines of ``section`` that hold numbers."""
        return [line for line in self.lines if line["section"] == section and not NO_NUMBER & line.keys()]


@dataclass(frozen=True, kw_only=True)
class Row:
    """The measurement of one contender by one run, beside bf16 and torchao of the same run and case."""

    run: Run
    case: tuple[Any, ...]
    contender: str
    line: Line
    bf16: Line | None
    torchao: Line | None

    @property
    def times_bf16(self) -> float | None:
        return times(self.line, self.bf16)

    @property
    def times_torchao(self) -> float | None:
        return times(self.line, self.torchao)


def pace(line: Line | None) -> float | None:
    """Return tokens per second, or calls per second by wall time; None: neither was measured."""
    if not line:
        return None
    return line.get("tokens_per_s") or (1e3 / line["wall_ms"] if line.get("wall_ms") else None)


def times(line: Line, other: Line | None) -> float | None:
    """Return how many times as fast as ``other``: the ratio of the two medians that a row prints."""
    own, theirs = pace(line), pace(other)
    return own / theirs if own and theirs else None


def base_of(contender: str) -> str:
    """Return the contender of plain torch.compile to compare with: with CUDA graphs if ``contender`` has them."""
    return BF16 + GRAPHS if contender.endswith(GRAPHS) else BF16


def load(folder: Path) -> list[Run]:
    """Read the runs in ``folder``, oldest first; tiny runs are left out, and so are lines that were cut off."""
    runs: list[Run] = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = list(_lines(path))
        if lines and lines[0]["section"] == "run" and not lines[0]["tiny"]:
            runs.append(Run(file=path.name, machine=lines[0]["machine"], lines=lines[1:]))
    return runs


def load_records(folder: Path) -> list[tuple[Run, str]]:
    """Read the records in ``folder``, each with its command; tiny ones are left out."""
    records: list[tuple[Run, str]] = []
    for path in sorted(folder.glob("*.json")):
        written = json.loads(path.read_text(encoding="utf-8"))
        if written.get("tiny"):
            continue
        lines = [{**row, "section": "table"} for row in written["rows"]]
        run = Run(file=f"records/{path.name}", machine=written["machine"], lines=_with_models(lines))
        records.append((run, written["command"]))
    return records


def _lines(path: Path) -> Iterator[Line]:
    lines: list[Line] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:  # the run was killed while it wrote
            continue
    for line in _with_models(lines):
        yield from _by_contender(line) if line["section"] == "smallest" else (line,)


def _with_models(lines: Iterable[Line]) -> list[Line]:
    """Name the model of each line of ``table``: a profile is of the model of its contender's row."""
    model, named = LLAMA, list[Line]()
    for line in lines:
        if line["section"] == "table":
            model = line.get("model") or (model if "profile" in line else LLAMA)
            line = {**line, "model": model}
        named.append(line)
    return named


def _by_contender(line: Line) -> Iterator[Line]:
    """Yield a line per contender; until November 27, 2026 one line held both, and another the narrowest layer."""
    if "narrowest" in line:
        return
    if not isinstance(wall := line.get("wall_ms"), Mapping):
        yield line
        return
    for name, ms in wall.items():
        case = {key: line[key] for key in ("section", "hidden", "tokens")}
        predicted = {"predicted": line["predicted"]} if name != BF16 else {}
        yield {**case, "contender": name, "wall_ms": ms, "profile": line["profiles"].get(name), **predicted}


def measured(run: Run, section: str) -> dict[tuple[tuple[Any, ...], str], Line]:
    """Map (case, contender) to all that ``run`` measured of it, as one line; without a time it is left out."""
    joined: dict[tuple[tuple[Any, ...], str], dict[str, Any]] = {}
    for line in run.of(section):
        if not line.get("contender", LIMIT).startswith(LIMIT):
            case = tuple(line.get(key) for key in CASES[section])
            values = {key: value for key, value in line.items() if value is not None}
            joined.setdefault((case, line["contender"]), {}).update(values)
    return {key: line for key, line in joined.items() if pace(line)}


def comparable(runs: Iterable[Run], section: str) -> list[Run]:
    """Return the clean runs of a GPU that have bf16 in ``section``, on the GPU and torch of the last of them."""
    with_bf16 = [run for run in runs if run.clean and run.gpu and any(n == BF16 for _, n in measured(run, section))]
    return [run for run in with_bf16 if _where(run) == _where(with_bf16[-1])]


def _where(run: Run) -> tuple[Any, ...]:
    return run.gpu, run.machine.get("torch")


def latest(runs: Iterable[Run], section: str, *needed: str, case: tuple[Any, ...] | None = None) -> Run | None:
    """Return the last comparable run that has all of ``needed`` in one case: in ``case``, if that is given."""
    for run in reversed(comparable(runs, section)):
        keys = measured(run, section).keys()
        cases = {of for of, _ in keys} if case is None else {case}
        if any(all((of, name) in keys for name in needed) for of in cases):
            return run
    return None


def rows(runs: Sequence[Run], section: str) -> dict[str, list[Row]]:
    """Map each file to the rows of ``section`` that are published from it, the last run first.

    Each contender's run is the last that has it beside bf16 and torchao, or, where none has all three, beside bf16.
    bf16 and torchao of a run stand beside each of its contenders.
    """
    candidates = {run.file: (run, measured(run, section)) for run in comparable(runs, section)}
    chosen: dict[tuple[tuple[Any, ...], str], tuple[bool, str]] = {}
    for file, (_, lines) in candidates.items():
        for case, name in lines:
            if (case, base_of(name)) in lines:
                rank = (case, TORCHAO) in lines, file
                chosen[case, name] = max(chosen.get((case, name), rank), rank)
    keys: dict[str, set[tuple[tuple[Any, ...], str]]] = {}
    for (case, name), (_, file) in chosen.items():
        if name != base_of(name):
            beside = {(case, base_of(name)), (case, TORCHAO)}
            keys.setdefault(file, set()).update({(case, name)} | beside & candidates[file][1].keys())
    if chosen and not keys:  # bf16 alone
        keys = {file: {key} for key, (_, file) in chosen.items()}
    return {
        file: [_row(candidates[file][0], candidates[file][1], *key) for key in candidates[file][1] if key in keys[file]]
        for file in sorted(keys, reverse=True)
    }


def _row(run: Run, lines: Mapping[tuple[tuple[Any, ...], str], Line], case: tuple[Any, ...], name: str) -> Row:
    return Row(
        run=run, case=case, contender=name, line=lines[case, name], bf16=lines.get((case, base_of(name))),
        torchao=lines.get((case, TORCHAO)),
    )  # fmt: skip


def all_rows(run: Run, section: str) -> list[Row]:
    """Return every contender of ``section`` in one run."""
    lines = measured(run, section)
    return [_row(run, lines, *key) for key in lines]


def whole_model(runs: Iterable[Run]) -> list[Row]:
    """Return README's rows: Llama-3-8B in the last clean run that has bf16, tensorwise and torchao."""
    run = latest(runs, "table", BF16, TENSORWISE, TORCHAO, case=(LLAMA,))
    return [row for row in all_rows(run, "table") if row.case == (LLAMA,)] if run else []


def last_with(runs: Iterable[Run], section: str) -> Run | None:
    """Return the last clean run that has numbers of ``section``, which compares nothing."""
    return next((run for run in reversed(list(runs)) if run.clean and run.of(section)), None)


def changed_trees(runs: Iterable[Run]) -> list[str]:
    """Return the files of the runs that are not published."""
    return [run.file for run in runs if not run.clean]


def bounds(run: Run, section: str) -> dict[str, Line]:
    """Return R's line per scaling: how much faster than in bf16 the GEMMs of the section are alone."""
    return {line["scaling"]: line for line in run.of(section) if "R" in line}
