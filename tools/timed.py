"""Run a command of the Makefile, and write its time and its result into CONTRIBUTING.md: ``make timed RUN=test``."""

from __future__ import annotations

import datetime
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[1] / "CONTRIBUTING.md"
_RESULT: Final = re.compile(r"^=* ?(\d+ (?:passed|failed|skipped|error).*) in [\d.]+s", re.MULTILINE)


def result_of(command: Sequence[str]) -> tuple[str, int]:
    """Run a command that runs pytest, and show its output: pytest's word on the tests, and the exit code."""
    output = ""
    with subprocess.Popen(command, cwd=PAGE.parent, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            output += line
    results = _RESULT.findall(output)
    return results[-1] if results else f"ended with exit code {process.returncode}", process.returncode


def today() -> str:
    return f"{datetime.date.today():%B %-d, %Y}"


def timed(target: str) -> tuple[str, str, int]:
    """Run ``make target``: the date with its time, pytest's word on it, and the exit code."""
    subprocess.run(["make", "--silent", ".venv/ready"], check=True)  # its time is the installer's
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    result, code = result_of(["make", target])
    seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    cost = (
        f"{seconds // 60:.0f}:{seconds % 60:02.0f} on {os.cpu_count()} cores{_processor()}, {cpu / 60:.1f} CPU minutes"
    )
    return f"{today()}: {cost}", result, code


def _processor() -> str:
    """Which processor, where Linux says it: the same tests take half as long on another one."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return f" of {found[1]}" if found else ""


def with_row(page: str, target: str, when: str, result: str) -> str:
    """``page`` with these cells behind ``make target`` and what it is. Raises ValueError if it has no such row."""
    row = re.compile(rf"^(\| `make {re.escape(target)}` \| [^|\n]* \|).*$", re.MULTILINE)
    if len(row.findall(page)) != 1:
        raise ValueError(f"CONTRIBUTING.md has no row, or several, for `make {target}`.")
    return row.sub(lambda found: f"{found[1]} {when} | {result} |", page)


def main(target: str) -> int:
    with_row(PAGE.read_text(encoding="utf-8"), target, "", "")  # raises now, not after the run
    when, result, code = timed(target)
    PAGE.write_text(with_row(PAGE.read_text(encoding="utf-8"), target, when, result), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
