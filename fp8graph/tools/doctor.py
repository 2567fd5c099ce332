"""``fp8graph doctor``: this machine's hardware and software, and the native GEMMs of each architecture.

``RUNS`` are the versions of torch, Python and transformers on which the tests ran; ``docs/support.md`` says which
tests, and when. An installer takes the newest versions that ``pyproject.toml`` allows, which may be newer, so this
machine's are compared with them. A release of a fix (2.13.1) counts as the version that it fixes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
from dataclasses import dataclass
from typing import Final

import torch

from fp8graph import hardware
from fp8graph.hardware import Hardware, support_of
from fp8graph.recipes import RECIPE_NAMES, Recipe, resolve_recipe
from fp8graph.version import __version__

SUPPORTED_TORCH: Final = ("2.11", "2.15")  # the oldest and the newest that pyproject.toml allows


@dataclass(frozen=True)
class TriedVersions:
    """One combination of versions."""

    torch: str
    python: str
    transformers: str
    all_fast_tests: bool  # all fast tests, at least; else a sample

    def __str__(self) -> str:
        return f"torch {self.torch} with Python {self.python} and transformers {self.transformers}"


RUNS: Final = (
    TriedVersions("2.13.0", "3.11", "5.24.0", all_fast_tests=True),
    TriedVersions("2.13.0", "3.11", "5.23.0", all_fast_tests=True),
    TriedVersions("2.13.0", "3.13", "5.23.0", all_fast_tests=False),
    TriedVersions("2.13.0", "3.12", "5.23.0", all_fast_tests=False),
    TriedVersions("2.11.0", "3.11", "5.23.0", all_fast_tests=True),
    TriedVersions("2.14.1", "3.11", "5.24.0", all_fast_tests=True),
    TriedVersions("2.15.0", "3.12", "5.24.0", all_fast_tests=True),
)

# libraries that train models, by their distributions, and the versions whose own code the tests ran
HOSTS: Final = {
    "accelerate": "1.15.0",
    "axolotl": "0.19.0",
    "deepspeed": "0.19.8",
    "lightning": "2.6.6",
    "llamafactory": "0.9.5",
    "nemo-automodel": "0.7.0",
    "ray": "2.60.0",
    "torchtitan": "0.3.0",
    "trl": "1.16.0",
    "veomni": "0.1.12",
    "verl": "0.9.1",
}


def hosts() -> list[tuple[str, str]]:
    """Return the installed ones of ``HOSTS``, and whether the tests ran with these versions."""
    rows: list[tuple[str, str]] = []
    for name, tried in HOSTS.items():
        if (version := _installed(name)) is not None:
            rows.append((name, f"{version}, {'which was tried' if version == tried else f'not tried; {tried} was'}"))
    return rows


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def here() -> tuple[str, str, str | None]:
    """Return the versions of torch, Python and transformers (None: it is not installed) of this machine."""
    return torch.__version__, platform.python_version(), _installed("transformers")


def remark(torch_version: str, python: str, transformers: str | None) -> str:
    """Return whether tests ran on these versions together, or with another Python; if not, the nearest that they ran
    on.
    """
    both = [run for run in RUNS if _same(torch_version, run.torch) and _same(transformers, run.transformers)]
    matches = [run for run in both if _same(python, run.python)] or both
    if matches:
        which = "all fast tests" if any(run.all_fast_tests for run in matches) else "a sample of the tests"
        pythons = " and ".join(dict.fromkeys(run.python for run in matches if not _same(python, run.python)))
        return f"{which} ran on them" + (f", with Python {pythons}" if pythons else "")
    low, high = SUPPORTED_TORCH
    allowed = _numbers(low) <= _numbers(torch_version) <= _numbers(high)
    only = "" if allowed else f", and only torch {low} to {high} is allowed"
    with_torch = [run for run in RUNS if _same(torch_version, run.torch)]
    nearest = max(with_torch or RUNS, key=lambda run: (run.all_fast_tests, *_numbers(run.torch)))
    return f"no tests ran on them{only}. {'All fast ones' if nearest.all_fast_tests else 'A sample'} ran on {nearest}"


def _same(version: str | None, tested: str) -> bool:
    return version is None or _numbers(version) == _numbers(tested)


def _numbers(version: str) -> tuple[int, ...]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def support(device: Hardware, recipe: Recipe, *, grouped: bool = False) -> str:
    """ "native", "emulated", or which of the GEMMs of a bf16 linear (of experts, if ``grouped``) are native."""
    support = support_of(device, recipe, grouped=grouped)
    if support:
        return "native"
    return f"{', '.join(support.native)} native" if support.native else "emulated"


def architectures() -> list[tuple[str, ...]]:
    """Return one row per recipe (linears, then experts) and one for the default recipe; one column per architecture."""
    devices = [hardware.from_target(name) for name in hardware.EXAMPLES]
    rows: list[tuple[str, ...]] = [("recipe", *hardware.EXAMPLES)]
    for name in RECIPE_NAMES:
        if (recipe := resolve_recipe(name)) is not None:
            for grouped in (False, True):
                cells = (support(device, recipe, grouped=grouped) for device in devices)
                rows.append((f"{name}, experts" if grouped else name, *cells))
    rows.append(("default recipe", *(device.default_recipe for device in devices)))
    return rows


def machine() -> list[tuple[str, str]]:
    """This machine's hardware and software. Optional packages: see ``fp8graph/cli.py``."""
    of_torch, python, transformers = here()
    rows = [
        ("fp8graph", __version__),
        ("python", python),
        ("torch", of_torch),
        *([("transformers", transformers)] if transformers is not None else []),
        ("these versions", remark(of_torch, python, transformers)),
        *hosts(),
    ]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    gpus = (
        []
        if accelerator is None
        else [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]
    )
    for gpu in gpus:
        device = hardware.of_device(gpu)
        fast = "" if device.scalings else ": no FP8 GEMMs, every recipe is emulated"
        rows.append((str(gpu), f"{hardware.device_name(gpu)}, {device.name}{fast}"))
    if not gpus:
        rows.append(("GPU", "none: the CPU gives the right numbers, but not faster than bf16"))
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    rows.append(("C++ compiler", compiler or 'missing: Inductor needs one on CPU; compiler="eager" does not'))
    if importlib.util.find_spec("accelerate") is not None:
        refused = (
            'torch_compile_backend="fp8graph" is refused ("not a valid DynamoBackend"): accelerate has a list of names'
        )
        rows.append(("Trainer", f"{refused}. Call fp8graph.compile(model) before Trainer or prepare()"))
    device = hardware.of_machine()
    rows.append(("default recipe", f"{device.default_recipe}, for {device.name}"))
    return rows
