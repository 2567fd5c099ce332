"""Stable Diffusion 3: blocks of two streams, the last of which drops the text's."""

from __future__ import annotations

from typing import Any

from fp8graph.models.family import Counts, Family, noise


def _tiny(layers: int) -> Any:
    from diffusers import SD3Transformer2DModel  # pyright: ignore[reportMissingImports]

    sizes: dict[str, Any] = {"attention_head_dim": 16, "num_attention_heads": 4, "caption_projection_dim": 64}
    sizes |= {"joint_attention_dim": 32, "pooled_projection_dim": 32, "sample_size": 8, "pos_embed_max_size": 16}
    return SD3Transformer2DModel(num_layers=layers, in_channels=4, out_channels=4, **sizes)


def _inputs(_model: Any) -> dict[str, Any]:
    import torch

    return {
        "hidden_states": noise(2, 4, 8, 8),
        "encoder_hidden_states": noise(2, 8, 32),
        "pooled_projections": noise(2, 32),
        "timestep": torch.tensor([250, 500]),
    }


FAMILY = Family(
    name="diffusers_sd3",
    model="diffusers.models.transformers.transformer_sd3.SD3Transformer2DModel",
    keep={},
    tiny=_tiny,
    inputs=_inputs,
    layer=Counts(sites=14, fp8_gemms=42, multiplied=30, quantized_tensors=30, casts=60),
    rest=Counts(sites=4, fp8_gemms=-9, multiplied=-9, quantized_tensors=-9, casts=-18),
    generates=False,
)
