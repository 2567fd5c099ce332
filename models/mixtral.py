"""Mixtral: attention is the same as Llama's; the experts are grouped matmuls."""

from __future__ import annotations

from fp8graph.models.family import HEAD, ROUTER, Counts, Family, causal_lm, tokens

FAMILY = Family(
    name="mixtral",
    keep={"lm_head": HEAD, "*.mlp.gate": ROUTER},
    tiny=causal_lm("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    inputs=tokens,
    layer=Counts(sites=7, fp8_gemms=18, multiplied=12, quantized_tensors=12, casts=24),
    rest=Counts(sites=1),
)
