"""LoRA on Flux's transformer, with diffusers: frozen weights in FP8, quantized once; adapters in high precision.

python examples/flux_lora.py                                a tiny Flux
python examples/flux_lora.py black-forest-labs/FLUX.1-dev   your model
"""

import sys

import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig

import fp8graph

if len(sys.argv) > 1:
    model = FluxTransformer2DModel.from_pretrained(sys.argv[1], subfolder="transformer", torch_dtype=torch.bfloat16)
else:
    sizes = {"attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 64, "pooled_projection_dim": 64}
    model = FluxTransformer2DModel(
        **sizes, in_channels=16, num_layers=1, num_single_layers=1, axes_dims_rope=(8, 12, 12)
    ).bfloat16()

device = "cuda" if torch.cuda.is_available() else "cpu"
model.requires_grad_(False).add_adapter(LoraConfig(r=8, target_modules=["to_q", "to_k", "to_v"]))
# the base is frozen: its copies are kept from step to step
fp8graph.compile(model.to(device), compiler="inductor" if device == "cuda" else "eager", cache_weights="update")

config, tokens = model.config, {"device": device, "dtype": torch.bfloat16}
inputs = {
    "hidden_states": torch.randn(1, 64, config.in_channels, **tokens),  # patches of a noisy latent
    "encoder_hidden_states": torch.randn(1, 16, config.joint_attention_dim, **tokens),  # the prompt
    "pooled_projections": torch.randn(1, config.pooled_projection_dim, **tokens),
    "timestep": torch.tensor([0.5], **tokens),
    "img_ids": torch.zeros(64, 3, **tokens),
    "txt_ids": torch.zeros(16, 3, **tokens),
    "guidance": torch.tensor([3.5], **tokens) if config.guidance_embeds else None,
}
wanted = torch.randn(1, 64, config.in_channels, **tokens)  # the velocity that flow matching learns
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for step in range(8):
    loss = torch.nn.functional.mse_loss(model(**inputs, return_dict=False)[0].float(), wanted.float())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")

backend = fp8graph.backend_of(model)
print(f"{backend.weights.quantized} weights quantized in 8 steps")
print(backend.report.summary())
