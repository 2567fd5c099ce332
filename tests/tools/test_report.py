"""The report: on MADE-UP results (``made_up.py``), and the figures of the pages against the raw files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import made_up
from benchmarks import goals, plots, published, report, tables
from benchmarks.records import RESULTS
from fp8graph.hardware import bf16_sheet
from helpers import in_one_test

ROOT = Path(__file__).parents[2]
MEASUREMENTS, RECORDS, README, RAW = report.PAGES
LEFT_OUT = "Runs of a changed tree, not shown: "
Line = dict[str, Any]


# --- the pages against the raw files, read anew -----------------------------------------------------------------------

SECTIONS = {
    "The linears of one layer": "linears",
    "Two Llama-3-8B layers": "layers",
    "Decode": "decode",
    "The narrowest layer that FP8 makes faster": "smallest",
    "One linear, forward and backward": "sweep",
}
# Column -> the key of a raw line, and how far the cell may be off: half of its last digit
FIGURES = {
    "wall ms": ("wall_ms", 6e-4), "tokens/s": ("tokens_per_s", 0.5), "peak MiB": ("peak_mib", 0.5), "W": ("watts", 0.5),
    "host ms": ("host_ms", 6e-4), "resident MiB": ("resident_mib", 0.5),
}  # fmt: skip
GOALS = {"linears": ("linears", "wall_ms"), "stack": ("layers", "wall_ms"), "Llama-3-8B": ("table", "tokens_per_s")}


class Cells(NamedTuple):
    """One row of a table of a page: the heading, the run and the titles that it stands under."""

    heading: str
    file: str
    cells: dict[str, str]

    def number(self, title: str) -> float | None:
        text = self.cells.get(title, "").replace(",", "")
        return float(text) if text else None


def rows_of(page: str) -> Iterator[Cells]:
    """Yield every row of a page's tables; the last text before the table names the run, or the row itself does."""
    heading, file, titles = "", "", list[str]()
    for line in page.splitlines():
        if line.startswith("#"):
            heading, file = line.lstrip("# "), ""
        if not line.startswith("|"):
            titles = []
            if run := re.search(r"`((?:records/)?[\w-]+\.jsonl?)`", line):
                file = run[1]
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not titles:
            titles = cells
        elif "---" not in cells[0]:
            by_title = dict(zip(titles, cells, strict=True))
            yield Cells(heading, by_title.get("run", "").strip("`") or file, by_title)


def raw(file: str) -> list[Line]:
    if file.startswith("records/"):
        rows = json.loads((RESULTS / file).read_text(encoding="utf-8"))["rows"]
        return [{**row, "section": "table"} for row in rows]
    return [json.loads(line) for line in (report.FOLDER / file).read_text(encoding="utf-8").splitlines()]


def figure(file: str, section: str, key: str, contender: str, **case: Any) -> float | None:
    """Return the last line of the file that has it; of several, rounds count and not single calls."""
    measured = None
    for line in raw(file):
        if line["section"] == section and all(line.get(name, value) == value for name, value in case.items()):
            if line.get("contender") == contender and line.get(key) is not None:
                measured = line[key]
            elif "contender" not in line and key == "wall_ms" and contender in line.get(key, ()):
                measured = line[key][contender]  # one line held both until November 27, 2026
    return measured


def case_of(section: str, row: Cells) -> dict[str, Any]:
    if section == "decode":
        return {"batch": int(row.cells["sequences"]), "cuda_graphs": row.cells["CUDA graphs"] == "yes"}
    if section == "smallest":
        return {"tokens": int(row.cells["tokens"]), "hidden": int(row.cells["hidden size"])}
    if section == "sweep":
        title = next(title for title in row.cells if "tokens x inputs" in title)
        return dict(zip(("tokens", "inputs", "outputs"), map(int, re.findall(r"\d+", row.cells[title])), strict=True))
    if section == "table" and row.file.startswith("records/"):
        return {"model": row.heading.split(",")[0]}
    return {}


