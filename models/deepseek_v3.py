"""DeepSeek-V3: low-rank q and k/v; one dense layer, then shared and routed experts (grouped matmuls)."""

from __future__ import annotations

from fp8graph.models.family import HEAD, ROUTER, Counts, Family, causal_lm, tokens

FAMILY = Family(
    name="deepseek_v3",
    keep={"lm_head": HEAD, "*.mlp.gate": ROUTER},
    tiny=causal_lm(
        "DeepseekV3",
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    inputs=tokens,
    layer=Counts(sites=13, fp8_gemms=30, multiplied=25, quantized_tensors=24, casts=48),
    rest=Counts(
        sites=-2, fp8_gemms=-6, multiplied=-6, quantized_tensors=-6, casts=-12
    ),  # the first layer has no experts,
)
