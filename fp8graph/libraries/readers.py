"""Read the FP8 layers of libraries, which are known by the names of their classes: none is imported.

* transformers: ``FP8Linear`` and ``FP8Experts`` of FineGrained FP8, the format of DeepSeek-V3 and Qwen3. Compiled,
  experts are transformers' own grouped matmuls, of the weights as they are stored.
* torchao: ``nn.Linear`` whose weight is a Float8Tensor, an MXTensor or an NVFP4Tensor.
* compressed-tensors: layers whose weights are bytes until the model's first call, in which a hook of the model
  decompresses all of it to bf16. It is removed, and the layers dequantize in eager: the library's forward fails on
  bytes, and cuts gradients to its input.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8graph.compat.fsdp import original_class
from fp8graph.libraries.stored_linear import StoredEmbedding, StoredLinear, StoredWeight, high_precision, one_scale

_MODULE = "transformers.integrations.finegrained_fp8"
_HOOK = "ct_decompress_hook"


def as_saved(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` of ``model`` under the names and in the pieces in which ``save_pretrained`` writes them."""
    if not hasattr(model, "save_pretrained"):
        return dict(tensors)
    loading = importlib.import_module("transformers.core_model_loading")
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None or all(map(_is_reversible, conversions)):
        return loading.revert_weight_conversion(model, dict(tensors))
    kept = [one for one in conversions if _is_reversible(one)]  # without torchao's, of its own tensors
    if not kept:
        return dict(tensors)
    same = copy.copy(model)
    same.__dict__["_weight_conversions"] = kept
    return loading.revert_weight_conversion(same, dict(tensors))


def _is_reversible(conversion: Any) -> bool:
    """Return whether transformers writes what ``conversion`` reads: it has no way back for torchao's tensors."""
    try:
        return all(operation.reverse_op is not None for operation in getattr(conversion, "operations", ()))
    except NotImplementedError:
        return False


def of_transformers(module: Any) -> Callable[[Any], StoredWeight] | None:
    """Return the function that reads the weight of ``module``; None for another layer, or if it was dequantized."""
    kind = original_class(module)
    mine = kind.__module__ == _MODULE and kind.__name__ in ("FP8Linear", "FP8GroupedLinear")
    return _read_fp8_linear if mine and module.weight.dtype == torch.float8_e4m3fn else None


def is_table(module: nn.Module) -> bool:
    """Return whether ``module`` is an embedding in FP8 with one ``weight_scale``: transformers' ``FP8Embedding``, or
    ours.
    """
    theirs = type(module).__module__ == _MODULE and type(module).__name__ == "FP8Embedding"
    return isinstance(module, StoredEmbedding) or theirs


def _read_fp8_linear(module: Any) -> StoredWeight:
    scale, block, static = module.weight_scale_inv, module.block_size, module.activation_scale
    if block is None:  # its kernels quantize tokens alone
        activations = "dynamic" if static is None else "static"
        weight, per_token = module.weight, static is None
        return one_scale(weight, scale, per_token=per_token, activations=activations, input_scale_inv=static)
    scaling = "block"
    if scale.dtype == torch.float8_e8m0fnu:
        scaling, scale = _of_e8m0(block), scale.detach().view(torch.uint8)
    return StoredWeight(
        data=module.weight,
        scale_inv=scale,
        scaling=scaling,
        block=[*block],
        activations="dynamic" if static is None else "static",
        input_scale_inv=static,
    )


def _of_e8m0(block: Sequence[int]) -> str:
    return "mxfp8" if tuple(block) == (1, 32) else "block_e8m0"


def forward_of_experts(module: nn.Module) -> Callable[..., Tensor] | None:
    """Return the ``forward`` of an ``FP8Experts``; None if ``module`` is none, or its weights are in FP4 or bf16."""
    kind = original_class(module)
    mine = kind.__module__ == _MODULE and kind.__name__ == "FP8Experts"
    if not mine or cast(Tensor, module.down_proj).dtype != torch.float8_e4m3fn:
        return None
    return _experts_forward(importlib.import_module("transformers.integrations.moe").grouped_mm_experts_forward)


