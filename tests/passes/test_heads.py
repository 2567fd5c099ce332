"""heads: which linears are output heads by what the graph does with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8graph
from fp8graph.passes.match import LOGITS, LOSS, TIED
from helpers import ALL, first_fast

IDS = torch.randint(0, 96, (2, 8))


class Model(nn.Module):
    """An embedding, a linear, and a head by the name of ``out``, whose logits ``after`` takes."""

    def __init__(self, after: Any = None, *, tied: bool = False, outputs: int = 96, embedding: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(96, 32) if embedding else nn.Linear(32, 32)
        self.body = nn.Linear(32, 32)
        self.out = nn.Linear(32, outputs, bias=False)
        self.after = after
        if tied:
            self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Any:
        logits = self.out(functional.silu(self.body(self.table(x))))
        return logits if self.after is None else self.after(logits)


def cross_entropy(logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), IDS.flatten() % logits.shape[-1])


def softcap(logits: Tensor) -> Tensor:
    return torch.tanh(logits / 30) * 30


def kept(module: nn.Module, x: Tensor, *, training: bool = True, **settings: Any) -> dict[str, str]:
    """The linears that the default policy leaves alone, with the reason."""
    report = fp8graph.explain(module, x, training=training, **settings)
    return {g.fqn: g.reason for g in report.gemms if g.recipe is None and g.op == "linear"}


@first_fast("training", [True, False])
@pytest.mark.parametrize(
    ("model", "why"),
    [
        pytest.param(Model(tied=True), TIED, id="tied"),
        pytest.param(Model(lambda y: functional.silu(y).sum(), tied=True), TIED, id="tied, with something behind it"),
        pytest.param(Model(cross_entropy), LOSS, id="loss"),
        pytest.param(Model(cross_entropy, outputs=7), LOSS, id="classes"),
        pytest.param(Model(lambda y: cross_entropy(softcap(y))), LOSS, id="soft cap and loss"),
        pytest.param(Model(lambda y: functional.log_softmax(y[:, -1], -1)), LOSS, id="log_softmax of the last row"),
        pytest.param(Model(), LOGITS, id="logits"),
        pytest.param(Model(lambda y: softcap(y[:, -1:]).float()), LOGITS, id="logits of the last row"),
    ],
)
def test_heads_and_why(model: Model, why: str, training: bool) -> None:
    found = kept(model, IDS, training=training)
    assert found == {"out": f"output head: {why}"}


@pytest.mark.parametrize(
    ("model", "x"),
    [
        pytest.param(Model(outputs=64), IDS, id="not the vocabulary's size"),
        pytest.param(Model(functional.silu), IDS, id="something behind it"),
        pytest.param(
            Model(lambda y: functional.softmax(y, -1) @ y.mT, embedding=False), torch.randn(2, 8, 32), id="attention"
        ),
        pytest.param(Model(lambda y: functional.mse_loss(y, y.detach() + 1)), IDS, id="regression"),
        pytest.param(Model(embedding=False), torch.randn(2, 8, 32), id="the last linear of a block"),
        pytest.param(nn.Linear(32, 96), torch.randn(8, 32), id="a linear"),
        pytest.param(
            nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)), torch.randn(8, 32), id="Sequential"
        ),
    ],
)  # fmt: skip
def test_no_heads(model: nn.Module, x: Tensor) -> None:
    assert kept(model, x) == {}


class Behind(nn.Module):
    """``after`` of the logits, or of what else ``out`` computes, the table and a further linear."""

    def __init__(self, after: Any) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(32, 32), nn.Linear(32, 32, bias=False)
        self.last = nn.Linear(32, 48, bias=False)
        self.after = after

    def forward(self, x: Tensor) -> Any:
        found = self.out(functional.silu(self.table(x)))
        return found, self.after(self, found)


def attended(model: Behind, v: Tensor) -> Tensor:
    v = torch.cat([torch.zeros_like(v), v], 1)  # after the tokens of earlier calls
    return functional.scaled_dot_product_attention(v, v, v)


@pytest.mark.parametrize(
    ("after", "is_head"),
    [
        pytest.param(lambda m, y: m.last(y), False, id="a hidden state"),
        pytest.param(lambda m, y: m.last(functional.silu(y)), False, id="a hidden state before its activation"),
        pytest.param(attended, False, id="values for a cache"),
        pytest.param(lambda m, y: y @ y.mT, False, id="similarities"),
        pytest.param(lambda m, y: m.last(m.table(y.argmax(-1))), True, id="the next token is read"),
        pytest.param(lambda m, y: m.last(functional.softmax(y, -1) @ m.table.weight), True, id="tokens are mixed"),
        pytest.param(lambda m, y: m.last(m.table(y.topk(2).indices)), True, id="the best tokens are read"),
        pytest.param(lambda m, y: functional.softplus(y).sum(), True, id="a number"),
    ],
)  # fmt: skip
def test_a_result_that_the_model_uses_is_not_a_head(after: Any, is_head: bool) -> None:
    """Though its width is that of the vocabulary."""
    assert kept(Behind(after), IDS % 32).get("out") == (f"output head: {LOGITS}" if is_head else None)


def small_llama(vocabulary: int) -> tuple[Any, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    # two heads for keys and values, which are as wide as the vocabulary together; four for queries
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=vocabulary // 2,
    )  # fmt: skip
    return LlamaForCausalLM(config), {}


def small_t5() -> tuple[Any, dict[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4)
    return T5ForConditionalGeneration(config), {"decoder_input_ids": TOKENS}


def small_whisper() -> tuple[Any, dict[str, Any]]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=64, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=8, max_source_positions=16,
        max_target_positions=16, pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    features = torch.empty(1, 8, 32, device="meta")
    return WhisperForConditionalGeneration(config), {"decoder_input_ids": TOKENS, "input_features": features}


TOKENS = torch.zeros(1, 8, dtype=torch.long, device="meta")


@first_fast(
    ("make", "head", "settings"),
    [
        *(pytest.param(lambda n=n: small_llama(n), "lm_head", {}, id=f"Llama-{n}") for n in (64, 256, 1024, 2048)),
        pytest.param(lambda: small_llama(64), "lm_head", {"output_hidden_states": True}, id="hidden states"),
        pytest.param(small_t5, "lm_head", {}, id="T5"),
        pytest.param(small_whisper, "proj_out", {}, id="Whisper"),
    ],
)
def test_keys_and_values_for_the_cache_are_in_fp8(make: Any, head: str, settings: dict[str, Any]) -> None:
    """Small vocabularies (bytes, codes of audio) are as wide as the keys and values that a model returns."""
    with torch.device("meta"):
        model, inputs = make()
    inputs = {"input_ids": TOKENS} | inputs if "input_features" not in inputs else inputs
    report = fp8graph.explain(model, training=False, use_cache=True, **settings, **inputs)
    assert {g.fqn for g in report.gemms if g.recipe is None and g.op == "linear"} == {head}
    assert any(g.fqn.endswith(("v_proj", "Attention.v")) for g in report.gemms)


def test_a_policy_of_ones_own_decides_by_itself() -> None:
    assert kept(Model(tied=True), IDS, policy=ALL) == {}


def test_a_rule_that_names_a_head_wins() -> None:
    policy = fp8graph.Policy([fp8graph.Rule("out", "rowwise")], min_speedup=0, keep_heads=True)
    assert kept(Model(tied=True), IDS, policy=policy) == {}


def test_a_head_under_autocast_is_a_head() -> None:
    """bf16 copies of the weight lie between the parameter and the matmul."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(cross_entropy, tied=True)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.model(x)

    assert kept(Cast(), IDS) == {"model.out": f"output head: {TIED}"}
