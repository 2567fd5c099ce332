"""The FP8 cache of one attention layer: two cache layers of transformers, one for the bytes and one for the scales."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from fp8graph.errors import ConfigError
from fp8graph.integrations.kv_scales import FixedScales
from fp8graph.numerics.quantization import dequantize_rows, quantize_rows

__all__ = ["Fp8Layer"]

_FP8: Final = torch.float8_e4m3fn
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


class Fp8Layer(CacheLayerMixin):
    """The cache of one layer: two of transformers' own layers, of which one holds bytes, the other scales.

    Both move their tokens alike, whatever the kind of the layer: they append, slide, crop, reorder.

    Attributes:
        data: ``keys`` and ``values`` are E4M3 as uint8 (torch moves no FP8 tensors on a CPU) [batch, heads, tokens,
            head_dim].
        scales: ``keys`` and ``values`` are FP32 [batch, heads, tokens, 1], or [1, heads, 1, 1] if they are given; they
            multiply.
        dtype: of the keys and values that attention reads: the model's. None before the first update.
    """

    def __init__(
        self,
        data: CacheLayerMixin,
        scales: CacheLayerMixin | FixedScales,
        *,
        power_2_scale: bool = False,
        exact_prefill: bool = False,
    ) -> None:
        # CacheLayerMixin sets tensors, which are properties here
        self.data: Final[Any] = data
        self.scales: Final[Any] = scales
        self.power_2_scale: Final = power_2_scale
        self.exact_prefill: Final = exact_prefill
        self.dtype: torch.dtype | None = None
        self._is_new = True

    def __repr__(self) -> str:
        return f"Fp8Layer({self.data})"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate what the kind of layer allocates, for keys and values of these shapes [batch, heads, any, head_dim].

        Raises:
            ConfigError: they are not bf16, fp16 or FP32.
        """
        if key_states.dtype not in _DTYPES:
            raise ConfigError(f"an FP8 cache takes keys in bf16, fp16 or FP32, not in {key_states.dtype}")
        self.dtype = key_states.dtype
        empty = [states.new_empty((*states.shape[:2], 0, states.shape[3])) for states in (key_states, value_states)]
        self.data.lazy_initialization(*(states.to(torch.uint8) for states in empty))
        self.scales.lazy_initialization(*(states[..., :1].to(torch.float32) for states in empty))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values of new tokens; return those that attention reads: decoded, of all tokens.

        Args:
            key_states, value_states: [batch, heads, tokens, head_dim] (which may differ), bf16, fp16 or FP32. With
                ``exact_prefill``, the first ones are returned as they are.

        Raises:
            ConfigError: a gradient is asked for, the dtype is another one, or a static cache has no room for so many
                tokens. In compiled code and on a GPU, where looking at the count would wait for the device, only the
                new tokens are compared with the room; torch's ``index_copy_`` then fails, or asserts on the device.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ConfigError(
                "keys and values in FP8 carry no gradient: call the model under torch.no_grad(), as generate() does, "
                "or train without a cache (use_cache=False)."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check_room(key_states)
        keys, values, *new = self._quantized(key_states, value_states)
        data = self.data.update(keys, values, *args, **kwargs)
        scales = self.scales.update(*new, *args, **kwargs)
        is_prefill, self._is_new = self._is_new, False
        if is_prefill and self.exact_prefill:
            room = data[0].shape[2] - key_states.shape[2]  # of a static cache, which the mask covers
            return nn.functional.pad(key_states, (0, 0, 0, room)), nn.functional.pad(value_states, (0, 0, 0, room))
        return self._decoded(data[0], scales[0]), self._decoded(data[1], scales[1])

    def _check_room(self, key_states: Tensor) -> None:
        """Refuse tokens for which a static layer that keeps all of them has no room."""
        if not isinstance(self.data, StaticLayer) or self.data.is_sliding:
            return
        is_countable = key_states.device.type == "cpu" and not torch.compiler.is_compiling()
        stored = int(self.data.get_seq_length()) if is_countable else 0
        new, room = key_states.shape[2], self.data.get_max_length()
        if stored + new > room:
            raise ConfigError(
                f"max_cache_len={room} is too small: {stored} tokens are stored, and {new} are to come. Make room for "
                "the prompt and all new tokens. A cache that was used before keeps its tokens until cache.reset()."
            )

    def _quantized(self, keys: Tensor, values: Tensor) -> list[Tensor]:
        """The bytes of both, and the scales of the new tokens, where tokens have scales."""
        if isinstance(self.scales, FixedScales):
            made = (self.scales.quantized(keys, self.scales.keys), self.scales.quantized(values, self.scales.values))
            return [data.view(torch.uint8) for data in made]
        both = [quantize_rows(states, _FP8, power_2_scale=self.power_2_scale) for states in (keys, values)]
        return [*(data.view(torch.uint8) for data, _ in both), *(scale_inv for _, scale_inv in both)]

    def _decoded(self, data: Tensor, scale_inv: Tensor) -> Tensor:
        assert self.dtype is not None
        return dequantize_rows(data.view(_FP8), scale_inv, self.dtype)

    @property
    def keys(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All keys that are stored, decoded: cross-attention reads them without an update."""
        return self._decoded(self.data.keys, self.scales.keys) if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See :attr:`keys`."""
        return self._decoded(self.data.values, self.scales.values) if self.is_initialized else None

    @property
    def clipped(self) -> int:
        """The count of numbers larger than their head's scale allows; 0 where tokens have scales of their own."""
        return int(self.scales.clipped) if isinstance(self.scales, FixedScales) else 0

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are stored: keys and values as bytes, then their scales."""
        layers = (self.data, self.scales) if self.is_initialized else ()
        return [tensor for layer in layers for tensor in (layer.keys, layer.values)]

    # What the kind of layer is, and how many tokens it holds: both agree.

    @property
    def is_initialized(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.data.is_initialized

    @property
    def is_compileable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.data.is_compileable

    @property
    def is_croppable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.data.is_croppable

    @property
    def is_sliding(self) -> bool:
        return self.data.is_sliding

    @property
    def record_past(self) -> bool:
        return getattr(self.data, "record_past", False)

    @property
    def batch_size(self) -> int:
        return self.data.batch_size  # AttributeError where transformers' own has none: of this it makes -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.data.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self.data.get_seq_length()

    def get_max_length(self) -> int:
        return self.data.get_max_length()

    # What is done to the tokens is done to both.

    def offload(self) -> None:
        self._both("offload")

    def prefetch(self) -> None:
        self._both("prefetch")

    def reset(self) -> None:
        self._both("reset")
        self._is_new = True

    def activate_past_recording(self) -> None:
        """Let sliding layers keep the tokens that a later ``crop`` needs; others keep all."""
        if hasattr(self.data, "activate_past_recording"):
            self._both("activate_past_recording")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._both("reorder_cache", beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        self._both("crop", tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._both("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._both("batch_select_indices", indices)

    def _both(self, method: str, *args: Any) -> None:
        for layer in (self.data, self.scales):
            if not hasattr(layer, method):
                raise ConfigError(
                    f"{type(layer).__name__}, of which this FP8 cache is made, has no {method}(): use Fp8DynamicCache "
                    "for assisted generation and for other methods that remove tokens or sequences."
                )
            getattr(layer, method)(*args)
