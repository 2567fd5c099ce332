"""The FP8 cache of one attention layer: a cache layer of transformers for the bytes, and the scales.

Scales are those of tokens, in a second cache layer, or one per head for all tokens: what FP8 attention kernels take,
and what servers store.

    scales = calibrate_head_scales(model, [input_ids], margin=1.5)     # amaxes of texts that are like yours
    scales = HeadScales.from_tensors(tensors)                          # k_scale and v_scale of a checkpoint
    cache = Fp8DynamicCache(model.config, head_scales=scales)
    cache.clipped                                                      # how many numbers were larger than that

A scale per head must be there before the first token is, and none that is stored could be changed later without
rounding it again. So larger numbers saturate (an infinite one becomes NaN), and are counted.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from fp8graph.compat.dynamo import mark_static
from fp8graph.errors import ConfigError
from fp8graph.numerics.quantization import clipped_by, dequantize_rows, quantize_by, quantize_rows

__all__ = ["FixedScales", "Fp8Layer", "HeadScales", "calibrate_head_scales"]

_FP8: Final = torch.float8_e4m3fn
_LARGEST: Final = 448.0
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
# The names that vLLM takes (get_cache_scale_mapper): of compressed-tensors, ModelOpt, AutoFP8, Quark and Hunyuan.
_NAME: Final = re.compile(
    r"(?:.*\.)?layers\.(\d+)\.(?:.*\.)?(?:_?(k|v|kv)_scale|([kv])_proj\.output_scale|([kv])_cache\.scale)"
)
_OTHERS: Final = re.compile(
    r"(?:.*\.)?layers\.\d+\.(?:.*\.)?(?:k|v|kv)_"
    r"(?:cache_(?:scales?|scaling_factor)|scales|scale_inv|scaling_factor|(?:de)?quant_scale|zero_points?)"
)


@dataclass(frozen=True, eq=False)
class HeadScales:
    """The scales of keys and values of each layer: FP32 [key heads], or [1] for all of them. They multiply the E4M3.

    Raises:
        ConfigError: a scale is not a positive finite number, or a layer has one of keys or of values alone.
    """

    layers: Mapping[int, tuple[Tensor, Tensor]]

    def __post_init__(self) -> None:
        for index, both in self.layers.items():
            for name, scale in zip(("keys", "values"), both, strict=True):
                if scale.ndim != 1 or scale.dtype != torch.float32:
                    raise ConfigError(f"layer {index}: scales of {name} are FP32 [heads], not {list(scale.shape)}")
                if not (scale.isfinite() & (scale > 0)).all():
                    raise ConfigError(f"layer {index}: scales of {name} must be positive and finite: {scale.tolist()}")

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> HeadScales:
        """Return the scales of keys and values among the tensors of a checkpoint: scalars or [heads].

        They are called ``model.layers.0.self_attn.k_scale`` or ``.k_proj.k_scale`` (compressed-tensors, ModelOpt),
        ``.attn.k_scale`` (vLLM), ``.k_proj.output_scale`` (Quark, AutoFP8), ``.k_cache.scale`` (Hunyuan), and so for
        values; ``.kv_scale`` is one for both. Scales of queries and probabilities are not of a cache.

        Raises:
            ConfigError: there are none, a layer has one of the two alone, or two of one (of a decoder and an encoder);
                or some have another name, which does not say whether they multiply, or zero points.
        """
        scales: dict[int, dict[str, Tensor]] = {}
        names: dict[tuple[int, str], str] = {}
        for name, tensor in tensors.items():
            if _OTHERS.fullmatch(name) is not None:
                raise ConfigError(
                    f"HeadScales.from_tensors(tensors): unknown scale name {name!r}: it may multiply or divide. If "
                    "a stored number times it is the key or value, rename it to k_scale or v_scale; else leave it out."
                )
            if (match := _NAME.fullmatch(name)) is None:
                continue
            if not isinstance(tensor, Tensor):
                raise ConfigError(f"HeadScales.from_tensors(tensors): {name!r} is {tensor!r:.100}, not a tensor.")
            layer = int(match[1])
            for which in match[2] or match[3] or match[4]:  # "kv": one for both
                if (other := names.setdefault((layer, which), name)) != name:
                    raise ConfigError(
                        f"{other!r} and {name!r} are both {which}_scale of layer {layer}: give those of one stack "
                        "of layers and one kind of attention."
                    )
                scales.setdefault(layer, {})[which] = tensor.to(torch.float32).reshape(-1)
        if not scales:
            raise ConfigError("no tensor is named ...layers.<number>....k_scale: there are no scales of a cache")
        for index, both in scales.items():
            if len(both) < 2:
                raise ConfigError(f"layer {index} has a {'kv'['k' not in both]}_scale alone: a cache needs both")
            keys, values = (names[index, which].rpartition("layers.")[0] for which in "kv")
            if keys != values:
                raise ConfigError(f"layer {index} has scales of keys in {keys!r} and of values in {values!r}")
        return HeadScales({index: (both["k"], both["v"]) for index, both in sorted(scales.items())})

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the scales by name, for a file: ``layers.0.k_scale``, ..."""
        return {
            f"layers.{index}.{name}_scale": scale
            for index, both in self.layers.items()
            for name, scale in zip("kv", both, strict=True)
        }


