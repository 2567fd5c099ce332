"""Check whether a device has GEMMs for a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fp8graph.hardware.device import Hardware
from fp8graph.hardware.devices import from_target, of_machine
from fp8graph.recipes import GEMM_OPERANDS, GemmName, Recipe, RecipeLike, resolve_recipe


@dataclass(frozen=True, kw_only=True)
class Support:
    """Which GEMMs of a bf16 linear run natively. True if all that the recipe quantizes do; ``str()`` gives reasons."""

    recipe: str  #: its name
    device: str  #: its name
    native: tuple[GemmName, ...]  #: those that run natively
    obstacles: Mapping[GemmName, str]  #: why the others are emulated

    def __bool__(self) -> bool:
        return not self.obstacles

    def __str__(self) -> str:
        if not self.obstacles:
            return f"{self.device} multiplies {self.recipe} natively"
        return "; ".join(f"{gemm} is emulated: {reason}" for gemm, reason in self.obstacles.items())


def supports(recipe: RecipeLike, target: str | None = None) -> Support:
    """Whether ``target`` has GEMMs for ``recipe``, asked before any model is compiled.

    Args:
        recipe: a recipe, or its name.
        target: "cpu", a GPU such as "sm_90" or "gfx942", or a calibration file; None: this machine's GPU or else CPU.

    Returns:
        A truthy or falsy :class:`~fp8graph.hardware.support.Support`; ``str()`` of it gives the reason.

    Raises:
        UnsupportedRecipeError, ConfigError: (``ValueError``) for a recipe or a target that does not exist.
    """
    found = of_machine() if target is None else from_target(target)
    resolved = resolve_recipe(recipe)
    if resolved is None:
        return Support(recipe="high precision", device=found.name, native=(), obstacles={})
    return support_of(found, resolved)


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
    return Support(recipe=recipe.name, device=device.name, native=tuple(native), obstacles=obstacles)
