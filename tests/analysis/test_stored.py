"""stored: the recipe of a weight that arrives quantized, and the GEMMs that can multiply its bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from fp8graph import Policy, Rule
from fp8graph.analysis.stored import as_stored, recipe_of, stored_weight, transposes
from fp8graph.compat.ops import named_arguments
from fp8graph.numerics import api
from fp8graph.recipes import Float8BlockScaling
from fp8graph.recipes.rules import Resolution
from helpers import passed
from stored_weights import KINDS, Stored, stored


def found(kind: str, policy: Policy, **settings: Any) -> tuple[fx.Node, Resolution]:
    x = torch.randn(16, 384, dtype=torch.bfloat16, requires_grad=True)
    _, compilation = passed(stored(kind, 256, 384, **settings), x, last="match", policy=policy)
    (site,) = compilation.sites
    node = stored_weight(site)
    assert node is not None
    return node, compilation.facts.decisions.of(site)


@pytest.mark.parametrize("kind", KINDS)
def test_the_recipe_stores_weights_so(kind: str) -> None:
    node, resolution = found(kind, Policy(default="tensorwise"))
    given = named_arguments(node)
    quantizer = recipe_of(node).quantizer("weight")
    assert (quantizer.scaling, [*quantizer.block] if any(quantizer.block) else []) == (kind, given["block"])
    answer = as_stored(resolution, node)
    assert answer is not None
    assert {*answer.recipes.values()} == {recipe_of(node)}
    assert transposes(given) == (kind in ("tensor", "block", "block_e8m0"))


def test_activations_are_quantized_along_the_same_dim_in_tiles_of_the_same_length() -> None:
    node, _ = found("block", Policy(default="tensorwise"))
    recipe = recipe_of(node)
    assert [recipe.quantizer(operand).block for operand in ("input", "weight", "grad_output")] == [
        (1, 128), (128, 128), (1, 128),
    ]  # fmt: skip


def test_a_weight_that_is_stored_transposed_swaps_the_tiles_of_its_operands() -> None:
    tiles = api.quantize(torch.randn(256, 384), Float8BlockScaling(w_block=(64, 128)), "weight", "rowwise")
    x = torch.randn(16, 384, dtype=torch.bfloat16, requires_grad=True)
    _, compilation = passed(Stored(tiles), x, last="match", policy=Policy(default="tensorwise"))
    node = stored_weight(compilation.sites[0])
    assert node is not None
    for flipped, blocks in ((False, [(1, 128), (64, 128), (1, 64)]), (True, [(1, 64), (64, 128), (1, 128)])):
        recipe = recipe_of(node, flipped=flipped)
        assert [recipe.quantizer(operand).block for operand in ("input", "weight", "grad_output")] == blocks


@pytest.mark.parametrize("policy", [Policy(default=None), Policy([Rule("*", "rowwise")])])
def test_policies_that_decide_themselves(policy: Policy) -> None:
    node, resolution = found("block", policy)
    assert as_stored(resolution, node) is None


def test_weights_only() -> None:
    node, resolution = found("row", Policy(default="tensorwise"), activations="none")
    answer = as_stored(resolution, node)
    assert answer is not None
    assert not any(answer.recipes.values())
    assert answer.source == "the checkpoint quantizes weights only: they are dequantized"
