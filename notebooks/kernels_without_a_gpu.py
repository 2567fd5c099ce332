# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Kernels without a GPU
#
# Which kernels would an H100 run for your layer in FP8? How many bytes would they move, and what do they compile to?
#
# These are questions about code, and code can be generated anywhere: Inductor writes Triton for a GPU that is not
# here, and `ptxas`, which comes with Triton, compiles it. Nothing is run. So you will find counts on this page, and
# no times.
#
# `pip install -e ".[notebooks]"` in the checkout brings what the notebooks import. Here that is Triton, where torch
# came without it.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import fp8graph

# %% [markdown]
# ## A layer
#
# Half of a decoder layer of Llama-3-8B: the norm, the MLP with its three linears, the residual. It lives on the meta
# device, where tensors have shapes and no numbers. That is enough, and takes no memory.


# %%
class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = LlamaRMSNorm(4096)
        self.mlp = LlamaMLP(LlamaConfig(hidden_size=4096, intermediate_size=14336))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


with torch.device("meta"):
    half = Half().bfloat16()
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, requires_grad=True)

# %% [markdown]
# ## What would be done
#
# `explain` traces forward and backward and decides about each matrix multiplication (GEMM), as it would on the
# target. "sm_90" is an H100.

# %%
report = fp8graph.explain(half, x, training=True, target="sm_90")
for gemm in report.gemms:
    print(f"{gemm.name:13} {gemm.gemm}  {gemm.m:6} x {gemm.n:5} x {gemm.k:5}  {gemm.recipe}: {gemm.reason}")

# %% [markdown]
# "Predicted" is what a simple model of the GPU says: its arithmetic, its memory, its launches. It decides whether FP8
# pays, and it has not been compared with a GPU yet.
#
# ## The kernels
#
# Reading `report.kernels` generates the code. There is one record per launch, in order.

# %%
kernels = report.kernels
for number, kernel in enumerate(kernels):
    print(f"{number:2}  {kernel.graph:8}  {kernel.bytes / 2**20:5.0f} MiB  {kernel.name}")

# %% [markdown]
# `extern` kernels are the GEMMs: torch's library multiplies FP8, and its bytes are not counted here. All others are
# Triton.
#
# Which of the Triton kernels move the most?

# %%
colors = {"forward": "tab:blue", "backward": "tab:orange"}
figure, axes = plt.subplots(figsize=(9, 4), dpi=120, layout="constrained")
for graph, color in colors.items():
    own = [(number, kernel.bytes / 2**20) for number, kernel in enumerate(kernels) if kernel.graph == graph]
    axes.bar([number for number, _ in own], [size for _, size in own], color=color, label=graph)
axes.set(xlabel="launch", ylabel="MiB read and written", title="Bytes of each launch (GEMMs: not counted)")
axes.set_xticks(range(0, len(kernels), 2))
axes.legend()
plt.show()

# %% [markdown]
# ## What one of them computes
#
# Take the largest of forward. `nodes` names the ops of the rewritten graph that it computes: activation and
# quantization are one kernel.

# %%
triton = [kernel for kernel in kernels if kernel.kind == "triton"]
largest = max((kernel for kernel in triton if kernel.graph == "forward"), key=lambda kernel: kernel.bytes)
print(largest.name)
print("computes:", ", ".join(largest.nodes))
print("writes:  ", ", ".join(largest.writes))

# %% [markdown]
# Here is its code, as it would run on the H100.

# %%
start = largest.source.index(f"def {largest.name}")
print(largest.source[start:].strip())

# %% [markdown]
# Look at its ends. Two tensors in bf16 and a scale are loaded at the top. One tensor in FP8 is stored at the bottom,
# once as it is and once transposed, because two GEMMs want it in two layouts
# ([why](../docs/how_fp8_works.md#two-layouts)). In between are SiLU, the product with the scale, and the clamp to
# 448, the largest number of E4M3.
#
# ## What it compiles to
#
# `compiled` compiles the kernel in the first configuration that Inductor's autotuner would try.

# %%
machine = largest.compiled
print(machine.configuration)
print(f"{machine.registers} registers per thread, {machine.spills} bytes spilled, {machine.instructions} instructions")
print("bytes per load:  ", machine.loads)
print("bytes per store: ", machine.stores)

# %% [markdown]
# The dictionaries count instructions by the bytes that each moves: `{16: 2}` are two loads of 16 bytes. Narrow stores
# and spilled registers cost bandwidth, and both show here before a GPU is rented.
#
# And this is the moment at which numbers become FP8. The instruction takes two of them at once:

# %%
conversions = [line.strip() for line in machine.ptx.splitlines() if "e4m3x2" in line]
print(f"{len(conversions)} conversions per thread, such as")
print(conversions[0])

# %% [markdown]
# ## The same layer under another recipe
#
# A recipe decides how scales are found, and so which kernels there are. `tensorwise` needs the largest magnitude of a
# tensor before it can quantize: it reads the tensor twice. `delayed` takes the scale from earlier steps, and reads it
# once. How much does that save here?


# %%
def moved(report):
    """MiB per call, forward and backward, the quantization of weights included."""
    return sum(kernel.bytes for kernel in report.kernels) / 2**20


sizes = {"tensorwise": moved(report)}
sizes["delayed"] = moved(fp8graph.explain(half, x, training=True, target="sm_90", recipe="delayed"))
sizes["bf16"] = moved(fp8graph.explain(half, x, training=True, target="sm_90", policy=fp8graph.Policy(default=None)))

figure, axes = plt.subplots(figsize=(8, 2.2), dpi=120, layout="constrained")
names = ["bf16", "delayed", "tensorwise"]
bars = axes.barh(names, [sizes[name] for name in names])
axes.bar_label(bars, fmt="%.0f", padding=3)
axes.invert_yaxis()
axes.margins(x=0.1)
axes.set(xlabel="MiB per call, without GEMMs", title="Norm, activation and quantization of half a layer")
plt.show()

# %% [markdown]
# This is the price of FP8, and only that: what the GEMMs gain stands on the other side, and cannot be counted, only
# measured. [Which recipe?](../docs/recipes.md#what-each-costs) has the table for a whole layer and all recipes.
#
# ## Another GPU
#
# A B200 (sm_100) multiplies MXFP8, with a scale for each 32 numbers, and takes it by default. Only the target
# changes:

# %%
b200 = fp8graph.explain(half, x, training=True, target="sm_100")
print(b200.summary())
print("recipes:", ", ".join({gemm.recipe for gemm in b200.gemms}))

# %% [markdown]
# `b200.kernels` generates its code, as above.
#
# ## Try it
#
# * Put your own layer in place of this one, with the shapes of your batches.
# * Write `report.to_html("report.html")` and open it: the kernels are listed beside a drawing of the layer, and a
#   click shows what each computes ([the page](../docs/report.md#the-page)).
# * [Performance](../docs/performance.md#what-is-fused) says what is fused and why, and
#   [KernelRecord](../docs/api/reports.md#kernelrecord) has every field.
