"""The names of recipes and targets that users type, and which of them was probably meant. Nothing here imports torch.

The ``fp8graph`` command checks its arguments by them, before it imports torch, which takes seconds.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Final, NamedTuple


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a sentence, with a space before it, that names what ``name`` was probably meant to be; or nothing."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


# Recipes (``recipes/recipe.py`` has one for each of these names, NeMo's where it has one).

HIGH_PRECISION: Final = "high_precision"
RECIPE_NAMES: Final = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise", "mxfp8", "nvfp4")

_NO_FP8: Final = f" For no FP8: {HIGH_PRECISION!r}, or None."
_OTHER_NAMES: Final = {  # of recipes: in other libraries, in sentences, and of their classes
    "tensorwise": ("current", "dynamic", "per_tensor", "per-tensor", "tensor", "float8currentscaling"),
    "rowwise": ("per_row", "per-row", "per_token", "per_channel", "axiswise", "float8rowwisescaling"),
    "blockwise": ("block", "per_block", "per-block", "deepseek", "float8blockscaling"),
    "mxfp8": ("mx", "mxfp8blockscaling"),
    "nvfp4": ("fp4", "nvfp4blockscaling"),
}
_HINTS: Final = {
    **{other: f" Did you mean {name!r}?" for name, others in _OTHER_NAMES.items() for other in others},
    **dict.fromkeys(("fp8", "float8", "auto", "default", "e4m3"), " Leave the recipe out: the device decides."),
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "fp32", "none", "off", "no"), _NO_FP8),
    **dict.fromkeys(("hybrid", "e5m2"), " 'tensorwise' and 'delayed' have gradients in E5M2, as HYBRID does."),
}


def why_no_recipe(name: str, names: Iterable[str] = RECIPE_NAMES) -> str:
    """Say that no recipe has this name, which one was probably meant, and which there are; "": one has it."""
    available = [*names, HIGH_PRECISION]
    if name in available:
        return ""
    meant = _HINTS.get(name.lower()) or did_you_mean(name.lower(), available)
    return f"unknown recipe {name!r}.{meant} Available: {', '.join(map(repr, available))}."


# Targets.


class Architectures(NamedTuple):
    """The names of one vendor's devices."""

    form: str  # an expression that matches each of them as a whole
    names: tuple[str, ...]


CPU: Final = Architectures("cpu", ("cpu",))
NVIDIA: Final = Architectures(
    r"sm_(\d+)(\d)a?",
    tuple(f"sm_{n}" for n in (70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121)),
)
AMD: Final = Architectures(
    "gfx[0-9a-f]{3,4}",
    tuple(
        f"gfx{name}"
        for name in "900 906 908 90a 940 941 942 950 1010 1012 1030 1031 1032 1034 1035 1036 1100 1101 1102 1103 "
        "1150 1151 1152 1153 1200 1201".split()
    ),
)
CALIBRATION: Final = ".json"  # the end of a file's name that ``fp8graph bench --calibrate`` wrote


def why_no_target(target: object) -> str:
    """Say that no device has this name, and which there are; "": one has it."""
    for form, names in (CPU, NVIDIA, AMD):
        if isinstance(target, str) and re.fullmatch(form, target):
            exists = target in names or target.removesuffix("a") in names
            return "" if exists else f"target: there is no {target!r}. Known: {', '.join(names)}."
    return (
        f"target must be 'cpu', a GPU like 'sm_90' or 'gfx942', or a calibration FILE.json, not {target!r}. "
        "An H100 is 'sm_90', a B200 'sm_100', an RTX 5090 'sm_120', an MI300 'gfx942'."
    )
