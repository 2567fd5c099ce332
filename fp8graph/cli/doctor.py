"""``fp8graph doctor``: what is native, emulated or missing on this machine."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

from fp8graph.cli.arguments import command
from fp8graph.cli.extras import EXTRAS, install


def add(commands: Any) -> None:
    """What the command takes."""
    command(commands, "doctor", run, "show what is native, emulated or missing on this machine")


def run(_options: argparse.Namespace) -> int:
    """Print the machine, what can be installed, and a table of recipes by architecture."""
    from fp8graph.report.tables import aligned
    from fp8graph.tools import doctor

    print("\n".join(aligned([*doctor.machine(), *missing()])))
    print("\nbf16 linears and experts (grouped matmuls). Recipes that are not native are emulated:\n")
    print("\n".join(aligned(doctor.architectures())))
    return 0


def missing() -> list[tuple[str, str]]:
    """Each optional package that is not installed, and the command that installs it."""
    names = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    rows = [(name, f"not installed. Run: {install(name)}") for name in names]
    return rows or [("optional packages", "all installed")]
