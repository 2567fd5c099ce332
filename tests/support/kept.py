"""Results that take a while to make, kept in build/kept between runs, and shared by the processes of one run.

A result is made again when a source that it may depend on has changed: any file of the product, the file of the
function that makes it, torch or Triton.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar, cast

from filelock import FileLock  # torch needs it, too

T = TypeVar("T")
ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "build" / "kept"
_PRODUCT: Final = ("fp8graph", "passes", "models")


@functools.cache
def product() -> bytes:
    """A hash of all product files, and of what they run on."""
    found = hashlib.sha256(sys.version.encode())
    for package in ("torch", "triton", "numpy"):
        found.update(importlib.metadata.version(package).encode())
    for folder in _PRODUCT:
        for file in sorted((ROOT / folder).rglob("*.py")):
            found.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return found.digest()


def kept(make: Callable[[str], T]) -> Callable[[str], T]:
    """``make``, a function of a name, with results that are kept."""
    source, results = Path(inspect.getfile(make)), cast("dict[str, T]", {})

    def get(name: str) -> T:
        if name not in results:
            asked = f"{make.__name__} {name}".encode()
            file = FOLDER / hashlib.sha256(product() + source.read_bytes() + asked).hexdigest()
            FOLDER.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{file}.lock"):
                if not file.exists():
                    part = file.with_suffix(".part")
                    part.write_bytes(pickle.dumps(make(name)))
                    part.replace(file)
                results[name] = pickle.loads(file.read_bytes())
        return results[name]

    return get
