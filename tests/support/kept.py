"""Results that take a while to make, kept in build/kept between runs, and shared by the processes of one run.

A result is made again when a source that it may depend on has changed: any file of the product or of tests/support,
torch or Triton.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from filelock import FileLock  # torch needs it, too

T = TypeVar("T")
ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "build" / "kept"
SOURCES: Final = tuple(ROOT / name for name in ("fp8graph", "passes", "models", "tests/support"))


@functools.cache
def sources() -> bytes:
    """A hash of all files that a result may depend on, and of what they run on."""
    found = hashlib.sha256(sys.version.encode())
    for package in ("torch", "triton", "numpy"):
        found.update(importlib.metadata.version(package).encode())
    for folder in SOURCES:
        for file in sorted(folder.rglob("*.py")):
            found.update(file.relative_to(folder.parent).as_posix().encode() + file.read_bytes())
    return found.digest()


def kept(make: Callable[[str], T]) -> Callable[[str], T]:
    """``make``, a function of a name, with results that are kept."""
    results: dict[str, T] = {}

    def get(name: str) -> T:
        if name not in results:
            result = f"{make.__name__} {name}".encode()
            file = FOLDER / hashlib.sha256(sources() + result).hexdigest()
            FOLDER.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{file}.lock"):
                if not file.exists():
                    part = file.with_suffix(".part")
                    part.write_bytes(pickle.dumps(make(name)))
                    part.replace(file)
                results[name] = pickle.loads(file.read_bytes())
        return results[name]

    return get
