"""Falcon: linears are plain matmuls, and so is attention with ALiBi or without SDPA, which stays in high precision."""

from __future__ import annotations

from typing import Any

from fp8graph.models.family import HEAD, Counts, Family, tokens


def _tiny(layers: int) -> Any:
    from transformers import FalconConfig, FalconForCausalLM

    return FalconForCausalLM(
        FalconConfig(
            hidden_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            vocab_size=256,
            # transformers 5.24 would take SDPA, 5.23 does not
            attn_implementation="eager",  # pyright: ignore[reportCallIssue]  # of all configs
        )
    )


FAMILY = Family(
    name="falcon",
    keep={"lm_head": HEAD},
    tiny=_tiny,
    inputs=tokens,
    layer=Counts(sites=6, fp8_gemms=12, multiplied=12, quantized_tensors=10, casts=20),
    rest=Counts(sites=1),
)
