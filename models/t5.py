"""T5: encoder and decoder; q, k and v of self-attention are fused, and so are cross-attention's k and v."""

from __future__ import annotations

from typing import Any

from fp8graph.models.family import HEAD, Counts, Family, tokens


def _tiny(layers: int) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "vocab_size": 256}
    special: dict[str, Any] = {"decoder_start_token_id": 0, "pad_token_id": 0, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(num_layers=layers, **sizes, **special))


FAMILY = Family(
    name="t5",
    keep={"lm_head": HEAD},
    tiny=_tiny,
    inputs=tokens,
    layer=Counts(sites=20, fp8_gemms=48, multiplied=33, quantized_tensors=32, casts=64),
    rest=Counts(sites=1, quantized_tensors=1, casts=2),
)