class FixedScales:
    """The scales of one layer, in place of the cache layer that holds those of tokens: nothing moves them.

    Attributes:
        keys, values: FP32 [1, heads, 1, 1].
        clipped: int64 [], how many numbers saturated.
    """

    def __init__(self, index: int, keys: Tensor, values: Tensor) -> None:
        self._index = index
        self.keys, self.values = (scale.reshape(1, -1, 1, 1) for scale in (keys, values))
        self.clipped = torch.zeros((), dtype=torch.int64)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Move to the device of [batch, heads, any, size]. Raises ConfigError for another number of heads."""
        for name, states in (("keys", key_states), ("values", value_states)):
            scale = getattr(self, name)
            if scale.shape[1] not in (1, states.shape[1]):
                raise ConfigError(
                    f"layer {self._index} has {states.shape[1]} heads of {name}, and head_scales has scales for "
                    f"{scale.shape[1]}: calibrate them with this model."
                )
            setattr(self, name, scale.to(states.device))
        self.clipped = mark_static(self.clipped.to(key_states.device))

    def quantized(self, states: Tensor, scale_inv: Tensor) -> Tensor:
        """E4M3 of ``states``; larger numbers saturate, and are counted."""
        self.clipped.add_(clipped_by(states, scale_inv))
        return quantize_by(states, scale_inv, _FP8)

    def update(self, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def reset(self) -> None:
        self.clipped.zero_()

    def _stay(self, *_args: Any) -> None:
        """Do nothing: tokens and sequences move, and their scales do not."""

    offload = prefetch = activate_past_recording = reorder_cache = crop = _stay
    batch_repeat_interleave = batch_select_indices = _stay


def _of_data(name: str) -> Any:
    """Return the attribute or method of an ``Fp8Layer`` that its layer of bytes has."""

    def read(self: Fp8Layer) -> Any:
        return getattr(self.data, name)

    return property(read)


def _on_both(method: str) -> Any:
    """Return the method of an ``Fp8Layer`` that calls ``method`` of both layers."""

    def call(self: Fp8Layer, *args: Any) -> None:
        self._both(method, *args)

    return call


class Fp8Layer(CacheLayerMixin):
    """The cache of one layer: two of transformers' own layers, of which one holds bytes, the other scales.

    Both move their tokens in the same way, whatever the kind of the layer: they append, slide, crop, reorder.

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
            ConfigError: a key or value requires a gradient, the dtype is another one, or a static cache has no room for
                so many tokens. In compiled code and on a GPU, where looking at the count would wait for the device,
                only the new tokens are compared with the room; torch's ``index_copy_`` then fails, or asserts on the
                device.
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
        """Return the bytes of both, and the scales of the new tokens, where tokens have scales."""
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

    is_initialized, is_compileable, is_croppable = map(_of_data, ("is_initialized", "is_compileable", "is_croppable"))
    is_sliding, get_mask_sizes, get_seq_length = map(_of_data, ("is_sliding", "get_mask_sizes", "get_seq_length"))
    get_max_length = _of_data("get_max_length")
    batch_size = _of_data("batch_size")  # AttributeError where transformers' own has none: of this it makes -1

    @property
    def record_past(self) -> bool:
        return getattr(self.data, "record_past", False)

    # What is done to the tokens is done to both.

    offload, prefetch, reorder_cache = _on_both("offload"), _on_both("prefetch"), _on_both("reorder_cache")
    crop, batch_select_indices = _on_both("crop"), _on_both("batch_select_indices")
    batch_repeat_interleave = _on_both("batch_repeat_interleave")

    def reset(self) -> None:
        self._both("reset")
        self._is_new = True

    def activate_past_recording(self) -> None:
        """Let sliding layers keep the tokens that a later ``crop`` needs; others keep all."""
        if hasattr(self.data, "activate_past_recording"):
            self._both("activate_past_recording")

    def _both(self, method: str, *args: Any) -> None:
        for layer in (self.data, self.scales):
            if not hasattr(layer, method):
                raise ConfigError(
                    f"{type(layer).__name__}, of which this FP8 cache is made, has no {method}(): use Fp8DynamicCache "
                    "for assisted generation and for other methods that remove tokens or sequences."
                )
            getattr(layer, method)(*args)


