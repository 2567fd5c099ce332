"""``fp8graph bench``: what FP8 gains on this machine's GPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fp8graph.cli.arguments import command

_ABOUT = "measure what FP8 gains on this GPU, and compare with the speed model's prediction"


def add(commands: Any) -> None:
    """What the command takes."""
    bench = command(commands, "bench", run, _ABOUT)
    bench.add_argument("--recipe", nargs="+", default=["tensorwise", "rowwise"], help="(default tensorwise rowwise)")
    bench.add_argument(
        "--calibrate", type=Path, metavar="FILE.json", help="measure the speed model's rates instead, for target=FILE"
    )


def run(options: argparse.Namespace) -> int:
    """Measure linears, or the rates that predictions are made of."""
    from rich.console import Console
    from rich.table import Table

    from fp8graph import hardware
    from fp8graph.errors import ConfigError
    from fp8graph.recipes import resolve_recipe
    from fp8graph.tools import bench

    for recipe in options.recipe:
        resolve_recipe(recipe)
    if options.calibrate is not None and options.calibrate.suffix != ".json":
        raise ConfigError(f"{options.calibrate}: a calibration file must end in .json.")
    device = bench.fp8_gpu()
    found = hardware.of_device(device)
    if options.calibrate is not None:
        for done in bench.calibrate(device, found):
            bench.write(options.calibrate, found, done)  # at once: the next measurement may end this process
            print(bench.describe(done, found), flush=True)
        print(f'wrote {options.calibrate}: Backend(target="{options.calibrate}")')
        return 0
    table = Table(title="one linear, forward and backward: FP8 compared with bf16 under torch.compile")
    for column in ("tokens x in -> out", "recipe", "bf16 ms", "FP8 ms", "speedup", "predicted"):
        table.add_column(column, justify="right")
    for r in bench.linears(device, options.recipe):
        shape = f"{r.tokens} x {r.inputs} -> {r.outputs}"
        numbers = (r.bf16_ms, r.fp8_ms, r.speedup, r.predicted)
        table.add_row(shape, r.recipe, *(f"{number:.3f}" for number in numbers))
    Console().print(table)
    return 0
