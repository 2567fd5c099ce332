"""Helpers of the tests of FP8 caches: models, generate(), and transformers' caches with tensors the oracle rounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import oracle
from tiny_models import TINY, causal_lm

E4M3 = torch.float8_e4m3fn
IDS = torch.randint(3, 250, (2, 12), generator=torch.Generator().manual_seed(0))


def model_of(name: str, dtype: torch.dtype = torch.bfloat16, layers: int = 2, **settings: Any) -> Any:
    torch.manual_seed(0)
    tiny = causal_lm(name, **settings) if settings else TINY[name].build
    return tiny(layers).to(dtype).eval()


def generate(model: Any, cache: Any, ids: Tensor = IDS, tokens: int = 8, **settings: Any) -> Any:
    """Sequences and the logits of each step, greedy."""
    mask = settings.pop("attention_mask", torch.ones_like(ids))
    asked = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0, **settings}
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, output_logits=True, return_dict_in_generate=True, **asked
    )


def quantized(x: Tensor, power_2_scale: bool = False) -> tuple[Any, Any]:
    """Codes of ``x`` [..., d] and ``scale_inv`` [..., 1], one per row, in float64 and by table search."""
    rows = x.detach().double().numpy()
    amaxes = np.abs(rows).max(-1)  # NaN if any is
    factors = [oracle.scale(float(a), E4M3, power_2_scale=power_2_scale) for a in amaxes.reshape(-1)]
    factor = np.array(factors).reshape(*amaxes.shape, 1)
    inverse = np.array([oracle.round_to_float32(1.0 / f) for f in factors]).reshape(factor.shape)
    scaled = rows.astype(np.float32) * factor.astype(np.float32)
    return oracle.cast(scaled.astype(np.float64), E4M3), inverse


def rounded(x: Tensor, power_2_scale: bool = False) -> Tensor:
    """The values of ``x`` that attention reads after they were stored."""
    codes, inverse = quantized(x, power_2_scale)
    return torch.from_numpy(oracle.dequantize(codes, inverse, E4M3, x.dtype)).to(x.dtype)


class _Emulated:
    """``exact_prefill`` is emulated as well: zeros fill a static cache up."""

    exact_prefill = True

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        cache: Any = super()
        is_first = int(cache.get_seq_length(layer_idx)) == 0
        found = cache.update(rounded(key_states), rounded(value_states), layer_idx, *args, **kwargs)
        if not (is_first and self.exact_prefill):
            return found
        exact = [torch.zeros_like(x) for x in found]
        for zeros, states in zip(exact, (key_states, value_states), strict=True):
            zeros[:, :, : states.shape[2]] = states
        return tuple(exact)


class EmulatedDynamic(_Emulated, DynamicCache):
    pass


class EmulatedStatic(_Emulated, StaticCache):
    pass
