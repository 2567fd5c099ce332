"""``fp8graph.autocast``: give a region of the user's code another recipe, as Transformer Engine's autocast does.

Inside compiled code the region travels as a string on every node (``torch.fx.traceback.annotate``), forward
and backward. Outside, Dynamo's guards cannot see it: a thread-local stack holds it, and the compiled callable
picks a variant at call time (``program.py``).
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final

import torch
from torch.fx.traceback import annotate

from fp8graph.compat import never_a_root_frame
from fp8graph.errors import UnsupportedRecipeError
from fp8graph.policy import INHERIT, GemmRecipe
from fp8graph.recipes import HIGH_PRECISION, Recipe, RecipeLike, resolve_recipe

REGION_KEY: Final = "fp8graph"  # key in node.meta["custom"]
DISABLED: Final = "autocast(enabled=False)"
POLICY: Final = "autocast(enabled=True)"  # enabled without a recipe: what the policy says


class _Stack(threading.local):
    """The regions open around the current call, outermost first (a region or a recipe object)."""

    def __init__(self) -> None:
        self.regions: list[str | Recipe] = []


_stack = _Stack()


def current_region() -> str | Recipe | None:
    """The innermost region open outside compiled code, or None."""
    return _stack.regions[-1] if _stack.regions else None


@never_a_root_frame
def autocast(
    enabled: bool = True, recipe: RecipeLike = None, amax_reduction_group: Any = None
) -> AbstractContextManager[None]:
    """Run the GEMMs of a region with ``recipe``, whatever the policy says. Backward inherits.

    The innermost region wins. It covers the same sites as a policy's default (linears and grouped matmuls,
    heads included); activation x activation matmuls stay with the policy.

    Args:
        enabled: ``False`` leaves every GEMM of the region in high precision.
        recipe: a recipe or its name; ``None`` (with ``enabled=True``) returns to the policy. Inside compiled
            code recipes go by name, a string (``register_recipe`` gives yours a name).
        amax_reduction_group: for delayed scaling across processes; not available yet.

    Raises:
        UnsupportedRecipeError: (a ``ValueError``) for an unknown recipe, or a reduction group.
    """
    if torch.compiler.is_compiling():
        # Dynamo traces this line: strings only. Names are checked when the graph is compiled.
        region = DISABLED if not enabled else POLICY if recipe is None else recipe
        return annotate({REGION_KEY: region})
    if amax_reduction_group is not None:
        raise UnsupportedRecipeError(
            "autocast(amax_reduction_group=...): amax reduction is not available in this version."
        )
    if not enabled:
        return _Region(DISABLED)
    if recipe is None:
        return _Region(POLICY)
    resolved = resolve_recipe(recipe)
    return _Region(recipe if isinstance(recipe, str) else resolved or DISABLED)


class _Region(AbstractContextManager[None]):
    def __init__(self, region: str | Recipe) -> None:
        self._region = region

    def __enter__(self) -> None:
        _stack.regions.append(self._region)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _stack.regions.pop()


def region_recipe(region: str | Recipe | None) -> GemmRecipe:
    """What a region asks for: INHERIT for the policy, None for high precision, or a recipe."""
    if region is None or region == POLICY:
        return INHERIT
    if region in (DISABLED, HIGH_PRECISION):
        return None
    return resolve_recipe(region)
