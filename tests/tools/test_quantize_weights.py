"""quantize_weights: a model in bf16 serves from FP8 weights alone, and half of their memory is free."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import fp8_checkpoints
import fp8graph
from fp8_checkpoints import CONFIG, LINEARS
from fp8graph import ConfigError, Policy, Rule
from fp8graph.libraries.stored_linear import StoredLinear
from helpers import dialect_counts, eager_backend, first_fast, same_bits

IDS = torch.arange(16).reshape(2, 8)
NUMBERS = CONFIG.num_hidden_layers * sum(n * k for n, k in LINEARS.values())
ROWS = CONFIG.num_hidden_layers * sum(n for n, _ in LINEARS.values())


def memory(module: nn.Module) -> int:
    """The bytes of all memory that a module's tensors are in."""
    gc.collect()
    tensors = [*module.parameters(), *module.buffers()]
    return sum({s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in tensors)}.values())


def logits(model: nn.Module, **settings: Any) -> tuple[Tensor, fp8graph.Backend]:
    torch._dynamo.reset()
    backend = eager_backend(Policy(extends="default"), cache_weights=True, **settings)
    with torch.no_grad():
        return torch.compile(model, backend=backend)(input_ids=IDS, use_cache=False).logits, backend


def test_a_linear_whose_weight_something_else_reads_stays(caplog: pytest.LogCaptureFixture) -> None:
    """Attention of torch.nn hands the weight of its projection to a function."""
    attention = nn.MultiheadAttention(64, 4, batch_first=True)
    model = nn.ModuleDict({"attention": attention, "up": nn.Linear(64, 64), "empty": nn.Linear(64, 8)}).bfloat16()
    model["empty"].weight = nn.Parameter(torch.empty(0, 64, dtype=torch.bfloat16))
    with caplog.at_level(logging.WARNING, "fp8graph"):
        fp8graph.quantize_weights(model, policy=Policy(default="rowwise"))
    assert type(model["up"]) is StoredLinear
    assert "out_proj stays in high precision: MultiheadAttention.forward reads its weight" in caplog.text
    assert "empty stays in high precision: its weight is empty" in caplog.text
    x = torch.randn(2, 8, 64, dtype=torch.bfloat16)
    assert attention(x, x, x)[0].isfinite().all()


def test_a_model_that_is_a_linear_is_refused() -> None:
    model = nn.Linear(64, 64, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="the model is a linear itself"):
        fp8graph.quantize_weights(model, policy=Policy(default="rowwise"))
    assert sorted(model.state_dict()) == ["bias", "weight"]


