"""A record as people read it: tables for the terminal, and a file in the form that torchtitan's benchmarks/ takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

Row = dict[str, Any]
COLUMNS: Final = (
    "contender", "tokens/s", "times bf16", "TFLOP/s (titan)", "of the board", "TFLOP/s (Megatron)", "peak GiB", "W",
    "SM MHz", "compile s", "last loss",
)  # fmt: skip


def cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return a row for ``COLUMNS``; ratios are of bf16 in the same file, and of the same model."""
    if reason := row.get("failed") or row.get("skipped"):
        return (row["contender"], f"left out: {reason.splitlines()[0][:60]}", *[""] * (len(COLUMNS) - 2))
    plain = next((r for r in rows if r["model"] == row["model"] and r["contender"] == "bf16" and "step_s" in r), None)
    rate, flop, sheet = row["tokens_per_s"], row["flop_per_token"], row["peak_flops"]

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return (
        row["contender"], f"{rate:,.0f}", number(None if plain is None else rate / plain["tokens_per_s"], ".3f"),
        f"{rate * flop['titan'] / 1e12:,.0f}", number(sheet and rate * flop["titan"] / sheet, ".0%"),
        f"{rate * flop['megatron'] / 1e12:,.0f}",
        number(row["peak_mib"] and row["peak_mib"] / 1024, ".1f"), number(row["watts"], ".0f"),
        number(row["sm_mhz"], ".0f"), f"{row['compile_s']:.1f}", f"{row['losses'][-1]:.3f}",
    )  # fmt: skip


def models_of(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield each model with its rows."""
    for model in dict.fromkeys(row["model"] for row in rows):
        yield model, [row for row in rows if row["model"] == model]


def conditions(rows: Sequence[Row]) -> str:
    """Return the settings that all contenders of a model share, in one sentence."""
    row = next((row for row in rows if "step_s" in row), None)
    if row is None:
        return "Nothing ran."
    return (
        f"{row['tokens']:,} tokens per step in sequences of {row['sequence']:,}, {len(row['steps_s'])} steps of fresh "
        f"text ({row['text']}), {row['optimizer']}; blocks compiled one by one, causal attention without a mask, the "
        "head in bf16."
    )


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a Markdown table per model, each under its conditions, in columns for the terminal."""
    for model, of_model in models_of(rows):
        lines = [COLUMNS, *(cells(row, rows) for row in of_model)]
        widths = [
            max(len(line[column]) for line in lines if "left out" not in line[1]) for column in range(len(COLUMNS))
        ]
        lines.insert(1, tuple("-" * max(width, 3) for width in widths))
        yield from (f"{model}: {conditions(of_model)}", "")
        for first, *others in lines:
            aligned = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            yield f"| {' | '.join([first.ljust(widths[0]), *aligned])} |"
        yield ""


def titan(record: dict[str, Any], entity: str) -> tuple[str, str]:
    """Return the name and the text of a file as torchtitan's ``benchmarks/README.md`` asks for it."""
    machine, rows = record["machine"], record["rows"]
    gpu = machine.get("gpu", machine["cpu"])
    hardware = gpu.removeprefix("NVIDIA ").split()[0].lower()
    memory = f", {machine['memory_mib'] / 1024:.0f} GiB; {machine['clocks']}" if "gpu" in machine else ""
    theme = "+".join(model for model, _ in models_of(rows))
    versions = [(name, machine[name]) for name in ("fp8graph", "torch", "triton", "transformers", "torchao")]
    lines = [
        f"FP8 training of unmodified Hugging Face models on one GPU, measured by {entity} with fp8graph, a backend of "
        "`torch.compile`. torchtitan was not used.", "",
        "### Models", "", *(f"* {model}" for model, _ in models_of(rows)), "",
        "### Hardware", "", f"One {gpu}{memory}.", "",
        "### Configuration", "", "```", record["command"], "```", "",
        "### Results", "",
    ]  # fmt: skip
    lines += tables(rows)
    commit = machine["commit"]
    lines += ["### Versions and Dates", "", "| repo | version | commit | date |", "| --- | --- | --- | --- |"]
    lines += [f"| {n} | {v} | {commit if n == 'fp8graph' else ''} | {machine['date'][:10]} |" for n, v in versions]
    name = f"{theme}_{hardware}_{machine['date'][:10].replace('-', '')}_{entity}.md"
    return name, "\n".join(lines) + "\n"
