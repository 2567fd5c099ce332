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
from fp8graph.backend.entry import MANY, regions_of
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


@pytest.mark.slow
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


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).relu()


class Net(nn.Module):
    def __init__(self, layers: int = MANY) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def said_of_long_compiles(model: nn.Module, caplog: pytest.LogCaptureFixture, **kwargs: Any) -> list[str]:
    """The lines of the next call with gradients; nothing is compiled, and code for a GPU would not run here."""
    caplog.clear()
    fp8graph.compile(model, **kwargs)
    with torch.compiler.set_stance("force_eager"), caplog.at_level(logging.WARNING, "fp8graph"):
        model(torch.randn(16, 32))
    return [record.getMessage() for record in caplog.records if "regions=" in record.getMessage()]


def test_a_long_compile_says_how_to_make_it_short_before_the_first_call_with_gradients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Net()
    fp8graph.compile(model, recipe="tensorwise")
    said: list[int] = []
    with torch.compiler.set_stance("force_eager"), caplog.at_level(logging.WARNING, "fp8graph"):
        for gradients in (False, True, True):
            with torch.set_grad_enabled(gradients):
                model(torch.randn(16, 32))
            said.append(caplog.text.count(f"Net is compiled as a whole, {MANY} Layer one after the other"))
    assert said == [0, 1, 1]
    assert 'fp8graph.compile(model, regions="auto")' in caplog.text


CHOSEN: dict[str, dict[str, Any]] = {
    "whole": {"regions": None},
    "blocks": {"regions": "auto"},
    "one graph": {"fullgraph": True},
    "CUDA graphs": {"mode": "reduce-overhead"},
    "no code to generate": {"compiler": "eager"},
}


@pytest.mark.parametrize("chosen", CHOSEN)
def test_a_choice_gets_no_hint(chosen: str, caplog: pytest.LogCaptureFixture) -> None:
    assert said_of_long_compiles(Net(), caplog)
    assert not said_of_long_compiles(Net(), caplog, **CHOSEN[chosen])


FEW: dict[str, nn.Module] = {
    "few": Net(MANY - 1),
    "layers": nn.Sequential(nn.Sequential(*(nn.Linear(32, 32) for _ in range(MANY)))),
}


@pytest.mark.parametrize("model", FEW.values(), ids=FEW)
def test_models_of_few_or_small_blocks_compile_without_a_word(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    assert not said_of_long_compiles(model, caplog)


class Trained(Net):
    """A model that computes its loss in FP32, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 512)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(super().forward(x))
        return nn.functional.cross_entropy(logits.float(), torch.arange(len(x)))


@pytest.mark.parametrize(("regions", "kept"), [(None, [torch.bfloat16]), ("auto", [torch.float32, torch.float32])])
def test_a_loss_keeps_more_of_its_logits_outside_the_graph(regions: Any, kept: list[torch.dtype]) -> None:
    torch._dynamo.reset()
    model = fp8graph.compile(Trained().bfloat16(), recipe="tensorwise", regions=regions, **EAGER)
    logits: list[torch.dtype] = []

    def keep(x: Tensor) -> Tensor:
        if x.shape == (64, 512):
            logits.append(x.dtype)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(torch.randn(64, 32, dtype=torch.bfloat16))
    assert logits == kept


def test_like_blocks_of_torch_nn_share_code() -> None:
    torch._dynamo.reset()
    blocks = [nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 32)) for width in (32, 32, 64, 64, 64)]
    model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(32, 16))
    fp8graph.compile(model, ALL, **EAGER, regions="auto")
    counters.clear()
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()  # as behind another block
    assert counters["stats"]["unique_graphs"] == 3  # both widths, the head
    assert len({gemm.fqn for gemm in fp8graph.backend_of(model).report.gemms}) == 11


def test_a_block_with_a_hook_shares_no_code() -> None:
    """Dynamo does not look whether hooks are the same."""
    torch._dynamo.reset()
    model: Any = nn.Sequential(nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3))))
    _, second, third = model[0]
    second.register_forward_hook(lambda module, args, out: out * 100)
    third[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    x = torch.randn(16, 32, requires_grad=True)  # as behind another block
    expected = model(x)
    fp8graph.compile(model, Policy(default=None), **EAGER, regions="auto")
    torch.testing.assert_close(model(x), expected)


def test_blocks_of_other_settings_count_for_no_common_recompile_limit() -> None:
    torch._dynamo.reset()
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.01 * index)) for index in range(1, 11)]
    model = nn.Sequential(nn.Sequential(*blocks))
    fp8graph.compile(model, ALL, **EAGER, regions="auto", strict=True)
    model(torch.randn(16, 32))
    assert not fp8graph.backend_of(model).report.eager_frames


def test_unlike_blocks_of_torch_nn_count_for_no_common_recompile_limit() -> None:
    torch._dynamo.reset()
    blocks = [nn.Sequential(*(nn.Linear(32, 32) for _ in range(count))) for count in range(1, 11)]
    model = nn.Sequential(nn.Sequential(*blocks))
    fp8graph.compile(model, ALL, **EAGER, regions="auto", strict=True)
    model(torch.randn(16, 32))
    assert not fp8graph.backend_of(model).report.eager_frames


def test_regions_of_lists_are_the_modules_in_them() -> None:
    """The lists are called by nobody."""
    model: Any = nn.Sequential(nn.ModuleList(nn.ModuleList([MLP(), nn.Linear(32, 32)]) for _ in range(2)))
    (first, second) = model[0]
    assert regions_of(model, "auto") == [*first, *second]
