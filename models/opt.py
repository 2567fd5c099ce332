"""OPT: it has biases everywhere, and ReLU."""

from __future__ import annotations

from typing import Any

from fp8graph.models.family import HEAD, SIZES, Counts, Family, tokens


def _tiny(layers: int) -> Any:
    from transformers import OPTConfig, OPTForCausalLM

    sizes: dict[str, Any] = {**SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0}
    del sizes["intermediate_size"]
    return OPTForCausalLM(OPTConfig(num_hidden_layers=layers, **sizes))


FAMILY = Family(
    name="opt",
    keep={"lm_head": HEAD},
    tiny=_tiny,
    inputs=tokens,
    layer=Counts(sites=6, fp8_gemms=18, multiplied=12, quantized_tensors=12, casts=24),
    rest=Counts(sites=1),
)
