"""Count the files that name an optional feature: ``python tools/spread.py`` prints a table.

For each feature: the product's files outside of its own place whose code (not comments, strings or docstrings) has one
of its names. What a user writes and reads has each name once and is not counted (``PUBLIC``), like the list of passes.
A feature is one entry of ``passes/`` when few other files must know of it.
"""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("fp8graph", "passes", "models")
PUBLIC = (
    "passes/__init__.py",
    "fp8graph/face.py",
    "fp8graph/records.py",
    "fp8graph/recipes/",
    "fp8graph/ir/settings.py",
)

TRANSFORMS = ("fp8graph/numerics/transforms.py", "fp8graph/ir/transforms.py")


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Attributes:
    names: matches an identifier of the feature, as a whole.
    places: the folders and files of the feature.
    """

    names: str
    places: tuple[str, ...]


FEATURES: dict[str, Feature] = {
    "FP32 gradients": Feature(
        names="accumulate_wgrad|main_grads?|MainGrads|Gradient|why_not_accumulated|gradient_bytes",
        places=("passes/accumulate_wgrad.py",),
    ),
    "FSDP2 gathers": Feature(
        names="fsdp|gather_weights|[Ss]ent_?[Ww]eights?|Gathered(Weight|Copies)|ToGather|ReadWhole|is_sent"
        "|why_not_sent",
        places=(
            "passes/gather_weights/",
            "fp8graph/compat/fsdp.py",
            "fp8graph/extras/planning/",
        ),  # a plan has a word "fsdp"
    ),
    "statistics": Feature(
        names="[Oo]bserv(e|ed|ation)|Observed(Tensor)?|[Ss]tatistics(Page)?|Statistic(s|Record)|Measuring|measur(es|ing)",
        places=("passes/observe/", "fp8graph/numerics/stats.py"),
    ),
    "attention": Feature(
        names=r"\w*[Aa]ttention\w*",
        # a plan and caches name the attention of a model, which this compiler need not see
        places=(
            "passes/attention/",
            "fp8graph/compat/attention.py",
            "fp8graph/extras/planning/",
            "fp8graph/integrations/",
        ),
    ),
    "delayed scaling": Feature(
        names="DelayedScaling|[Dd]elayed|PageLayout|JoinsReduction|connect_scales|[Ss]caling_?[Ss]tate|amax_history\\w*"
        "|reduce_amax|amax_group|history",
        places=("passes/connect_scales", "fp8graph/numerics/history.py", "fp8graph/numerics/scalings/delayed.py"),
    ),
    "weight copies": Feature(
        names="CachedWeight|hoist_weights|note_weights|weight_cache|cache_weights|keeps_weights"
        "|refresh_weights|weight_bytes",
        places=("passes/hoist_weights", "passes/gather_weights/"),
    ),
    "guard": Feature(
        names="[Gg]uard(s|ed|Settings)?|saved_guard",
        places=("passes/observe/guard.py", "passes/observe/findings.py"),
    ),
    "NVFP4's transform": Feature(
        names=r"\w*hadamard\w*|rotat\w+|prepare_fp4|RHT",
        places=("passes/prepare_fp4.py", "passes/attention/", *TRANSFORMS),  # which has its own transform, of q and k
    ),
}


def identifiers(path: Path) -> set[str]:
    """The identifiers in the code of a file."""
    with path.open("rb") as file:
        return {token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME}


def files(root: Path = ROOT) -> Iterator[str]:
    """The product's files, as paths from ``root``."""
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if not name.startswith(("fp8graph/passes/", "fp8graph/models/", *PUBLIC)):
                yield name


def spread(root: Path = ROOT) -> dict[str, list[str]]:
    """The files outside of its place that know each feature."""
    known = {name: identifiers(root / name) for name in files(root)}
    return {
        title: [
            name
            for name, found in known.items()
            if not name.startswith(feature.places) and any(re.fullmatch(feature.names, each) for each in found)
        ]
        for title, feature in FEATURES.items()
    }


if __name__ == "__main__":
    found = spread()
    for title, names in found.items():
        print(f"{len(names):3}  {title:20}", *(name.removeprefix("fp8graph/") for name in names))
    print(f"{sum(map(len, found.values())):3}  in all")
