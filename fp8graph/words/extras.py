"""The optional packages, and the command that installs one. Nothing here imports torch."""

from __future__ import annotations

import importlib
import pathlib
from typing import Final

# the extra of ours that brings an optional package
EXTRAS: Final = {
    "rich": "cli",
    "shtab": "cli",
    "transformers": "hf",
    "safetensors": "checkpoints",
    "matplotlib": "demo",
    "plotext": "demo",
    "triton": "kernels",
}
_ROOT: Final = pathlib.Path(__file__).parents[2]


def is_installed() -> bool:
    """Return whether pip has installed fp8graph, from a wheel or editable. Else it is imported from a checkout."""
    if any(_ROOT.glob("fp8graph-*.dist-info")):  # from a wheel
        return True
    metadata = importlib.import_module("importlib.metadata")  # takes a fifth of a second
    try:
        return bool(metadata.distribution("fp8graph"))
    except metadata.PackageNotFoundError:
        return False


def install(package: str) -> str | None:
    """Return the command that installs an optional package; None for one that no extra of ours brings.

    No index has fp8graph: where it is installed, pip takes it as it is, and installs what the extra names.
    """
    if package not in EXTRAS:
        return None
    extra = f"[{EXTRAS[package]}]"
    return f'pip install "fp8graph{extra}"' if is_installed() else f'pip install -e "{_ROOT}{extra}"'
