"""Keys and values in FP8 for transformers' ``generate()``: its dynamic and static caches at half the memory of bf16.

Each key and each value of a token is quantized by itself, rowwise: E4M3 with one FP32 scale per token and head, as
``Float8RowwiseScaling`` does. So no token changes another one, a scale is never out of date, and nothing is calibrated.

    cache = Fp8DynamicCache(model.config)                     # grows, as DynamicCache does
    cache = Fp8StaticCache(model.config, max_cache_len=4096)  # allocated once, as StaticCache is: for compiled decoding
    model.generate(**inputs, past_key_values=cache)
    cache.nbytes, cache.nbytes_unquantized
    compare_logits(model, input_ids, Fp8DynamicCache(model.config), prompt=32)  # what it changes in the logits

Attention reads what is stored. The first call is an exception (``exact_prefill``): it has its keys and values at hand,
and so the prompt is computed, and what is stored of it, as with a cache in high precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, __version__

from fp8graph.errors import ConfigError

try:
    from transformers.cache_utils import (
        Cache,
        DummyLayer,
        DynamicCache,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionLayer,
        StaticCache,
        StaticLayer,
        StaticSlidingWindowLayer,
    )
except ImportError as error:
    raise ConfigError(
        f"FP8 caches need a newer transformers than {__version__}: {error}. `fp8graph doctor` names those that were "
        "tested."
    ) from error

from fp8graph.extras.kv_layer import FixedScales, Fp8Layer, HeadScales, cache_argument, calibrate_head_scales
from fp8graph.numerics import sqnr_db

__all__ = [
    "CacheComparison",
    "Fp8DynamicCache",
    "Fp8StaticCache",
    "HeadScales",
    "calibrate_head_scales",
    "compare_logits",
]

QUANTIZED: Final = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
AS_THEY_ARE: Final = (DummyLayer, LinearAttentionLayer)  # no keys: layers that read another's, recurrent ones


class _Fp8Cache(Cache):
    """The base of both caches: a cache of transformers, of which each layer is replaced."""

    layers: list[Any]
    _config: PreTrainedConfig

    def _quantize_layers(self, config: PreTrainedConfig, head_scales: HeadScales | None, **settings: bool) -> None:
        for name, value in settings.items():
            if type(value) is not bool:
                raise ConfigError(f"{name} must be True or False, not {value!r}")
        if head_scales is not None and not isinstance(head_scales, HeadScales):
            raise ConfigError(f"head_scales must be HeadScales or None, not {type(head_scales).__name__}")
        if head_scales is not None and settings["power_2_scale"]:
            raise ConfigError("power_2_scale=True is for scales per token: those of head_scales are used as they are")
        self._config = config
        for index, scales in enumerate(self.without_fp8().layers):
            layer = self.layers[index]
            if type(layer) in QUANTIZED:
                if head_scales is not None:
                    if index not in head_scales.layers:
                        raise ConfigError(f"head_scales has none for layer {index}, which keeps keys and values")
                    scales = FixedScales(index, *head_scales.layers[index])
                self.layers[index] = Fp8Layer(layer, scales, **settings)  # pyright: ignore[reportArgumentType]
            elif type(layer) not in AS_THEY_ARE:
                raise ConfigError(
                    f"layer {index} of {config.model_type} keeps a {type(layer).__name__}, which holds more than keys "
                    f"and values: {type(self).__name__} cannot quantize it. Use transformers' own cache."
                )

    def without_fp8(self) -> Cache:
        """transformers' own cache of this kind and model, empty."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored: keys, values and their scales, which each step of decoding reads; and the states
        of recurrent layers, in their own dtype."""
        return sum(tensor.nbytes for layer in self.layers for tensor in _tensors(layer))

    @property
    def clipped(self) -> int:
        """The count of numbers that were larger than their head's scale allows; 0 without ``head_scales``."""
        return sum(layer.clipped for layer in self.layers if isinstance(layer, Fp8Layer))

    @property
    def nbytes_unquantized(self) -> int:
        """Bytes of the same tokens in the model's dtype: of transformers' own cache."""
        return sum(_unquantized(layer) for layer in self.layers)


def _tensors(layer: Any) -> Sequence[Tensor]:
    if isinstance(layer, Fp8Layer):
        return layer.tensors
    states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    return [state for state in states if state is not None]


def _unquantized(layer: Any) -> int:
    if not isinstance(layer, Fp8Layer):
        return sum(tensor.nbytes for tensor in _tensors(layer))
    return sum(tensor.numel() * layer.dtype.itemsize for tensor in layer.tensors[:2] if layer.dtype is not None)


