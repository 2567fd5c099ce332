"""NVFP4: which operand gets which ingredient. ``test_recipe.py`` has the defaults and the refusals."""

from __future__ import annotations

from typing import Any

from fp8graph import NVFP4BlockScaling, Policy
from fp8graph.recipes import OPERANDS, OperandName
from helpers import in_one_test


def test_the_scopes_of_four_over_six() -> None:
    def found(**fields: Any) -> list[tuple[str, float]]:
        recipe = NVFP4BlockScaling(**fields)
        operands: tuple[OperandName, ...] = ("input", "weight", "grad_output")
        return [(recipe.quantizer(o).four_over_six, recipe.quantizer(o).largest_scale) for o in operands]

    assert found() == [("", 448.0)] * 3
    assert found(nvfp4_4over6="all") == [("MAE", 256.0), ("MAE", 256.0), ("", 448.0)]
    assert found(nvfp4_4over6="weights", nvfp4_4over6_err_mode="MSE") == [("", 448.0), ("MSE", 256.0), ("", 448.0)]
    assert found(nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256="weights")[0] == ("MAE", 448.0)


@in_one_test(
    ("fields", "rotated", "random", "square"),
    [
        ({}, ["input", "grad_output"], ["grad_output"], ["weight"]),
        ({"disable_rht": True}, [], ["grad_output"], ["weight"]),
        ({"disable_stochastic_rounding": True}, ["input", "grad_output"], [], ["weight"]),
        ({"disable_2d_quantization": True}, ["input", "grad_output"], ["grad_output"], []),
    ],
)
def test_the_ingredients(fields: dict[str, Any], rotated: list[str], random: list[str], square: list[str]) -> None:
    """Transformer Engine's: weights are neither transformed nor rounded at random, gradients alone are."""
    made = {operand: NVFP4BlockScaling(**fields).quantizer(operand) for operand in OPERANDS}
    assert [operand for operand, quantizer in made.items() if quantizer.rotation is not None] == rotated
    assert [operand for operand, quantizer in made.items() if quantizer.stochastic] == random
    assert [operand for operand, quantizer in made.items() if quantizer.block == (16, 16)] == square


def test_inputs_alone_have_scales_of_rows() -> None:
    recipe = NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True)
    assert [recipe.quantizer(operand).row_scaled for operand in ("input", "weight", "grad_output")] == [
        True,
        False,
        False,
    ]
    assert Policy.from_dict(Policy(default=recipe).to_dict()).default == recipe


def test_the_fields_survive_a_file() -> None:
    recipe = NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="weights", hadamard_signs=5)
    assert Policy.from_dict(Policy(default=recipe).to_dict()).default == recipe
