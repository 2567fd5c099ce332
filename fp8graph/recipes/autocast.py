"""``fp8graph.autocast``: give a region of the user's code its own recipe, as Transformer Engine's autocast does.

Inside compiled code, every node of the region, forward and backward, is annotated with a string
(``torch.fx.traceback.annotate``). Outside it, Dynamo's guards cannot see the region: a thread-local stack holds it,
and the compiled callable picks a variant at call time (``backend/program.py``).
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.fx.traceback import annotate

from fp8graph.compat.dynamo import never_a_root_frame
from fp8graph.errors import UnsupportedRecipeError
from fp8graph.recipes.base import Recipe
from fp8graph.recipes.registry import HIGH_PRECISION, RecipeLike, resolve_recipe
from fp8graph.recipes.rules import INHERIT, GemmRecipe

REGION_KEY: Final = "fp8graph"  # key in node.meta["custom"]
DISABLED: Final = "autocast(enabled=False)"
POLICY: Final = "autocast(enabled=True)"  # enabled without a recipe: the policy decides


class _Stack(threading.local):
    """The regions open around the current call, outermost first (a region or a recipe object)."""

    def __init__(self) -> None:
        self.regions: list[str | Recipe] = []
        self.groups: list[Any] = []  # their amax_reduction_group


_stack = _Stack()


def current_region() -> str | Recipe | None:
    """The innermost region open outside compiled code, or None."""
    return _stack.regions[-1] if _stack.regions else None


@never_a_root_frame
def autocast(
    enabled: bool = True, recipe: RecipeLike = None, amax_reduction_group: Any = None
) -> AbstractContextManager[None]:
    """Run the GEMMs of a region with ``recipe``, whatever the policy says. Their backward uses it, too.

    The innermost region wins. It covers the same sites as a policy's default (linears and grouped matmuls,
    heads included); the policy still decides for activation x activation matmuls.

    Args:
        enabled: ``False`` leaves every GEMM of the region in high precision.
        recipe: a recipe or its name; ``None`` (with ``enabled=True``) returns to the policy. Inside compiled
            code recipes go by name, a string (``register_recipe`` gives yours a name).
        amax_reduction_group: the ranks over which delayed scaling reduces amaxes: a ProcessGroup or a
            one-dimensional DeviceMesh; ``None`` means the enclosing region's, or all ranks (in a pipeline, those of
            the stage). Only for regions around compiled code.

    Raises:
        UnsupportedRecipeError: (a ``ValueError``) for an unknown recipe, a value that is not a group, or a
            group given inside compiled code.
        TypeError: a recipe in the place of ``enabled``.
    """
    given: object = enabled
    if isinstance(given, (str, Recipe)):  # would be true, and the recipe would be lost
        raise TypeError("the first argument of autocast is enabled, not a recipe: write autocast(recipe=...)")
    if torch.compiler.is_compiling():
        # Dynamo traces these lines: use only strings and Python's exceptions. Compiling the graph checks the names.
        if amax_reduction_group is not None:
            raise ValueError("autocast(amax_reduction_group=...) can only surround compiled code, not be inside it")
        region = DISABLED if not enabled else POLICY if recipe is None else recipe
        return annotate({REGION_KEY: region})
    if amax_reduction_group is not None:
        _group_name(amax_reduction_group)
    if not enabled:
        return _Region(DISABLED, amax_reduction_group)
    if recipe is None:
        return _Region(POLICY, amax_reduction_group)
    resolved = resolve_recipe(recipe)
    return _Region(recipe if isinstance(recipe, str) else resolved or DISABLED, amax_reduction_group)


def names_a_group() -> bool:
    """Whether a region around the current call says over which ranks amaxes are reduced."""
    return any(group is not None for group in _stack.groups)


def amax_group() -> str | None:
    """The name of the group that the regions ask for, or of all ranks; None if there is one rank."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = next((g for g in reversed(_stack.groups) if g is not None), dist.group.WORLD)
    return _group_name(group)


def _group_name(group: Any) -> str | None:
    group = group.get_group() if hasattr(group, "get_group") else group  # a DeviceMesh
    if not isinstance(group, dist.ProcessGroup):
        raise UnsupportedRecipeError(
            f"autocast(amax_reduction_group=...) takes a ProcessGroup or a DeviceMesh, not {type(group).__name__}."
        )
    return group.group_name if group.size() > 1 else None


class _Region(AbstractContextManager[None]):
    def __init__(self, region: str | Recipe, group: Any) -> None:
        self._region, self._group = region, group

    def __enter__(self) -> None:
        _stack.regions.append(self._region)
        _stack.groups.append(self._group)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _stack.regions.pop()
        _stack.groups.pop()


def region_recipe(region: str | Recipe | None) -> GemmRecipe:
    """The request of a region: INHERIT for the policy, None for high precision, or a recipe."""
    if region is None or region == POLICY:
        return INHERIT
    if region in (DISABLED, HIGH_PRECISION):
        return None
    return resolve_recipe(region)
