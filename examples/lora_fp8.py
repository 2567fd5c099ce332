"""LoRA with PEFT on an FP8 checkpoint: the base weights stay as they are stored, and their bytes are multiplied.

python examples/lora_fp8.py            a tiny Llama, written as an FP8 checkpoint first
python examples/lora_fp8.py FOLDER     an FP8 checkpoint of Hugging Face, compressed-tensors or ModelOpt
"""

import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fp8graph
from fp8graph.tools.export import export_folder

on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"

with tempfile.TemporaryDirectory() as temporary:
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
    else:
        folder = Path(temporary, "fp8")
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 256}
        LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).bfloat16().save_pretrained(Path(temporary, "bf16"))
        export_folder(Path(temporary, "bf16"), folder, recipe="blockwise")
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config  # the model is made in bf16; its linears get what the checkpoint holds
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fp8graph.load_checkpoint(model, folder)

model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")).to(device)
# eager: no code generation, starts at once. The base is frozen: its transposed copies are kept from step to step
fp8graph.compile(model, compiler="inductor" if on_gpu else "eager", cache_weights="update")

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
ids = torch.arange(16, device=device).repeat(4, 1)
for step in range(8):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")

backend = fp8graph.backend_of(model)
print(backend.report)  # base_layer: fprop and dgrad with the bytes of the checkpoint
stored = [p for p in model.parameters() if p.dtype == torch.float8_e4m3fn]
print(f"{sum(p.nbytes for p in stored):,} bytes of base weights, {backend.weights.bytes:,} bytes of transposed copies")
