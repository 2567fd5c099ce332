"""One scale per head for all tokens of an FP8 cache: what FP8 attention kernels take, and what servers store.

    scales = calibrate_head_scales(model, [input_ids], margin=1.5)     # amaxes of texts that are like yours
    scales = HeadScales.from_tensors(tensors)                          # k_scale and v_scale of a checkpoint
    cache = Fp8DynamicCache(model.config, head_scales=scales)
    cache.clipped                                                      # how many numbers were larger than that

The scale must be there before the first token is, and none that is stored could be changed later without rounding it
again. So larger numbers saturate (an infinite one becomes NaN), and are counted.
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

from fp8graph.compat.dynamo import mark_static
from fp8graph.errors import ConfigError
from fp8graph.numerics.quantization import clipped_by, quantize_by

__all__ = ["FixedScales", "HeadScales", "calibrate_head_scales"]

_FP8: Final = torch.float8_e4m3fn
_LARGEST: Final = 448.0
_NAME: Final = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:.*\.)?([kv])_scale")


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
        """The ``k_scale`` and ``v_scale`` among the tensors of a checkpoint, as compressed-tensors and ModelOpt name
        them (``model.layers.0.self_attn.k_scale``, ``model.layers.0.self_attn.k_proj.k_scale``): scalars or [heads].

        Raises:
            ConfigError: there are none, a layer has one of the two alone, or two of one (of a decoder and an encoder).
        """
        found: dict[int, dict[str, Tensor]] = {}
        names: dict[tuple[int, str], str] = {}
        for name, tensor in tensors.items():
            if (match := _NAME.fullmatch(name)) is not None:
                layer, which = int(match[1]), match[2]
                if (other := names.setdefault((layer, which), name)) != name:
                    raise ConfigError(
                        f"{other!r} and {name!r} are both {which}_scale of layer {layer}: give those of one stack "
                        "of layers and one kind of attention."
                    )
                if not isinstance(tensor, Tensor):
                    raise ConfigError(f"HeadScales.from_tensors(tensors): {name!r} is {tensor!r:.100}, not a tensor.")
                found.setdefault(layer, {})[which] = tensor.to(torch.float32).reshape(-1)
        if not found:
            raise ConfigError("no tensor is named ...layers.<number>....k_scale: there are no scales of a cache")
        for index, both in found.items():
            if len(both) < 2:
                raise ConfigError(f"layer {index} has a {'kv'['k' not in both]}_scale alone: a cache needs both")
            keys, values = (names[index, which].rpartition("layers.")[0] for which in "kv")
            if keys != values:
                raise ConfigError(f"layer {index} has scales of keys in {keys!r} and of values in {values!r}")
        return HeadScales({index: (both["k"], both["v"]) for index, both in sorted(found.items())})

    def to_tensors(self) -> dict[str, Tensor]:
        """The scales by name, for a file: ``layers.0.k_scale``, ..."""
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
        """What is done to tokens and sequences."""

    offload = prefetch = activate_past_recording = reorder_cache = crop = _stay
    batch_repeat_interleave = batch_select_indices = _stay


@torch.no_grad()
def calibrate_head_scales(
    model: nn.Module, batches: Iterable[Tensor | Mapping[str, Any]], *, margin: float = 1.0
) -> HeadScales:
    """The scales with which the largest key and value of each head, in these texts, become 448 / ``margin``.

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
    """The argument by which ``model`` takes a cache: transformers 5.24 renamed it to "cache"."""
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
