"""A Llama decoder layer whose attention is one opaque op: what is counted in generated code without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


# Attention is not ours: an op whose two directions read and write bf16.
_library = torch.library.Library("fp8graph_benchmarks", "DEF")
_library.define("attention(Tensor q, Tensor k, Tensor v) -> Tensor")
_library.define("attention_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor o) -> (Tensor, Tensor, Tensor)")


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _attention_backward(ctx: Any, gradient: Tensor) -> Any:
    return torch.ops.fp8graph_benchmarks.attention_backward(gradient, *ctx.saved_tensors)


def _save_for_backward(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _fake(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _like(q)


def _fake_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> tuple[Tensor, ...]:
    return _like(q), _like(k), _like(v)


torch.library.register_fake("fp8graph_benchmarks::attention", _fake, lib=_library)
torch.library.register_fake("fp8graph_benchmarks::attention_backward", _fake_backward, lib=_library)
torch.library.register_autograd(
    "fp8graph_benchmarks::attention", _attention_backward, setup_context=_save_for_backward, lib=_library
)


class DecoderLayer(nn.Module):
    """A Llama decoder layer, by default with the sizes of Llama-3-8B; attention is one opaque op."""

    def __init__(self, hidden: int = 4096, keys: int = 1024, inner: int = 14336, **factory: Any) -> None:
        super().__init__()

        def linear(a: int, b: int) -> nn.Linear:
            return nn.Linear(a, b, bias=False, **factory)

        self.q_proj, self.k_proj, self.v_proj = linear(hidden, hidden), linear(hidden, keys), linear(hidden, keys)
        self.o_proj = linear(hidden, hidden)
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(hidden, inner),
            linear(hidden, inner),
            linear(inner, hidden),
        )
        self.norm1, self.norm2 = (nn.Parameter(torch.ones(hidden, **factory)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = rms_norm(x, self.norm1)
        x = x + self.o_proj(torch.ops.fp8graph_benchmarks.attention(self.q_proj(h), self.k_proj(h), self.v_proj(h)))
        h = rms_norm(x, self.norm2)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(h)) * self.up_proj(h))
