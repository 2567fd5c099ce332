"""Count the small faults of the product that the fast tests notice: ``make mutants``.

Each fault of ``small_faults.py`` is made in a copy of the repository, and the tests that ought to notice it run there::

    python tools/mutants.py                       # all
    python tools/mutants.py "strict mode warns"   # some, by name
    python tools/mutants.py -j 2 --write          # two at a time; the result goes into tests/data/mutants.json

A fault is killed if a test fails that passes without it, and survives if all pass. A test that fails without any fault
shows nothing: the tests that failed run once more in a copy without faults. The exit code is 1 if a fault survives that
is not a known survivor, or if nothing can be said of it.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from small_faults import FAULTS, SURVIVORS, Fault

ROOT: Final = Path(__file__).parents[1]
RESULT: Final = ROOT / "tests" / "data" / "mutants.json"
_LINKS: Final = ("passes", "models")  # links in fp8graph/ that git does not track
_PYTEST: Final = (
    *("-m", "pytest", "-q", "-m", "fast", "-n", "0", "--tb=line"),
    *("-p", "no:cacheprovider", "-p", "no:randomly"),  # the same test kills each time
)
_PATIENCE: Final = 600  # seconds for the tests of one fault: one that hangs is noticed, too
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_DONE, _FAILURES, _NO_TESTS = 0, 1, 5  # exit codes of pytest


class Outcome(NamedTuple):
    """The tests' word on one fault. ``by``: the first test that failed; "" if none did."""

    fault: Fault
    by: str
    seconds: float
    wrong: str = ""  # why nothing can be said

    def __str__(self) -> str:
        said = f"killed by {self.by}" if self.by else "SURVIVED"
        return f"{self.wrong or said} ({self.seconds:.0f} s): {self.fault.file}: {self.fault.name}"


