"""gpt-oss: biased attention with sinks, written as plain matmuls; the experts are grouped matmuls."""

from __future__ import annotations

from fp8graph.models.family import HEAD, ROUTER, Counts, Family, causal_lm, tokens

FAMILY = Family(
    name="gpt_oss",
    keep={"lm_head": HEAD, "*.mlp.router": ROUTER},
    tiny=causal_lm("GptOss", head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    inputs=tokens,
    layer=Counts(sites=9, fp8_gemms=18, multiplied=14, quantized_tensors=12, casts=24),
    rest=Counts(sites=1),
)
