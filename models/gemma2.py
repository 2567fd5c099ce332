"""Gemma 2: Llama's graph with norms behind the blocks; capped attention is two plain matmuls in high precision."""

from __future__ import annotations

from fp8graph.models.family import HEAD, Counts, Family, causal_lm, tokens

FAMILY = Family(
    name="gemma2",
    keep={"lm_head": HEAD},
    tiny=causal_lm("Gemma2", head_dim=16),
    inputs=tokens,
    layer=Counts(sites=9, fp8_gemms=21, multiplied=12, quantized_tensors=12, casts=24),
    rest=Counts(sites=1),
)
