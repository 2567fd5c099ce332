"""``FP8Linear`` and ``FP8Experts`` of transformers: FineGrained FP8, the format of DeepSeek-V3 and Qwen3.

Compiled, experts are transformers' own grouped matmuls, of the weights as they are stored.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8graph.libraries.linear import StoredWeight, high_precision, one_scale

_MODULE = "transformers.integrations.finegrained_fp8"


def as_saved(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` of ``model`` under the names and in the pieces in which ``save_pretrained`` writes them."""
    if not hasattr(model, "save_pretrained"):
        return dict(tensors)
    loading = importlib.import_module("transformers.core_model_loading")
    return loading.revert_weight_conversion(model, dict(tensors))


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


def forward_of_experts(module: nn.Module) -> Callable[..., Tensor] | None:
    """The ``forward`` of an ``FP8Experts``; None if ``module`` is none, or its weights are in FP4 or bf16."""
    mine = type(module).__module__ == _MODULE and type(module).__name__ == "FP8Experts"
    if not mine or cast(Tensor, module.down_proj).dtype != torch.float8_e4m3fn:
        return None
    return _experts_forward(importlib.import_module("transformers.integrations.moe").grouped_mm_experts_forward)


class _HighPrecision:
    """What transformers' grouped matmuls read of experts: the same module, with weights in high precision."""

    has_bias = has_post_expert_norm = is_transposed = False

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self.num_experts, self.has_gate, self.act_fn = module.num_experts, module.has_gate, module.act_fn
        self._apply_gate, self._is_expert_parallel = module._apply_gate, module._is_expert_parallel
        first = "gate_up_proj" if module.has_gate else "up_proj"
        setattr(self, first, high_precision(_of_experts(module, first), dtype))
        self.down_proj = high_precision(_of_experts(module, "down_proj"), dtype)


@functools.cache  # Dynamo guards a forward by its identity
def _experts_forward(grouped: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return type(self).forward(self, hidden_states, top_k_index, top_k_weights)
        return grouped(_HighPrecision(self, hidden_states.dtype), hidden_states, top_k_index, top_k_weights)

    return forward


def _of_experts(module: Any, name: str) -> StoredWeight:
    data, scale = (
        getattr(module, name),
        getattr(module, f"{name}_scale_inv"),
    )  # [experts, N, K], [experts, tiles, tiles]
    rows, columns = module.block_size or data.shape[-2:]
    if scale.shape[-2] > -(-data.shape[-2] // rows):  # gate and up have tiles of their own, however small they are
        rows = data.shape[-2] // scale.shape[-2]
    e8m0, static = scale.dtype == torch.float8_e8m0fnu, module.activation_scheme == "static"
    return StoredWeight(
        data=data,
        scale_inv=scale.detach().view(torch.uint8) if e8m0 else scale,
        scaling="block_e8m0" if e8m0 else "block",
        block=[rows, columns],
        activations="static" if static else "dynamic",
        input_scale_inv=getattr(module, f"{name}_activation_scale") if static else None,  # [experts]
    )
