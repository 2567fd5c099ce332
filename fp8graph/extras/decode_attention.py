"""Attention of one new token that reads the cache where it multiplies: an FP8 cache is decoded in registers.

SDPA's kernels take keys and values from memory in bf16, so an FP8 cache is decoded into a copy first. Here the scores
and the sum over values are products and reductions, which Inductor fuses with whatever makes their inputs.

    use_decode_attention(model)  # before it is compiled
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from fp8graph.errors import ConfigError
from fp8graph.extras.kv_cache import AS_THEY_ARE, QUANTIZED
from fp8graph.numerics.hints import materialize

__all__ = ["NAME", "decode_attention", "use_decode_attention"]

NAME: Final = "fp8graph_decode"  # as transformers knows it


def use_decode_attention(model: nn.Module) -> None:
    """Let ``model`` decode with :func:`decode_attention`. All else of it, prefill too, stays with SDPA.

    Raises:
        ConfigError: it is not a model of transformers, has attention that SDPA does not compute or that chooses its
            keys, or does not take its attention from transformers' AttentionInterface.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"use_decode_attention takes a model of transformers, not {type(model).__name__}")
    if not model._supports_sdpa:
        raise ConfigError(
            f"{type(model).__name__} has attention that SDPA does not compute (sinks, caps, biases of its own), and "
            "neither does use_decode_attention: leave its attention as it is. An FP8 cache works without."
        )
    if (layer := _other_than_keys(model)) is not None:
        raise ConfigError(
            f"{type(model).__name__} has attention that chooses its keys (its cache keeps a {layer}) if SDPA is asked "
            "for by name: use_decode_attention would attend to all of them. Leave its attention as it is."
        )
    AttentionInterface.register(NAME, decode_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    if model.config.get_text_config()._attn_implementation != NAME:
        raise ConfigError(
            f"{type(model).__name__} does not take its attention from transformers' AttentionInterface: "
            "use_decode_attention cannot change it. An FP8 cache works without."
        )


def _other_than_keys(model: PreTrainedModel) -> str | None:
    """Return the first layer of the model's cache that keeps more than keys and values, by name."""
    layers = DynamicCache(config=model.config.get_text_config()).layers
    return next((type(layer).__name__ for layer in layers if type(layer) not in (*QUANTIZED, *AS_THEY_ARE)), None)


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention, as transformers calls it. SDPA computes it in eager, for several new tokens, and with a bias.

    Args:
        module: the attention layer.
        query: [batch, heads, tokens, head_dim].
        key, value: [batch, key heads, cached tokens, head_dim] (which may differ).
        attention_mask: True where a token is seen, or what is added to the scores; [batch or 1, heads or 1, tokens,
            cached tokens].
        dropout, scaling: of the probabilities; of the scores, by default ``head_dim ** -0.5``.

    Returns:
        [batch, tokens, heads, head_dim of the values], and None for the probabilities.
    """
    (batch, heads, tokens, size), key_heads = query.shape, key.shape[1]
    other = dropout or kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None
    if not torch.compiler.is_compiling() or tokens != 1 or batch != key.shape[0] or other:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    groups = heads // key_heads  # of heads that share a key head
    # else each key would rotate it again
    q = materialize(query.reshape(batch, key_heads, groups, 1, size).to(torch.float32))
    scores = (q * key.unsqueeze(2).to(torch.float32)).sum(-1) * (size**-0.5 if scaling is None else scaling)
    if attention_mask is not None:  # to [batch, key heads, groups, cached tokens]
        own = attention_mask.shape[1] != 1  # of each head
        mask = attention_mask.reshape(-1, key_heads, groups, scores.shape[-1]) if own else attention_mask
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    shares = torch.softmax(scores, -1).unsqueeze(-1)
    out = (shares * value.unsqueeze(2).to(torch.float32)).sum(-2)  # [batch, key heads, groups, head_dim]
    return out.to(query.dtype).reshape(batch, 1, heads, value.shape[-1]), None