class _HighPrecision:
    """The parts of experts that transformers' grouped matmuls read, with weights in high precision."""

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
    data = getattr(module, name)  # [experts, N, K]
    scale = getattr(module, f"{name}_scale_inv")  # [experts, tiles, tiles]
    rows, columns = module.block_size or data.shape[-2:]
    if scale.shape[-2] > -(-data.shape[-2] // rows):  # gate and up have tiles of their own, however small they are
        rows = data.shape[-2] // scale.shape[-2]
    e8m0, static = scale.dtype == torch.float8_e8m0fnu, module.activation_scheme == "static"
    return StoredWeight(
        data=data,
        scale_inv=scale.detach().view(torch.uint8) if e8m0 else scale,
        scaling=_of_e8m0((rows, columns)) if e8m0 else "block",
        block=[rows, columns],
        activations="static" if static else "dynamic",
        input_scale_inv=getattr(module, f"{name}_activation_scale") if static else None,  # [experts]
    )


def of_torchao(module: Any) -> Callable[[Any], StoredWeight] | None:
    """Give the function that reads the weight of ``module``; None for another layer, or if no GEMM has such scales."""
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear) or weight is None or not type(weight).__module__.startswith("torchao."):
        return None
    kind = type(weight).__name__
    if kind == "Float8Tensor":
        return _ao_float8 if _ao_scaling(weight) is not None else None
    if kind == "MXTensor":
        return _ao_mx if (weight.block_size, weight.elem_dtype) == (32, torch.float8_e4m3fn) else None
    if kind == "NVFP4Tensor":
        # a static scale of activations goes with E2M1 in torchao alone
        return _ao_nvfp4 if weight.act_per_tensor_scale is None and weight.qdata.is_contiguous() else None
    return None


def _ao_scaling(weight: Any) -> str | None:
    (rows, columns), (n, k) = weight.block_size, weight.shape
    if (rows, columns) == (n, k):
        return "tensor"
    if (rows, columns) == (1, k):
        return "row"
    return "block" if (rows, columns) == (128, 128) else None


def _ao_activations(weight: Any) -> str:
    return "none" if weight.act_quant_kwargs is None else "dynamic"


def _ao_float8(module: Any) -> StoredWeight:
    weight = module.weight
    scaling = _ao_scaling(weight)
    assert scaling is not None
    return StoredWeight(
        data=weight.qdata,
        scale_inv=weight.scale.reshape(()) if scaling == "tensor" else weight.scale,
        scaling=scaling,
        block=[128, 128] if scaling == "block" else [],
        activations=_ao_activations(weight),
    )


