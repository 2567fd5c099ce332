"""Tables and pictures of a folder of results: ``python -m benchmarks.report [FOLDER] [--write]``.

FOLDER (benchmarks/results/first_hour) has one file of JSON lines per run of ``benchmarks.first_hour``. Printed: which
goals hold, every speedup, and what the GPU's time is made of. ``--write`` puts the same between the marks of ``PAGES``,
and the pictures beside the results. ``benchmarks.published`` says which runs are shown; tiny runs never are.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import plots, tables
from benchmarks.compile_time import GPU_CODE
from benchmarks.published import (
    BF16,
    Row,
    Run,
    all_rows,
    changed_trees,
    last_with,
    load,
    load_records,
    rows,
    whole_model,
)
from benchmarks.records import RESULTS, console

ROOT: Final = Path(__file__).parent.parent
FOLDER: Final = RESULTS / "first_hour"
RECORDS: Final = RESULTS / "records"
PAGES: Final = (
    ROOT / "docs" / "measurements.md",
    ROOT / "docs" / "records.md",
    ROOT / "README.md",
    RESULTS / "README.md",
)
NO_GPU: Final = "Not run on a GPU yet: no GPU result exists, and no speed is claimed."
NO_RECORD: Final = "There is no record yet."
# What is compared with bf16: the heading, and the table of one run's rows
COMPARED: Final[dict[str, tuple[str, Callable[[Sequence[Row]], str]]]] = {
    "linears": ("The linears of one layer", tables.contenders),
    "layers": ("Two Llama-3-8B layers", tables.contenders),
    "table": ("Llama-3-8B, trained whole on one GPU", tables.whole),
    "decode": ("Decode", tables.decode),
    "smallest": ("The narrowest layer that FP8 makes faster", tables.smallest),
    "sweep": ("One linear, forward and backward", tables.sweep),
}
BOUNDED: Final = ("linears", "layers")  # R is measured in the same run
OTHERS: Final[dict[str, tuple[str, Callable[[Run], str]]]] = {"train": ("Steps with fused AdamW", tables.train)}
# Of single kernels, which stand beside the raw files
KERNELS: Final[dict[str, tuple[str, Callable[[Run], str]]]] = {
    "gemm": ("GEMMs, TFLOP/s", tables.gemms),
    "quant": ("Quantization, TB/s", tables.quantization),
}


def gpu_page(runs: Sequence[Run], folder: Path) -> str:
    """Return what GPUs measured of linears, layers and models, or the line that says that none has."""
    runs = [run for run in runs if run.gpu]
    if not any(run.clean for run in runs):
        return "\n\n".join([NO_GPU, *_left_out(runs)])
    parts = [*_left_out(runs), "### Goals", tables.goals(runs)]
    for section, (title, make) in COMPARED.items():
        if published := rows(runs, section):
            parts += [
                f"### {title}",
                *_of_section(section, published, make),
                *_shown(folder, plots.of_section(section)),
            ]
    parts += _of_last_runs(runs, OTHERS)
    return "\n\n".join(part for part in parts if part).strip()


def kernels_page(runs: Sequence[Run]) -> str:
    """Return what GPUs measured of single kernels, and what failed or was not reached in any section."""
    runs = [run for run in runs if run.gpu]
    parts = [*_of_last_runs(runs, KERNELS)]
    if notes := list(tables.failures(runs)):
        parts += ["### What failed or was not reached", "\n".join(notes)]
    return "\n\n".join(parts) or NO_GPU


def _of_last_runs(runs: Sequence[Run], sections: dict[str, tuple[str, Callable[[Run], str]]]) -> Iterator[str]:
    """Yield the heading, the run and the table of each section that a run has."""
    for section, (title, make) in sections.items():
        if run := last_with(runs, section):
            yield from (f"### {title}", tables.run_line(run), make(run))


def _left_out(runs: Sequence[Run]) -> Iterator[str]:
    if files := changed_trees(runs):
        yield f"Runs of a changed tree, not shown: {', '.join(f'`{file}`' for file in files)}."


def _of_section(section: str, published: dict[str, list[Row]], make: Callable[[Sequence[Row]], str]) -> Iterator[str]:
    """Yield a table per run."""
    for of_run in published.values():
        yield tables.run_line(of_run[0].run)
        if section in BOUNDED:
            yield tables.limits(of_run[0].run, section)
        yield make(of_run)
        if section == "layers" and (calls := list(tables.on_the_host(of_run))):
            yield "Where the host's time goes:"
            yield "\n".join(calls)


def _shown(folder: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield the pictures that ``plots.draw`` made; those outside the repository have no path for a page."""
    for path in (folder / f"{name}.png" for name in names):
        if path.exists() and path.is_relative_to(ROOT):
            yield f"![{path.stem}](../{path.relative_to(ROOT)})"


