"""Count the lines of the product, and of the core: what a compilation needs. ``make size``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
AROUND = ("checkpoints", "cli.py", "extras", "integrations", "models", "offline", "report", "tools")


def lines() -> Counter[str]:
    """The lines of Python by the part of the product: a folder of ``fp8graph``, or a file in it."""
    counts: Counter[str] = Counter()
    for folder in (ROOT / "fp8graph", ROOT / "passes", ROOT / "models"):
        for file in folder.rglob("*.py"):
            if not any(each.is_symlink() for each in file.parents):
                part = file.relative_to(ROOT / "fp8graph").parts[0] if folder.name == "fp8graph" else folder.name
                counts[part] += len(file.read_text(encoding="utf-8").splitlines())
    return counts


if __name__ == "__main__":
    counts = lines()
    for part, count in counts.most_common():
        print(f"{count:>7,}  {part}{'' if part in AROUND else ' (core)'}")
    core = sum(count for part, count in counts.items() if part not in AROUND)
    print(f"{counts.total():>7,}  in all, {core:,} in the core")