def faults_of_row(row: Cells) -> Iterator[str]:
    """Yield what one file does not say of a row of contenders."""
    section = "table" if "tokens/s" in row.cells else SECTIONS[row.heading]
    key = "tokens_per_s" if section == "table" else "wall_ms"
    contender, case = row.cells["contender"], case_of(section, row)
    plain = "bf16, CUDA graphs" if contender.endswith(", CUDA graphs") else "bf16"
    own = figure(row.file, section, key, contender, **case)
    assert own, (row, "no such figure")
    for title, (of, off) in FIGURES.items():
        cell, measured = row.number(title), figure(row.file, section, of, contender, **case)
        if cell is not None and (measured is None or abs(cell - measured) > off):
            yield f"{row.file}: {contender}: {title} is {measured}, not {cell}"
    for name, other in (("bf16", plain), ("torchao", "torchao tensorwise")):
        ratio, theirs = row.number(f"times {name}"), figure(row.file, section, key, other, **case)
        cell = row.number(f"{name}'s ms" if key == "wall_ms" else f"{name}'s tokens/s")
        if cell is not None and (theirs is None or abs(cell - theirs) > (0.5 if key == "tokens_per_s" else 0.0006)):
            yield f"{row.file}: {contender}: {other} took {theirs}, not {cell}"
        if ratio is not None:
            expected = theirs and (own / theirs if key == "tokens_per_s" else theirs / own)
            if expected is None or abs(ratio - expected) > 0.0006:
                yield f"{row.file}: {contender}: times {name} is {expected}, not {ratio}"


def faults_of_goal(row: Cells) -> Iterator[str]:
    """Yield what one file does not say of a row of goals."""
    ratio = row.number("measured")
    kind, _, rest = row.cells["goal"].partition(", ")
    if ratio is None or kind not in (*GOALS, "decode"):
        return
    if kind == "decode":
        batch = int(rest.split()[1].strip(","))
        lines = [line for line in raw(row.file) if line.get("batch") == batch and line.get("cuda_graphs")]
        ms = {line["contender"]: line["wall_ms"] for line in lines if "wall_ms" in line}
        fastest = min(ms, key=lambda name: ms[name])
        expected = ms["bf16"] / ms[fastest]
        if row.cells[""] != f"{fastest}: the best of {len(ms) - 1} measured":
            yield f"{row.file}: {row.cells['goal']}: {fastest} is the fastest of {len(ms) - 1}"
    else:
        section, key = GOALS[kind]
        contender, _, other = rest.partition(" over ")
        own = figure(row.file, section, key, contender)
        theirs = figure(row.file, section, key, other or "bf16")
        assert own, row
        assert theirs, row
        expected = own / theirs if key == "tokens_per_s" else theirs / own
    if abs(expected - ratio) > 0.0006:
        yield f"{row.file}: {row.cells['goal']}: the ratio is {expected}, not {ratio}"
    if kind == "linears":
        (bound,) = (line for line in raw(row.file) if "R" in line and line["scaling"] == "tensor")
        wanted = float(row.cells["bar"].split()[0]) * bound["bf16_ms"] / bound["fp8_ms"]
        if abs(wanted - (row.number("times as fast") or 0)) > 0.0006:
            yield f"{row.file}: {row.cells['goal']}: {wanted} is wanted"
        if f"{bound['bf16_ms']:.3f} / {bound['fp8_ms']:.3f} ms" not in row.cells[""]:
            yield f"{row.file}: {row.cells['goal']}: R is of other milliseconds"


def faults(page: str) -> list[str]:
    """List what the raw files do not say of a page's rows with ratios."""
    faults_of_page: list[str] = []
    for row in rows_of(page):
        if "times bf16" in row.cells:
            faults_of_page += faults_of_row(row)
        elif "goal" in row.cells and "run" in row.cells:
            faults_of_page += faults_of_goal(row)
    return faults_of_page


@in_one_test("page", report.PAGES, ids=lambda page: page.name)
def test_each_ratio_is_of_one_run_and_of_its_row(page: Path) -> None:
    assert faults(page.read_text(encoding="utf-8")) == []


def test_the_rows_are_read() -> None:
    rows = list(rows_of(MEASUREMENTS.read_text(encoding="utf-8")))
    compared = [row for row in rows if "times bf16" in row.cells]
    judged = [row for row in rows if "goal" in row.cells and row.cells.get("run")]
    assert (len(compared) > 30, len(judged) > 8) == (True, True)
    assert all(row.file for row in (*compared, *judged))
    assert len([row for row in rows_of(README.read_text(encoding="utf-8")) if "times bf16" in row.cells]) >= 3


