"""base: what every recipe has, a recipe of the user's own too."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from fp8graph import Format, UnsupportedRecipeError
from fp8graph.recipes import GEMMS
from fp8graph.recipes.base import Recipe


@dataclass(frozen=True, kw_only=True)
class Own(Recipe):
    """A recipe with a field of its own."""

    name: ClassVar[str] = "own"
    tiles: Any = (1, 2)


def test_what_a_file_says_is_what_code_says() -> None:
    """TOML and JSON have neither formats nor tuples."""
    arguments: dict[str, Any] = {"fp8_format": "E4M3", "use_fast_accum": [False, True, False]}
    assert Own(**arguments) == Own(fp8_format=Format.E4M3, use_fast_accum=(False, True, False))
    assert hash(Own(**arguments)) == hash(Own(fp8_format=Format.E4M3, use_fast_accum=(False, True, False)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fp8_format": "E3M4"}, "Own(fp8_format='E3M4'): fp8_format must be one of E4M3, HYBRID."),
        ({"fp8_format": 8}, "Own(fp8_format=8): fp8_format must be a Format."),
        ({"fp8_format": Format.E5M2}, "Own(fp8_format=E5M2): no NVIDIA GPU multiplies E5M2 by E5M2. Use Format.HYBRID"),
        ({"fp8_format": "E5M2"}, "no NVIDIA GPU multiplies E5M2 by E5M2"),
        ({"use_fast_accum": True}, "use_fast_accum must be three booleans, for fprop, dgrad and wgrad."),
        ({"use_fast_accum": (True, False)}, "must be three booleans"),
        ({"use_fast_accum": [1, 0, 0]}, "must be three booleans"),
    ],
)
def test_what_no_recipe_takes(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedRecipeError, match=re.escape(message)):
        Own(**fields)


def test_each_gemm_has_its_accumulator() -> None:
    assert [Own().fast_accum(gemm) for gemm in GEMMS] == [True, False, False]
    assert [Own(use_fast_accum=(False, True, True)).fast_accum(gemm) for gemm in GEMMS] == [False, True, True]
    assert [Own().covers(gemm) for gemm in GEMMS] == [True] * 3


def test_plain_values_for_a_file() -> None:
    assert Own().to_dict() == {
        "type": "Own",
        "fp8_format": "HYBRID",
        "use_fast_accum": [True, False, False],
        "tiles": [1, 2],
    }


def test_code_cannot_be_written_to_a_file() -> None:
    with pytest.raises(UnsupportedRecipeError, match="cannot be written to a file. Register the recipe under a name"):
        Own(tiles=max).to_dict()


def test_how_operands_are_quantized_a_recipe_says_itself() -> None:
    with pytest.raises(NotImplementedError):
        Own().quantizer("input")
