"""Serve an FP8 checkpoint: generate() with a static cache; prefill and decode are a graph each.

python examples/serve.py                          a tiny Llama, written as an FP8 checkpoint first
python examples/serve.py FOLDER --prompt "Once"   an FP8 checkpoint of Hugging Face, compressed-tensors or ModelOpt
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import fp8graph
from fp8graph.tools.export import export_folder

parser = argparse.ArgumentParser(description="Generate tokens with an FP8 checkpoint.")
parser.add_argument("folder", nargs="?", type=Path, help="an FP8 checkpoint; by default a tiny one is made")
parser.add_argument("--prompt", default="The weights of this model are", help="needs a tokenizer in the folder")
parser.add_argument("--tokens", type=int, default=16, help="how many to generate")
arguments = parser.parse_args()
if arguments.folder is not None and not (arguments.folder / "config.json").exists():
    parser.error(f"{arguments.folder}: there is no config.json in it")
device = "cuda" if torch.cuda.is_available() else "cpu"

with tempfile.TemporaryDirectory() as temporary:
    folder = arguments.folder or Path(temporary, "fp8")
    if arguments.folder is None:
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 256}
        LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).bfloat16().save_pretrained(Path(temporary, "bf16"))
        export_folder(Path(temporary, "bf16"), folder, recipe="rowwise", format="compressed-tensors")
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config  # the model is made in bf16; its linears get what the checkpoint holds
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device).eval()
    fp8graph.load_checkpoint(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder) if arguments.folder else None
ids = tokenizer(arguments.prompt, return_tensors="pt").input_ids if tokenizer else torch.arange(3, 11).unsqueeze(0)
fp8graph.compile(model, compiler="inductor" if device == "cuda" else "eager", dynamic=False)  # two graphs
settings = {"do_sample": False, "cache_implementation": "static", "disable_compile": True}  # it is compiled already
for run in ("compiling", "compiled"):
    start = time.perf_counter()
    found = model.generate(ids.to(device), **settings, max_new_tokens=arguments.tokens, min_new_tokens=arguments.tokens)
    print(f"{run}: {arguments.tokens} tokens in {time.perf_counter() - start:.2f} s")
print("tokens:", tokenizer.decode(found[0]) if tokenizer else found[0, ids.shape[1] :].tolist())

graphs = fp8graph.backend_of(model).report.graphs
for name, graph in zip(("prefill", "decode"), graphs, strict=False):  # one token needs no decode
    print(f"\n{name}: {graph.summary()}")
    print(*(f"  {g.name} {g.m} x {g.n} x {g.k}: {g.recipe or 'high precision'}" for g in graph.gemms), sep="\n")
