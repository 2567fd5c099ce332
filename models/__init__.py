"""Model families: what each keeps in high precision and why, a tiny config, and the counts to expect."""

if __name__ != "fp8graph.models":
    raise ImportError(f"import fp8graph.models, not {__name__}")

from fp8graph.models import (
    bert,
    bloom,
    clip,
    deepseek_v3,
    falcon,
    gemma2,
    gemma3,
    glm4,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    opt,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    roberta,
    starcoder2,
    t5,
    vit,
    whisper,
)
from fp8graph.models.family import Family
from fp8graph.models.general import general_policy, policy_for, policy_of

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (
        bert,
        bloom,
        clip,
        deepseek_v3,
        falcon,
        gemma2,
        gemma3,
        glm4,
        gpt2,
        gpt_neox,
        gpt_oss,
        granite,
        llama,
        mistral,
        mixtral,
        olmo2,
        opt,
        phi3,
        qwen2,
        qwen3,
        qwen3_moe,
        roberta,
        starcoder2,
        t5,
        vit,
        whisper,
    )
}

__all__ = ["FAMILIES", "Family", "general_policy", "policy_for", "policy_of"]
