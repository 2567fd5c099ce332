"""Every family of tests/support/tiny_models.py: counts, training, generation, and how far from bf16."""

from __future__ import annotations

import dataclasses
import importlib.util
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import fp8graph
from benchmarks.coverage import agreement, result_and_loss, step
from fp8graph.models import general_policy, policy_for
from fp8graph.report import Report
from helpers import counted_passes, dialect_counts, eager_backend, first_slow, needs_library
from tiny_models import TINY, Counts, causal_lm, model_and_inputs

# of a model of two layers: a dense one and one of experts, or a cache that slides and one that does not
LAYERS_DIFFER = {"deepseek_v3", "gemma2", "gemma3", "gpt_oss"}


# those whose graphs differ: dense, experts; Conv1D and a broken graph, an encoder and a decoder
FAST, OTHERS = ("llama", "mixtral"), ("gpt2", "t5")
# the first family of those with the same counts, but for models that take as long as ten others
DISTINCT = {
    *{(family.layer, family.rest): name for name, family in reversed(TINY.items())}.values(),
} - {"diffusers_unet", "diffusers_dit", "diffusers_flux", "diffusers_sd3", "gemma3", "glm4", "bloom", "falcon"}


def every(names: Iterable[str], fast: Iterable[str], slow: Iterable[str] = ()) -> list[Any]:
    """All ``names`` as parameters. Those that are neither in ``fast`` nor in ``slow`` wait for a release."""

    def tier(name: str) -> list[pytest.MarkDecorator]:
        return [] if name in fast else [pytest.mark.slow if name in slow else pytest.mark.release]

    return [pytest.param(name, marks=[*needs_library(name), *tier(name)]) for name in names]


# their forward calls copy.deepcopy, at which Dynamo breaks the graph before torch 2.13
DEEPCOPY = {"t5", "whisper"}


def plain_graphs(model: Any, inputs: dict[str, Any]) -> int:
    """The number of graphs that Dynamo makes of the model by itself."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def count(module: Any, _inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    torch.compile(model, backend=count)(**inputs)
    torch._dynamo.reset()
    return len(graphs)


def assert_counts(report: Report, name: str, layers: int) -> None:
    """Of the graphs in which weights are still quantized."""
    found = Counts(
        sites=len({(g.fqn, g.index) for g in report.gemms}), fp8_gemms=sum(g.recipe is not None for g in report.gemms)
    )
    for view in report.graphs:
        nodes = dialect_counts(view.stages["fuse_linears"])
        multiplied = nodes["scaled_mm"] + nodes["scaled_grouped_mm"]
        found += Counts(multiplied=multiplied, quantized_tensors=nodes["quantize"], casts=nodes["casts"])
    assert dataclasses.asdict(found) == dataclasses.asdict(TINY[name].counts(layers))
    if torch.__version__ >= "2.13" or name not in DEEPCOPY:
        assert len(report.graphs) == TINY[name].graphs
    left = {g.reason.partition(":")[0].partition(' "')[0] for g in report.gemms if not g.recipe}
    assert left <= {"rule", "no rule", "output head"}
    assert_attention_is_found(report)


def assert_attention_is_found(report: Report) -> None:
    """All matmuls of activations are those of an attention that is written out, two each."""
    written = [a for a in report.attention if a.written_out and a.direction == "forward"]
    matmuls = [g for g in report.gemms if g.op == "matmul" and g.gemm == "fprop" and g.fqn]  # but CLIP's logits
    assert len(matmuls) == 2 * len(written)
    assert report.attention


def assert_agrees(found: dict[str, float], name: str) -> None:
    assert [value >= bound for value, bound in zip(found.values(), TINY[name].db, strict=True)] == [True] * 3, found


@pytest.mark.parametrize("name", every(TINY, FAST, OTHERS))
def test_counts_of_one_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the counts of two: those of each further layer, and of everything else."""
    traced = counted_passes(monkeypatch)
    model, inputs = model_and_inputs(name, 1)
    backend = eager_backend(None, cache_weights="update")
    torch.compile(model, backend=backend)(**inputs)
    assert_counts(backend.report, name, 1)
    assert len(traced) == len(backend.report.graphs)  # all weights were foreseen


