"""``fp8graph export``: quantize a checkpoint for an inference engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fp8graph.cli.arguments import check_recipe, command

_ABOUT = "quantize a checkpoint for an inference engine (of a trained model: fp8graph.export in Python)"


def add(commands: Any) -> None:
    """What the command takes."""
    export = command(commands, "export", run, _ABOUT)
    export.add_argument("source", type=Path, help="a folder with config.json and safetensors files in high precision")
    export.add_argument("folder", type=Path, help="the folder to write, which must not exist")
    export.add_argument("--recipe", default="blockwise", help="(default blockwise)")
    export.add_argument("--policy", type=Path, metavar="FILE", help="a policy file, in place of the default policy")
    export.add_argument("--format", default="auto", help="auto, fp8, compressed-tensors or modelopt (default auto)")
    export.add_argument("--overwrite", action="store_true", help="replace a checkpoint in the folder")


def run(options: argparse.Namespace) -> int:
    """Write the folder, and show what is in it."""
    check_recipe(options.recipe)
    from fp8graph.errors import ConfigError

    if not options.overwrite and options.folder.is_dir() and any(options.folder.iterdir()):
        raise ConfigError(f"{options.folder}: exists. Choose another folder, or pass --overwrite to replace it.")
    from fp8graph.tools import inspect_checkpoint
    from fp8graph.tools.export_folder import export_folder

    settings = {name: getattr(options, name) for name in ("recipe", "policy", "format", "overwrite")}
    folder = export_folder(options.source, options.folder, **settings)
    print(inspect_checkpoint.text(inspect_checkpoint.inspected(folder)))
    return 0
