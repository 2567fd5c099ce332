"""Fine-tune with Hugging Face Trainer in FP8: compile the model in place, then give it to Trainer as ever.

python examples/trainer.py                      a tiny Llama and made-up data
python examples/trainer.py Qwen/Qwen3-0.6B      your model
"""

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fp8graph

if len(sys.argv) > 1:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
else:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))

on_gpu = torch.cuda.is_available()
backend = fp8graph.Backend(compiler="inductor" if on_gpu else "eager")  # eager: no code generation, starts at once
model.compile(backend=backend)  # not Trainer's torch_compile_backend, which knows torch's own backends only

data = [{"input_ids": ids, "labels": ids} for ids in (torch.arange(i, i + 16) % 64 for i in range(64))]
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    bf16=True,  # weights and optimizer in FP32; what is not in FP8 is computed in bf16
    use_cpu=not on_gpu,
    max_steps=8,
    learning_rate=1e-3,
    logging_steps=4,
    save_strategy="no",
    report_to=[],
)
Trainer(model=model, args=arguments, train_dataset=data).train()
print(backend.report.summary())
