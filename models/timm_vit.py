"""ViT of timm: q, k and v are one linear; head stays in high precision."""

from __future__ import annotations

from typing import Any

from fp8graph.models.family import Counts, Family, noise


def _tiny(layers: int) -> Any:
    from timm.models.vision_transformer import VisionTransformer  # pyright: ignore[reportMissingImports]

    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "num_classes": 8}
    return VisionTransformer(depth=layers, embed_dim=64, num_heads=4, **sizes)


def _inputs(_model: Any) -> dict[str, Any]:
    return {"x": noise(2, 3, 32, 32)}


FAMILY = Family(
    name="timm_vit",
    model="timm.models.vision_transformer.VisionTransformer",
    keep={},
    tiny=_tiny,
    inputs=_inputs,
    layer=Counts(sites=4, fp8_gemms=12, multiplied=12, quantized_tensors=12, casts=24),
    rest=Counts(sites=1),
    generates=False,
)
