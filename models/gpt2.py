"""GPT-2: Conv1D is an addmm with a [K, N] weight; one of them makes q, k and v."""

from __future__ import annotations

from typing import Any

from fp8graph.models.family import HEAD, Counts, Family, tokens


def _tiny(layers: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_head=4, n_embd=64, vocab_size=256, n_positions=128, **dropouts))


FAMILY = Family(
    name="gpt2",
    keep={"lm_head": HEAD},
    tiny=_tiny,
    inputs=tokens,
    layer=Counts(sites=4, fp8_gemms=12, multiplied=12, quantized_tensors=12, casts=24),
    rest=Counts(sites=1),
    graphs=2,
)
