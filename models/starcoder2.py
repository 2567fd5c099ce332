"""StarCoder 2: biases everywhere, a plain MLP."""

from __future__ import annotations

from fp8graph.models.family import HEAD, Counts, Family, causal_lm, tokens

FAMILY = Family(
    name="starcoder2",
    keep={"lm_head": HEAD},
    tiny=causal_lm("Starcoder2"),
    inputs=tokens,
    layer=Counts(sites=6, fp8_gemms=18, multiplied=12, quantized_tensors=12, casts=24),
    rest=Counts(sites=1),
)
