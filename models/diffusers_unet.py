"""The UNet of Stable Diffusion: attention between convolutions, which stay; a block up has one layer more than down."""

from __future__ import annotations

from typing import Any

from fp8graph.models.family import EMBEDDER, Counts, Family, noise


def _tiny(layers: int) -> Any:
    from diffusers import UNet2DConditionModel  # pyright: ignore[reportMissingImports]

    blocks: dict[str, Any] = {"block_out_channels": (64,), "norm_num_groups": 8, "layers_per_block": layers}
    blocks |= {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    sizes: dict[str, Any] = {"sample_size": 8, "cross_attention_dim": 32, "attention_head_dim": 4}
    return UNet2DConditionModel(use_linear_projection=True, mid_block_type=None, **blocks, **sizes)


def _inputs(_model: Any) -> dict[str, Any]:
    import torch

    return {
        "sample": noise(2, 4, 8, 8),
        "timestep": torch.tensor([250, 500]),
        "encoder_hidden_states": noise(2, 8, 32),
    }


FAMILY = Family(
    name="diffusers_unet",
    model="diffusers.models.unets.unet_2d_condition.UNet2DConditionModel",
    keep={"*.time_emb_proj": EMBEDDER},
    tiny=_tiny,
    inputs=_inputs,
    layer=Counts(sites=26, fp8_gemms=68, multiplied=52, quantized_tensors=52, casts=100),
    rest=Counts(sites=15, fp8_gemms=34, multiplied=26, quantized_tensors=27, casts=52),
    generates=False,
)
