"""Tables and pictures of a folder of results: ``python -m benchmarks.report [FOLDER] [--write]``.

FOLDER (benchmarks/results/first_hour) has one file of JSON lines per run of ``benchmarks.first_hour``. Printed: which
goals hold, every speedup, and what keeps the others back. ``--write`` puts the same between the marks in
docs/measurements.md and README.md, and the pictures beside the results. Runs with ``--tiny`` are left out.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import plots, tables
from benchmarks.compile_time import GPU_CODE
from benchmarks.goals import Line, speedups, whole_speedups
from benchmarks.records import RESULTS, console

ROOT: Final = Path(__file__).parent.parent
FOLDER: Final = RESULTS / "first_hour"
PAGES: Final = (ROOT / "docs" / "measurements.md", ROOT / "README.md")
NO_GPU: Final = "Not run on a GPU yet: no GPU result exists, and no speed is claimed."
COMPARED: Final = {"linears": "The linears of one layer", "layers": "Two Llama-3-8B layers"}
OTHERS: Final[dict[str, tuple[str, Callable[[list[Line]], str]]]] = {
    "table": ("Llama-3-8B, trained whole on one GPU", tables.whole),
    "decode": ("Decode", tables.decode),
    "train": ("Steps with fused AdamW", tables.train),
    "smallest": ("The narrowest layer that FP8 makes faster", tables.smallest),
    "sweep": ("One linear, forward and backward", tables.sweep),
    "gemm": ("GEMMs, TFLOP/s", tables.gemms),
    "quant": ("Quantization, TB/s", tables.quantization),
}


def load(folder: Path) -> list[Line]:
    """The lines of all runs in ``folder``, oldest first, each with its run's ``machine``; tiny runs left out.

    A line that was cut off (a run that was killed) is left out as well.
    """
    found: list[Line] = []
    for path in sorted(folder.glob("*.jsonl")):
        run: dict[str, Any] = {}
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if line["section"] == "run":
                run = line
            if run and not run["tiny"]:
                found.append({**line, "machine": run["machine"], "file": path.name})
    return found


def newest(lines: Iterable[Line]) -> list[Line]:
    """Of each section the lines of the last run that measured it: what is compared was measured in one run."""
    lines = list(lines)
    no_number = {"failed", "stopped", "skipped", "section_s"}
    last = {line["section"]: line["file"] for line in lines if not no_number & line.keys()}
    files = {file for section, file in last.items() if section != "run"}
    return [
        line
        for line in lines
        if (line["file"] in files if line["section"] == "run" else last.get(line["section"], "") == line["file"])
    ]


def on_gpu(lines: Iterable[Line]) -> list[Line]:
    """The results of a GPU, each section by its last run."""
    return newest(line for line in lines if "gpu" in line["machine"] and line["section"] != "host")


def gpu_page(lines: list[Line], pictures: Sequence[Path] = ()) -> str:
    """All of what GPUs measured, or the line that says that none has."""
    if not lines:
        return NO_GPU
    measured = {line["section"] for line in lines}
    parts = [*tables.machines(lines), "", "### Goals", "", tables.goals(lines)]
    for section in (name for name in COMPARED if name in measured):
        parts += ["", f"### {COMPARED[section]}", "", tables.limits(lines, section), ""]
        parts += [tables.contenders(lines, section), "", "What holds each back, by GPU time:", ""]
        parts += tables.holding_back(lines, section)
    for section, (title, make) in OTHERS.items():
        if section in measured:
            parts += ["", f"### {title}", "", make(lines)]
    parts += _shown(pictures)
    if notes := list(tables.left_out(lines)):
        parts += ["", "### What failed or was left out", "", *notes]
    return "\n".join(parts).strip()


def _shown(pictures: Iterable[Path]) -> list[str]:
    """Lines of docs/measurements.md; nothing for pictures outside the repository."""
    inside = [path.relative_to(ROOT) for path in pictures if path.is_relative_to(ROOT)]
    return ["", *(f"![{path.stem}](../{path})" for path in inside)] if inside else []


def short(lines: list[Line]) -> str:
    """README's lines: the speedups of the recipes, each by the last run on the same GPU that has it."""
    last = max((line["file"] for line in lines if line["section"] in (*COMPARED, "table")), default="")
    where = next((line["machine"] for line in lines if line["file"] == last), {})
    lines = [line for line in lines if all(line["machine"].get(key) == where.get(key) for key in ("gpu", "torch"))]
    columns = {title: speedups(lines, section) for section, title in COMPARED.items()}
    columns["Llama-3-8B, whole"] = whole_speedups(lines)
    columns = {title: column for title, column in columns.items() if column}
    names = list(dict.fromkeys(name for column in columns.values() for name in column if "," not in name))
    if not names:
        return "Not compared with bf16 on a GPU yet." if lines else NO_GPU
    head = (
        f"Times as fast as bf16 with `torch.compile` in the same run, forward and backward, {where['gpu']}, torch "
        f"{where['torch']}; of each the last run that has it:"
    )
    rows = [(name, *(column.get(name) for column in columns.values())) for name in names]
    return f"{head}\n\n{tables.table(('', *columns), rows)}"


def blocks(folder: Path) -> dict[str, str]:
    """Name of a block -> its text. A block stands between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``."""
    lines = load(folder)
    gpu = on_gpu(lines)
    host = [line for line in newest(lines) if line["section"] in ("run", "host")]
    hosted = {line["file"] for line in host if line["section"] == "host"}
    host = [line for line in host if line["file"] in hosted]
    pictures = sorted(folder.glob("*.png"))
    found = {
        "gpu": gpu_page(gpu, [path for path in pictures if path.stem != "host"]),
        "speed": short([line for line in lines if "gpu" in line["machine"]]),
        "host": "Not measured yet.",
    }
    if host:
        shown = _shown(path for path in pictures if path.stem == "host")
        found["host"] = "\n".join([*tables.machines(host), "", tables.host(host), *shown])
    path = RESULTS / "compile_time.json"
    if path.exists():
        written = json.loads(path.read_text(encoding="utf-8"))
        where = f"torch {written['machine']['torch']}, {written['machine']['date'][:10]}:"
        found["compile"] = f"{where}\n\n{tables.compile_time(written['results'])}"
    for name, table in ((GPU_CODE, tables.gpu_code_time), ("checkpointing", tables.checkpointing)):
        path = RESULTS / f"{name}.json"
        if path.exists():
            written = json.loads(path.read_text(encoding="utf-8"))
            machine = written["machine"]
            where = f"torch {machine['torch']}, triton {machine['triton']}, {machine['date'][:10]}:"
            found[name] = f"{where}\n\n{table(written['results'])}"
    return found


def filled(text: str, found: dict[str, str]) -> str:
    """``text`` with its blocks replaced by those of ``found``."""
    for name, block in found.items():
        pattern = rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)"
        text = re.sub(pattern, lambda m, block=block: f"{m[1]}{block}\n{m[2]}", text, flags=re.DOTALL)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--write", action="store_true", help="into docs/measurements.md, README.md, and the pictures")
    chosen = parser.parse_args(arguments)
    if not chosen.write:
        console.print("\n\n".join(blocks(chosen.folder).values()), markup=False, highlight=False)
        return 0
    lines = load(chosen.folder)
    pictures = plots.draw(on_gpu(lines), newest(lines), chosen.folder)
    found = blocks(chosen.folder)
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    written = [*PAGES, *pictures, *plots.passes(RESULTS / "compile_time.json")]
    console.print("wrote " + ", ".join(map(str, written)), markup=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
