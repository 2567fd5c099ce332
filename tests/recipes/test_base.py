"""base: what every recipe has, a recipe of the user's own too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from fp8graph import Format, UnsupportedRecipeError
from fp8graph.recipes import GEMMS
from fp8graph.recipes.base import AttentionFields, Recipe


@dataclass(frozen=True, kw_only=True)
class Own(Recipe):
    """A recipe with a field of its own."""

    name: ClassVar[str] = "own"
    tiles: Any = (1, 2)


def test_recipe_from_strings_and_lists_equals_the_typed_one() -> None:
    """TOML and JSON have neither formats nor tuples."""
    arguments: dict[str, Any] = {"fp8_format": "E4M3", "use_fast_accum": [False, True, False]}
    assert Own(**arguments) == Own(fp8_format=Format.E4M3, use_fast_accum=(False, True, False))
    assert hash(Own(**arguments)) == hash(Own(fp8_format=Format.E4M3, use_fast_accum=(False, True, False)))


def test_each_gemm_has_its_accumulator() -> None:
    assert [Own().fast_accum(gemm) for gemm in GEMMS] == [True, False, False]
    assert [Own(use_fast_accum=(False, True, True)).fast_accum(gemm) for gemm in GEMMS] == [False, True, True]
    assert [Own().covers(gemm) for gemm in GEMMS] == [True] * 3


def test_plain_values_for_a_file() -> None:
    assert Own().to_dict() == {
        "type": "Own",
        "fp8_format": "HYBRID",
        "use_fast_accum": [True, False, False],
        "backward_override": None,
        "tiles": [1, 2],
    }


def test_code_cannot_be_written_to_a_file() -> None:
    with pytest.raises(UnsupportedRecipeError, match="cannot be written to a file. Register the recipe under a name"):
        Own(tiles=max).to_dict()


def test_base_recipe_has_no_quantizer() -> None:
    with pytest.raises(NotImplementedError):
        Own().quantizer("input")


def test_fields_for_attention() -> None:
    assert (Own().rotates_qk, Own().only_for_attention) == (False, "")
    fields = AttentionFields(hadamard_qk=True)
    assert (fields.rotates_qk, fields.only_for_attention) == (True, "hadamard_qk")
    assert (AttentionFields().rotates_qk, AttentionFields().only_for_attention) == (False, "")
    backward = AttentionFields(attention_backward=True)
    assert (Own().quantizes_attention_backward, backward.quantizes_attention_backward) == (False, True)
    assert backward.only_for_attention == "attention_backward"
    with pytest.raises(UnsupportedRecipeError, match="hadamard_qk must be True or False"):
        AttentionFields(hadamard_qk="yes")  # pyright: ignore[reportArgumentType]
