"""LoRA with PEFT: the frozen weights are quantized to FP8 once, the adapters stay in high precision.

python examples/lora.py                      a tiny Llama
python examples/lora.py Qwen/Qwen3-0.6B      your model
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fp8graph

if len(sys.argv) > 1:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
else:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).bfloat16()

on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"])).to(device)
# eager: no code generation, starts at once. The base is frozen: its copies are kept from step to step
backend = fp8graph.Backend(compiler="inductor" if on_gpu else "eager", cache_weights="update")
model.compile(backend=backend)

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
ids = torch.arange(16, device=device).repeat(4, 1)
for step in range(8):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")

print(backend.report)  # base_layer: fprop and dgrad, no wgrad; lora_A and lora_B: high precision
print(f"{backend.weights.quantized} weights quantized in 8 steps")
# merge_adapter() is noticed: the merged weights are quantized again
