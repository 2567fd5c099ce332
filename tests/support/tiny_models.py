"""Tiny models of 33 families with random weights, and what must become of each: counts, graphs, distance from bf16."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor


@dataclass(frozen=True)
class Counts:
    """The counts that the rewritten training graph must have."""

    sites: int = 0  # matmuls of the program, including those left in high precision
    fp8_gemms: int = 0  # fprop, dgrad and wgrad of each site in FP8
    multiplied: int = 0  # GEMMs that are left of these after fusion
    quantized_tensors: int = 0  # quantize nodes after sharing and fusion, including weights: one amax each
    casts: int = 0  # FP8 copies that they write: rowwise and columnwise

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(sum, zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __mul__(self, times: int) -> Counts:
        return Counts(*(times * count for count in dataclasses.astuple(self)))


def tokens() -> dict[str, Any]:
    """Two sequences that are their own labels."""
    ids = torch.randint(3, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A family as a tiny model, and what is expected of it."""

    build: Callable[[int], Any]  # number of layers -> a model with random weights, on the CPU
    inputs: Callable[[], dict[str, Any]] = tokens  # the arguments of one training step
    layer: Counts  # of each further layer
    rest: Counts = Counts(1)  # of everything else: a head; negative if the first layers have less than a further one
    db: tuple[int, int, int]  # see below
    graphs: int = 1  # that Dynamo makes
    generates: bool = True
    library: str = "transformers"

    def counts(self, layers: int) -> Counts:
        return self.layer * layers + self.rest


def model_and_inputs(name: str, layers: int = 2) -> tuple[Any, dict[str, Any]]:
    """The tiny model of a family in bf16, and the arguments of a step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = TINY[name].build(layers).bfloat16(), TINY[name].inputs()
    return model, {k: v.bfloat16() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


SIZES: Final[Mapping[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}


def llama_config(layers: int = 2, **overrides: Any) -> Any:
    """A LlamaConfig that traces like a real one (grouped-query attention, SwiGLU) and fits anywhere."""
    from transformers import LlamaConfig

    settings: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "num_hidden_layers": layers, **overrides}
    return LlamaConfig(**settings)


def causal_lm(prefix: str, *, config: str = "", **settings: Any) -> Callable[[int], Any]:
    """Builds ``<prefix>ForCausalLM`` from ``<prefix>Config``, grouped-query attention included."""
    sizes: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, **settings}
    return of_transformers(f"{prefix}ForCausalLM", config or f"{prefix}Config", ("num_hidden_layers",), **sizes)


def of_transformers(
    model: str, config: str, layers_are: tuple[str, ...] = ("num_hidden_layers",), **settings: Any
) -> Callable[[int], Any]:
    def build(layers: int) -> Any:
        import transformers

        depth = dict.fromkeys(layers_are, layers)
        return getattr(transformers, model)(getattr(transformers, config)(**settings, **depth))

    return build


def of_diffusers(
    model: str, *, layers_are: tuple[str, ...] = ("num_layers",), training: bool = True, **settings: Any
) -> Callable[[int], Any]:
    def build(layers: int) -> Any:
        import diffusers  # pyright: ignore[reportMissingImports]

        return getattr(diffusers, model)(**settings, **dict.fromkeys(layers_are, layers)).train(training)

    return build


def clip(layers: int) -> Any:
    from transformers import CLIPConfig, CLIPModel

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    sizes["num_hidden_layers"] = layers
    text = {"vocab_size": 256, "max_position_embeddings": 32, **sizes}
    vision = {"image_size": 32, "patch_size": 8, **sizes}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=32))


def timm_vit(layers: int) -> Any:
    from timm.models.vision_transformer import VisionTransformer  # pyright: ignore[reportMissingImports]

    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "num_classes": 8}
    return VisionTransformer(depth=layers, embed_dim=64, num_heads=4, **sizes)


def torchvision_vit(layers: int) -> Any:
    from torchvision.models import VisionTransformer  # pyright: ignore[reportMissingImports]

    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_classes": 8, "hidden_dim": 64, "mlp_dim": 128}
    model = VisionTransformer(num_layers=layers, num_heads=4, **sizes)
    model.heads[0].reset_parameters()  # torchvision starts from zeros: no gradient would reach a block
    return model


def noise(*shape: int) -> Tensor:
    """Random numbers, the same in each run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def two_steps() -> Tensor:
    return torch.tensor([250, 500])


