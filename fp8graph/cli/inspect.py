"""``fp8graph inspect``: what is in an FP8 checkpoint."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fp8graph.cli.arguments import command

_ABOUT = "show what is in an FP8 checkpoint: formats, layers, outliers, and what does not fit together"


def add(commands: Any) -> None:
    """What the command takes."""
    inspect = command(commands, "inspect", run, _ABOUT)
    inspect.add_argument("folder", type=Path, help="a folder with config.json and safetensors files")
    inspect.add_argument("--json", action="store_true", help="print all of it as JSON, with a row per layer")


def run(options: argparse.Namespace) -> int:
    """Read one layer at a time; 1 if something does not fit together."""
    from fp8graph.tools import inspect_checkpoint

    found = inspect_checkpoint.inspected(options.folder)
    print(json.dumps(found.to_dict(), indent=1) if options.json else inspect_checkpoint.text(found))
    return 1 if found.problems else 0
