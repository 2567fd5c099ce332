# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A first training in FP8
#
# We train one small Llama three times and ask two questions. Does FP8 learn what bf16 learns? And which of the
# model's matrix multiplications ran in FP8 at all?
#
# Everything here runs on a CPU. A CPU computes the numbers that FP8 gives, but not its speed: the losses below mean
# something, the seconds do not. `pip install -e ".[notebooks]"` in the checkout brings what the notebooks import.

# %%
import pydoc_data.topics

import matplotlib.pyplot as plt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fp8graph

# %% [markdown]
# ## The data
#
# Python carries half a megabyte of English with it: the text behind `help()`. One byte is one token, so that we need
# neither a download nor a tokenizer.

# %%
text = "\n\n".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore")
data = torch.tensor(list(text))
print(f"{len(data):,} tokens, which begin with {text[:60]!r}")

# %% [markdown]
# A batch is four windows of 128 tokens. All runs see the same batches in the same order.

# %%
STEPS = 80
random = torch.Generator().manual_seed(0)
starts = torch.randint(len(data) - 128, (STEPS, 4), generator=random)
batches = [torch.stack([data[start : start + 128] for start in row.tolist()]) for row in starts]

# %% [markdown]
# ## The model
#
# It is the Llama of transformers, unchanged, with random weights in bf16. The seed makes the weights the same each
# time.

# %%
config = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    use_cache=False,
)


def new_model():
    torch.manual_seed(0)
    return LlamaForCausalLM(config).bfloat16()


print(f"{sum(p.numel() for p in new_model().parameters()):,} parameters")

# %% [markdown]
# ## The loop
#
# Nothing in it knows of FP8. The learning rate rises during the first ten steps.


# %%
def train(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    losses = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


bf16 = train(new_model(), batches)
print(f"bf16: from {bf16[0]:.3f} to {bf16[-1]:.3f}")

# %% [markdown]
# For FP8 there is one line more. `fp8graph.compile` works in place: the model keeps its class, its parameters and its
# `state_dict()`. With `compiler="eager"` the rewritten graph runs op by op and starts at once. On a GPU, leave it
# out, and Inductor generates kernels.

# %%
model = new_model()
fp8graph.compile(model, compiler="eager")
fp8 = train(model, batches)
print(f"FP8:  from {fp8[0]:.3f} to {fp8[-1]:.3f}")

# %% [markdown]
# ## How much difference is a difference?
#
# The two losses will not be equal, and a number like "0.3 % apart" says nothing by itself. We need a yardstick.
#
# Here is one. Reverse the order of the four windows in each batch. The loss is a mean over them, so that nothing
# changes but the order in which numbers are added. In bf16 that order changes the rounding, and rounding, step after
# step, leads to other weights.

# %%
in_reverse = train(new_model(), [ids.flip(0) for ids in batches])
print(f"bf16, batches reversed: from {in_reverse[0]:.3f} to {in_reverse[-1]:.3f}")

# %% [markdown]
# On the left are the losses themselves. On the right is their distance from the first bf16 run, which the left
# picture is too coarse to show. FP8 rounds more coarsely than bf16, so expect its line to move further from zero, in
# either direction.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), dpi=120, layout="constrained")
left.plot(bf16, label="bf16", linewidth=3, alpha=0.5)
left.plot(fp8, label="FP8", linewidth=1.2)
left.set(xlabel="step", ylabel="loss (nats per byte)", title="Loss")
right.plot([b - a for a, b in zip(bf16, in_reverse, strict=True)], label="bf16, batches reversed", alpha=0.8)
right.plot([b - a for a, b in zip(bf16, fp8, strict=True)], label="FP8", linewidth=1.2)
right.axhline(0, color="gray", linewidth=0.8)
right.set(xlabel="step", ylabel="loss minus that of bf16", title="How far from bf16?")
for axes in (left, right):
    axes.grid(alpha=0.3)
    axes.legend()
plt.show()


# %%
def average(losses):
    return sum(losses[-20:]) / 20


for name, losses in (("bf16", bf16), ("bf16, batches reversed", in_reverse), ("FP8", fp8)):
    print(f"{name:22} {average(losses):.4f}  {average(losses) / average(bf16) - 1:+.2%}")

# %% [markdown]
# These are the last 20 losses. One run per line is an anecdote, whatever its sign: another seed gives other
# differences. [Which recipe?](../docs/recipes.md#the-evidence) has five seeds and eight recipes, over 1,000 steps,
# with intervals.
#
# ## What ran in FP8?
#
# A loss that looks like that of bf16 proves little: it would look the same if nothing had run in FP8. The report says
# what did.

# %%
report = fp8graph.backend_of(model).report
print(report.summary())

# %% [markdown]
# A linear layer is three matrix multiplications (GEMMs) in training: **fprop** computes its output, **dgrad** the
# gradient of its input, **wgrad** the gradient of its weight. Each gets its own decision. Two decoder layers with
# seven linears have 42, and the output head has three more.

# %%
print(report)

# %% [markdown]
# Read a row from left to right. `model.layers.*` stands for both layers, and `count` says so. `m x n x k` is the
# size: [m, k] times [k, n]. `dtypes` are those of the two operands and of the result: activations and weights are
# E4M3, which has more precision, and gradients E5M2, which has more range. `reason` says who decided: "default" is
# the default policy.
#
# The last table lists what could have been done and was not, again with reasons.
#
# ## The report as data
#
# Everything that is printed is also a record. Which GEMMs stayed in bf16, and why?

# %%
for gemm in report.gemms:
    if gemm.recipe is None:
        print(f"{gemm.name} {gemm.gemm}: {gemm.reason}")

# %% [markdown]
# The head turns hidden states into logits. Its errors reach the loss directly, so the default policy leaves it alone.
# A [policy](../docs/policies.md) of yours can say otherwise.
#
# How much work is that?

# %%
work = {"FP8": {}, "bf16": {}}
for gemm in report.gemms:
    kind = gemm.name.rpartition(".")[2]  # model.layers.0.mlp.up_proj: up_proj
    for name, done in work.items():
        done[kind] = done.get(kind, 0) + gemm.flops * (name == ("bf16" if gemm.recipe is None else "FP8"))

figure, axes = plt.subplots(figsize=(8, 3), dpi=120, layout="constrained")
kinds = list(work["FP8"])
axes.barh(kinds, [work["FP8"][kind] / 1e9 for kind in kinds], label="FP8")
axes.barh(kinds, [work["bf16"][kind] / 1e9 for kind in kinds], label="bf16")
axes.invert_yaxis()
axes.set(xlabel="GFLOP per step, both layers together", title="The work of the GEMMs")
axes.legend()
plt.show()

# %% [markdown]
# If a rule of yours asks for FP8 and the GEMM cannot have it, you want to hear of it. `check()` raises an error then.
# It is quiet here, because everything that was asked for was done.

# %%
report.check()
print("as asked")

# %% [markdown]
# ## Try it
#
# * Pass `recipe="rowwise"`, `"blockwise"` or `"nvfp4"` to `fp8graph.compile`, and run the notebook again. `nvfp4`
#   stores four bits per number, and is the one whose curve you may be able to tell from bf16.
# * Make the model wider, and see the head's share shrink.
# * Put your own model in place of the Llama. Anything that `torch.compile` takes will do.
#
# Then read on: [Start](../docs/start.md) asks which of these GEMMs would be worth it on an H100, and [choose a
# policy](choose_a_policy.py) measures which of them FP8 harms.
