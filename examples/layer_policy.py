"""Choose what runs in FP8, layer by layer and GEMM by GEMM, and check that it does.

python examples/layer_policy.py                      a tiny Llama
python examples/layer_policy.py Qwen/Qwen3-0.6B      your model
"""

import re
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fp8graph

if len(sys.argv) > 1:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
else:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2)).bfloat16()

on_gpu = torch.cuda.is_available()
model = model.to("cuda" if on_gpu else "cpu")
policy = fp8graph.Policy(
    [  # the first rule that matches wins
        fp8graph.Rule(re.compile(r"model\.layers\.0\..*"), None),  # None: high precision
        fp8graph.Rule("*.mlp.down_proj", "tensorwise", wgrad=None),  # two of its three GEMMs
        fp8graph.Rule("*.self_attn.*", "delayed"),
    ],
    default="tensorwise",
    extends="default",  # lm_head and whatever else the default policy keeps in high precision
)
print(policy)
ids = torch.arange(16, device=model.device).repeat(4, 1)
print(fp8graph.explain(model, input_ids=ids, labels=ids, policy=policy))  # before anything is computed

backend = fp8graph.Backend(policy, strict=True, compiler="inductor" if on_gpu else "eager")
model.compile(backend=backend)
model(input_ids=ids, labels=ids).loss.backward()
backend.report.check()  # raises if a rule matched nothing, or a GEMM that a rule names is not in FP8
