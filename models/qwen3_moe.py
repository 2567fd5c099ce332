"""Qwen3-MoE: attention is the same as Qwen3's; the experts are grouped matmuls."""

from __future__ import annotations

from fp8graph.models.family import HEAD, ROUTER, Counts, Family, causal_lm, tokens

FAMILY = Family(
    name="qwen3_moe",
    keep={"lm_head": HEAD, "*.mlp.gate": ROUTER},
    tiny=causal_lm("Qwen3Moe", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    inputs=tokens,
    layer=Counts(sites=7, fp8_gemms=18, multiplied=12, quantized_tensors=12, casts=24),
    rest=Counts(sites=1),
)
