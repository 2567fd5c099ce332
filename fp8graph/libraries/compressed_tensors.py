"""Layers of compressed-tensors that are compressed: their weights are bytes until the model's first call.

A hook of the model decompresses all of it to bf16 in that call. It is removed, and the layers dequantize in eager:
the library's forward fails on bytes, and cuts gradients to its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fp8graph.libraries.linear import StoredWeight, one_scale

_HOOK = "ct_decompress_hook"


def reader(module: Any) -> Callable[[Any], StoredWeight] | None:
    """How the weight of ``module`` is read; None if it is no such layer, or no GEMM has scales of that form."""
    status = getattr(module, "quantization_status", None)
    if not _is_linear(module) or getattr(status, "value", None) != "compressed":
        return None
    weights = module.quantization_scheme.weights
    zero_points = getattr(module, "weight_zero_point", None) is not None
    if zero_points or weights is None or weights.type != "float" or not weights.symmetric:
        return None
    return {
        ("tensor", 8): _one_scale,
        ("channel", 8): _rows,
        ("block", 8): _tiles if weights.block_structure == [128, 128] else None,
        ("group", 8): _mx if (weights.group_size, module.weight_scale.dtype) == (32, torch.uint8) else None,
        ("tensor_group", 4): _nvfp4 if weights.group_size == 16 else None,
    }.get((_name(weights.strategy), weights.num_bits))


def _name(strategy: Any) -> str:
    return str(getattr(strategy, "value", strategy))


def _is_linear(module: object) -> bool:
    return isinstance(module, nn.Linear)


def keep_compressed(model: nn.Module) -> None:
    """Remove the hook that would dequantize ``model`` in its first call."""
    for module in model.modules():
        hook: Any = module.__dict__.pop(_HOOK, None)
        if hook is not None:
            hook.remove()


def _inputs(module: Any) -> dict[str, Any]:
    inputs = module.quantization_scheme.input_activations
    if inputs is None:
        return {"activations": "none"}
    if inputs.dynamic is True:
        return {"activations": "dynamic"}
    if inputs.dynamic == "local":  # scales of tiles are dynamic; that of the whole tensor divides
        one = module.input_global_scale.detach().to(torch.float32).reciprocal()
        return {"activations": "static", "input_scale_inv": one}
    return {"activations": "static", "input_scale_inv": module.input_scale.detach().to(torch.float32)}


def _one_scale(module: Any) -> StoredWeight:
    inputs = module.quantization_scheme.input_activations
    per_token = inputs is not None and _name(inputs.strategy) == "token"
    return one_scale(module.weight, module.weight_scale, per_token=per_token, **_inputs(module))


def _rows(module: Any) -> StoredWeight:
    scale = module.weight_scale.detach().to(torch.float32)
    return StoredWeight(data=module.weight, scale_inv=scale, scaling="row", **_inputs(module))


def _tiles(module: Any) -> StoredWeight:
    scale = module.weight_scale.detach().to(torch.float32)
    return StoredWeight(data=module.weight, scale_inv=scale, scaling="block", block=[128, 128], **_inputs(module))


def _mx(module: Any) -> StoredWeight:
    given = module.weight_scale
    return StoredWeight(data=module.weight, scale_inv=given, scaling="mxfp8", block=[1, 32], **_inputs(module))


def _nvfp4(module: Any) -> StoredWeight:
    return StoredWeight(
        data=module.weight_packed,
        scale_inv=module.weight_scale,
        scaling="nvfp4",
        block=[1, 16],
        global_scale_inv=module.weight_global_scale.detach().reciprocal().reshape(()),  # it divides
        **_inputs(module),
    )
