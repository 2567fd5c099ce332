"""Whisper: encoder and decoder; k has no bias, so q and v are fused and k is not."""

from __future__ import annotations

from typing import Any

from fp8graph.models.family import HEAD, Counts, Family, tokens


def _tiny(layers: int) -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 64, "vocab_size": 256, "num_mel_bins": 16, "max_target_positions": 64}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": layers, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 128}
    special: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return WhisperForConditionalGeneration(WhisperConfig(max_source_positions=32, **sizes, **special))


def _inputs(model: Any) -> dict[str, Any]:
    import torch

    sound = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))
    return {"input_features": sound, "labels": tokens(model)["labels"]}


FAMILY = Family(
    name="whisper",
    keep={"proj_out": HEAD},
    tiny=_tiny,
    inputs=_inputs,
    layer=Counts(sites=16, fp8_gemms=48, multiplied=42, quantized_tensors=38, casts=76),
    rest=Counts(sites=1, quantized_tensors=1, casts=2),
)
