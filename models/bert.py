"""BERT: biases everywhere; the head for masked tokens (cls) stays in high precision."""

from __future__ import annotations

from typing import Any

from fp8graph.models.family import HEAD, SIZES, Counts, Family, tokens


def _tiny(layers: int) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    dropouts: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(num_hidden_layers=layers, **SIZES, **dropouts))


FAMILY = Family(
    name="bert",
    keep={"cls.*": HEAD},
    tiny=_tiny,
    inputs=tokens,
    layer=Counts(sites=6, fp8_gemms=18, multiplied=12, quantized_tensors=12, casts=24),
    rest=Counts(sites=2),
    generates=False,
)