def changed(page: Path, contender: str, heading: str, *cells: tuple[str, str]) -> str:
    """Return the page with other text in the first row of a contender below a heading; it held the old text."""
    before, mark, after = page.read_text(encoding="utf-8").partition(heading)
    row = next(line for line in after.splitlines() if line.startswith(f"| {contender} |"))
    tampered = row
    for old, new in cells:
        assert old in tampered, (old, tampered)
        tampered = tampered.replace(old, new)
    return before + mark + after.replace(row, tampered, 1)


def test_a_row_that_mixes_runs_is_a_fault() -> None:
    """Torchao's figure of another run, with the ratio that fits it; README's old mixture; another run's goal."""
    mixed = changed(
        MEASUREMENTS,
        "tensorwise",
        "### Two Llama-3-8B layers",
        ("35.620", "35.891"),
        ("1.129", f"{35.891 / 31.557:.3f}"),
    )
    assert [re.sub(r"(\.\d{3})\d+", r"\1", fault) for fault in faults(mixed)] == [
        "20261127-124704.jsonl: tensorwise: torchao tensorwise took 35.620, not 35.891",
        "20261127-124704.jsonl: tensorwise: times torchao is 1.128, not 1.137",
    ]
    mixed = changed(README, "torchao tensorwise", "<!-- speed: begin -->", ("12,896", "13,251"), ("1.202", "1.236"))
    assert len(faults(mixed)) == 2
    page = MEASUREMENTS.read_text(encoding="utf-8")
    goal = next(line for line in page.splitlines() if line.startswith("| Llama-3-8B, tensorwise over bf16"))
    assert faults(page.replace(goal, goal.replace("1.301", "1.339"))) != []


def test_the_named_runs_are_of_committed_code() -> None:
    named: dict[str, str] = {}
    for page in (README, *sorted((ROOT / "docs").rglob("*.md"))):
        for line in page.read_text(encoding="utf-8").splitlines():
            if not line.startswith(LEFT_OUT):
                named |= dict.fromkeys(re.findall(r"\d{8}-\d{6}\.jsonl|records/[\w-]+\.json\b", line), page.name)
    assert named
    for file, page in named.items():
        if file.startswith("records/"):
            commit = json.loads((RESULTS / file).read_text(encoding="utf-8"))["machine"]["commit"]
        else:
            commit = raw(file)[0]["machine"]["commit"]
        assert commit, (page, file)
        assert not commit.endswith("-dirty"), (page, file)


