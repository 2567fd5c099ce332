"""A loop of accelerate in FP8: DDP on CPUs, FSDP2 with weights that are gathered in FP8 on GPUs.

accelerate launch --use_fsdp --fsdp_version 2 --mixed_precision bf16 examples/trainers/accelerate_loop.py
torchrun --nproc-per-node 2 examples/trainers/accelerate_loop.py      on CPUs
"""

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import fp8graph

POLICY = {"rules": [{"pattern": "*layers.1.*", "recipe": "high_precision"}], "default": "delayed"}
on_gpu = torch.cuda.is_available()
accelerator = Accelerator(mixed_precision="bf16", cpu=not on_gpu)
torch.manual_seed(0)  # the same model everywhere
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))

compiler = "inductor" if on_gpu else "eager"  # eager: no code generation, starts at once
fp8graph.compile(model, policy=POLICY, regions="auto", compiler=compiler)  # before prepare(), which shards the blocks
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
backend = fp8graph.backend_of(model)
accelerator.register_for_checkpointing(backend)  # save_state() and load_state(): its scales

ids = torch.arange(16, device=accelerator.device) + 16 * accelerator.process_index
ids = ids.repeat(4, 1)  # each rank's own data
for step in range(4):
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step}: loss {loss.item():.2f}")
accelerator.print(backend.report.summary())
accelerator.end_training()
