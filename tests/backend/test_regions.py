"""Blocks compiled one by one: each kind of block once, every layer under its own name."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fp8graph
from fp8graph import ConfigError, Policy, Rule
from fp8graph.backend.entry import regions_of
from fp8graph.numerics import sqnr_db
from helpers import ALL, MLP
from tiny_models import causal_lm

EAGER: dict[str, Any] = {"options": {"compiler": "eager"}}


def trained(layers: int, policy: Policy, **kwargs: Any) -> tuple[Any, fp8graph.Backend, list[Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = causal_lm("Llama")(layers).bfloat16()
    fp8graph.compile(model, policy, **EAGER, **kwargs)
    counters.clear()
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    logits = model(input_ids=ids, use_cache=False).logits
    logits.float().square().mean().backward()
    return model, fp8graph.backend_of(model), [logits.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.slow
def test_each_kind_of_block_is_compiled_once() -> None:
    _, whole, expected = trained(3, ALL)
    _, backend, got = trained(3, ALL, regions="auto")
    assert counters["stats"]["unique_graphs"] == 2  # a layer, the head
    assert Counter(gemm.fqn for gemm in backend.report.gemms) == Counter(gemm.fqn for gemm in whole.report.gemms)
    assert (
        min(sqnr_db(e, g) for e, g in zip(expected, got, strict=True)) > 15
    )  # 17 measured: other roundings around FP8
    names = {gemm.fqn for gemm in backend.report.gemms}
    assert {"model.layers.2.mlp.down_proj", "lm_head"} <= names


def test_layers_by_their_class_and_a_rule_for_one() -> None:
    policy = Policy([Rule("model.layers.0.*", None), Rule("lm_head", None)], default="tensorwise", min_speedup=0)
    _, backend, _ = trained(2, policy, regions=["LlamaDecoderLayer"], strict=False)
    recipes = {gemm.fqn.split(".")[2]: gemm.recipe for gemm in backend.report.gemms if "layers" in gemm.fqn}
    assert recipes == {"0": None, "1": "tensorwise"}


@pytest.mark.parametrize("model", [nn.Linear(32, 16), nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))])
def test_modules_of_torch_nn_are_compiled_in_place(model: nn.Module) -> None:
    """``Module.compile`` of them compiles nothing, and says nothing."""
    fp8graph.compile(model, ALL, **EAGER)
    model(torch.randn(4, 32))
    assert {gemm.recipe for gemm in fp8graph.backend_of(model).report.gemms} == {"tensorwise"}


class Blocks(nn.Module):
    """Two kinds of blocks, one within another, an embedding, two projections around them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 32)
        self.stem = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
        self.stages = nn.ModuleList([nn.ModuleDict({"blocks": nn.ModuleList([MLP(), MLP()])}), MLP()])
        self.head = nn.Linear(32, 10)


def test_regions_are_repeated_blocks_and_the_rest() -> None:
    model: Any = Blocks()
    first, last = model.stages
    assert regions_of(model, "auto") == [*first["blocks"], model.stem, last, model.head]
    assert regions_of(model, ["MLP", "Linear"]) == [model.stem[0], *first["blocks"], last, model.head]


def test_a_model_in_which_nothing_repeats(caplog: pytest.LogCaptureFixture) -> None:
    model = MLP()
    with caplog.at_level(logging.WARNING, "fp8graph"):
        assert regions_of(model, "auto") == [model]
    assert "no block of MLP repeats" in caplog.text


@pytest.mark.parametrize("regions", ["Auto", ["LlamaLayer"]])
def test_regions_that_are_none(regions: Any) -> None:
    with pytest.raises(ConfigError, match="regions"):
        fp8graph.compile(MLP(), regions=regions)