def _ao_mx(module: Any) -> StoredWeight:
    weight, (n, k) = module.weight, module.weight.shape
    return StoredWeight(
        data=weight.qdata,
        scale_inv=_ao_scales(weight.scale.view(torch.uint8), n, k // 32, weight.is_swizzled_scales),
        scaling="mxfp8",
        block=[1, 32],
        activations=_ao_activations(weight),
    )


def _ao_nvfp4(module: Any) -> StoredWeight:
    weight, (n, k) = module.weight, module.weight.shape
    scale = _ao_scales(weight.scale.view(torch.uint8), n, k // 16, weight.is_swizzled_scales)
    whole = weight.per_tensor_scale
    if whole is None:
        whole = torch.ones((), device=scale.device)
    return StoredWeight(
        data=weight.qdata.view(torch.uint8),
        scale_inv=scale.view(torch.float8_e4m3fn),
        scaling="nvfp4",
        block=[1, 16],
        global_scale_inv=whole.reshape(()),
        activations=_ao_activations(weight),
    )


def _ao_scales(scale: Tensor, rows: int, columns: int, swizzled: bool) -> Tensor:
    """Bytes [rows, columns], from cuBLAS's order: tiles of 128 x 4, each kept as 32 rows of 16."""
    if not swizzled:
        return scale.reshape(rows, columns)
    down, across = -(-rows // 128), -(-columns // 4)
    tiles = scale.reshape(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * 128, across * 4)[:rows, :columns].contiguous()


def swizzled(scale: Tensor) -> Tensor:
    """Bytes [rows, columns] in cuBLAS's order, as ``_ao_scales`` reads it; rows and columns that are filled are 0."""
    rows, columns = scale.shape
    filled = torch.constant_pad_nd(scale, [0, -columns % 4, 0, -rows % 128])
    return filled.reshape(-(-rows // 128), 4, 32, -(-columns // 4), 4).permute([0, 3, 2, 1, 4]).contiguous()


def of_compressed_tensors(module: Any) -> Callable[[Any], StoredWeight] | None:
    """Give the function that reads the weight of ``module``; None for another layer, or if no GEMM has such scales."""
    status = getattr(module, "quantization_status", None)
    if not _is_linear(module) or getattr(status, "value", None) != "compressed":
        return None
    weights = module.quantization_scheme.weights
    zero_points = getattr(module, "weight_zero_point", None) is not None
    if zero_points or weights is None or weights.type != "float" or not weights.symmetric:
        return None
    return {
        ("tensor", 8): _ct_one_scale,
        ("channel", 8): _ct_rows,
        ("block", 8): _ct_tiles if weights.block_structure == [128, 128] else None,
        ("group", 8): _ct_mx if (weights.group_size, module.weight_scale.dtype) == (32, torch.uint8) else None,
        ("tensor_group", 4): _ct_nvfp4 if weights.group_size == 16 else None,
    }.get((_name(weights.strategy), weights.num_bits))


def _name(strategy: Any) -> str:
    return str(getattr(strategy, "value", strategy))


def _is_linear(module: object) -> bool:
    return isinstance(module, nn.Linear)


def forward_of_codes(module: Any) -> Callable[[Any, Tensor], Tensor] | None:
    """Return the ``forward`` of a layer of compressed-tensors with packed integers (W4A16, W8A16); None for any other.

    It decodes the weight in the graph, so that the linear behind is one like any other: in FP8 by the policy's recipe.
    """
    status = getattr(module, "quantization_status", None)
    if not _is_linear(module) or getattr(status, "value", None) != "compressed" or not hasattr(module, "weight_packed"):
        return None
    scheme = module.quantization_scheme
    weights, k = scheme.weights, module.in_features
    reordered = hasattr(module, "weight_g_idx") or getattr(module, "weight_zero_point", None) is not None
    of_groups = weights.group_size or k
    if weights.type != "int" or not weights.symmetric or reordered or scheme.input_activations is not None:
        return None
    return _codes_forward if weights.num_bits in (4, 8) and k % of_groups == 0 and k % 8 == 0 else None


def _codes_forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002  (its name in nn.Linear)
    packed, scale = self.weight_packed.detach(), self.weight_scale.detach()
    bits = self.quantization_scheme.weights.num_bits
    (n, words), groups = packed.shape, scale.shape[-1] if scale.ndim > 1 else 1
    places = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)  # the first number in the lowest bits
    codes = ((packed.unsqueeze(-1) >> places) & (2**bits - 1)) - 2 ** (bits - 1)
    grid = codes.reshape(n, groups, words * 32 // bits // groups).to(scale.dtype)
    weight = (grid * scale.reshape(-1, groups, 1)).reshape(n, -1)
    return nn.functional.linear(input, weight.to(input.dtype), self.bias)


def keep_compressed(model: nn.Module) -> None:
    """Remove the hook that would dequantize ``model`` in its first call, unless no layer of it is read as it is."""
    read = any(of_compressed_tensors(module) or forward_of_codes(module) for module in model.modules())
    for module in model.modules() if read else ():
        hook: Any = module.__dict__.pop(_HOOK, None)
        if hook is not None:
            hook.remove()


def _ct_inputs(module: Any) -> dict[str, Any]:
    inputs = module.quantization_scheme.input_activations
    if inputs is None:
        return {"activations": "none"}
    if inputs.dynamic is True:
        return {"activations": "dynamic"}
    if inputs.dynamic == "local":  # scales of tiles are dynamic; that of the whole tensor divides
        one = module.input_global_scale.detach().to(torch.float32).reciprocal()
        return {"activations": "static", "input_scale_inv": one}
    return {"activations": "static", "input_scale_inv": module.input_scale.detach().to(torch.float32)}


def _ct_one_scale(module: Any) -> StoredWeight:
    inputs = module.quantization_scheme.input_activations
    per_token = inputs is not None and _name(inputs.strategy) == "token"
    return one_scale(module.weight, module.weight_scale, per_token=per_token, **_ct_inputs(module))


def _ct_rows(module: Any) -> StoredWeight:
    scale = module.weight_scale.detach().to(torch.float32)
    return StoredWeight(data=module.weight, scale_inv=scale, scaling="row", **_ct_inputs(module))


def _ct_tiles(module: Any) -> StoredWeight:
    scale = module.weight_scale.detach().to(torch.float32)
    return StoredWeight(data=module.weight, scale_inv=scale, scaling="block", block=[128, 128], **_ct_inputs(module))


def _ct_mx(module: Any) -> StoredWeight:
    given = module.weight_scale
    return StoredWeight(data=module.weight, scale_inv=given, scaling="mxfp8", block=[1, 32], **_ct_inputs(module))


def _ct_nvfp4(module: Any) -> StoredWeight:
    return StoredWeight(
        data=module.weight_packed,
        scale_inv=module.weight_scale,
        scaling="nvfp4",
        block=[1, 16],
        global_scale_inv=module.weight_global_scale.detach().reciprocal().reshape(()),  # it divides
        **_ct_inputs(module),
    )


def reader_of(module: nn.Module) -> Callable[[Any], StoredWeight] | None:
    """Return the function that reads the weight of ``module``, of a library or a ``StoredLinear``; None for another
    layer.
    """
    if isinstance(module, StoredLinear):
        return StoredLinear.stored
    readers = (of_transformers, of_torchao, of_compressed_tensors)
    return next((read for reader in readers if (read := reader(module)) is not None), None)
