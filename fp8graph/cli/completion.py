"""``fp8graph completion``: what a shell reads to complete commands and options."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from fp8graph.cli.arguments import command

_ABOUT = 'print the completion for a shell: eval "$(fp8graph completion bash)"'


def add(commands: Any) -> None:
    """What the command takes."""
    completion = command(commands, "completion", run, _ABOUT)
    completion.add_argument("shell", choices=("bash", "zsh"))


def run(options: argparse.Namespace) -> int:
    """Print what shtab makes of the parser."""
    shtab: Any = importlib.import_module("shtab")
    parser = importlib.import_module("fp8graph.cli").parser()
    print(shtab.complete(parser, shell=options.shell))
    return 0