def test_the_page_of_comparisons_has_the_run_of_readme() -> None:
    """Speeds and peaks, from the raw file that README's table is of."""
    page = " ".join((ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8").split())
    (file,) = {row.file for row in rows_of(README.read_text(encoding="utf-8")) if "times bf16" in row.cells}
    names = {"bf16": "bf16", "tensorwise": "ours", "torchao tensorwise": "torchao"}
    speed, peak = (
        {names[name]: f"{figure(file, 'table', key, name) or 0:,.0f}" for name in names}
        for key in ("tokens_per_s", "peak_mib")
    )
    assert (
        f"`tensorwise` {speed['ours']} tokens/s, torchao's {speed['torchao']}, bf16 {speed['bf16']} ([conditions]"
        in page
    )
    assert f"torchao {peak['torchao']} MiB, bf16 {peak['bf16']}, fp8graph {peak['ours']}." in page


def test_readme_names_the_narrow_layers_that_were_slower() -> None:
    readme = " ".join(README.read_text(encoding="utf-8").split())
    rows = [row for row in rows_of(MEASUREMENTS.read_text(encoding="utf-8")) if row.cells.get("tokens") == "8192"]
    ratios = {
        int(row.cells["hidden size"]): row.number("times bf16") for row in rows if "tensorwise" in row.cells.values()
    }
    slower = [f"{size:,}" for size, ratio in ratios.items() if ratio is not None and ratio < 1]
    (faster,) = (f"{size:,}" for size, ratio in ratios.items() if ratio is not None and ratio > 1)
    assert f"8,192 tokens, layers of hidden size {' and '.join(slower)} were slower in FP8 on an H200" in readme
    assert f"and one of {faster} was faster" in readme


def test_the_pictures_are_those_that_are_drawn() -> None:
    shown = {path.stem for path in report.FOLDER.glob("*.png")}
    pages = "".join(page.read_text(encoding="utf-8") for page in report.PAGES)
    assert shown <= set(plots.NAMES)
    assert [name for name in sorted(shown) if f"first_hour/{name}.png" not in pages] == []


# --- which run is shown -----------------------------------------------------------------------------------------------

NEXT, LAST = "20000102-000000", "20000103-000000"


def later(ratios: dict[str, float], **machine: Any) -> Iterator[Line]:
    """Yield a run of the layers and of whole models, faster than that of ``made_up.lines``."""
    yield made_up.run(**machine)
    yield from made_up.comparison("layers", ratios, 20.0)
    yield from made_up.trained({"bf16": 2000.0, "tensorwise": 3000.0})


def test_a_later_run_without_torchao_hides_no_row_that_has_it(tmp_path: Path) -> None:
    folder = made_up.write(tmp_path)
    made_up.write_lines(folder, NEXT, later({"tensorwise": 1.8, "tensorwise, save memory": 1.1}))
    rows = published.rows(published.load(folder), "layers")
    assert [(file, [row.contender for row in of_run]) for file, of_run in rows.items()] == [
        ("20000102-000000.jsonl", ["bf16", "tensorwise, save memory"]),
        ("20000101-000000.jsonl", ["bf16", *made_up.LAYERS]),
    ]
    (save, ours) = (next(row for row in of_run if row.contender.startswith("tensorwise")) for of_run in rows.values())
    assert (save.times_bf16, save.times_torchao) == (pytest.approx(1.1), None)
    assert (ours.times_bf16, ours.times_torchao) == (pytest.approx(1.36), pytest.approx(1.36 / 1.31))
    judged = {goal.name: (goal.ratio, goal.run) for goal in goals.judge(published.load(folder))}
    first, last = "20000101-000000.jsonl", "20000102-000000.jsonl"
    assert judged["stack, tensorwise over torchao tensorwise"] == (pytest.approx(1.36 / 1.31), first)
    assert judged["stack, tensorwise over bf16"] == (pytest.approx(1.8), last)
    assert judged["Llama-3-8B, tensorwise over torchao tensorwise"] == (pytest.approx(1.31 / 1.21), first)
    assert judged["Llama-3-8B, tensorwise over bf16"] == (pytest.approx(1.5), last)
    assert "| tensorwise | 1,310 | 1.310 | 1.083 | 2,000 | 690 |" in report.blocks(folder)["speed"]


def test_a_later_run_that_has_all_is_shown(tmp_path: Path) -> None:
    folder = made_up.write(tmp_path)
    made_up.write_lines(folder, NEXT, later({"tensorwise": 1.8, "torchao tensorwise": 1.6}))
    rows = published.rows(published.load(folder), "layers")
    assert "Over 2 runs of the layers, R per tensor was 1.700 to 1.700." in report.blocks(folder)["gpu"]
    assert [[row.contender for row in of_run] for of_run in rows.values()] == [
        ["bf16", "tensorwise", "torchao tensorwise"],
        ["bf16", "delayed", "rowwise", "blockwise", "torchao tensorwise"],
    ]
    assert {row.torchao["wall_ms"] for row in rows["20000101-000000.jsonl"] if row.torchao} == {33 / 1.31}


@pytest.mark.parametrize("commit", ["1234567-dirty", ""])
def test_a_run_of_a_changed_tree_hides_nothing_and_is_not_shown(tmp_path: Path, commit: str) -> None:
    before = report.blocks(made_up.write(tmp_path))
    changed_tree = later({"tensorwise": 1.8, "torchao tensorwise": 1.6, "made for this": 2.5}, commit=commit)
    made_up.write_lines(tmp_path, NEXT, changed_tree)
    after = report.blocks(tmp_path)
    assert after.pop("gpu") == f"{LEFT_OUT}`{NEXT}.jsonl`.\n\n{before.pop('gpu')}"
    assert after == before
    assert goals.judge(published.load(tmp_path)) == goals.judge(published.load(tmp_path)[:1])


def test_only_runs_of_one_gpu_and_torch_are_compared(tmp_path: Path) -> None:
    folder = made_up.write(tmp_path)
    made_up.write_lines(folder, NEXT, later({"tensorwise": 1.8}, gpu="another, made up"))
    rows = published.rows(published.load(folder), "layers")
    assert [[row.contender for row in of_run] for of_run in rows.values()] == [["bf16", "tensorwise"]]
    assert "linears" in {section for section in report.COMPARED if published.rows(published.load(folder), section)}


def test_a_run_that_was_cut_off_or_failed_replaces_nothing(tmp_path: Path) -> None:
    folder = made_up.write(tmp_path)
    lines = [made_up.run(), {"section": "layers", "contender": "tensorwise", "failed": "RuntimeError: made up"}]
    made_up.write_lines(folder, NEXT, lines)
    with (folder / f"{NEXT}.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"section": "decode", "contender')
    runs = published.load(folder)
    assert list(published.rows(runs, "layers")) == ["20000101-000000.jsonl"]
    failed = "* `20000102-000000.jsonl`: layers, tensorwise: RuntimeError: made up"
    assert failed in (notes := list(tables.failures(runs)))
    made_up.write_lines(folder, LAST, later({"tensorwise": 1.8}))
    assert failed not in (mended := list(tables.failures(published.load(folder))))
    assert set(mended) < set(notes)


def test_old_lines_of_narrow_layers_are_read(tmp_path: Path) -> None:
    """One line held both contenders, and one the narrowest."""
    profiles = {name: made_up.profile(2.0, 0.7) for name in ("bf16", "tensorwise")}
    old = {"section": "smallest", "hidden": 512, "tokens": 64, "speedup": 9.0, "predicted": {"a": 1.2, "b": 0.9}}
    lines = [
        made_up.run(),
        {**old, "wall_ms": {"bf16": 3.0, "tensorwise": 2.0}, "profiles": profiles},
        {"section": "smallest", "tokens": 64, "narrowest": 512},
    ]
    made_up.write_lines(tmp_path, NEXT, lines)
    ((_, rows),) = published.rows(published.load(tmp_path), "smallest").items()
    assert tables.smallest(rows).splitlines()[2:] == [
        "| 64 | 512 | bf16 | 3.000 | 3.000 | 1.000 | 2.000 | 40 |  |",
        "| 64 | 512 | tensorwise | 2.000 | 3.000 | 1.500 | 2.000 | 40 | 1 of 2 |",
    ]


# --- the text ---------------------------------------------------------------------------------------------------------


def test_goals_are_judged_by_the_bound_of_their_run(tmp_path: Path) -> None:
    judged = {goal.name: goal for goal in goals.judge(published.load(made_up.write(tmp_path)))}
    assert {name: goal.verdict for name, goal in judged.items()} == {
        "linears, delayed": "holds",  # 1.60 of 0.91 * 1.7
        "linears, tensorwise": "holds",
        "linears, rowwise": "missed",  # 1.42 of 0.87 * 1.7
        "linears, blockwise": "holds",
        "stack, blockwise over bf16": "missed",
        "stack, tensorwise over bf16": "holds",
        "stack, tensorwise over torchao tensorwise": "missed",  # 1.36 / 1.31
        "Llama-3-8B, tensorwise over bf16": "missed",  # 1.31
        "Llama-3-8B, tensorwise over torchao tensorwise": "missed",  # 1.31 / 1.21
        "Llama-3-8B, peak of torchao tensorwise over that of tensorwise, save memory": "not measured",
        "decode, sequences: 1, CUDA graphs, the best recipe": "holds",
        "decode, sequences: 32, CUDA graphs, the best recipe": "holds",
        "one linear by GPU time, the worst case": "missed",
        "narrow layers, tensorwise, where it pays, the worst case": "holds",  # 0.99
    }
    worst = judged["one linear by GPU time, the worst case"]
    assert worst.detail == "256 x 4096 -> 2048, tensorwise: the worst of 27 measured"
    narrow = judged["narrow layers, tensorwise, where it pays, the worst case"]
    assert narrow.detail == "8192 tokens, hidden size 1024: the worst of 2 measured"
    assert judged["decode, sequences: 32, CUDA graphs, the best recipe"].detail == "rowwise: the best of 2 measured"
    assert judged["linears, delayed"].wanted == pytest.approx(0.91 * 1.7)
    assert {goal.run for goal in judged.values() if goal.run} == {"20000101-000000.jsonl"}
    assert {goal.verdict for goal in goals.judge([])} == {"not measured"}


def test_gemms_of_few_rows_are_shown_for_one_weight(tmp_path: Path) -> None:
    folder = made_up.write(tmp_path)
    (start, *_) = later({})
    shapes = [(8192, 4096, 4096), (1, 4096, 4096), (8, 4096, 4096), (1, 2048, 2048), (8192, 2048, 2048)]
    rates = [{"section": "gemm", "variant": "bf16", "m": m, "n": n, "k": k, "tflops": 700.0} for m, n, k in shapes]
    made_up.write_lines(folder, NEXT, [start, *rates])
    shown = report.blocks(folder)["kernels"].partition("### GEMMs, TFLOP/s")[2]
    sizes = [" x ".join(map(str, shape)) for shape in shapes]
    assert [size for size in sizes if f"\n| {size} | 700 |" not in shown] == ["1 x 2048 x 2048"]
    assert "The file has 1 more shapes" in shown


def test_the_peaks_of_one_run_are_compared(tmp_path: Path) -> None:
    folder = made_up.write(tmp_path)
    (start, *_) = later({})
    both = [
        *made_up.trained({published.BF16: 1.0, published.TORCHAO: 1.0}),
        *made_up.trained({published.SAVING: 1.0}, peak_mib=1600.0),
    ]
    made_up.write_lines(folder, NEXT, [start, *both])
    (goal,) = [goal for goal in goals.judge(published.load(folder)) if "peak" in goal.name]
    assert (goal.ratio, goal.verdict, goal.detail) == (1.25, "holds", "2,000 / 1,600 MiB")


def test_a_page_of_made_up_results(tmp_path: Path) -> None:
    folder = made_up.write(tmp_path)
    page = report.blocks(folder)
    run = "`20000101-000000.jsonl`"
    detail = "0.84 R; R: 1.700 / 1.000 ms = 1.700"
    assert f"| linears, rowwise | 0.87 R | 1.479 | 1.420 | {detail} | missed | {run} |" in page["gpu"]
    row = "| tensorwise | 17.419 | 27.000 | 1.550 | 19.286 | 1.107 | 5.0% | 1.000 | 17.419 | 40 | 62 | 8 | 28 |"
    assert f"{row} 100 | 200 | 650 | 1,500 |" in page["gpu"]
    assert "Where the host's time goes:\n\n* **bf16**: `aten::made_up` 0.25 ms (3x)" in page["gpu"]
    assert f"* {run}: layers, torchao rowwise: RuntimeError: made up" in page["kernels"]
    assert f"* {run}: layers, made up: it is not installed" in page["kernels"]
    stopped = f"* Contenders that no run reached before its time was over: 1 ({run}): layers: `tensorwise, save memory`"
    assert stopped in page["kernels"]
    row = "| tensorwise | 1,310 | 1,000 | 1.310 | 1,210 | 1.083 | 8 | 7 | 79% | 2,000 | 1,000 | 690 | 12.3 |"
    assert f"{row} 9.000 | 8.100 | 7.100 | 6.100 |" in page["gpu"]
    assert "llama-3-8b: 8,192 tokens per step, AdamW, fresh text in each step (made up). The board" in page["gpu"]
    narrow = "| 8192 | 1024 | tensorwise, CUDA graphs | 2.222 | 2.000 | 0.900 | 1.000 | 40 |"
    assert narrow in page["gpu"]
    assert "| tensorwise | 1,310 | 1.310 | 1.083 | 2,000 | 690 |" in page["speed"]
    assert "torchao takes no less memory: 2,000 MiB" in page["speed"].replace("\n", " ")
    assert "GEMMs alone" not in page["gpu"]
    assert "| tensorwise | 38 (+18) |" in page["host"]
    assert report.main([str(folder)]) == 0


def test_losses_on_one_batch_are_not_shown(tmp_path: Path) -> None:
    """Until November 27, 2026 a row named no text: one batch of random tokens was repeated."""
    lines = [made_up.run(), *made_up.trained(made_up.TRAINED, text=None, losses=[12.6, 0.9])]
    made_up.write_lines(tmp_path, NEXT, lines)
    page = report.blocks(tmp_path)["gpu"].replace("\n", " ")
    assert (
        "AdamW, one batch of random tokens that each step repeats. So the losses prove nothing: none is shown." in page
    )
    assert "bf16 came first: its first step also paid for the start of the process." in page
    assert "first step's extra s |" in page
    assert "loss at step" not in page


def test_flops_are_counted_as_torchtitan_and_as_megatron_do() -> None:
    """Of Llama-3-8B, where a row does not say it: 63 % of the data sheet in bf16, and 742 TFLOP/s."""
    counted = tables.flop_per_token({})
    assert counted is not None
    assert counted["titan"] * 10_767 / bf16_sheet("NVIDIA H200") == pytest.approx(0.63, abs=0.001)
    assert counted["megatron"] * 14_419 / 1e12 == pytest.approx(742, abs=0.5)


def test_memory_that_cannot_be_true_is_not_printed() -> None:
    assert tables.memory({"resident_mib": -2148.5, "peak_mib": 697.8}) == (None, None)
    assert tables.memory({"resident_mib": 900.0, "peak_mib": 700.0}) == (None, None)
    assert tables.memory({"resident_mib": 898.0, "peak_mib": 3744.0}) == (898.0, 3744.0)
    assert tables.memory({"peak_mib": 3744.0}) == (None, 3744.0)


def write_record(folder: Path, name: str, **written: Any) -> None:
    rows = [
        *made_up.trained(made_up.TRAINED),
        {"model": "llama-3-8b", "contender": "blockwise", "failed": "E: made up"},
    ]
    record = {"machine": made_up.MACHINE, "command": "fp8graph bench record", "tiny": False, "rows": rows} | written
    (folder / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")


def test_records_are_tables(tmp_path: Path) -> None:
    records = tmp_path / "records"
    assert report.record_page(records) == report.NO_RECORD
    records.mkdir()
    write_record(records, "one")
    page = report.record_page(records)
    assert "### llama-3-8b, made up, 2000-01-01\n\nRun `records/one.json`: made up, torch 0.0" in page
    assert "| tensorwise | 1,310 | 1,000 | 1.310 | 1,210 | 1.083 |" in page
    assert page.endswith("Not measured:\n\n* llama-3-8b, blockwise: E: made up")
    write_record(records, "two", machine=made_up.MACHINE | {"commit": "1234567-dirty"})
    write_record(records, "three", tiny=True)
    assert report.record_page(records) == f"{LEFT_OUT}`records/two.json`.\n\n{page}"


@pytest.mark.slow
def test_pictures_of_made_up_results(tmp_path: Path) -> None:
    folder = made_up.write(tmp_path)
    pictures = plots.draw(published.load(folder), folder)
    assert {path.stem for path in pictures} == set(plots.NAMES)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_blocks_are_replaced_in_place() -> None:
    text = "a\n<!-- speed: begin -->\nold\n<!-- speed: end -->\nb\n"
    assert report.filled(text, {"speed": "new \\1"}) == text.replace("old", "new \\1")


def test_the_documents_say_what_the_results_say() -> None:
    """``python -m benchmarks.report --write`` was run after the last result; nothing made up is among them."""
    made = report.blocks(report.FOLDER)
    for page in report.PAGES:
        text = page.read_text(encoding="utf-8")
        assert report.filled(text, made) == text, f"{page.name}: run python -m benchmarks.report --write"
    measurements = MEASUREMENTS.read_text(encoding="utf-8")
    assert all(f"<!-- {name}: begin -->" in measurements for name in ("gpu", "host", "compile", "checkpointing"))
    assert "<!-- speed: begin -->" in README.read_text(encoding="utf-8")
    assert "<!-- records: begin -->" in RECORDS.read_text(encoding="utf-8")
    assert "<!-- kernels: begin -->" in RAW.read_text(encoding="utf-8")
    assert not [path for path in RESULTS.rglob("*.json*") if "made up" in path.read_text(encoding="utf-8")]
