"""The models that are measured, with the two ways in which transformers attends under ``torch.compile``.

``STOCK`` is ``attn_implementation="sdpa"``. While Dynamo traces, transformers builds the causal mask as a whole
[1, 1, s, s] tensor: with torch up to 2.13 or an older transformers always, later where there is an ``attention_mask``
(transformers issue #48925). Attention then takes a mask, so never the flash kernels, and does twice the work.
``CAUSAL`` is the same function registered with no mask: it calls ``scaled_dot_product_attention(is_causal=True)``, as
``fp8graph bench record`` does.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8graph.tools.record.workloads import CAUSAL, register_causal_attention

STOCK: Final = "sdpa"


class Embedded(nn.Module):
    """A Llama that takes its inputs as embeddings and returns its hidden states, both [batch, tokens, hidden]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x).last_hidden_state


def llama(layers: int, hidden: int, attention: str, device: torch.device) -> nn.Module:
    """Decoder layers with the proportions of Llama-3-8B (``hidden`` 4096) in bf16."""
    from transformers import LlamaModel

    with device:
        model: Any = LlamaModel(_config(layers, hidden, 256, attention))
    return Embedded(model.to(torch.bfloat16))


def llama_with_head(layers: int, hidden: int, vocabulary: int, attention: str, device: torch.device) -> Any:
    """:func:`llama` with embeddings and a head: tokens [batch, tokens] -> ``.logits``."""
    from transformers import LlamaForCausalLM

    from fp8graph.tools.hugging_face import in_bf16

    with in_bf16(device):
        return LlamaForCausalLM(_config(layers, hidden, vocabulary, attention))


def _config(layers: int, hidden: int, vocabulary: int, attention: str) -> Any:
    from transformers import LlamaConfig

    if attention == CAUSAL:
        register_causal_attention()
    head = min(128, hidden // 4)
    settings: dict[str, Any] = {"attn_implementation": attention}  # not among the arguments that it declares
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_attention_heads=hidden // head,
        num_key_value_heads=hidden // head // 4,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        use_cache=False,
        **settings,
    )


class Linears(nn.Module):
    """The four linears of a layer, one after the other: what Transformer Engine's benchmark multiplies."""

    def __init__(self, hidden: int, inner: int, device: torch.device) -> None:
        super().__init__()
        self.hidden = hidden
        self.layers = nn.ModuleList(
            nn.Linear(a, b, bias=False, device=device, dtype=torch.bfloat16) for a, b in self.sizes(hidden, inner)
        )

    @staticmethod
    def sizes(hidden: int, inner: int) -> list[tuple[int, int]]:
        """(inputs, outputs) of each."""
        return [(hidden, 3 * hidden), (hidden, hidden), (hidden, inner), (inner, hidden)]

    def forward(self, x: Tensor) -> Tensor:
        qkv, out, up, down = self.layers
        q, k, v = qkv(x).split(self.hidden, dim=-1)
        return down(up(out(q + k + v)))  # all three: zeros in a gradient would make its GEMMs faster
