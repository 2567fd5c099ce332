"""Flux: as many blocks of two streams as of one; proj_out of a single block is in FP8, the model's is not."""

from __future__ import annotations

from typing import Any

from fp8graph.models.family import Counts, Family, noise


def _tiny(layers: int) -> Any:
    from diffusers import FluxTransformer2DModel  # pyright: ignore[reportMissingImports]

    sizes: dict[str, Any] = {"attention_head_dim": 16, "num_attention_heads": 4, "axes_dims_rope": (4, 4, 8)}
    sizes |= {"in_channels": 16, "joint_attention_dim": 32, "pooled_projection_dim": 32, "guidance_embeds": True}
    return FluxTransformer2DModel(num_layers=layers, num_single_layers=layers, **sizes)


def _inputs(_model: Any) -> dict[str, Any]:
    import torch

    return {
        "hidden_states": noise(2, 16, 16),
        "encoder_hidden_states": noise(2, 8, 32),
        "pooled_projections": noise(2, 32),
        "timestep": torch.tensor([0.25, 0.5]),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
        "txt_ids": torch.zeros(8, 3),
        "guidance": torch.tensor([3.5, 3.5]),
    }


FAMILY = Family(
    name="diffusers_flux",
    model="diffusers.models.transformers.transformer_flux.FluxTransformer2DModel",
    keep={},
    tiny=_tiny,
    inputs=_inputs,
    layer=Counts(sites=20, fp8_gemms=60, multiplied=44, quantized_tensors=41, casts=82),
    rest=Counts(sites=10),
    generates=False,
)
