"""Phi-3: one linear makes q, k and v, and another one gate and up."""

from __future__ import annotations

from fp8graph.models.family import HEAD, Counts, Family, causal_lm, tokens

FAMILY = Family(
    name="phi3",
    keep={"lm_head": HEAD},
    tiny=causal_lm("Phi3", pad_token_id=0),
    inputs=tokens,
    layer=Counts(sites=4, fp8_gemms=12, multiplied=12, quantized_tensors=12, casts=24),
    rest=Counts(sites=1),
)