def short(runs: Sequence[Run], folder: Path) -> str:
    """Return README's lines: a picture, its conditions, and one small table, all of one run."""
    if not any(run.gpu and run.clean for run in runs):
        return NO_GPU
    if not (whole := whole_model(runs)):
        return "Not compared with bf16 and torchao on a GPU yet."
    run, line = whole[0].run, whole[0].line
    m = run.machine
    attention = "attention by cuDNN, " if tables.cudnn_attends(whole) else ""
    sentences = (
        f"Llama-3-8B on one {m['gpu']}, torch {m['torch']}, torchao {m['torchao']}, commit {m['commit']}, in one run, "
        f"`{run.file}`: {line.get('tokens', tables.TOKENS):,} tokens per step, {line['optimizer']}, "
        f"{tables.text_of(whole)}.",
        f"The rows share {attention}blocks compiled one by one, and a head in bf16.",
        tables.against_torchao(whole),
    )
    parts: list[str] = []
    picture = folder / f"{plots.WHOLE}.png"
    if picture.exists() and picture.is_relative_to(ROOT):
        parts.append(f"![{_in_words(whole)}]({picture.relative_to(ROOT)})")
    parts.append(tables.prose(" ".join(sentence for sentence in sentences if sentence)))
    parts.append(tables.speed(whole))
    return "\n\n".join(parts)


def _in_words(whole: Sequence[Row]) -> str:
    """Return the picture's figures, for those who do not see it."""
    m = whole[0].run.machine
    rows = [
        f"{plots.NAMED[row.contender]} {row.line['tokens_per_s']:,.0f} tokens/s".replace("\n", " ")
        + (f" ({row.times_bf16:.2f}x)" if row.contender != BF16 and row.times_bf16 else "")
        + (f", {row.line['peak_mib'] / 1024:.1f} GiB" if row.line.get("peak_mib") else "")
        + (f", {row.line['watts']:.0f} W" if row.line.get("watts") else "")
        for row in plots.of_whole(whole)
    ]
    return f"Training Llama-3-8B on one {m['gpu']}, {m['date'][:10]}: {'; '.join(rows)}"


def record_page(folder: Path) -> str:
    """Return a table per file and model; records of a changed tree are named, and not shown."""
    records = load_records(folder) if folder.exists() else []
    parts = list(_left_out([run for run, _ in records]))
    for run, command in records:
        if not run.clean:
            continue
        of_run = all_rows(run, "table")
        for model in dict.fromkeys(row.case for row in of_run):
            of_model = [row for row in of_run if row.case == model]
            parts += [f"### {model[0]}, {run.gpu}, {run.machine['date'][:10]}", tables.run_line(run)]
            parts += [f"`{command}`", tables.whole(of_model)]
        left_out = [(line, why) for line in run.lines if (why := line.get("failed") or line.get("skipped"))]
        notes = [f"* {line['model']}, {line['contender']}: {why.splitlines()[0][:100]}" for line, why in left_out]
        parts += ["Not measured:", "\n".join(notes)] if notes else []
    return "\n\n".join(parts) or NO_RECORD


def _from_json(name: str, table: Callable[[Any], str]) -> Iterator[tuple[str, str]]:
    """Yield the block of a file that another program wrote, under a line that says when, and with which code."""
    path = RESULTS / f"{name}.json"
    if path.exists():
        written = json.loads(path.read_text(encoding="utf-8"))
        m = written["machine"]
        versions = ", ".join(f"{key} {m[key]}" for key in ("torch", "triton") if key in m)
        changed = " (a changed tree)" if m["commit"].endswith("-dirty") else ""
        where = f"`{path.name}`: {versions}, {m['date'][:10]}, commit {m['commit']}{changed}."
        yield name, f"{where}\n\n{table(written['results'])}"


def blocks(folder: Path, records: Path = RECORDS) -> dict[str, str]:
    """Map the name of each block to its text.

    A block stands between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``.
    """
    runs = load(folder)
    made = {
        "gpu": gpu_page(runs, folder),
        "kernels": kernels_page(runs),
        "speed": short(runs, folder),
        "host": "Not measured yet.",
        "records": record_page(records),
    }
    if run := last_with(runs, "host"):
        made["host"] = "\n\n".join([tables.run_line(run), tables.host(run), *_shown(folder, ["host"])])
    made |= _from_json("compile_time", tables.compile_time)
    made |= _from_json(GPU_CODE, tables.gpu_code_time)
    made |= _from_json("checkpointing", tables.checkpointing)
    # "compile" is what docs/measurements.md calls it
    return {"compile" if name == "compile_time" else name: text for name, text in made.items()}


def filled(text: str, made: dict[str, str]) -> str:
    """Return ``text`` with its blocks replaced by those of ``made``."""
    for name, block in made.items():
        pattern = rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)"
        text = re.sub(pattern, lambda m, block=block: f"{m[1]}{block}\n{m[2]}", text, flags=re.DOTALL)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    pages = ", ".join(str(page.relative_to(ROOT)) for page in PAGES)
    parser.add_argument("--write", action="store_true", help=f"into {pages}, and the pictures")
    chosen = parser.parse_args(arguments)
    if not chosen.write:
        console.print("\n\n".join(blocks(chosen.folder).values()), markup=False, highlight=False)
        return 0
    pictures = plots.draw(load(chosen.folder), chosen.folder)
    for name in plots.NAMES:
        if (path := chosen.folder / f"{name}.png") not in pictures:  # of a run that is not published any more
            path.unlink(missing_ok=True)
    made = blocks(chosen.folder)
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8"), made), encoding="utf-8")
    written = [*PAGES, *pictures, *plots.passes(RESULTS / "compile_time.json")]
    console.print("wrote " + ", ".join(map(str, written)), markup=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
