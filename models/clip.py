"""CLIP: two encoders; their projections, whose outputs are compared, stay in high precision."""

from __future__ import annotations

from typing import Any

from fp8graph.models.family import HEAD, Counts, Family, pixels, tokens


def _tiny(layers: int) -> Any:
    from transformers import CLIPConfig, CLIPModel

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    sizes["num_hidden_layers"] = layers
    text = {"vocab_size": 256, "max_position_embeddings": 32, **sizes}
    vision = {"image_size": 32, "patch_size": 8, **sizes}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=32))


def _inputs(model: Any) -> dict[str, Any]:
    images = pixels(model)["pixel_values"]
    return {"input_ids": tokens(model)["input_ids"], "pixel_values": images, "return_loss": True}


FAMILY = Family(
    name="clip",
    keep={"*_projection": HEAD},
    tiny=_tiny,
    inputs=_inputs,
    layer=Counts(sites=12, fp8_gemms=36, multiplied=24, quantized_tensors=24, casts=48),
    rest=Counts(sites=3),
    generates=False,
)
