"""ViT of torchvision: attention is torch.nn.MultiheadAttention; heads.head stays in high precision."""

from __future__ import annotations

from typing import Any

from fp8graph.models.family import Counts, Family, noise


def _tiny(layers: int) -> Any:
    from torchvision.models import VisionTransformer  # pyright: ignore[reportMissingImports]

    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_classes": 8, "hidden_dim": 64, "mlp_dim": 128}
    model = VisionTransformer(num_layers=layers, num_heads=4, **sizes)
    model.heads[0].reset_parameters()  # torchvision starts from zeros: no gradient would reach a block
    return model


def _inputs(_model: Any) -> dict[str, Any]:
    return {"x": noise(2, 3, 32, 32)}


FAMILY = Family(
    name="torchvision_vit",
    model="torchvision.models.vision_transformer.VisionTransformer",
    keep={},
    tiny=_tiny,
    inputs=_inputs,
    layer=Counts(sites=4, fp8_gemms=12, multiplied=12, quantized_tensors=12, casts=24),
    rest=Counts(sites=1),
    generates=False,
)