SCALES = {"rowwise": ROWS, "blockwise": NUMBERS // 128**2, "tensorwise": 7 * CONFIG.num_hidden_layers}


@first_fast("recipe", SCALES)
def test_half_of_the_weights_memory_is_free(recipe: str) -> None:
    model = fp8_checkpoints.model()
    before = memory(model)
    assert fp8graph.quantize_weights(model, recipe=recipe) is model
    assert memory(model) == before - 2 * NUMBERS + NUMBERS + 4 * SCALES[recipe]
    y, backend = logits(model)
    assert memory(model) == before - NUMBERS + 4 * SCALES[recipe]  # moved, and not copied
    assert backend.weights.bytes == 0
    assert {gemm.recipe for gemm in backend.report.gemms if gemm.fqn.endswith("_proj")} == {recipe}
    assert y.isfinite().all()


def test_bf16_weights_stay_beside_the_copies_without_it() -> None:
    model = fp8_checkpoints.model().eval()
    before = memory(model)
    torch._dynamo.reset()
    backend = eager_backend(Policy(extends="default", default="rowwise"), cache_weights=True)
    with torch.no_grad():
        torch.compile(model, backend=backend)(input_ids=IDS, use_cache=False)
    assert memory(model) + backend.weights.bytes == before + NUMBERS + 4 * ROWS


def test_weights_are_those_that_a_checkpoint_loads_as(tmp_path: Path) -> None:
    recipe = fp8graph.Float8RowwiseScaling(power_2_scale=False, amax_epsilon=0.0)
    model = fp8_checkpoints.model().eval()
    backend = eager_backend(Policy(default=recipe, min_speedup=0, rules=[Rule("lm_head", None)]), cache_weights=True)
    with torch.no_grad():
        expected = torch.compile(model, backend=backend)(input_ids=IDS, use_cache=False).logits
    fp8graph.export(model, tmp_path / "fp8", "compressed-tensors")
    loaded, _ = logits(fp8graph.load_checkpoint(fp8_checkpoints.model(), tmp_path / "fp8").eval())
    fp8graph.quantize_weights(model, recipe=recipe)
    y, backend = logits(model)
    assert same_bits([y, y], [expected, loaded])
    counts = dialect_counts(backend.report.graphs[0].after)
    assert counts["scaled_mm"] == 4 * CONFIG.num_hidden_layers


def test_the_policy_decides() -> None:
    model = fp8_checkpoints.model()
    policy = Policy([Rule("*.mlp.*", "rowwise"), Rule("*.q_proj", None)], default="blockwise")
    fp8graph.quantize_weights(model, policy=policy)
    stored = {name: each.scaling for name, each in model.named_modules() if isinstance(each, StoredLinear)}
    assert len(stored) == 6 * CONFIG.num_hidden_layers + 1  # without extends="default" heads are linears like others
    assert {scaling for name, scaling in stored.items() if ".mlp." in name} == {"row"}
    assert {scaling for name, scaling in stored.items() if ".mlp." not in name} == {"block"}
    assert not model.training


def test_training_is_refused() -> None:
    model = fp8_checkpoints.model()
    fp8graph.quantize_weights(model, recipe="rowwise")
    model(input_ids=IDS)  # evaluation, with gradients or not
    model.train()
    with torch.no_grad():
        model(input_ids=IDS)
    message = r"layers.0.self_attn.q_proj is called to train, and fp8graph.quantize_weights has dropped its weight"
    with pytest.raises(ConfigError, match=message):
        model(input_ids=IDS)
    torch._dynamo.reset()
    fp8graph.compile(model, compiler="eager")
    with pytest.raises(ConfigError, match=message):
        model(input_ids=IDS)


class _Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def _model(**layers: nn.Module) -> nn.Module:
    return nn.ModuleDict({"plain": nn.Linear(32, 32), **layers}).bfloat16()


def _tied() -> nn.Module:
    model: Any = _model(tied=nn.Linear(32, 64, bias=False), table=nn.Embedding(64, 32))
    model["table"].weight = model["tied"].weight
    return model


def _hooked() -> nn.Module:
    model: Any = _model(hooked=nn.Linear(32, 32))
    model["hooked"].register_forward_hook(lambda *_: None)
    return model


KEPT = {
    "own": (lambda: _model(own=_Own(32, 32)), "multiplies in a way of its own"),
    "tied": (_tied, "another module has the same weight"),
    "hooked": (_hooked, "it has hooks"),
}


@pytest.mark.parametrize("name", KEPT)
def test_linears_that_stay_say_why(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, reason = KEPT[name]
    model: Any = make()
    kept = model[name]
    with caplog.at_level(logging.WARNING, "fp8graph"):
        fp8graph.quantize_weights(model, policy=Policy(default="rowwise"))
    assert [f"{name} stays in high precision: " in text and reason in text for text in caplog.messages] == [True]
    assert model[name] is kept
    assert isinstance(model["plain"], StoredLinear)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Policy(default="delayed"), "its delayed scales need a run of the model"),
        (Policy(default="nvfp4"), "its nvfp4 scales need a run of the model"),
        (Policy(default=None), "no linear of ModuleDict is quantized by the policy"),
    ],
)
def test_recipes_that_need_more_than_the_weight_are_refused(policy: Policy, message: str) -> None:
    model: Any = _model()
    with pytest.raises(ConfigError, match=message):
        fp8graph.quantize_weights(model, policy=policy)
    assert type(model["plain"]) is nn.Linear


def test_a_llama_keeps_its_head() -> None:
    model = fp8graph.quantize_weights(fp8_checkpoints.model())
    assert isinstance(model, LlamaForCausalLM)
    assert type(model.lm_head) is nn.Linear
