"""docs/trainers.md for the tests of the trainers: its commands with their output, and its table of wrong set-ups."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

from samples import ROOT, same_output

PAGE = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
_RUN = re.compile(r"^```\n(?P<command>[^`]*?)^```\n+```output\n(?P<output>.*?)^```$", re.MULTILINE | re.DOTALL)
_PROGRAMS = {
    "accelerate": ["-m", "accelerate.commands.accelerate_cli"],
    "python": [],
    "torchrun": ["-m", "torch.distributed.run", "--standalone"],
}


def section(heading: str) -> str:
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def run_commands(heading: str, seconds: float = 600) -> None:
    """Type each command of a section whose output is shown, and compare: lines that the page leaves out are the host's.

    The output on the page is the standard output, in order, with "..." for any text.
    """
    shown = [*_RUN.finditer(section(heading))]
    assert shown, heading
    for each in shown:
        program, *arguments = shlex.split(each["command"].replace("\\\n", ""))
        done = subprocess.run(
            [sys.executable, *_PROGRAMS[program], *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
        assert done.returncode == 0, done.stderr
        assert same_output(each["output"], done.stdout), done.stdout


def wrong_set_ups(trainer: str) -> list[str]:
    """The messages that the table has for a trainer, in order."""
    rows = [[cell.strip() for cell in row.split(" | ")] for row in section("Wrong set-ups").splitlines()]
    found = [row[2].rstrip(" |").strip("`") for row in rows if row[0].lstrip("| ") == trainer]
    assert len(found) >= 2, trainer
    return found
