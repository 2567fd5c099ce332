"""ViT: the projection of patches remains a convolution; the classifier stays in high precision."""

from __future__ import annotations

from typing import Any

from fp8graph.models.family import HEAD, Counts, Family, pixels


def _tiny(layers: int) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_labels": 8}
    return ViTForImageClassification(ViTConfig(num_hidden_layers=layers, image_size=32, patch_size=8, **sizes))


FAMILY = Family(
    name="vit",
    keep={"classifier": HEAD},
    tiny=_tiny,
    inputs=pixels,
    layer=Counts(sites=6, fp8_gemms=18, multiplied=12, quantized_tensors=12, casts=24),
    rest=Counts(sites=1),
    generates=False,
)
