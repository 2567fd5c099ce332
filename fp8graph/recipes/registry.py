"""Recipes by name: the built-in ones, and the user's."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from fp8graph.errors import UnsupportedRecipeError, did_you_mean
from fp8graph.recipes.base import Recipe
from fp8graph.recipes.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)


def has_code(recipe: Recipe) -> bool:
    """Whether a field is a function, which no cache key can name."""
    return any(callable(getattr(recipe, field.name)) for field in dataclasses.fields(recipe))


HIGH_PRECISION: Final = "high_precision"
# Names that users type (NeMo's where it has one).
_NAMES: dict[str, Recipe] = {
    "tensorwise": Float8CurrentScaling(),
    "rowwise": Float8RowwiseScaling(),
    "rowwise_with_gw_hp": Float8RowwiseScaling(high_precision_wgrad=True),
    "delayed": DelayedScaling(),
    "blockwise": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
RECIPE_NAMES: Final = tuple(_NAMES)
_TYPES: Final[dict[str, type[Recipe]]] = {type(recipe).__name__: type(recipe) for recipe in _NAMES.values()}
RecipeLike = Recipe | str | dict[str, Any] | None


def register_recipe(name: str, recipe: Recipe) -> None:
    """Give ``recipe`` a name that policies, policy files and ``autocast`` in compiled code can use.

    Raises:
        UnsupportedRecipeError: for a built-in name, an empty name, or something that is not a recipe.
    """
    if not isinstance(name, str) or not name or name == HIGH_PRECISION or name in RECIPE_NAMES:
        raise UnsupportedRecipeError(f"register_recipe({name!r}, ...): the name is empty or already taken.")
    if not isinstance(recipe, Recipe):
        raise UnsupportedRecipeError(
            f"register_recipe({name!r}, {recipe!r}): the second argument must be a recipe object."
        )
    _NAMES[name] = recipe


def name_of(recipe: Recipe) -> str | None:
    """A name under which :func:`resolve_recipe` finds a recipe; None: it has none."""
    return next((name for name, known in _NAMES.items() if known == recipe), None)


def known_recipe(value: object) -> bool:
    """Whether ``value`` is the name of a recipe."""
    return isinstance(value, str) and value in _NAMES


def resolve_recipe(value: RecipeLike) -> Recipe | None:
    """A recipe object, a recipe's name, its dict form, or ``None``/"high_precision" for no FP8.

    Raises:
        UnsupportedRecipeError: for anything else, with the names that exist.
    """
    if value is None or value == HIGH_PRECISION:
        return None
    if isinstance(value, Recipe):
        return value
    if isinstance(value, dict):
        return recipe_from_dict(value)
    names = ", ".join(repr(n) for n in [*_NAMES, HIGH_PRECISION])
    if not isinstance(value, str):
        hint = f" Did you mean {value.__name__}()?" if isinstance(value, type) and issubclass(value, Recipe) else ""
        raise UnsupportedRecipeError(f"{value!r} is not a recipe. Give a recipe object, one of {names}, or None.{hint}")
    if value in _NAMES:
        return _NAMES[value]
    meant = did_you_mean(value.lower(), [*_NAMES, HIGH_PRECISION])
    raise UnsupportedRecipeError(f"unknown recipe {value!r}.{meant} Available: {names}.")


def recipe_from_dict(values: dict[str, Any]) -> Recipe:
    """The inverse of :meth:`Recipe.to_dict`.

    Raises:
        UnsupportedRecipeError: for an unknown ``type`` or field.
    """
    fields = dict(values)
    kind = fields.pop("type", None)
    if not isinstance(kind, str) or kind not in _TYPES:
        raise UnsupportedRecipeError(f"unknown recipe type {kind!r}. Available: {', '.join(_TYPES)}.")
    recipe_type = _TYPES[kind]
    known = {field.name for field in dataclasses.fields(recipe_type)}
    if unknown := sorted(str(name) for name in fields.keys() - known):
        meant = did_you_mean(unknown[0], known)
        raise UnsupportedRecipeError(f"{kind} has no field {unknown[0]!r}.{meant} Fields: {', '.join(sorted(known))}.")
    return recipe_type(**fields)
