"""Gemma 3 (text): Llama's graph with norms behind the blocks and on queries and keys."""

from __future__ import annotations

from fp8graph.models.family import HEAD, Counts, Family, causal_lm, tokens

FAMILY = Family(
    name="gemma3",
    keep={"lm_head": HEAD},
    tiny=causal_lm("Gemma3", config="Gemma3TextConfig", head_dim=16),
    inputs=tokens,
    layer=Counts(sites=7, fp8_gemms=21, multiplied=12, quantized_tensors=12, casts=24),
    rest=Counts(sites=1),
)
