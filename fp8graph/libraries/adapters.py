"""Adapters of PEFT on linears in FP8: merged into the format of the base, and taken out to the bit.

PEFT adds the product of an adapter to ``base_layer.weight.data``. torch has no sum of FP8 numbers ("Promotion for
Float8 Types is not supported"), and it would be without scales. So each of PEFT's layers on a linear in FP8 gets a
``merge`` and an ``unmerge`` of its own, attributes of the instance as :func:`fp8graph.adopt`'s ``forward`` is, and
copied and pickled with it. The weight is decoded to FP32, PEFT's own ``merge`` adds to it, and the sum is quantized
once, in the tiles and with the rule of the base. ``unmerge`` writes the bytes back that were there before. No class of
PEFT is changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8graph.compat import fsdp
from fp8graph.compat.distributed import local
from fp8graph.errors import ConfigError
from fp8graph.libraries.readers import reader_of, swizzled
from fp8graph.libraries.stored_linear import StoredWeight
from fp8graph.numerics.quantization import dequantize_data
from fp8graph.numerics.requantize import requantize

_BEFORE: Final = "_fp8graph_before_merging"  # in a layer's __dict__ while something is merged into its base


def adopt_adapters(model: nn.Module) -> None:
    """Let PEFT merge the adapters of ``model`` into weights in FP8.

    Raises:
        ConfigError: PEFT adapts a parameter in FP8 itself, such as that of fused experts (``target_parameters``).
    """
    for name, module in model.named_modules():
        if _adapts_fp8(module):
            module.__dict__.update(_ours(module))
        elif isinstance(parameter := getattr(module, "parameter_name", None), str):
            base = module
            while (inner := base._modules.get("base_layer")) is not None:
                base = inner
            if getattr(getattr(base, parameter, None), "dtype", None) == torch.float8_e4m3fn:
                raise ConfigError(
                    f"{name}: PEFT adapts {parameter} of {type(base).__name__}, which is in FP8: it would add the "
                    "adapter to the FP8 numbers, without their scales. Leave it out of target_parameters and adapt "
                    "linears (target_modules), or load the model with dequantize=True."
                )


def _adapts_fp8(module: nn.Module) -> bool:
    base = module._modules.get("base_layer")
    if base is None or not isinstance(getattr(module, "merged_adapters", None), list):
        return False
    if isinstance(getattr(module, "parameter_name", None), str):
        return False
    if type(getattr(base, "weight", None)).__name__ == "NVFP4Tensor":
        return False  # torchao quantizes those, and PEFT asks it to
    return reader_of(base) is not None


@dataclass(frozen=True, kw_only=True)
class _AdaptedWeight:
    """A weight in FP8, and the tensors of its layer that hold it."""

    stored: StoredWeight
    data: Tensor  # [n, k]
    scale: Tensor  # in the dtype and the order of the library
    swizzled: bool

    @property
    def block(self) -> tuple[int, int]:
        """(rows, columns) that share a scale."""
        n, k = self.data.shape
        scales = self.stored.scale_inv
        # one scale may stand for those of all rows: see one_scale
        if self.stored.scaling == "tensor" or (self.stored.scaling == "row" and bool((scales == scales[0]).all())):
            return n, k
        if self.stored.scaling == "row":
            return 1, k
        rows, columns = self.stored.block
        return rows, columns

    def decoded(self) -> Tensor:
        """FP32 [n, k]."""
        one = self.stored
        return dequantize_data(self.data, one.scale_inv.detach(), torch.float32, scaling=one.scaling, block=one.block)

    def write(self, x: Tensor) -> None:
        """Quantize ``x``, FP32 [n, k], in place of this weight."""
        (n, k), (rows, columns) = self.data.shape, self.block
        grid = -(-n // rows), -(-k // columns)
        e8m0 = self.stored.scale_inv.dtype == torch.uint8
        scales = self.stored.scale_inv if e8m0 else self.scale
        scales = scales.reshape(-1)[:1].reshape(1, 1) if grid == (1, 1) else scales.reshape(grid)
        data, scales = requantize(x, scales, (rows, columns), self.data.dtype)
        self.data.copy_(data)
        if self.swizzled:
            scales = swizzled(scales)
        place = self.scale.view(torch.uint8) if e8m0 else self.scale
        place.copy_(scales.reshape(place.shape) if scales.numel() == place.numel() else scales.expand(place.shape))


def _weight(layer: Any) -> _AdaptedWeight:
    """Return the weight that ``layer`` of PEFT adapts.

    Raises:
        ConfigError: nothing can be merged into it.
    """
    base = layer._modules["base_layer"]
    read = reader_of(base)
    assert read is not None  # see _adapts_fp8
    stored = read(base)
    if stored.data.dtype != torch.float8_e4m3fn:
        raise ConfigError(
            f"{type(layer).__name__} on {type(base).__name__}: its weight is in FP4 ({stored.scaling}), in which most "
            "of what an adapter adds is rounded away. Keep the adapters, or merge into a base in high precision."
        )
    holder = base.weight if type(base.weight).__module__.startswith("torchao.") else base
    data = getattr(holder, "qdata", base.weight)
    names = ("weight_scale_inv", "weight_scale", "scale")
    scale = next(getattr(holder, name) for name in names if hasattr(holder, name))
    if local(data) is not data or id(data) in fsdp.gathered():
        raise ConfigError(
            f"{type(layer).__name__} on {type(base).__name__}: its weight is sharded, and what is added to a gathered "
            "copy would be lost. Save the adapters (peft.get_peft_model_state_dict, full_tensor() of each), and merge "
            "them on the checkpoint in one process."
        )
    turned = bool(getattr(holder, "is_swizzled_scales", False))
    return _AdaptedWeight(stored=stored, data=data.detach(), scale=scale.detach(), swizzled=turned)


def _ours(layer: Any) -> dict[str, Callable[..., Any]]:
    """Give the attributes of ``layer``. A pickle has a bound function as an attribute of its class, which has none."""
    return {"merge": functools.partial(_merge, layer), "unmerge": functools.partial(_unmerge, layer)}


@torch.compiler.disable
@torch.no_grad()
def _merge(layer: Any, safe_merge: bool = False, adapter_names: Sequence[str] | None = None) -> None:
    """PEFT's ``merge``: several adapters are added to the weight as it was before, which is quantized once."""
    of_peft = _of_peft(layer, "merge")
    merged = [*layer.merged_adapters]
    wanted = layer.active_adapters if adapter_names is None else adapter_names
    if isinstance(wanted, str) or all(name in merged for name in wanted):
        of_peft(safe_merge=safe_merge, adapter_names=adapter_names)  # it refuses, or says that nothing is to be done
        return
    weight, base = _weight(layer), layer._modules["base_layer"]
    bias = getattr(base, "bias", None)
    now = _copies(weight, bias)
    try:
        before = layer.__dict__.get(_BEFORE, now)
        _restore(before, weight, bias)
        weight = _weight(layer)  # some scales are read as copies
        decoded = weight.decoded()
        n, k = decoded.shape
        wide = nn.Linear(k, n, bias=bias is not None, device="meta")
        wide.weight = nn.Parameter(decoded.clone(), requires_grad=False)
        if bias is not None:
            wide.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
        layer.merged_adapters.clear()
        layer._modules["base_layer"] = wide
        layer.__dict__["merge"], layer.__dict__["unmerge"] = of_peft, _of_peft(layer, "unmerge")  # DoRA calls them
        of_peft(safe_merge=safe_merge, adapter_names=list(dict.fromkeys([*merged, *wanted])))
        layer._modules["base_layer"] = base
        if not torch.equal(wide.weight, decoded):
            weight.write(wide.weight.detach().to(torch.float32))
        if bias is not None:
            bias.detach().copy_(wide.bias)
        layer.__dict__[_BEFORE] = before
    except BaseException:
        layer.merged_adapters[:] = merged
        _restore(now, weight, bias)
        raise
    finally:
        layer._modules["base_layer"] = base
        layer.__dict__.update(_ours(layer))


