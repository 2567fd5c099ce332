"""Llamas as workloads of the cost model, without a model; and tiny models of Hugging Face."""

from __future__ import annotations

from typing import Any

import torch

from fp8graph.extras.planning.workload import Linear, Workload

LLAMA_PLAN = {
    "lm_head": "colwise_gather_output",
    "model.embed_tokens": "embedding_rowwise",
    **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


def llama(
    *, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, seq: int, **more: Any
) -> Workload:
    """One sequence through a Llama whose heads have ``hidden / heads`` numbers, as ``of_model`` makes it."""
    key_value = hidden // heads * kv_heads
    sizes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    names = [(f"model.layers.{layer}.{name}", *size) for layer in range(layers) for name, size in sizes.items()]
    linears = [Linear(fqn=name, m=seq, n=n, k=k) for name, n, k in names]
    linears.append(Linear(fqn="lm_head", m=seq, n=vocabulary, k=hidden, fp8=frozenset()))
    norms = [f"model.layers.{i}.{name}_layernorm" for i in range(layers) for name in ("input", "post_attention")]
    return Workload(
        linears=tuple(linears),
        parameters={
            "model.embed_tokens.weight": (vocabulary, hidden),
            **{f"{linear.fqn}.weight": (linear.n, linear.k) for linear in linears},
            **{f"{norm}.weight": (hidden,) for norm in (*norms, "model.norm")},
        },
        plan=LLAMA_PLAN,
        attention_flops=7.0 * seq * seq * hidden * layers,
        heads={"attention heads": heads, "key and value heads": kv_heads},
        **more,
    )


def llama_8b(seq: int = 8192) -> Workload:
    return llama(hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8, vocabulary=128256, seq=seq)


def tiny_model(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