@pytest.mark.parametrize("name", every(TINY, (), {"llama", *DISTINCT}))
def test_counts_and_agreement_with_bf16(name: str) -> None:
    model, inputs = model_and_inputs(name)
    backend = eager_backend(None, recipe="tensorwise")
    found = agreement(model, torch.compile(model, backend=backend), inputs)
    assert_counts(backend.report, name, 2)
    assert_agrees(found, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, family in TINY.items() if family.graphs > 1])
def test_graph_breaks_are_those_of_plain_dynamo(name: str) -> None:
    assert plain_graphs(*model_and_inputs(name)) == TINY[name].graphs


@pytest.mark.slow
@pytest.mark.parametrize("name", every(TINY, ("mixtral",)))
def test_rows_agree_with_bf16_and_train(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of rows, and weights that are kept in FP8 and go stale with each update."""
    traced = counted_passes(monkeypatch)
    model, inputs = model_and_inputs(name)
    backend = eager_backend(None, recipe="rowwise", cache_weights="update")
    compiled = torch.compile(model, backend=backend)
    assert_agrees(agreement(model, compiled, inputs), name)
    assert len(traced) == len(backend.report.graphs)  # all weights were foreseen
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for _ in range(3):
        optimizer.zero_grad()
        _, loss = result_and_loss(compiled(**inputs))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]


GENERATING = [name for name, family in TINY.items() if family.generates]


@pytest.mark.slow
@pytest.mark.parametrize("name", every(GENERATING, ("gemma3", "t5")))
def test_generates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, as generate() calls it: static shapes are not asked for, the cache grows."""
    traced = counted_passes(monkeypatch)
    model, inputs = model_and_inputs(name, 2 if name in LAYERS_DIFFER else 1)
    model.eval()
    inputs.pop("labels")
    backend = eager_backend(None, cache_weights=True)
    model.compile(backend=backend)
    torch.manual_seed(0)
    out = model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    started = {0, 1} if model.config.is_encoder_decoder else {inputs["input_ids"].shape[-1]}  # Whisper gives new ones
    assert out.shape[-1] - 4 in started
    assert any(g.recipe for g in backend.report.gemms)
    quantized = backend.weights.quantized
    model.generate(**inputs, max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert backend.weights.quantized == quantized  # once, not once per token
    assert len(traced) == len(backend.report.graphs)  # all weights were foreseen


def test_the_policy_of_a_model_is_its_familys() -> None:
    clip, mixtral, llama = (TINY[name].build(1) for name in ("clip", "mixtral", "llama"))
    assert policy_for(clip).resolve("visual_projection", "linear").recipes["fprop"] is None
    assert policy_for(llama).resolve("visual_projection", "linear").recipes["fprop"] is not None
    assert policy_for(mixtral).resolve("model.layers.0.mlp.gate", "linear").recipes["fprop"] is None
    assert policy_for(llama).resolve("model.layers.0.mlp.gate_proj", "linear").recipes["fprop"] is not None
    assert policy_for(llama) == general_policy()
    assert policy_for(nn.Linear(4, 4)) == general_policy()
    assert policy_for(llama, "rowwise").default == "rowwise"


@pytest.mark.slow
def test_a_backend_by_name_finds_the_family() -> None:
    """CLIP's projections have no name that the general policy knows."""
    model, inputs = model_and_inputs("clip", 1)
    compiled = torch.compile(model, backend="fp8graph", options={"compiler": "eager"})
    compiled(**inputs)
    left = {g.fqn for g in fp8graph.backend_of(compiled).report.gemms if not g.recipe}
    assert {"visual_projection", "text_projection"} <= left
    torch._dynamo.reset()
    chosen = eager_backend(fp8graph.Policy(default="tensorwise"))
    torch.compile(model, backend=chosen)(**inputs)
    assert "visual_projection" in {g.fqn for g in chosen.report.gemms if g.recipe}  # the user's policy is the user's


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="diffusers is not installed")
def test_a_model_and_a_block_of_it_have_layers_of_one_name() -> None:
    """The model's proj_out is its result; a single block's is most of that block's work, wherever it runs."""
    model, inputs = model_and_inputs("diffusers_flux", 1)
    with torch.no_grad():
        explained = fp8graph.explain(model, **inputs)
        left = {g.fqn for g in explained.gemms if not g.recipe}
        assert left >= {"proj_out", "norm_out.linear", "x_embedder"}
        assert {g.fqn for g in explained.gemms} - left >= {"single_transformer_blocks.0.proj_out"}
        block = model.single_transformer_blocks[0]
        x, text, condition = (torch.zeros(2, *size).bfloat16() for size in ((16, 64), (8, 64), (64,)))
        alone = fp8graph.explain(block, hidden_states=x, encoder_hidden_states=text, temb=condition)
    assert "proj_out" in {g.fqn for g in alone.gemms if g.recipe}


@first_slow("copied", [False, True])
def test_rules_of_ones_own_before_the_familys(copied: bool) -> None:
    model, inputs = model_and_inputs("clip", 1)
    policy = fp8graph.Policy([fp8graph.Rule("*.fc1", None), fp8graph.Rule("nosuch", None)], extends="default")
    backend = eager_backend(policy)
    if copied:
        backend = pickle.loads(pickle.dumps(backend))
    torch.compile(model, backend=backend)(**inputs)
    report = backend.report
    left = {g.fqn.rpartition(".")[2]: g.reason for g in report.gemms if not g.recipe and g.op == "linear"}
    assert left == {
        "fc1": 'rule "*.fc1" -> high precision',
        "visual_projection": 'rule "*_projection" -> high precision',  # the family's
        "text_projection": 'rule "*_projection" -> high precision',
    }
    assert report.unused_rules == ['rule "nosuch" -> high precision']
    explained = fp8graph.explain(model, backend=backend, training=True, **inputs)
    assert [g.reason for g in explained.gemms] == [g.reason for g in report.gemms]
    assert explained.unused_rules == report.unused_rules


# without a bound each
FURTHER: dict[str, Any] = {
    "stablelm": causal_lm("StableLm"),
    "cohere": causal_lm("Cohere", pad_token_id=0),
    "smollm3": causal_lm("SmolLM3", pad_token_id=0),
    "phi": causal_lm("Phi", num_key_value_heads=4),
    "nemotron": causal_lm("Nemotron"),
    "gptj": causal_lm("GPTJ", rotary_dim=8),
    "ernie4_5": causal_lm("Ernie4_5", head_dim=16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", every(FURTHER, ("cohere",)))
def test_further_families(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = FURTHER[name](2).bfloat16()
    ids = torch.randint(3, 256, (2, 16))
    inputs = {"input_ids": ids, "labels": ids}
    expected, gradients = step(model, model, inputs)
    backend = eager_backend(None)
    got, found = step(model, torch.compile(model, backend=backend), inputs)
    assert {g.fqn for g in backend.report.gemms if not g.recipe and g.op == "linear"} <= {"lm_head"}
    assert sum(g.recipe is not None for g in backend.report.gemms) >= 24
    assert fp8graph.numerics.sqnr_db(expected, got) > 18
    flat = [torch.cat([g.float().reshape(-1) for g in gs.values()]) for gs in (gradients, found)]
    assert fp8graph.numerics.sqnr_db(*flat) > 14


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_are_native_on_a_blackwell_gpu(name: str) -> None:
    """Under its default recipe, forward and backward; the report says by what that is known."""
    model, inputs = model_and_inputs(name, 2)  # DeepSeek's first layer has no experts
    policy = fp8graph.Policy(default="mxfp8", min_speedup=0)
    report = fp8graph.explain(model.to(torch.bfloat16), target="sm_100", policy=policy, **inputs)
    experts = [gemm for gemm in report.gemms if gemm.op == "grouped_mm"]
    layers = 1 if name == "deepseek_v3" else 2
    assert [gemm.gemm for gemm in experts] == ["fprop", "dgrad", "wgrad"] * 2 * layers
    assert {(gemm.recipe, gemm.execution) for gemm in experts} == {("mxfp8", "native")}
    assert all("by the sources of torch and MSLK" in gemm.reason for gemm in experts)
    assert "; native by the sources of torch and MSLK" in str(report)
