# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Choose a policy by measurement
#
# FP8 does not harm every layer alike. Some GEMMs hardly notice it; a few make most of the error. A policy can keep
# those in bf16. Which are they? `fp8graph.tune` measures it on your model and your data, without training.
#
# A CPU is enough. `pip install -e ".[notebooks]"` in the checkout brings what the notebooks import.

# %%
import json
import pydoc_data.topics
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fp8graph

# %% [markdown]
# ## A model in training
#
# The weights of a model that has not learned anything say little about the ones that it will have. So we train a
# small Llama for some steps, in bf16. The text is Python's own help, and a token is a byte.

# %%
data = torch.tensor(list("\n\n".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore")))
random = torch.Generator().manual_seed(0)


def batch():
    starts = torch.randint(len(data) - 128, (4,), generator=random).tolist()
    ids = torch.stack([data[start : start + 128] for start in starts])
    return {"input_ids": ids, "labels": ids}


sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "vocab_size": 256}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, use_cache=False)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(40):
    loss = model(**batch()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.2f}")

# %% [markdown]
# ## Measure
#
# Four batches are enough for a start. Each runs forward and backward once, in bf16. Beside each GEMM, `tune` computes
# what it would return under each recipe, and how much that differs.

# %%
batches = [batch() for _ in range(4)]
recipes = ["tensorwise", "rowwise"]
found = fp8graph.tune(model, batches, recipes=recipes, target="sm_90", budget=0.3)
print(found.summary())

# %% [markdown]
# The policy is bf16 everywhere, and that is the right answer: this model is a toy. Its GEMMs are so small that
# quantizing for an H100 is predicted to cost more time than FP8 gains. `tune` weighs error against predicted time,
# and there is no time to gain.
#
# ## Pretend that the model is large
#
# The larger the layers, the more of the time is arithmetic. To see what `tune` says then, we describe a GPU that
# multiplies at the rates assumed for an H100, and on which launches and memory cost next to nothing. `target` takes
# such a file; `fp8graph bench --calibrate` writes one for a real GPU. **For a model of real size leave this cell out,
# and pass `target="sm_90"`.**

# %%
speed = {
    "name": "an H100 with arithmetic alone",
    "bf16_flops": 790e12,
    "fp32_flops": 54e12,
    "fp8_flops": 1345e12,
    "fp4_flops": 1345e12,  # an H100 has no FP4
    "bandwidth": 1e16,  # bytes per second: without limit
    "launch": 1e-12,  # seconds: nothing
    "host_launch": 0.0,
}
folder = Path(tempfile.mkdtemp())
target = folder / "arithmetic_alone.json"
target.write_text(json.dumps({"target": "sm_90", "speed": speed}))

found = fp8graph.tune(model, batches, recipes=recipes, target=target, budget=0.3)
print(found.summary())

# %% [markdown]
# `budget=0.3` means: spend at most 30 % of the error that FP8 everywhere would make, and be as fast as that allows.
# The speed is a prediction for a GPU that we made up: nothing here has been timed.
#
# ## The trade
#
# Each point of the line is a policy: from bf16 (no error) on the left to the fastest on the right. The squares are
# the simple choices, one recipe for everything.

# %%
figure, axes = plt.subplots(figsize=(8, 4), dpi=120, layout="constrained")
axes.plot([p.speedup for p in found.curve], [p.error for p in found.curve], ".-", label="best choices")
for name, point in found.uniform.items():
    axes.scatter(point.speedup, point.error, marker="s", label=f"{name} everywhere", zorder=2)
axes.scatter(found.chosen.speedup, found.chosen.error, s=140, marker="*", color="black", label="chosen", zorder=3)
axes.set(xlabel="predicted speedup of the GEMMs", ylabel="error (FP8 everywhere = 1)", title="Error against time")
axes.grid(alpha=0.3)
axes.legend()
plt.show()

# %% [markdown]
# The line is flat at first: the first GEMMs that go to FP8 are nearly free. It is steep at the end, where the last
# ones cost most of the error. `found.plot("curve.png")` draws this picture into a file.
#
# ## The ranking
#
# What makes the error? Each linear has three GEMMs: its output (fprop), the gradient of its input (dgrad) and that of
# its weight (wgrad). Here they are under `tensorwise`, sorted, as shares of the error that FP8 everywhere would make.

# %%
scores = sorted((s for s in found.scores if s.recipe == "tensorwise"), key=lambda score: -score.error)
colors = {"fprop": "tab:blue", "dgrad": "tab:orange", "wgrad": "tab:green"}
figure, axes = plt.subplots(figsize=(9, 3.8), dpi=120, layout="constrained")
for gemm, color in colors.items():
    own = [(place, score.error) for place, score in enumerate(scores) if score.gemm == gemm]
    axes.bar([place for place, _ in own], [error for _, error in own], color=color, label=gemm)
axes.set(xlabel="GEMMs, the worst first", ylabel="share of the error", title=f"{len(scores)} GEMMs")
axes.legend()
plt.show()

for score in scores[:6]:
    print(f"{score.error:6.2%}  {score.gemm}  {score.site}")
half = sum(score.error for score in scores) / 2
count = next(n for n in range(len(scores)) if sum(score.error for score in scores[:n]) >= half)
print(f"{count} of {len(scores)} GEMMs make half of the error")

# %% [markdown]
# How far can the ranking be trusted? [A policy by measurement](../docs/tune.md#what-is-measured) compares it with
# what happens when one GEMM after the other is switched to FP8: the order of fprop and dgrad is close, that of wgrad
# rough.
#
# ## The policy
#
# It is a list of rules, and the first that matches a layer wins.

# %%
print(found.policy)

# %% [markdown]
# Save it, read it, commit it beside your training code. It is data, and nothing in it is run.

# %%
found.save(folder / "policy.toml")
print((folder / "policy.toml").read_text()[:400])

# %% [markdown]
# ## Use it
#
# The model is compiled with the file. On a GPU leave out `compiler="eager"`, and Inductor generates kernels.

# %%
fp8graph.compile(model, policy=folder / "policy.toml", compiler="eager")
for _ in range(5):
    loss = model(**batch()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
report = fp8graph.backend_of(model).report
print(report.summary())
report.check()  # raises where a rule did not take effect

# %% [markdown]
# ## Try it
#
# * Another `budget`, or `min_speedup=1.3` in its place: the least error at which the GEMMs are predicted to be that
#   fast.
# * `resume="measured.json"` keeps the measurements, so that another budget costs one batch.
# * More batches, and see whether the ranking holds.
#
# [Policies](../docs/policies.md) says what rules can do, and [tune](../docs/api/planning.md#tune) has every argument.
# `fp8graph tune` does this from the shell.
