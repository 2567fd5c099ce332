"""``fp8graph explain``: what would run in FP8, layer by layer, and why the rest would not."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from fp8graph.cli.arguments import add_model, add_policy, check_recipe, command, meta_model, traced, writable
from fp8graph.cli.extras import install


def add(commands: Any) -> None:
    """What the command takes."""
    explain = command(commands, "explain", run, "show what would be rewritten in a Hugging Face model, and why not")
    add_model(explain)
    add_policy(explain)
    explain.add_argument("--inference", action="store_true", help="forward only")
    printed = explain.add_mutually_exclusive_group()
    printed.add_argument("--table", action="store_true", help="print a row per GEMM in place of the tree of layers")
    printed.add_argument("--graph", metavar="STAGE", help="print the graph: before, after, or the name of a pass")
    printed.add_argument("--json", action="store_true", help="print the report as JSON")
    explain.add_argument("--html", type=Path, metavar="FILE", help="write the report as an HTML page too")


def run(options: argparse.Namespace) -> int:
    """Trace the model on the meta device, and print the report."""
    check_recipe(options.recipe)
    from fp8graph.backend import Backend

    if options.html is not None:
        writable(options.html)
    settings = {"policy": options.policy, "recipe": options.recipe, "target": options.target}
    Backend(**settings)  # raises for one that cannot be used, before a model is built
    training = not options.inference
    model, inputs = meta_model(options, training=training)
    report = traced(model, inputs, training=training, **settings)
    if options.html is not None:
        report.to_html(options.html)
        print(f"fp8graph: wrote {options.html}", file=sys.stderr)
    if options.json:
        print(json.dumps(report.to_dict(), indent=1))
    elif options.graph is not None:
        print(_stage(report, options.graph))
    elif options.table or (options.html is None and not _has_rich()):
        print(report)
    elif options.html is None:
        from fp8graph.cli.tree import print_tree

        print_tree(report, type(model).__name__)
    return 0


def _has_rich() -> bool:
    if importlib.util.find_spec("rich") is not None:
        return True
    print(f"fp8graph: rich is missing: a table in place of the tree of layers. Run: {install('rich')}", file=sys.stderr)
    return False


def _stage(report: Any, name: str) -> str:
    from fp8graph.errors import ConfigError

    texts: list[str] = []
    for view in report.graphs:
        stages = {"before": view.before, "after": view.after, **view.stages}
        if name not in stages:
            raise ConfigError(f"no stage {name!r}. Stages: {', '.join(stages)}.")
        texts.append(f"# {view.name}\n{stages[name]}")
    return "\n".join(texts)
