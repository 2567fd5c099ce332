"""Llama (and what shares its graph: Mistral): q/k/v/o and gate/up/down in FP8, the head in high precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What must be in the rewritten training graph of a model with a given number of layers."""

    sites: int  # matmuls of the program, the head included
    fp8_gemms: int  # fprop, dgrad and wgrad of each site in FP8
    multiplied: int  # the GEMMs that they are after grouping
    quantized_tensors: int  # quantize nodes after sharing and grouping, weights aside: one amax each
    casts: int  # FP8 copies that they write: rowwise and columnwise
    cached_weights: int  # quantize nodes that run once per update, outside the graph


def expected_counts(layers: int) -> Counts:
    """Per layer: 7 linears in 4 groups (q/k/v are one, gate/up are one), each with an input and an output gradient."""
    linears, groups = 7, 4
    return Counts(
        sites=linears * layers + 1,
        fp8_gemms=3 * linears * layers,
        multiplied=3 * groups * layers,
        quantized_tensors=2 * groups * layers,
        casts=2 * 2 * groups * layers,
        cached_weights=groups * layers,
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
