"""``fp8graph.autocast``: give a region of the user's code its own recipe, as Transformer Engine's autocast does.

Inside compiled code, every node of the region, forward and backward, is annotated with a string
(``torch.fx.traceback.annotate``). Outside it, Dynamo's guards cannot see the region: a thread-local stack holds it,
and the compiled callable picks a variant at call time (``backend/compiled_graph.py``).

A region holds for the forwards that are called in it. A backward that is called in it may run forwards again
(activation checkpointing): these have their own regions (``runtime/recomputation.py``).
"""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Never
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.fx.traceback import annotate

from fp8graph.compat import checkpointing
from fp8graph.compat.dynamo import never_a_root_frame
from fp8graph.errors import ConfigError, UnsupportedRecipeError, did_you_mean
from fp8graph.recipes.base import Recipe
from fp8graph.recipes.recipe import RecipeLike, resolve_recipe
from fp8graph.recipes.rules import INHERIT, Inherit

_log = logging.getLogger("fp8graph")

REGION_KEY: Final = "fp8graph"  # key in node.meta["custom"]
DISABLED: Final = "autocast(enabled=False)"
POLICY: Final = "autocast(enabled=True)"  # enabled without a recipe: the policy decides
_WITH_RANKS: Final = dist.is_available()  # as torch was built; amax_group is called in each call


@dataclass(frozen=True, eq=False)
class Region:
    """The request of a region: a recipe, None for high precision, or INHERIT for the policy.

    ``given``: as the user wrote it.
    """

    recipe: Recipe | None | Literal[Inherit.INHERIT]
    given: str

    @property
    def source(self) -> str:
        """The region in a reason."""
        return DISABLED if self.recipe is None else f"autocast({self.given})"

    def __str__(self) -> str:
        return self.given


_known_regions: Final[WeakValueDictionary[Any, Region]] = WeakValueDictionary()


class _Open(NamedTuple):
    """A region that is open."""

    region: Region
    group: Any  # its amax_reduction_group
    task: int  # the backward in which it was opened


_TRANSFORMER_ENGINE: Final = {
    "fp8_recipe": " Here it is recipe.",
    "fp8_group": " Here it is amax_reduction_group.",
    "calibrating": " Amaxes are recorded by training in FP8; backend.observe() measures tensors.",
}  # arguments of its autocast and fp8_autocast


class _Stack(threading.local):
    """The regions that are open on this thread, outermost first."""

    def __init__(self) -> None:
        self.regions: list[_Open] = []
        self.graphs = 0  # calls of graphs inside regions


_stack = _Stack()
_said: Final[set[str]] = set()  # once in a process
_NO_GRAPH: Final = (
    "fp8graph.autocast: no compiled code of fp8graph was called in a region, so that nothing in it ran in FP8. It "
    'is for forwards of what fp8graph.compile(model) or torch.compile(model, backend="fp8graph") has compiled.'
)


def current_region() -> Region | None:
    """Return the innermost region open outside compiled code, or None; for a graph that is called."""
    regions = None
    if _stack.regions:
        _stack.graphs += 1
        regions = _regions()
    return regions[-1].region if regions else None


def _regions() -> list[_Open]:
    """Return the regions around the current call, outermost first: in a backward, those that were opened in it."""
    task = checkpointing.graph_task()
    return [region for region in _stack.regions if region.task == task]


@never_a_root_frame
def autocast(
    enabled: bool = True, recipe: RecipeLike = None, amax_reduction_group: Any = None, **unknown: Never
) -> AbstractContextManager[None]:
    """Run the GEMMs of a region with ``recipe``, whatever the policy says. Their backward uses it, too.

    The innermost region wins. It covers the same sites as a policy's default (linears and grouped matmuls,
    heads included); the policy still decides for activation x activation matmuls. Activation checkpointing repeats a
    forward under the regions of its first time, wherever backward is called.

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
        TypeError: ``enabled`` is a recipe, or another value that is not True or False; or an argument that does not
            exist.
    """
    if unknown:
        raise TypeError(_unknown_argument(next(iter(unknown))))
    given: object = enabled
    if isinstance(given, (str, Recipe)):  # would be true, and the recipe would be lost
        raise TypeError("the first argument of autocast is enabled, not a recipe: write autocast(recipe=...)")
    if not isinstance(given, bool):
        raise TypeError("the first argument of autocast, enabled, must be True or False")
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
    resolved = resolve_recipe(recipe)  # an error is the caller's line
    return _Region(recipe if isinstance(recipe, str) else resolved or DISABLED, amax_reduction_group)


def _unknown_argument(name: str) -> str:
    names = ("enabled", "recipe", "amax_reduction_group")
    hint = _TRANSFORMER_ENGINE.get(name) or f"{did_you_mean(name, names)} Fields of a recipe go into the recipe."
    return f"autocast has no argument {name!r}.{hint} Arguments: {', '.join(names)}."


def names_a_group() -> bool:
    """Return whether a region around the current call names the ranks over which amaxes are reduced."""
    return any(region.group is not None for region in _regions())


def amax_group() -> str | None:
    """Return the name of the group that the regions ask for, or of all ranks; None if there is one rank."""
    if not _WITH_RANKS or not dist.is_initialized():
        return None
    group = next((r.group for r in reversed(_regions()) if r.group is not None), dist.group.WORLD)
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
        self._region, self._group, self._entered = region, group, 0
        self._before: list[int] = []  # calls of graphs, for each time that it was entered

    def __enter__(self) -> None:
        opened = _Open(region_of(self._region), self._group, checkpointing.graph_task())
        self._entered += 1
        self._before.append(_stack.graphs)
        _stack.regions.append(opened)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._entered:
            raise ConfigError("autocast(): the region was left before it was entered. Write `with autocast(...):`.")
        self._entered -= 1
        _stack.regions.pop()
        unused = self._before.pop() == _stack.graphs and self._region != DISABLED
        if unused and exc_type is None and not _said:
            _said.add(_NO_GRAPH)
            _log.warning(_NO_GRAPH)


def region_of(given: str | Recipe) -> Region:
    """Return a region that is given as text or recipe, with the recipe that its name has now.

    Raises:
        UnsupportedRecipeError: there is none of that name.
    """
    if given == POLICY:
        return _region(INHERIT, POLICY)
    recipe = None if given == DISABLED else resolve_recipe(given)
    return _region(recipe, given if isinstance(given, str) else type(recipe).__name__)


def _region(recipe: Recipe | None | Literal[Inherit.INHERIT], given: str) -> Region:
    """Return one object for equal regions: calls in them are compared by identity."""
    return _known_regions.setdefault((recipe, given), Region(recipe, given))
