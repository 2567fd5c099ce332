"""Recipes: Transformer Engine's defaults, frozen, checked at construction."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
from typing import Any

import pytest
import torch

import fp8graph
from fp8graph import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    recipes,
)
from fp8graph.recipes import Recipe, recipe_from_dict, resolve_recipe
from helpers import in_one_test


def test_defaults_are_transformer_engines() -> None:
    recipe = Float8CurrentScaling()
    assert dataclasses.asdict(recipe) == {
        "fp8_format": Format.HYBRID,
        "use_fast_accum": (True, False, False),  # fast in fprop, split in dgrad and wgrad
        "backward_override": None,
        "power_2_scale": False,
        "amax_epsilon": 0.0,
        "hadamard_qk": False,
        "attention_backward": False,
    }
    assert [recipe.fast_accum(gemm) for gemm in ("fprop", "dgrad", "wgrad")] == [True, False, False]
    assert recipe.quantizer("input").dtype == recipe.quantizer("weight").dtype == torch.float8_e4m3fn
    assert recipe.quantizer("grad_output").dtype == torch.float8_e5m2


def test_frozen_and_keyword_only() -> None:
    recipe = Float8CurrentScaling()
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.power_2_scale = True  # pyright: ignore[reportAttributeAccessIssue]
    kinds = {p.kind for p in inspect.signature(Float8CurrentScaling).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    assert hash(recipe) == hash(Float8CurrentScaling())


@in_one_test(
    ("fields", "message"),
    [
        ({"fp8_format": Format.E5M2}, "no NVIDIA GPU multiplies E5M2 by E5M2. Use Format.HYBRID"),
        ({"fp8_format": "E5M2"}, "no NVIDIA GPU multiplies E5M2 by E5M2"),
        ({"fp8_format": "E3M4"}, "'E3M4'.*must be one of E4M3, HYBRID"),
        ({"fp8_format": 3}, "fp8_format=3.*fp8_format must be a Format"),
        ({"fp8_format": None}, "fp8_format=None.*fp8_format must be a Format"),
        ({"fp8_format": []}, "fp8_format must be a Format"),
        ({"power_2_scale": 1}, "power_2_scale=1.*must be True or False"),
        ({"amax_epsilon": -1e-6}, "amax_epsilon=-1e-06.*a finite number >= 0"),
        ({"amax_epsilon": float("inf")}, "a finite number >= 0"),
        ({"amax_epsilon": float("nan")}, "a finite number >= 0"),
        ({"amax_epsilon": "0"}, "amax_epsilon='0'.*a finite number >= 0"),
        ({"amax_epsilon": True}, "amax_epsilon=True.*a finite number >= 0"),
        ({"amax_epsilon": None}, "amax_epsilon=None.*a finite number >= 0"),
        ({"amax_epsilon": 1e39}, r"amax_epsilon=1e\+39"),  # finite, but not in FP32
        ({"amax_epsilon": 10**400}, "amax_epsilon=1000"),
        ({"power_2_scale": None}, "power_2_scale=None.*must be True or False"),
        ({"use_fast_accum": True}, "use_fast_accum=True.*three booleans, for fprop, dgrad and wgrad"),
        ({"use_fast_accum": None}, "use_fast_accum=None.*three booleans"),
        ({"use_fast_accum": ()}, "three booleans"),
        ({"use_fast_accum": (True, False)}, "three booleans"),
        ({"use_fast_accum": (1, 0, 0)}, "three booleans"),
    ],
)
def test_bad_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(fp8graph.UnsupportedRecipeError, match=message) as caught:
        Float8CurrentScaling(**fields)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(fp8graph.UnsupportedRecipeError, match=message):
        recipe_from_dict({"type": "Float8CurrentScaling", **fields})


@in_one_test("epsilon", [0, 0.0, 1e-45, 1, float(torch.finfo(torch.float32).max)])
def test_every_epsilon_that_fp32_holds(epsilon: float) -> None:
    quantizer = Float8CurrentScaling(amax_epsilon=epsilon).quantizer("input")
    assert (quantizer.amax_epsilon, type(quantizer.amax_epsilon)) == (epsilon, float)


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="positional"):
        Float8CurrentScaling(Format.E4M3)  # pyright: ignore[reportCallIssue]


@in_one_test(
    "recipe",
    [
        *(resolve_recipe(name) for name in recipes.RECIPE_NAMES),
        Float8CurrentScaling(fp8_format=Format.E4M3, power_2_scale=True, amax_epsilon=1e-6),
        Float8BlockScaling(x_block=(2, 64), w_block=(32, 32)),
        Float8BlockScaling(scale_format="ue8m0"),
        DelayedScaling(margin=2, amax_history_len=1, amax_compute_algo="most_recent", reduce_amax=False),
    ],
)
def test_dict_round_trip(recipe: Recipe) -> None:
    values = recipe.to_dict()
    assert values.keys() == {"type", *(field.name for field in dataclasses.fields(recipe))}
    through_json = json.loads(json.dumps(values))
    assert recipe_from_dict(through_json) == resolve_recipe(values) == recipe
    assert isinstance(recipe_from_dict(through_json).use_fast_accum, tuple)
    assert pickle.loads(pickle.dumps(recipe)) == copy.deepcopy(recipe) == recipe
    assert values == recipe.to_dict()  # reading a dict does not use it up


@in_one_test(
    "fields",
    [{"fp8_format": Format.E4M3}, {"power_2_scale": True}, {"amax_epsilon": 1e-6}, {"use_fast_accum": (True,) * 3}],
)
def test_recipes_that_differ_are_not_equal(fields: dict[str, Any]) -> None:
    assert Float8CurrentScaling(**fields) != Float8CurrentScaling()
    assert repr(Float8CurrentScaling(**fields)) != repr(Float8CurrentScaling())  # the compile cache's key


def test_the_defaults_of_the_other_recipes() -> None:
    split = {"use_fast_accum": (False, False, False), "backward_override": None}
    fast = split | {"use_fast_accum": (True, False, False)}
    assert dataclasses.asdict(DelayedScaling()) == fast | {
        "fp8_format": Format.HYBRID,
        "margin": 0,
        "amax_history_len": 1024,
        "initial_scale": "auto",
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
    }
    assert dataclasses.asdict(Float8RowwiseScaling()) == fast | {
        "fp8_format": Format.E4M3,
        "power_2_scale": True,
        "amax_epsilon": 1e-12,
        "high_precision_wgrad": False,
        "hadamard_qk": False,
        "attention_backward": False,
    }
    assert dataclasses.asdict(Float8BlockScaling()) == split | {
        "fp8_format": Format.E4M3,
        "x_block": (1, 128),
        "w_block": (128, 128),
        "grad_block": (1, 128),
        "power_2_scale": True,
        "amax_epsilon": 0.0,
        "scale_format": "fp32",
    }
    assert dataclasses.asdict(MXFP8BlockScaling()) == split | {
        "fp8_format": Format.E4M3,
        "enable_2d_quantization": False,
        "columnwise_from_rowwise": False,
    }
    assert dataclasses.asdict(NVFP4BlockScaling()) == split | {
        "fp8_format": Format.E4M3,
        "disable_rht": False,
        "disable_stochastic_rounding": False,
        "disable_2d_quantization": False,
        "row_scaled_activation": False,
        "nvfp4_4over6": "none",
        "nvfp4_4over6_e4m3_use_256": "all",
        "nvfp4_4over6_err_mode": "MAE",
        "hadamard_signs": 0b1101_0111_1110_1000,
    }


@in_one_test(
    ("recipe", "fields", "message"),
    [
        (DelayedScaling, {"amax_history_len": 0}, "amax_history_len=0.*a whole number >= 1"),
        (DelayedScaling, {"amax_history_len": 2.0}, "a whole number >= 1"),
        (DelayedScaling, {"amax_history_len": True}, "a whole number >= 1"),
        (DelayedScaling, {"margin": -1}, "margin=-1.*from 0 to 100"),
        (DelayedScaling, {"margin": float("nan")}, "from 0 to 100"),
        (
            DelayedScaling,
            {"amax_compute_algo": "mean"},
            'amax_compute_algo=\'mean\'.*"max", "most_recent" or a function',
        ),
        (DelayedScaling, {"amax_compute_algo": None}, "or a function"),
        (DelayedScaling, {"scaling_factor_compute_algo": "x"}, "a function or None"),
        (DelayedScaling, {"reduce_amax": 1}, "True or False"),
        (DelayedScaling, {"reduce_amax": "yes"}, "reduce_amax='yes'.*True or False"),
        (Float8CurrentScaling, {"power_2_scale": None}, "True or False"),
        (DelayedScaling, {"fp8_format": Format.E5M2}, "no NVIDIA GPU multiplies E5M2 by E5M2"),
        (Float8RowwiseScaling, {"power_2_scale": 1}, "True or False"),
        (Float8RowwiseScaling, {"amax_epsilon": -1}, "a finite number"),
        (Float8RowwiseScaling, {"high_precision_wgrad": None}, "True or False"),
        (Float8BlockScaling, {"x_block": (0, 128)}, r"x_block=\(0, 128\).*two whole numbers >= 1"),
        (Float8BlockScaling, {"x_block": 128}, "two whole numbers"),
        (Float8BlockScaling, {"w_block": (128,)}, "w_block.*two whole numbers"),
        (Float8BlockScaling, {"w_block": (128, 128, 1)}, "two whole numbers"),
        (Float8BlockScaling, {"grad_block": (1.0, 128)}, "grad_block.*two whole numbers"),
        (Float8BlockScaling, {"grad_block": (1, -128)}, "two whole numbers"),
        (Float8BlockScaling, {"scale_format": "e8m0"}, 'scale_format must be "fp32" or "ue8m0"'),
        (Float8BlockScaling, {"scale_format": "ue8m0", "power_2_scale": False}, "power_2_scale must be True with"),
        (Float8BlockScaling, {"use_fast_accum": (True, False, False)}, "block scaling accumulates in FP32 only"),
        (MXFP8BlockScaling, {"fp8_format": "E2M1"}, "one of E4M3, HYBRID"),
        (MXFP8BlockScaling, {"enable_2d_quantization": 1}, "enable_2d_quantization=1.*True or False"),
        (MXFP8BlockScaling, {"columnwise_from_rowwise": 0}, "columnwise_from_rowwise=0.*True or False"),
        (NVFP4BlockScaling, {"fp8_format": Format.HYBRID}, "Format.E4M3: the type of the block scales"),
        (NVFP4BlockScaling, {"disable_rht": 16}, "disable_rht=16.*True or False"),
        (NVFP4BlockScaling, {"disable_stochastic_rounding": None}, "True or False"),
        (NVFP4BlockScaling, {"disable_2d_quantization": "no"}, "True or False"),
        (
            NVFP4BlockScaling,
            {"row_scaled_activation": 1, "disable_rht": True},
            "row_scaled_activation=1.*True or False",
        ),
        (NVFP4BlockScaling, {"row_scaled_activation": True}, "disable_rht=False.*True with row_scaled_activation=True"),
        (NVFP4BlockScaling, {"nvfp4_4over6": True}, "one of none, weights, activations, all"),
        (NVFP4BlockScaling, {"nvfp4_4over6_e4m3_use_256": "gradients"}, "one of none, weights, activations, all"),
        (NVFP4BlockScaling, {"nvfp4_4over6_err_mode": "mae"}, '"MAE" or "MSE"'),
        (NVFP4BlockScaling, {"hadamard_signs": 2**16}, "16 bits: a whole number from 0 to 65535"),
        (NVFP4BlockScaling, {"hadamard_signs": True}, "16 bits"),
    ],
)
def test_bad_fields_of_the_other_recipes(recipe: type[Recipe], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(fp8graph.UnsupportedRecipeError, match=message):
        recipe(**fields)


def test_rowwise_covers_wgrad_unless_it_is_to_stay_in_high_precision() -> None:
    assert [Float8RowwiseScaling().covers(gemm) for gemm in ("fprop", "dgrad", "wgrad")] == [True, True, True]
    half = Float8RowwiseScaling(high_precision_wgrad=True)
    assert [half.covers(gemm) for gemm in ("fprop", "dgrad", "wgrad")] == [True, True, False]
