"""Llama: q/k/v and gate/up are fused into one GEMM each per direction; the head stays in high precision."""

from __future__ import annotations

from typing import Any

from fp8graph.models.family import HEAD, SIZES, Counts, Family, tokens


def tiny_config(layers: int = 2, **overrides: Any) -> Any:
    """A LlamaConfig that traces like a real one (grouped-query attention, SwiGLU) and fits anywhere."""
    from transformers import LlamaConfig

    settings: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "num_hidden_layers": layers, **overrides}
    return LlamaConfig(**settings)


def _tiny(layers: int) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(tiny_config(layers))


FAMILY = Family(
    name="llama",
    keep={"lm_head": HEAD},
    tiny=_tiny,
    inputs=tokens,
    layer=Counts(sites=7, fp8_gemms=21, multiplied=12, quantized_tensors=12, casts=24),
    rest=Counts(sites=1),
)