def copied(folder: Path) -> Path:
    """A copy of the files that git knows, or would add, in ``folder``."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (source := ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    for link in _LINKS:
        (folder / "fp8graph" / link).symlink_to(Path("..", link))
    return folder


def with_fault(text: str, fault: Fault) -> str:
    """``text`` of the fault's file with the fault.

    Raises:
        ValueError: the text to replace does not stand there once.
    """
    if (count := text.count(fault.before)) != 1:
        raise ValueError(f"{fault.file}: {fault.before!r} stands there {count} times, not once.")
    return text.replace(fault.before, fault.after)


def pytest_in(folder: Path, tests: Iterable[str], *options: str) -> tuple[int, str]:
    """The exit code (-1: they did not end) and the output of the fast tests among ``tests``, in a copy."""
    settings = {"PYTHONPATH": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / ".inductor"), "COLUMNS": "400"}
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **settings}
    command = [sys.executable, *_PYTEST, *options, *tests]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, ""
    return done.returncode, done.stdout + done.stderr


def tried(fault: Fault, folder: Path) -> Outcome:
    """Make ``fault`` in the copy ``folder``, run its tests, and undo it."""
    file = folder / fault.file
    text, times = file.read_text(encoding="utf-8"), file.stat()
    file.write_text(with_fault(text, fault), encoding="utf-8")
    # Python keeps bytecode by size and second of the file: each fault gets a second of its own
    os.utime(file, (times.st_atime, times.st_mtime + 10 + FAULTS.index(fault)))
    start = time.monotonic()
    try:
        code, output = pytest_in(folder, fault.tests, "-x")
    finally:
        file.write_text(text, encoding="utf-8")
        os.utime(file, (times.st_atime, times.st_mtime))
    seconds = time.monotonic() - start
    if code == -1:
        return Outcome(fault, "a test that does not end", seconds)
    if code == _DONE:
        return Outcome(fault, "", seconds)
    found = _FAILED.search(output)
    if code != _FAILURES or found is None:
        problem = "it runs no test" if code == _NO_TESTS else "nothing can be imported"
        return Outcome(fault, "", seconds, wrong=f"NOTHING SAID, {problem}\n{output[-2000:]}\n")
    return Outcome(fault, found[1], seconds)


def checked(outcomes: Sequence[Outcome], folder: Path) -> list[Outcome]:
    """The outcomes, without those that a test is said to show that fails in a copy without faults, too."""
    killers = sorted({outcome.by for outcome in outcomes if "::" in outcome.by})
    _, output = pytest_in(folder, killers) if killers else (0, "")
    broken = {*_FAILED.findall(output)}
    if killers and not re.search(r"\d+ passed", output):
        broken = {*killers}
    return [
        each._replace(wrong=f"NOTHING SAID, {each.by} fails without the fault") if each.by in broken else each
        for each in outcomes
    ]


def run(faults: Sequence[Fault], workers: int, record: Callable[[Sequence[Outcome]], None]) -> list[Outcome]:
    """Try ``faults``, ``workers`` at a time, each worker in a copy of its own. Prints and records each outcome."""
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as temporary:
        folders: queue.Queue[Path] = queue.Queue()
        for index in range(workers):
            folders.put(copied(Path(temporary, str(index))))

        def one(fault: Fault) -> Outcome:
            folder = folders.get()
            try:
                outcome = tried(fault, folder)
            finally:
                folders.put(folder)
            with lock:
                print(outcome, flush=True)
                record([outcome])
            return outcome

        with ThreadPoolExecutor(workers) as pool:
            outcomes = list(pool.map(one, faults))
        return checked(outcomes, folders.get())


def recorded() -> dict[str, dict[str, Any]]:
    """The rows that were written last, by the name of the fault."""
    if not RESULT.is_file():
        return {}
    return {row["fault"]: row for row in json.loads(RESULT.read_text(encoding="utf-8"))["faults"]}


def write(outcomes: Iterable[Outcome]) -> None:
    """Record ``outcomes`` beside those of faults that did not run now."""
    rows = recorded()
    for fault, by, seconds, wrong in outcomes:
        rows.pop(fault.name, None)
        if not wrong:
            rows[fault.name] = {
                "fault": fault.name, "file": fault.file, "killed_by": by or None, "seconds": round(seconds)
            }  # fmt: skip
    known = [rows[fault.name] for fault in FAULTS if fault.name in rows]
    killed = sum(row["killed_by"] is not None for row in known)
    text = json.dumps({"killed": killed, "of": len(known), "faults": known}, indent=1)
    RESULT.write_text(text + "\n", encoding="utf-8")


def surprises(outcomes: Iterable[Outcome], survivors: Mapping[str, str] = SURVIVORS) -> list[Outcome]:
    """Outcomes that need a look: survivors that nobody knows, and faults of which nothing can be said."""
    return [each for each in outcomes if each.wrong or (not each.by and each.fault.name not in survivors)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Make small faults, and count those that the fast tests notice.")
    parser.add_argument("names", nargs="*", metavar="name", help="of a fault, or the file that it is in (default: all)")
    parser.add_argument("-j", type=int, default=1, dest="workers", help="faults at a time (default 1)")
    parser.add_argument("--write", action="store_true", help=f"record the result in {RESULT.relative_to(ROOT)}")
    parser.add_argument("--new", action="store_true", help="only faults of which nothing is recorded (a run goes on)")
    options = parser.parse_args(arguments)
    known = {name for fault in FAULTS for name in (fault.name, fault.file)}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no fault, and no file with one: {', '.join(unknown)}")
    before = recorded() if options.new else {}
    asked = [fault for fault in FAULTS if not options.names or {fault.name, fault.file} & {*options.names}]
    record: Callable[[Sequence[Outcome]], None] = write if options.write else lambda _: None
    outcomes = run([fault for fault in asked if fault.name not in before], options.workers, record)
    record(outcomes)  # without those that the check took back
    killed = sum(bool(each.by) and not each.wrong for each in outcomes)
    seconds = sum(each.seconds for each in outcomes)
    print(f"{killed} of {len(outcomes)} faults were killed, in {seconds:.0f} seconds of tests.")
    for each in outcomes:
        if not each.by and each.fault.name in SURVIVORS:
            print(f"known to survive: {each.fault.name}: {SURVIVORS[each.fault.name]}")
    for each in (found := surprises(outcomes)):
        print(f"look at this: {each}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
