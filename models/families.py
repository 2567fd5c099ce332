"""The list of all model families that have a policy of their own."""

from fp8graph.models.bert import FAMILY as bert
from fp8graph.models.bloom import FAMILY as bloom
from fp8graph.models.clip import FAMILY as clip
from fp8graph.models.deepseek_v3 import FAMILY as deepseek_v3
from fp8graph.models.diffusers_dit import FAMILY as diffusers_dit
from fp8graph.models.diffusers_flux import FAMILY as diffusers_flux
from fp8graph.models.diffusers_pixart import FAMILY as diffusers_pixart
from fp8graph.models.diffusers_sd3 import FAMILY as diffusers_sd3
from fp8graph.models.diffusers_unet import FAMILY as diffusers_unet
from fp8graph.models.falcon import FAMILY as falcon
from fp8graph.models.family import Family
from fp8graph.models.gemma2 import FAMILY as gemma2
from fp8graph.models.gemma3 import FAMILY as gemma3
from fp8graph.models.glm4 import FAMILY as glm4
from fp8graph.models.gpt2 import FAMILY as gpt2
from fp8graph.models.gpt_neox import FAMILY as gpt_neox
from fp8graph.models.gpt_oss import FAMILY as gpt_oss
from fp8graph.models.granite import FAMILY as granite
from fp8graph.models.llama import FAMILY as llama
from fp8graph.models.mistral import FAMILY as mistral
from fp8graph.models.mixtral import FAMILY as mixtral
from fp8graph.models.olmo2 import FAMILY as olmo2
from fp8graph.models.opt import FAMILY as opt
from fp8graph.models.phi3 import FAMILY as phi3
from fp8graph.models.qwen2 import FAMILY as qwen2
from fp8graph.models.qwen3 import FAMILY as qwen3
from fp8graph.models.qwen3_moe import FAMILY as qwen3_moe
from fp8graph.models.roberta import FAMILY as roberta
from fp8graph.models.starcoder2 import FAMILY as starcoder2
from fp8graph.models.t5 import FAMILY as t5
from fp8graph.models.timm_vit import FAMILY as timm_vit
from fp8graph.models.torchvision_vit import FAMILY as torchvision_vit
from fp8graph.models.vit import FAMILY as vit
from fp8graph.models.whisper import FAMILY as whisper

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        bert,
        bloom,
        clip,
        deepseek_v3,
        diffusers_dit,
        diffusers_flux,
        diffusers_pixart,
        diffusers_sd3,
        diffusers_unet,
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
        timm_vit,
        torchvision_vit,
        vit,
        whisper,
    )
}