# db: dB of logits, of all gradients and of the deepest layer's, at least, against the same model
# in bf16, tensorwise and rowwise: what was measured (docs/coverage.md), less 1 to 2. Norms behind the blocks (gemma,
# olmo2, glm4) and T5's unscaled attention amplify what the blocks' last linears round; of BERT's and BLOOM's logits
# most is the embedding. Two of gpt_oss's 32 tokens go to another expert under tensorwise (8 dB each; 24 and more for
# the other 30).
TINY: Final[dict[str, TinyModel]] = {
    # biases everywhere
    "bert": TinyModel(
        build=of_transformers(
            "BertForMaskedLM", "BertConfig", **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        ),
        layer=Counts(6, 18, 12, 12, 24),
        rest=Counts(2),
        db=(43, 42, 26),
        generates=False,
    ),
    # one linear makes q, k and v; attention is baddbmm and bmm, in high precision unless a rule asks for FP8
    "bloom": TinyModel(
        build=of_transformers(
            "BloomForCausalLM", "BloomConfig", layers_are=("n_layer",), hidden_size=64, n_head=4, vocab_size=256
        ),
        layer=Counts(6, 12, 12, 12, 24),
        db=(46, 42, 22),
    ),
    # two encoders; their projections, whose outputs are compared, stay in high precision
    "clip": TinyModel(
        build=clip,
        inputs=lambda: {"input_ids": tokens()["input_ids"], "pixel_values": noise(2, 3, 32, 32), "return_loss": True},
        layer=Counts(12, 36, 24, 24, 48),
        rest=Counts(3),
        db=(19, 15, 14),
        generates=False,
    ),
    # low-rank q and k/v; one dense layer, then shared and routed experts (grouped matmuls)
    "deepseek_v3": TinyModel(
        build=causal_lm(
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
        layer=Counts(13, 30, 25, 24, 48),
        rest=Counts(-2, -6, -6, -6, -12),  # the first layer has no experts
        db=(25, 21, 19),
    ),
    # each block embeds the time step and the class by itself; two final projections
    "diffusers_dit": TinyModel(
        library="diffusers",
        build=of_diffusers(
            "DiTTransformer2DModel",
            attention_head_dim=16,
            num_attention_heads=4,
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=8,
            num_embeds_ada_norm=8,
            training=False,  # in training it drops classes at random
        ),
        inputs=lambda: {
            "hidden_states": noise(2, 4, 8, 8),
            "timestep": two_steps(),
            "class_labels": torch.tensor([1, 2]),
        },
        layer=Counts(9, 21, 15, 15, 30),
        rest=Counts(4),
        db=(33, 28, 22),
        generates=False,
    ),
    # as many blocks of two streams as of one; proj_out of a single block is in FP8, the model's is not
    "diffusers_flux": TinyModel(
        library="diffusers",
        build=of_diffusers(
            "FluxTransformer2DModel",
            layers_are=("num_layers", "num_single_layers"),
            attention_head_dim=16,
            num_attention_heads=4,
            axes_dims_rope=(4, 4, 8),
            in_channels=16,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            guidance_embeds=True,
        ),
        inputs=lambda: {
            "hidden_states": noise(2, 16, 16),
            "encoder_hidden_states": noise(2, 8, 32),
            "pooled_projections": noise(2, 32),
            "timestep": torch.tensor([0.25, 0.5]),
            "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
            "txt_ids": torch.zeros(8, 3),
            "guidance": torch.tensor([3.5, 3.5]),
        },
        layer=Counts(20, 60, 44, 41, 82),
        rest=Counts(10),
        db=(42, 36, 24),
        generates=False,
    ),
    # the modulation of all blocks is computed once; the caption is projected once
    "diffusers_pixart": TinyModel(
        library="diffusers",
        build=of_diffusers(
            "PixArtTransformer2DModel",
            attention_head_dim=16,
            num_attention_heads=4,
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=8,
            cross_attention_dim=64,
            caption_channels=32,
            use_additional_conditions=False,
        ),
        inputs=lambda: {
            "hidden_states": noise(2, 4, 8, 8),
            "encoder_hidden_states": noise(2, 8, 32),
            "timestep": two_steps(),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        layer=Counts(10, 30, 21, 20, 40),
        rest=Counts(6, quantized_tensors=1, casts=2),
        db=(39, 36, 29),
        generates=False,
    ),
    # blocks of two streams, the last of which drops the text's
    "diffusers_sd3": TinyModel(
        library="diffusers",
        build=of_diffusers(
            "SD3Transformer2DModel",
            attention_head_dim=16,
            num_attention_heads=4,
            caption_projection_dim=64,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            sample_size=8,
            pos_embed_max_size=16,
            in_channels=4,
            out_channels=4,
        ),
        inputs=lambda: {
            "hidden_states": noise(2, 4, 8, 8),
            "encoder_hidden_states": noise(2, 8, 32),
            "pooled_projections": noise(2, 32),
            "timestep": two_steps(),
        },
        layer=Counts(14, 42, 30, 30, 60),
        rest=Counts(4, -9, -9, -9, -18),
        db=(43, 41, 26),
        generates=False,
    ),
    # Stable Diffusion's: attention between convolutions, which stay; a block up has one layer more than down
    "diffusers_unet": TinyModel(
        library="diffusers",
        build=of_diffusers(
            "UNet2DConditionModel",
            layers_are=("layers_per_block",),
            block_out_channels=(64,),
            norm_num_groups=8,
            down_block_types=("CrossAttnDownBlock2D",),
            up_block_types=("CrossAttnUpBlock2D",),
            sample_size=8,
            cross_attention_dim=32,
            attention_head_dim=4,
            use_linear_projection=True,
            mid_block_type=None,
        ),
        inputs=lambda: {
            "sample": noise(2, 4, 8, 8),
            "timestep": two_steps(),
            "encoder_hidden_states": noise(2, 8, 32),
        },
        layer=Counts(26, 68, 52, 52, 100),
        rest=Counts(15, 34, 26, 27, 52),
        db=(24, 24, 22),
        generates=False,
    ),
    # linears are plain matmuls, and so is attention with ALiBi or without SDPA, which stays in high precision
    "falcon": TinyModel(
        build=of_transformers(
            "FalconForCausalLM",
            "FalconConfig",
            hidden_size=64,
            num_attention_heads=4,
            vocab_size=256,
            attn_implementation="eager",  # transformers 5.24 would take SDPA, 5.23 does not
        ),
        layer=Counts(6, 12, 12, 10, 20),
        db=(24, 20, 19),
    ),
    # Llama's graph with norms behind the blocks; capped attention is two plain matmuls in high precision
    "gemma2": TinyModel(build=causal_lm("Gemma2", head_dim=16), layer=Counts(9, 21, 12, 12, 24), db=(17, 15, 15)),
    # of text: Llama's graph with norms behind the blocks and on queries and keys
    "gemma3": TinyModel(
        build=causal_lm("Gemma3", config="Gemma3TextConfig", head_dim=16),
        layer=Counts(7, 21, 12, 12, 24),
        db=(18, 15, 15),
    ),
    # Llama's attention with biases on q, k and v; one linear makes gate and up
    "glm4": TinyModel(
        build=causal_lm("Glm4", head_dim=16, pad_token_id=0),
        layer=Counts(6, 18, 12, 12, 24),
        db=(19, 16, 15),
    ),
    # Conv1D is an addmm with a [K, N] weight; one of them makes q, k and v
    "gpt2": TinyModel(
        build=of_transformers(
            "GPT2LMHeadModel",
            "GPT2Config",
            layers_are=("n_layer",),
            n_head=4,
            n_embd=64,
            vocab_size=256,
            n_positions=128,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        layer=Counts(4, 12, 12, 12, 24),
        db=(28, 24, 22),
        graphs=2,
    ),
    # and Pythia: one linear makes q, k and v; attention and MLP run in parallel
    "gpt_neox": TinyModel(build=causal_lm("GPTNeoX"), layer=Counts(4, 12, 12, 11, 22), db=(24, 21, 21)),
    # biased attention with sinks, written as plain matmuls; the experts are grouped matmuls
    "gpt_oss": TinyModel(
        build=causal_lm("GptOss", head_dim=16, num_local_experts=4, num_experts_per_tok=2),
        layer=Counts(9, 18, 14, 12, 24),
        db=(17, 15, 15),
    ),
    # Llama's graph with scaled embeddings, residuals and logits
    "granite": TinyModel(build=causal_lm("Granite"), layer=Counts(7, 21, 12, 12, 24), db=(25, 22, 19)),
    # q/k/v and gate/up are fused into one GEMM each per direction; the head stays in high precision
    "llama": TinyModel(build=causal_lm("Llama"), layer=Counts(7, 21, 12, 12, 24), db=(25, 22, 20)),
    # Llama's graph
    "mistral": TinyModel(build=causal_lm("Mistral"), layer=Counts(7, 21, 12, 12, 24), db=(25, 22, 20)),
    # attention is the same as Llama's; the experts are grouped matmuls
    "mixtral": TinyModel(
        build=causal_lm("Mixtral", num_local_experts=4, num_experts_per_tok=2),
        layer=Counts(7, 18, 12, 12, 24),
        db=(26, 22, 20),
    ),
    # Llama's graph with norms behind the blocks, none before them
    "olmo2": TinyModel(build=causal_lm("Olmo2"), layer=Counts(7, 21, 12, 12, 24), db=(19, 16, 14)),
    # biases everywhere, and ReLU
    "opt": TinyModel(
        build=of_transformers(
            "OPTForCausalLM",
            "OPTConfig",
            hidden_size=64,
            ffn_dim=128,
            word_embed_proj_dim=64,
            num_attention_heads=4,
            vocab_size=256,
            max_position_embeddings=128,
            dropout=0.0,
        ),
        layer=Counts(6, 18, 12, 12, 24),
        db=(25, 15, 14),
    ),
    # one linear makes q, k and v, and another one gate and up
    "phi3": TinyModel(build=causal_lm("Phi3", pad_token_id=0), layer=Counts(4, 12, 12, 12, 24), db=(26, 22, 19)),
    # Llama's graph with a bias on q, k and v, which goes into their GEMM
    "qwen2": TinyModel(build=causal_lm("Qwen2"), layer=Counts(7, 21, 12, 12, 24), db=(27, 21, 18)),
    # Llama's graph with a norm on each head's query and key
    "qwen3": TinyModel(build=causal_lm("Qwen3", head_dim=16), layer=Counts(7, 21, 12, 12, 24), db=(24, 19, 17)),
    # attention is the same as Qwen3's; the experts are grouped matmuls
    "qwen3_moe": TinyModel(
        build=causal_lm("Qwen3Moe", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        layer=Counts(7, 18, 12, 12, 24),
        db=(23, 19, 17),
    ),
    # BERT's encoder; its heads are called lm_head and classifier
    "roberta": TinyModel(
        build=of_transformers(
            "RobertaForMaskedLM", "RobertaConfig", **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        ),
        layer=Counts(6, 18, 12, 12, 24),
        rest=Counts(2),
        db=(43, 41, 26),
        generates=False,
    ),
    # biases everywhere, a plain MLP
    "starcoder2": TinyModel(build=causal_lm("Starcoder2"), layer=Counts(6, 18, 12, 12, 24), db=(24, 22, 21)),
    # encoder and decoder; q, k and v of self-attention are fused, and so are cross-attention's k and v
    "t5": TinyModel(
        build=of_transformers(
            "T5ForConditionalGeneration",
            "T5Config",
            layers_are=("num_layers",),
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_heads=4,
            vocab_size=256,
            decoder_start_token_id=0,
            pad_token_id=0,
            dropout_rate=0.0,
        ),
        layer=Counts(20, 48, 33, 32, 64),
        rest=Counts(1, quantized_tensors=1, casts=2),
        db=(23, 13, 13),
    ),
    # q, k and v are one linear
    "timm_vit": TinyModel(
        library="timm",
        build=timm_vit,
        inputs=lambda: {"x": noise(2, 3, 32, 32)},
        layer=Counts(4, 12, 12, 12, 24),
        db=(21, 20, 20),
        generates=False,
    ),
    # attention is torch.nn.MultiheadAttention
    "torchvision_vit": TinyModel(
        library="torchvision",
        build=torchvision_vit,
        inputs=lambda: {"x": noise(2, 3, 32, 32)},
        layer=Counts(4, 12, 12, 12, 24),
        db=(18, 13, 14),
        generates=False,
    ),
    # the projection of patches remains a convolution
    "vit": TinyModel(
        build=of_transformers(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_labels=8,
            image_size=32,
            patch_size=8,
        ),
        inputs=lambda: {"pixel_values": noise(2, 3, 32, 32), "labels": torch.tensor([1, 2])},
        layer=Counts(6, 18, 12, 12, 24),
        db=(21, 23, 22),
        generates=False,
    ),
    # encoder and decoder; k has no bias, so q and v are fused and k is not
    "whisper": TinyModel(
        build=of_transformers(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            layers_are=("encoder_layers", "decoder_layers"),
            d_model=64,
            vocab_size=256,
            num_mel_bins=16,
            max_source_positions=32,
            max_target_positions=64,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        inputs=lambda: {"input_features": noise(2, 16, 64), "labels": tokens()["labels"]},
        layer=Counts(16, 48, 42, 38, 76),
        rest=Counts(1, quantized_tensors=1, casts=2),
        db=(24, 22, 22),
    ),
}
