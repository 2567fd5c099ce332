"""``FP8Linear`` of transformers: FineGrained FP8, the format of DeepSeek-V3's and Qwen3's checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8graph.libraries.linear import StoredWeight, one_scale

_MODULE = "transformers.integrations.finegrained_fp8"


def reader(module: Any) -> Callable[[Any], StoredWeight] | None:
    """How the weight of ``module`` is read; None if it is no such layer, or was dequantized."""
    kind = type(module)  # not its subclasses: a grouped linear multiplies otherwise
    mine = kind.__module__ == _MODULE and kind.__name__ == "FP8Linear"
    return _read if mine and module.weight.dtype == torch.float8_e4m3fn else None


def _read(module: Any) -> StoredWeight:
    scale, block, static = module.weight_scale_inv, module.block_size, module.activation_scale
    if block is None:  # its kernels quantize tokens alone
        activations = "dynamic" if static is None else "static"
        weight, per_token = module.weight, static is None
        return one_scale(weight, scale, per_token=per_token, activations=activations, input_scale_inv=static)
    scaling = "block"
    if scale.dtype == torch.float8_e8m0fnu:
        scaling, scale = "block_e8m0", scale.detach().view(torch.uint8)
    return StoredWeight(
        data=module.weight,
        scale_inv=scale,
        scaling=scaling,
        block=[*block],
        activations="dynamic" if static is None else "static",
        input_scale_inv=static,
    )
