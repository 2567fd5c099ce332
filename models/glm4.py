"""GLM-4: Llama's attention with biases on q, k and v; one linear makes gate and up."""

from __future__ import annotations

from fp8graph.models.family import HEAD, Counts, Family, causal_lm, tokens

FAMILY = Family(
    name="glm4",
    keep={"lm_head": HEAD},
    tiny=causal_lm("Glm4", head_dim=16, pad_token_id=0),
    inputs=tokens,
    layer=Counts(sites=6, fp8_gemms=18, multiplied=12, quantized_tensors=12, casts=24),
    rest=Counts(sites=1),
)
