"""Weights of torchao: ``nn.Linear`` whose weight is a Float8Tensor, an MXTensor or an NVFP4Tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp8graph.libraries.linear import StoredWeight


def reader(module: Any) -> Callable[[Any], StoredWeight] | None:
    """How the weight of ``module`` is read; None if it is no such layer, or no GEMM has scales of that form."""
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear) or weight is None or not type(weight).__module__.startswith("torchao."):
        return None
    kind = type(weight).__name__
    if kind == "Float8Tensor":
        return _float8 if _scaling(weight) is not None else None
    if kind == "MXTensor":
        return _mx if (weight.block_size, weight.elem_dtype) == (32, torch.float8_e4m3fn) else None
    if kind == "NVFP4Tensor":
        # a static scale of activations goes with E2M1 in torchao alone
        return _nvfp4 if weight.act_per_tensor_scale is None and weight.qdata.is_contiguous() else None
    return None


def trains_in_fp8(kind: str) -> bool:
    """Whether modules of a class quantize the operands of their GEMMs in code of their own.

    Args:
        kind: the full name of the class. torchao's conversions for training make such modules.
    """
    return kind.startswith("torchao.") and kind.rpartition(".")[2] in ("Float8Linear", "MXLinear")


def _scaling(weight: Any) -> str | None:
    (rows, columns), (n, k) = weight.block_size, weight.shape
    if (rows, columns) == (n, k):
        return "tensor"
    if (rows, columns) == (1, k):
        return "row"
    return "block" if (rows, columns) == (128, 128) else None


def _activations(weight: Any) -> str:
    return "none" if weight.act_quant_kwargs is None else "dynamic"


def _float8(module: Any) -> StoredWeight:
    weight = module.weight
    scaling = _scaling(weight)
    assert scaling is not None
    return StoredWeight(
        data=weight.qdata,
        scale_inv=weight.scale.reshape(()) if scaling == "tensor" else weight.scale,
        scaling=scaling,
        block=[128, 128] if scaling == "block" else [],
        activations=_activations(weight),
    )


def _mx(module: Any) -> StoredWeight:
    weight, (n, k) = module.weight, module.weight.shape
    return StoredWeight(
        data=weight.qdata,
        scale_inv=_scales(weight.scale.view(torch.uint8), n, k // 32, weight.is_swizzled_scales),
        scaling="mxfp8",
        block=[1, 32],
        activations=_activations(weight),
    )


def _nvfp4(module: Any) -> StoredWeight:
    weight, (n, k) = module.weight, module.weight.shape
    scale = _scales(weight.scale.view(torch.uint8), n, k // 16, weight.is_swizzled_scales)
    whole = weight.per_tensor_scale
    if whole is None:
        whole = torch.ones((), device=scale.device)
    return StoredWeight(
        data=weight.qdata.view(torch.uint8),
        scale_inv=scale.view(torch.float8_e4m3fn),
        scaling="nvfp4",
        block=[1, 16],
        global_scale_inv=whole.reshape(()),
        activations=_activations(weight),
    )


def _scales(scale: Tensor, rows: int, columns: int, swizzled: bool) -> Tensor:
    """Bytes [rows, columns], from cuBLAS's order: tiles of 128 x 4, each kept as 32 rows of 16."""
    if not swizzled:
        return scale.reshape(rows, columns)
    down, across = -(-rows // 128), -(-columns // 4)
    tiles = scale.reshape(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * 128, across * 4)[:rows, :columns].contiguous()
