"""This machine's hardware and software, and the native GEMMs of each architecture, for ``fp8graph doctor``."""

from __future__ import annotations

import importlib.util
import shutil

import torch

from fp8graph import hardware
from fp8graph.hardware import Hardware
from fp8graph.hardware.support import support_of
from fp8graph.recipes import RECIPE_NAMES, Recipe, resolve_recipe
from fp8graph.tools import tested
from fp8graph.version import __version__


def support(found: Hardware, recipe: Recipe, *, grouped: bool = False) -> str:
    """ "native", "emulated", or which of the GEMMs of a bf16 linear (of experts, if ``grouped``) are native."""
    support = support_of(found, recipe, grouped=grouped)
    if support:
        return "native"
    return f"{', '.join(support.native)} native" if support.native else "emulated"


def architectures() -> list[tuple[str, ...]]:
    """One row per recipe (linears, then experts) and one for the default recipe; one column per architecture."""
    devices = [hardware.from_target(name) for name in hardware.EXAMPLES]
    rows: list[tuple[str, ...]] = [("recipe", *hardware.EXAMPLES)]
    for name in RECIPE_NAMES:
        if (recipe := resolve_recipe(name)) is not None:
            for grouped in (False, True):
                cells = (support(device, recipe, grouped=grouped) for device in devices)
                rows.append((f"{name}, experts" if grouped else name, *cells))
    rows.append(("default recipe", *(device.default_recipe for device in devices)))
    return rows


def trainer() -> list[str]:
    """What users of Hugging Face Trainer meet: its option takes accelerate's list of names."""
    if importlib.util.find_spec("accelerate") is None:
        return []
    return [
        'torch_compile_backend="fp8graph" is refused ("not a valid DynamoBackend"): accelerate has a list of names. '
        "Call fp8graph.compile(model) before Trainer or prepare()"
    ]


def machine() -> list[tuple[str, str]]:
    """This machine's hardware and software. Optional packages: see ``fp8graph/cli.py``."""
    of_torch, python, transformers = tested.here()
    rows = [
        ("fp8graph", __version__),
        ("python", python),
        ("torch", of_torch),
        *([("transformers", transformers)] if transformers is not None else []),
        ("these versions", tested.remark(of_torch, python, transformers)),
    ]
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        found = hardware.of_device(device)
        fast = "" if found.scalings else ": no FP8 GEMMs, every recipe is emulated"
        rows.append((str(device), f"{torch.cuda.get_device_name(device)}, {found.name}{fast}"))
    if not torch.cuda.is_available():
        rows.append(("cuda", "no GPU: the CPU gives the right numbers, but not faster than bf16"))
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    rows.append(("C++ compiler", compiler or 'missing: Inductor needs one on CPU; compiler="eager" does not'))
    rows += [("Trainer", line) for line in trainer()]
    here = hardware.of_machine()
    rows.append(("default recipe", f"{here.default_recipe}, for {here.name}"))
    return rows
