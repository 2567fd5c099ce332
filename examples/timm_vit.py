"""Classify pictures with a ViT of timm, in FP8.

python examples/timm_vit.py                           a tiny ViT
python examples/timm_vit.py vit_base_patch16_224      timm's model of this name, with its pretrained weights

It needs timm: pip install timm
"""

import sys

import timm
import torch
from torch.nn import functional as F

import fp8graph

torch.manual_seed(0)
if len(sys.argv) > 1:
    model = timm.create_model(sys.argv[1], pretrained=True, num_classes=2)
else:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=2, **sizes)

on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
compiler = "inductor" if on_gpu else "eager"  # eager: no code generation, starts at once
model = fp8graph.compile(model.to(device), options={"compiler": compiler})

labels = torch.arange(16, device=device) % 2
size = model.patch_embed.img_size
pictures = 0.1 * torch.randn(16, 3, *size, device=device) + labels[:, None, None, None]  # dark ones and bright ones
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    with torch.autocast(device, torch.bfloat16):  # weights in FP32
        loss = F.cross_entropy(model(pictures), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")

print(fp8graph.backend_of(model).report.summary())  # patch_embed is a convolution, and the head stays in high precision
