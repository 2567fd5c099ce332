"""Devices: the low-precision GEMMs that they have, how torch calls them, and how fast they are.

A vendor is a file with a subclass of ``Hardware``, and a line in ``VENDORS``. Here a device is found by its name or by
torch's device, and a recipe is compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from fp8graph import words
from fp8graph.errors import ConfigError
from fp8graph.hardware import amd, nvidia
from fp8graph.hardware.amd import AMD
from fp8graph.hardware.device import CPU, Hardware
from fp8graph.hardware.nvidia import NVIDIA
from fp8graph.hardware.speed import BF16_SHARE, Speed, of_device_name
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import GEMM_OPERANDS, GemmName, Recipe, RecipeLike, resolve_recipe

VENDORS: Final[tuple[type[Hardware], ...]] = (CPU, NVIDIA, AMD)
EXAMPLES: Final = tuple(name for vendor in VENDORS for name in vendor.examples)


def from_target(target: str, device_name: str = "") -> Hardware:
    """Return the hardware named by ``target``: "cpu", a GPU like "sm_90" or "gfx942", or a calibration
    (``Speed.load``).

    Raises:
        ConfigError: (a ``ValueError``) for anything else.
    """
    if isinstance(target, str) and target.endswith(words.CALIBRATION):
        target, speed = Speed.load(target)
        if (measured := _named(target)) is not None:  # on a machine that has it: of any architecture
            return replace(measured, speed=speed)
    elif not words.why_no_target(target) and (device := _named(target, device_name)) is not None:
        return device
    raise ConfigError(words.why_no_target(target))


def _named(target: str, device_name: str = "") -> Hardware | None:
    return next(filter(None, (vendor.from_target(target, device_name) for vendor in VENDORS)), None)


def current_device() -> torch.device:
    """Return the device that a model will most likely run on: the GPU, if it is one of ``VENDORS``, or the CPU."""
    gpu = torch.accelerator.current_accelerator(check_available=True)
    return gpu if gpu is not None and vendor_of(gpu) in VENDORS else torch.device("cpu")


def of_machine() -> Hardware:
    """Return the hardware behind :func:`current_device`."""
    return of_device(current_device())


def device_name(device: torch.device) -> str:
    """Return the vendor's name of a device, like "NVIDIA H100"; that of its type if it has none."""
    named: Any = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if named is None else named(device)


def bf16_sheet(name: str) -> float | None:
    """Return the dense bf16 FLOP per second of the data sheet of a board, by its name; None if it is not listed."""
    speed = of_device_name(name, {**nvidia.BOARDS, **amd.BOARDS}, None)
    return None if speed is None else speed.bf16_flops / BF16_SHARE


def of_device(device: torch.device) -> Hardware:
    """Return the hardware behind ``device``; there is none behind meta tensors."""
    return (Hardware if device.type == "meta" else vendor_of(device)).of_device(device)


def vendor_of(device: torch.device) -> type[Hardware]:
    """Return the vendor whose kernels run on ``device``, or the base class, which has none. Meta tensors stand for a
    GPU's.
    """
    return next((vendor for vendor in VENDORS if vendor.runs(device)), Hardware)


def scaled_mm(a: Tensor, *args: Any, **settings: Any) -> Tensor:
    """``Hardware.scaled_mm`` on the device of ``a``."""
    return vendor_of(a.device).scaled_mm(a, *args, **settings)


def scaled_grouped_mm(a: Tensor, *args: Any, **settings: Any) -> Tensor:
    """``Hardware.scaled_grouped_mm`` on the device of ``a``."""
    return vendor_of(a.device).scaled_grouped_mm(a, *args, **settings)


@dataclass(frozen=True, kw_only=True)
class Support:
    """The GEMMs of a bf16 linear that are native. True if all that the recipe quantizes do; ``str()`` gives reasons."""

    recipe: str  #: its name
    device: str  #: its name
    native: tuple[GemmName, ...]  #: those that run natively
    obstacles: Mapping[GemmName, str]  #: why the others are emulated
    evidence: str = ""  #: by what the native ones are known, where no such device has run them for us

    def __bool__(self) -> bool:
        return not self.obstacles

    def __str__(self) -> str:
        if not self.obstacles:
            by = f", by {self.evidence}" if self.evidence else ""
            return f"{self.device} multiplies {self.recipe} natively{by}"
        return "; ".join(f"{gemm} is emulated: {reason}" for gemm, reason in self.obstacles.items())


def supports(recipe: RecipeLike, target: str | None = None) -> Support:
    """Return whether ``target`` has GEMMs for ``recipe``, before any model is compiled.

    Args:
        recipe: a recipe, or its name.
        target: "cpu", a GPU such as "sm_90" or "gfx942", or a calibration file; None: this machine's GPU or else CPU.

    Returns:
        A truthy or falsy :class:`~fp8graph.hardware.Support`; ``str()`` of it gives the reason.

    Raises:
        UnsupportedRecipeError, ConfigError: (``ValueError``) for a recipe or a target that does not exist.
    """
    device = of_machine() if target is None else from_target(target)
    resolved = resolve_recipe(recipe)
    if resolved is None:
        return Support(recipe="high precision", device=device.name, native=(), obstacles={})
    return support_of(device, resolved)


def support_of(device: Hardware, recipe: Recipe, *, grouped: bool = False) -> Support:
    """:func:`supports` for a device; for the GEMMs of experts if ``grouped``."""
    native: list[GemmName] = []
    obstacles: dict[GemmName, str] = {}
    for gemm, operands in GEMM_OPERANDS.items():
        if recipe.covers(gemm):
            a, b = (device.quantizer(recipe, operand) for operand in operands)
            reason = device.obstacle(a, b, torch.bfloat16, grouped=grouped)
            if reason is None:
                native.append(gemm)
            else:
                obstacles[gemm] = reason
    kind = SCALINGS[recipe.quantizer("input").scaling].gemm
    evidence = device.evidence_without_device(kind, grouped=grouped) if native else ""
    return Support(recipe=recipe.name, device=device.name, native=tuple(native), obstacles=obstacles, evidence=evidence)
