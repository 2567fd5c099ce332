"""``fp8graph demo``: a small Llama in bf16 and in FP8, side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fp8graph.cli.arguments import check_recipe, command, positive


def add(commands: Any) -> None:
    """What the command takes."""
    demo = command(commands, "demo", run, "train a small Llama in bf16 and in FP8 and compare them")
    demo.add_argument("--steps", type=positive, default=150, help="training steps of each run (default 150)")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--recipe", default="tensorwise", help="the FP8 recipe (default tensorwise)")
    demo.add_argument("--compiler", choices=("inductor", "eager"), default="inductor")
    demo.add_argument("--out", type=Path, default=Path("fp8graph-demo"), help="folder for the plot")


def run(options: argparse.Namespace) -> int:
    """Train both."""
    check_recipe(options.recipe)
    from fp8graph.tools.demo import run_demo

    return run_demo(
        steps=options.steps,
        seed=options.seed,
        recipe=options.recipe,
        compiler=options.compiler,
        out=options.out,
    )
