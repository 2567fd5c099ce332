"""A mixture of experts: the router stays in high precision, the report says what became of every GEMM.

python examples/moe.py                                  a tiny Mixtral
python examples/moe.py Qwen/Qwen3-30B-A3B-Base          your model
"""

import sys

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import fp8graph

if len(sys.argv) > 1:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
else:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **experts, num_hidden_layers=1)).bfloat16()

on_gpu = torch.cuda.is_available()
model = model.to("cuda" if on_gpu else "cpu")
backend = fp8graph.Backend(compiler="inductor" if on_gpu else "eager")  # eager: no code generation, starts at once
model.compile(backend=backend)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
ids = torch.arange(16, device=model.device).repeat(4, 1)
for step in range(4):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")

for gemm in backend.report.gemms:
    print(f"{gemm.name} {gemm.gemm}: {gemm.recipe or 'high precision'} ({gemm.reason})")