@torch.no_grad()
def calibrate_head_scales(
    model: nn.Module, batches: Iterable[Tensor | Mapping[str, Any]], *, margin: float = 1.0
) -> HeadScales:
    """Return the scales with which the largest key and value of each head, in these texts, become 448 / ``margin``.

    Args:
        model: a causal language model of transformers, in high precision or not.
        batches: input_ids [batch, tokens], or further arguments of ``model`` by name. At least one.
        margin: room for larger numbers in other texts, >= 1. FP8 numbers are floating: 2 costs no accuracy but of the
            smallest ones.

    Raises:
        ConfigError: there is no batch, a margin below 1, or a key or value that is not finite.
    """
    if type(margin) not in (int, float) or not 1 <= margin < 1e6:
        raise ConfigError(f"margin must be a number >= 1, not {margin!r}")
    amaxes: dict[int, list[Tensor]] = {}
    for batch in batches:
        cache = DynamicCache(config=getattr(model, "config"))  # noqa: B009
        layers: list[Any] = cache.layers
        for index, layer in enumerate(layers):
            if hasattr(layer, "update"):  # recurrent layers have no keys
                layer.update = _recording(layer.update, amaxes, index)
        given = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
        model(**given, **{cache_argument(model): cache}, use_cache=True)
    if not amaxes:
        raise ConfigError("calibrate_head_scales needs a batch at least, of a model that keeps keys and values")
    return HeadScales(dict(_scales(amaxes, margin)))


def cache_argument(model: nn.Module) -> str:
    """Return the argument by which ``model`` takes a cache: transformers 5.24 renamed it to "cache"."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _recording(update: Any, amaxes: dict[int, list[Tensor]], index: int) -> Any:
    def recorded(key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        new = [states.float().abs().amax((0, 2, 3)) for states in (key_states, value_states)]
        old = amaxes.get(index, new)
        amaxes[index] = [torch.maximum(a, b) for a, b in zip(old, new, strict=True)]
        return update(key_states, value_states, *args, **kwargs)

    return recorded


def _scales(amaxes: Mapping[int, list[Tensor]], margin: float) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    for index, both in sorted(amaxes.items()):
        if not all(amax.isfinite().all() for amax in both):
            raise ConfigError(f"layer {index}: a key or a value is not finite in these texts")
        keys, values = (torch.where(amax > 0, amax * (margin / _LARGEST), 1.0) for amax in both)
        yield index, (keys, values)
