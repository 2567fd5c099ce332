"""BLOOM: one linear makes q, k and v; attention is baddbmm and bmm, in high precision unless a rule asks for FP8."""

from __future__ import annotations

from typing import Any

from fp8graph.models.family import HEAD, Counts, Family, tokens


def _tiny(layers: int) -> Any:
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(hidden_size=64, n_layer=layers, n_head=4, vocab_size=256))


FAMILY = Family(
    name="bloom",
    keep={"lm_head": HEAD},
    tiny=_tiny,
    inputs=tokens,
    layer=Counts(sites=6, fp8_gemms=12, multiplied=12, quantized_tensors=12, casts=24),
    rest=Counts(sites=1),
)