@torch.compiler.disable
@torch.no_grad()
def _unmerge(layer: Any) -> None:
    """PEFT's ``unmerge``: the bytes and scales from before."""
    before = layer.__dict__.pop(_BEFORE, None)
    if before is None or not layer.merged_adapters:
        _of_peft(layer, "unmerge")()  # it says that nothing is to be done
        return
    _restore(before, _weight(layer), getattr(layer._modules["base_layer"], "bias", None))
    layer.merged_adapters.clear()


def _of_peft(layer: Any, name: str) -> Callable[..., None]:
    """PEFT's own method, for a base in high precision: not that which calls torchao."""
    kinds = (kind for kind in type(layer).__mro__ if not kind.__module__.endswith(".torchao"))
    return MethodType(next(kind.__dict__[name] for kind in kinds if name in kind.__dict__), layer)


def _copies(weight: _AdaptedWeight, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    return weight.data.clone(), weight.scale.clone(), None if bias is None else bias.detach().clone()


def _restore(copies: tuple[Tensor, Tensor, Tensor | None], weight: _AdaptedWeight, bias: Tensor | None) -> None:
    data, scale, old_bias = copies
    weight.data.copy_(data)
    weight.scale.copy_(scale)
    if bias is not None and old_bias is not None:
        bias.detach().copy_(old_bias)
