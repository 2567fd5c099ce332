"""Granite: Llama's graph with scaled embeddings, residuals and logits."""

from __future__ import annotations

from fp8graph.models.family import HEAD, Counts, Family, causal_lm, tokens

FAMILY = Family(
    name="granite",
    keep={"lm_head": HEAD},
    tiny=causal_lm("Granite"),
    inputs=tokens,
    layer=Counts(sites=7, fp8_gemms=21, multiplied=12, quantized_tensors=12, casts=24),
    rest=Counts(sites=1),
)
