"""DiT: each block embeds the time step and the class by itself; two final projections."""

from __future__ import annotations

from typing import Any

from fp8graph.models.family import Counts, Family, noise


def _tiny(layers: int) -> Any:
    from diffusers import DiTTransformer2DModel  # pyright: ignore[reportMissingImports]

    sizes: dict[str, Any] = {"attention_head_dim": 16, "num_attention_heads": 4, "sample_size": 8, "patch_size": 2}
    sizes |= {"in_channels": 4, "out_channels": 8, "num_embeds_ada_norm": 8}
    return DiTTransformer2DModel(num_layers=layers, **sizes).eval()  # in training it drops classes at random


def _inputs(_model: Any) -> dict[str, Any]:
    import torch

    return {
        "hidden_states": noise(2, 4, 8, 8),
        "timestep": torch.tensor([250, 500]),
        "class_labels": torch.tensor([1, 2]),
    }


FAMILY = Family(
    name="diffusers_dit",
    model="diffusers.models.transformers.dit_transformer_2d.DiTTransformer2DModel",
    keep={},
    tiny=_tiny,
    inputs=_inputs,
    layer=Counts(sites=9, fp8_gemms=21, multiplied=15, quantized_tensors=15, casts=30),
    rest=Counts(sites=4),
    generates=False,
)