class Fp8DynamicCache(_Fp8Cache, DynamicCache):
    """transformers' ``DynamicCache`` with keys and values in FP8. Layers with a sliding window keep no more than it.

    Args:
        config: the model's, ``model.config``. It says which layers have a sliding window.
        power_2_scale: round scales down to powers of two.
        exact_prefill: the first call attends to its keys and values in high precision. False: it attends to what is
            stored, so that a text gives the same numbers however it is split into calls.
        head_scales: one scale per head for all tokens, in place of one per token; see
            :class:`~fp8graph.extras.kv_layer.HeadScales`. Larger numbers
            saturate, and are counted (``clipped``).

    Raises:
        ConfigError: a layer keeps more than keys and values, or an argument is wrong.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        power_2_scale: bool = False,
        exact_prefill: bool = True,
        head_scales: HeadScales | None = None,
    ) -> None:
        _check(config)
        super().__init__(config=config)
        self._quantize_layers(config, head_scales, power_2_scale=power_2_scale, exact_prefill=exact_prefill)

    def without_fp8(self) -> DynamicCache:
        return DynamicCache(config=self._config)


class Fp8StaticCache(_Fp8Cache, StaticCache):
    """transformers' ``StaticCache`` with keys and values in FP8: allocated once, and written in place.

    Args:
        config: the model's, ``model.config``. It says which layers have a sliding window.
        max_cache_len: the number of tokens for which there is room.
        power_2_scale, exact_prefill, head_scales: see :class:`Fp8DynamicCache`.

    Raises:
        ConfigError: a layer keeps more than keys and values, or an argument is wrong.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        max_cache_len: int,
        *,
        power_2_scale: bool = False,
        exact_prefill: bool = True,
        head_scales: HeadScales | None = None,
    ) -> None:
        _check(config)
        if type(max_cache_len) is not int or max_cache_len < 1:
            raise ConfigError(f"max_cache_len must be a whole number >= 1, the tokens to keep, not {max_cache_len!r}")
        super().__init__(config=config, max_cache_len=max_cache_len)
        self.max_cache_len = max_cache_len
        self._quantize_layers(config, head_scales, power_2_scale=power_2_scale, exact_prefill=exact_prefill)

    def without_fp8(self) -> StaticCache:
        return StaticCache(config=self._config, max_cache_len=self.max_cache_len)


def _check(config: object) -> None:
    if not isinstance(config, PreTrainedConfig):
        raise ConfigError(f"the first argument must be the model's config (model.config), not {type(config).__name__}")


@dataclass(frozen=True, kw_only=True)
class CacheComparison:
    """The differences that an FP8 cache makes, and the memory that it takes.

    ``sqnr_db``: of the logits, one per forward: of the last token of the prompt (inf if prefill is exact), and of each
    token after it.
    ``same_token``: the share of these, of all sequences, whose largest logit is the same token's. ``nbytes``,
    ``nbytes_unquantized``: of the cache in the end, which the last step reads. ``clipped``: how many numbers its
    ``head_scales`` were too small for.
    """

    sqnr_db: tuple[float, ...]
    same_token: float
    nbytes: int
    nbytes_unquantized: int
    clipped: int = 0


@torch.no_grad()
def compare_logits(
    model: nn.Module, input_ids: Tensor, cache: Fp8DynamicCache | Fp8StaticCache, *, prompt: int, **inputs: Any
) -> CacheComparison:
    """Run ``model`` over the same tokens with ``cache`` and with transformers' own: the prompt, then one at a time.

    Args:
        model: a causal language model of transformers.
        input_ids: [batch, tokens].
        cache: an empty one.
        prompt: how many of the tokens are the prompt, at least 1.
        inputs: further arguments of ``model`` in each of the calls.

    Raises:
        ConfigError: the cache is not empty, or the prompt not shorter than the text.
    """
    if not isinstance(cache, _Fp8Cache) or any(_tensors(layer) for layer in cache.layers):
        raise ConfigError("compare_logits takes an empty Fp8DynamicCache or Fp8StaticCache: make a new one")
    if type(prompt) is not int or not 1 <= prompt < input_ids.shape[1]:
        raise ConfigError(
            f"prompt must be a whole number from 1 to {input_ids.shape[1] - 1}, as there are {input_ids.shape[1]} "
            f"tokens, not {prompt!r}"
        )
    reference, argument = cache.without_fp8(), cache_argument(model)
    sqnr: list[float] = []
    same: list[Tensor] = []
    calls = [input_ids[:, :prompt], *input_ids[:, prompt:].split(1, 1)]
    for ids in calls:
        exact, fp8 = (
            model(ids, **{argument: each}, use_cache=True, **inputs).logits[:, -1] for each in (reference, cache)
        )
        sqnr.append(sqnr_db(exact, fp8))
        same.append(exact.argmax(-1) == fp8.argmax(-1))
    return CacheComparison(
        sqnr_db=tuple(sqnr),
        same_token=torch.stack(same).double().mean().item(),
        nbytes=cache.nbytes,
        nbytes_unquantized=cache.nbytes_unquantized,
        clipped=cache.clipped,
    )
