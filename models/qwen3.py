"""Qwen3: Llama's graph with a norm on each head's query and key."""

from __future__ import annotations

from fp8graph.models.family import HEAD, Counts, Family, causal_lm, tokens

FAMILY = Family(
    name="qwen3",
    keep={"lm_head": HEAD},
    tiny=causal_lm("Qwen3", head_dim=16),
    inputs=tokens,
    layer=Counts(sites=7, fp8_gemms=21, multiplied=12, quantized_tensors=12, casts=24),
    rest=Counts(sites=1),
)
