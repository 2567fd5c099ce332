"""GPT-NeoX and Pythia: one linear makes q, k and v; attention and MLP run in parallel."""

from __future__ import annotations

from fp8graph.models.family import HEAD, Counts, Family, causal_lm, tokens

FAMILY = Family(
    name="gpt_neox",
    keep={"embed_out": HEAD, "lm_head": HEAD},
    tiny=causal_lm("GPTNeoX"),
    inputs=tokens,
    layer=Counts(sites=4, fp8_gemms=12, multiplied=12, quantized_tensors=11, casts=22),
    rest=Counts(sites=1),
)
