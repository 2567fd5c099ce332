"""DeepSpeed's ZeRO-2 in FP8: the engine compiles the model, with a policy that tells its layers apart.

torchrun --nproc-per-node 2 examples/trainers/deepspeed_zero.py
"""

import os

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fp8graph

torch.manual_seed(0)  # the same model everywhere
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2)).bfloat16()
config = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
policy = {"rules": [{"pattern": "*layers.1.*", "recipe": "high_precision"}], "default": "delayed"}
compiler = "inductor" if torch.cuda.is_available() else "eager"  # eager: no code generation, starts at once
engine.compile(backend="fp8graph", compile_kwargs={"options": {"policy": policy, "compiler": compiler}})

rank = int(os.environ["RANK"])
ids = (torch.arange(16, device=engine.device) + 16 * rank).repeat(4, 1)  # each rank's own data
for step in range(4):
    loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
    engine.backward(loss)
    engine.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.2f}")
if rank == 0:
    print(fp8graph.backend_of(engine.module).report.summary())
engine.destroy()
