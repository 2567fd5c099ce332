# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # LoRA on an FP8 checkpoint
#
# Many models are published in FP8. LoRA does not touch their weights: it trains two thin matrices beside each of
# them. So the weights can stay what they are, one byte per number, and can be multiplied as they are.
#
# We make such a checkpoint, fine-tune it, count bytes, and save the adapters. PEFT does the LoRA, safetensors reads
# the files; `pip install -e ".[notebooks]"` in the checkout brings both. A CPU is enough.

# %%
import argparse
import pydoc_data.topics
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fp8graph

# %% [markdown]
# ## A model that knows something
#
# A byte is a token. The model first learns English: the text behind Python's `help()`. This stands for the months
# that somebody else has spent.


# %%
def batches(text, steps, seed):
    """Random windows of the text: [4, 128] bytes each."""
    data = torch.tensor(list(text.encode("ascii", "ignore")))
    random = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - 128, (steps, 4), generator=random)
    return [torch.stack([data[start : start + 128] for start in row.tolist()]) for row in starts]


def train(model, batches, rate):
    """The losses; the optimizer, too, because we count its bytes later."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, optimizer


sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "vocab_size": 256}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, use_cache=False)).bfloat16()
english = batches("\n\n".join(pydoc_data.topics.topics.values()), 60, seed=0)
losses, _ = train(model, english, rate=1e-3)
print(f"English: from {losses[0]:.2f} to {losses[-1]:.2f}")

# %% [markdown]
# ## Its two checkpoints
#
# One in bf16, as transformers saves it. One in FP8: `fp8graph.export` writes the bytes and scales that the compiled
# model multiplies. With the recipe `blockwise` they are those of DeepSeek-V3's format, with one scale for each 128 x
# 128 numbers.

# %%
folder = Path(tempfile.mkdtemp())
model.save_pretrained(folder / "bf16")

fp8graph.compile(model, recipe="blockwise", compiler="eager")
with torch.no_grad():
    model(input_ids=english[0])  # what is exported is what ran
fp8graph.export(model, folder / "fp8")
print(sorted(file.name for file in (folder / "fp8").iterdir()))


# %%
def contents(path):
    """Bytes by dtype."""
    found = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():
            tensor = file.get_tensor(name)
            dtype = str(tensor.dtype).removeprefix("torch.")
            found[dtype] = found.get(dtype, 0) + tensor.nbytes
    return found


for name in ("bf16", "fp8"):
    sizes_by_dtype = contents(folder / name / "model.safetensors")
    print(f"{name}: {sum(sizes_by_dtype.values()):,} bytes, {sizes_by_dtype}")

# %% [markdown]
# The linears of the decoder layers are one byte per number now, and their scales take next to nothing. The embedding
# and the head stayed in bf16. From the shell, `fp8graph inspect FOLDER` says this and more.
#
# ## Load it
#
# The model is made from the config without its quantization, and then filled. Each quantized linear becomes one that
# keeps the bytes of the file.


# %%
def load_fp8():
    config = AutoConfig.from_pretrained(folder / "fp8")
    del config.quantization_config
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return fp8graph.load_checkpoint(base, folder / "fp8")


base = load_fp8()
print(base.model.layers[0].mlp)

# %% [markdown]
# ## Add the adapters
#
# PEFT puts two thin matrices beside each linear, and freezes the rest. Then compile. All of that is the same for a
# base in bf16, with which we want to compare.


# %%
def with_adapters(base):
    torch.manual_seed(0)
    return get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))


on_fp8 = with_adapters(base)
# the base is frozen: its copies are kept. On a GPU leave out compiler="eager": Inductor generates kernels there
fp8graph.compile(on_fp8, compiler="eager", cache_weights="update")
on_bf16 = with_adapters(AutoModelForCausalLM.from_pretrained(folder / "bf16", dtype=torch.bfloat16))
print(f"{sum(p.numel() for p in on_fp8.parameters() if p.requires_grad):,} numbers are trained")

# %% [markdown]
# ## Fine-tune
#
# The new task is to write Python: the source of `argparse`. The loss of a batch depends on the batch as much as on
# what was learned, so we measure on eight batches that are not trained on, before and after.

# %%
source = Path(argparse.__file__).read_text(encoding="utf-8")
middle = len(source) * 3 // 4
python, held_out = batches(source[:middle], 60, seed=1), batches(source[middle:], 8, seed=2)


def evaluate(model):
    with torch.no_grad():
        return sum(model(input_ids=ids, labels=ids).loss.item() for ids in held_out) / len(held_out)


results = {}
for name, tuned in (("FP8", on_fp8), ("bf16", on_bf16)):
    before = evaluate(tuned)
    losses, optimizer = train(tuned, python, rate=1e-2)
    results[name] = {"before": before, "after": evaluate(tuned), "losses": losses, "optimizer": optimizer}
    print(f"base in {name:4}: held-out loss {before:.3f} before, {results[name]['after']:.3f} after")

# %% [markdown]
# Both learn the same. Batch by batch, the two curves go up and down together:

# %%
figure, axes = plt.subplots(figsize=(8, 3.6), dpi=120, layout="constrained")
axes.plot(results["bf16"]["losses"], label="LoRA, base in bf16", linewidth=3, alpha=0.5)
axes.plot(results["FP8"]["losses"], label="LoRA, base in FP8", linewidth=1.2)
axes.set(xlabel="step", ylabel="loss (nats per byte)", title="From English to Python")
axes.grid(alpha=0.3)
axes.legend()
plt.show()

# %% [markdown]
# ## What ran in FP8?
#
# `base_layer` is the linear of the checkpoint. Its forward (fprop) and the gradient of its input (dgrad) multiply the
# bytes of the file. (A CPU has no FP8 GEMM with one scale per tile, and emulates it; an H100 has one.) It is frozen,
# so it has no wgrad. The adapters are thin, and stay in high precision. Here is one linear:

# %%
report = fp8graph.backend_of(on_fp8).report
print(report.summary())
rows = [
    f"{gemm.name.rpartition('up_proj.')[2]:14} {gemm.gemm}  {gemm.recipe or 'high precision'} ({gemm.reason})"
    for gemm in report.gemms
    if "layers.1.mlp.up_proj" in gemm.name
]
print("\n".join(dict.fromkeys(rows)))  # training and evaluation are a graph each: what both have is printed once

# %% [markdown]
# ## The bytes
#
# Training keeps the weights, a gradient of each weight that is trained, and AdamW's two averages of it. We count the
# tensors that are there. `copies` are the transposed copies, in FP8, that dgrad multiplies; they are made once.


# %%
def nbytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def counted(model, optimizer, copies=0):
    trained = [p for p in model.parameters() if p.requires_grad]
    averages = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "weights": nbytes(p for p in model.parameters() if not p.requires_grad),
        "copies": copies,
        "trained": 2 * nbytes(trained) + nbytes(averages),  # themselves and their gradients
    }


everything = nbytes(p for p in on_bf16.parameters() if not p.requires_grad)
memory = {
    "all weights trained": {"weights": 0, "copies": 0, "trained": 4 * everything},
    "LoRA, base in bf16": counted(on_bf16, results["bf16"]["optimizer"]),
    "LoRA, base in FP8": counted(on_fp8, results["FP8"]["optimizer"], fp8graph.backend_of(on_fp8).weights.bytes),
}
for name, parts in memory.items():
    print(f"{name:19}  {sum(parts.values()):>9,} bytes: {parts}")

# %%
figure, axes = plt.subplots(figsize=(8, 2.4), dpi=120, layout="constrained")
left = [0.0] * len(memory)
for part in ("weights", "copies", "trained"):
    widths = [parts[part] / 2**20 for parts in memory.values()]
    axes.barh(list(memory), widths, left=left, label=part)
    left = [a + b for a, b in zip(left, widths, strict=True)]
axes.invert_yaxis()
axes.set(xlabel="MiB, without activations")
axes.legend()
plt.show()

# %% [markdown]
# LoRA saves what gradients and averages would take. FP8 nearly halves the frozen weights; with the copies of training
# they are about as large as in bf16, and in inference the copies are not made.
#
# ## The base is untouched
#
# Not one byte of the checkpoint has changed in the model.

# %%
trained = dict(on_fp8.named_parameters())
same = 0
with safe_open(folder / "fp8" / "model.safetensors", "pt") as file:
    for name in file.keys():
        stored = file.get_tensor(name)
        if stored.dtype == torch.float8_e4m3fn:
            layer = name.removesuffix(".weight")
            now = trained[f"base_model.model.{layer}.base_layer.weight"]
            assert torch.equal(now.view(torch.uint8), stored.view(torch.uint8)), name
            same += 1
print(f"{same} weights are, bit for bit, those of the file")

# %% [markdown]
# ## Save the adapters
#
# They are PEFT's own files, and know nothing of FP8. They go onto the FP8 base again, or onto the one in bf16.

# %%
on_fp8.save_pretrained(folder / "adapters")
for file in sorted((folder / "adapters").glob("adapter*")):
    print(f"{file.name}: {file.stat().st_size:,} bytes")

# %%
again = PeftModel.from_pretrained(load_fp8(), folder / "adapters").eval()
fp8graph.compile(again, compiler="eager")
on_fp8.eval()
with torch.no_grad():
    before = on_fp8(input_ids=python[0]).logits
    after = again(input_ids=python[0]).logits
print("the same logits:", torch.equal(before, after))

# %% [markdown]
# ## Try it
#
# * [lora_fp8.py](../examples/lora_fp8.py) takes the folder of a checkpoint of yours, and a GPU if there is one.
# * Export with `recipe="rowwise"` or `"mxfp8"`:
#   [Checkpoints](../docs/checkpoints.md#out-what-was-trained-for-an-engine) has the formats.
# * [Serving](../docs/serving.md) goes from here to tokens. `merge_and_unload()` merges
#   into the FP8 weights, before you export again.
