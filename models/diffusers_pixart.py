"""PixArt: the modulation of all blocks is computed once; the caption is projected once."""

from __future__ import annotations

from typing import Any

from fp8graph.models.family import EMBEDDER, Counts, Family, noise


def _tiny(layers: int) -> Any:
    from diffusers import PixArtTransformer2DModel  # pyright: ignore[reportMissingImports]

    sizes: dict[str, Any] = {"attention_head_dim": 16, "num_attention_heads": 4, "sample_size": 8, "patch_size": 2}
    sizes |= {"in_channels": 4, "out_channels": 8, "cross_attention_dim": 64, "caption_channels": 32}
    return PixArtTransformer2DModel(num_layers=layers, use_additional_conditions=False, **sizes)


def _inputs(_model: Any) -> dict[str, Any]:
    import torch

    return {
        "hidden_states": noise(2, 4, 8, 8),
        "encoder_hidden_states": noise(2, 8, 32),
        "timestep": torch.tensor([250, 500]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


FAMILY = Family(
    name="diffusers_pixart",
    model="diffusers.models.transformers.pixart_transformer_2d.PixArtTransformer2DModel",
    keep={"adaln_single.linear": EMBEDDER, "caption_projection.*": EMBEDDER},
    tiny=_tiny,
    inputs=_inputs,
    layer=Counts(sites=10, fp8_gemms=30, multiplied=21, quantized_tensors=20, casts=40),
    rest=Counts(sites=6, quantized_tensors=1, casts=2),
    generates=False,
)
