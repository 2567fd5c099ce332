"""One run of a benchmark: its lines, each written the moment it is made, and its budget.

A run is one file of JSON lines. The first says where and with what it ran; each further line is one measurement, or
one failure, or something that was left out and why. ``benchmarks.report`` reads folders of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import time
import traceback
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from fp8graph.tools.record.machine import this_machine

RESULTS: Final = Path(__file__).parent / "results"
TRACEBACK: Final = 6  # last lines of it that a failure keeps
console: Final = Console(soft_wrap=True)


class OutOfTime(RuntimeError):
    """The budget ended during a measurement."""


class Run:
    """The lines and the time of one run.

    Args:
        path: of the file of lines, None to print them only.
        budget: seconds for everything.
        tiny: small sizes, to try the scripts on any machine; such a run is no result.
        compiler: "inductor", or "eager" to generate no code.
        only: the contenders to measure; all of them if it is empty.
        widths: the hidden sizes of ``smallest``; all of them if it is empty.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        budget: float = 560,
        tiny: bool = False,
        compiler: Any = "inductor",
        only: Sequence[str] = (),
        widths: Sequence[int] = (),
    ) -> None:
        self.path = path
        self.budget = budget
        self.tiny = tiny
        self.compiler = compiler
        self.only = only
        self.widths = widths
        self._started = time.monotonic()
        self._section = (0.0, budget)  # seconds after the start: when the section began, when it is to end

    def chosen(self, contenders: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of ``contenders`` that are measured."""
        return {name: value for name, value in contenders.items() if not self.only or name in self.only}

    def write(self, section: str, **values: Any) -> None:
        """One line, in the file before this returns."""
        line = json.dumps({"section": section, "at_s": round(self.seconds, 1), **values}, default=str)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        print(line if len(line) <= 300 else line[:297] + "...", flush=True)

    @contextlib.contextmanager
    def attempt(self, section: str, **what: Any) -> Generator[None]:
        """An error in here becomes a line, with the last lines of its traceback, and the run goes on."""
        try:
            yield
        except Exception as error:
            text = "".join(traceback.format_exception(error)).strip()
            for folder in (RESULTS.parents[1], Path(torch.__file__).parents[1]):  # results name no place of a machine
                text = text.replace(f"{folder}/", "")
            last = text.splitlines()[-TRACEBACK:]
            self.write(section, **what, failed=f"{type(error).__name__}: {str(error)[:600]}", traceback=last)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def begin_section(self, left: int, seconds: float | None = None) -> None:
        """Give the next section ``seconds``, or an equal part of the time left for it and the others (``left``)."""
        now = self.seconds
        rest = max(0.0, self.budget - now)
        self._section = (now, now + (rest / left if seconds is None else min(seconds, rest)))

    @property
    def left(self) -> float:
        """Seconds that the section has left."""
        return self._section[1] - self.seconds

    def late(self, share: float = 1.0) -> bool:
        """Whether ``share`` of the section's time is over."""
        begin, end = self._section
        return self.seconds >= begin + share * (end - begin)

    @contextlib.contextmanager
    def limited(self) -> Generator[None]:
        """Raise :class:`OutOfTime` inside the code that still runs when the budget is over.

        By the alarm signal, which reaches Python code only: a library call that hangs is beyond it.
        """

        def stop(*_: Any) -> None:
            raise OutOfTime(f"the budget of {self.budget:g} s is over")

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, max(0.001, self.budget - self.seconds))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def write_json(name: str, results: Any) -> Path:
    """``benchmarks/results/<name>.json`` with the machine beside the numbers."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": this_machine(), "results": results}, indent=1) + "\n", encoding="utf-8")
    return path


def importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
