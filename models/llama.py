"""Llama (and what shares its graph: Mistral): q/k/v/o and gate/up/down in FP8, the head in high precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What must be in the rewritten training graph of a model with a given number of layers."""

    sites: int  # matmuls of the program, the head included
    fp8_gemms: int  # fprop, dgrad and wgrad of each site in FP8
    quantized_tensors: int  # quantize nodes after sharing, weights aside: one amax each
    casts: int  # FP8 copies that they write: rowwise and columnwise
    cached_weights: int  # quantized once per update, outside the graph


def expected_counts(layers: int) -> Counts:
    """Per layer: 7 linears; 4 activations (q/k/v share one, gate/up share one), 7 output gradients."""
    linears, activations = 7, 4
    tensors = activations + linears
    return Counts(
        sites=linears * layers + 1,
        fp8_gemms=3 * linears * layers,
        quantized_tensors=tensors * layers,
        casts=2 * tensors * layers,
        cached_weights=linears * layers,
    )


def tiny_config(layers: int = 2, **overrides: Any) -> Any:
    """A LlamaConfig that traces like a real one (grouped-query attention, SwiGLU) and fits anywhere."""
    from transformers import LlamaConfig

    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 128,
    }
    return LlamaConfig(**(settings | overrides))
