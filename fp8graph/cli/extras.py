"""Which extra of ours brings an optional package."""

from __future__ import annotations

from typing import Final

EXTRAS: Final = {
    "rich": "cli",
    "shtab": "cli",
    "transformers": "hf",
    "safetensors": "checkpoints",
    "matplotlib": "demo",
    "plotext": "demo",
    "triton": "kernels",
}


def install(package: str) -> str | None:
    """The command that installs an optional package; None for one that no extra of ours brings."""
    return f'pip install "fp8graph[{EXTRAS[package]}]"' if package in EXTRAS else None
