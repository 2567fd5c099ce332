"""Inductor's GPU code for a function of fake tensors: what the tests of kernel counts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fp8graph
from benchmarks.decoder_layer import DecoderLayer, rms_norm
from fp8graph import hardware
from fp8graph.backend.inductor_passes import compile_dialect, run_eagerly
from fp8graph.ir import ops
from fp8graph.ir.settings import Settings
from fp8graph.numerics import quantization
from fp8graph.offline import KernelRecord, OfflineInductor
from fp8graph.recipes import OperandName, resolve_recipe
from helpers import ALL, MLP

MIB = 2**20
OF_ONE_INDUCTOR = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="kernels and bytes are counted for one version of Inductor"
)


def generate(function: Callable[..., Any], inputs: Sequence[Tensor], target: str = "sm_90") -> OfflineInductor:
    """The code for ``function``, which may call dialect ops. Only shapes and dtypes of ``inputs`` matter."""
    with FakeTensorMode():
        fakes = [torch.empty(x.shape, dtype=x.dtype) for x in inputs]
        module = make_fx(function, decomposition_table=select_decomp_table())(*fakes)
    offline = OfflineInductor(target, run_eagerly)
    with torch.no_grad():
        compile_dialect(module, fakes, Settings(target=target), offline)
    return offline


# what makes the tensor that is quantized: (x [rows, columns], weight [columns], y [rows, columns]) -> [rows, columns]
PRODUCERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "nothing": lambda x, weight, y: x,
    "rms_norm": lambda x, weight, y: rms_norm(x, weight),
    "silu_mul": lambda x, weight, y: nn.functional.silu(x) * y,
    "add": lambda x, weight, y: x + y,
    "gelu": lambda x, weight, y: nn.functional.gelu(x),
}


def quantize_after(
    producer: str, recipe: str, operand: OperandName, rowwise: bool, columnwise: bool, *, multiple: int = 16
) -> Any:
    """A function of (x, weight, y, scales) that quantizes what ``producer`` makes.

    ``multiple``: of the size along the contraction dim, rowwise.
    """
    resolved = resolve_recipe(recipe)
    assert resolved is not None
    quantizer = resolved.quantizer(operand)

    def function(x: Tensor, weight: Tensor, y: Tensor, scales: Tensor) -> list[Tensor]:
        settings = quantization.quantizer_kwargs(quantizer)
        if quantizer.scaling == "delayed":
            settings |= {"scales": scales, "row": 0}
        layouts = [[16, size] if wanted else [] for wanted, size in ((rowwise, multiple), (columnwise, 16))]
        made = PRODUCERS[producer](x, weight, y)
        return list(ops.quantize(made, *quantization.quantizer_args(quantizer), *layouts, **settings))

    return function


def swiglu_backward(x: Tensor, weight: Tensor, y: Tensor) -> list[Tensor]:
    """The gradients of gate and up, for dh = weight * x."""
    gate, up, dh = x, y, x * weight
    return [torch.ops.aten.silu_backward(dh * up, gate), dh * nn.functional.silu(gate)]


def norm_backward(x: Tensor, weight: Tensor, y: Tensor) -> list[Tensor]:
    """The gradient of rms_norm's input, and the residual's added."""
    wide, dy = x.float(), (y * weight).float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    dx = inverse * dy - wide * inverse.pow(3) * (dy * wide).mean(-1, keepdim=True)
    return [dx.to(x.dtype) + y]


def quantize_after_backward(producer: str, recipe: str) -> Any:
    """A function of (x, weight, y, scales) that quantizes the gradients that ``producer`` makes, as one tensor."""
    return quantize_gradients(recipe, {"swiglu": swiglu_backward, "norm": norm_backward}[producer])


def quantize_gradients(recipe: str, make: Callable[..., list[Tensor]]) -> Any:
    """A function of (x, weight, y, scales) that quantizes what ``make(x, weight, y)`` returns side by side."""
    resolved = resolve_recipe(recipe)
    assert resolved is not None
    quantizer = resolved.quantizer("grad_output")

    def function(x: Tensor, weight: Tensor, y: Tensor, scales: Tensor) -> list[Tensor]:
        settings = quantization.quantizer_kwargs(quantizer)
        if quantizer.scaling == "delayed":
            settings |= {"scales": scales, "row": 0}
        first, *more = make(x, weight, y)
        settings |= {"more": more, "dim": -1} if more else {}
        return list(ops.quantize(first, *quantization.quantizer_args(quantizer), [16, 16], [16, 16], **settings))

    return function


def quantize_joined(recipe: str) -> Any:
    """A function of (x, weight, y, scales) that quantizes silu(x) * y and x * y side by side, as one gradient."""
    return quantize_gradients(recipe, lambda x, weight, y: [nn.functional.silu(x) * y, x * y])


def joined_weights(recipe: str, a: Tensor, b: Tensor) -> list[Tensor]:
    """The FP8 copies of two weights that are quantized as one, both layouts, and their scales in the GEMM's order."""
    resolved = resolve_recipe(recipe)
    assert resolved is not None
    quantizer = resolved.quantizer("weight")
    order = hardware.from_target("sm_100").scale_order(quantizer.scaling, quantizer.block)
    settings = quantization.quantizer_kwargs(quantizer) | {"more": [b], "dim": -2}
    settings |= {"rowwise_order": order, "columnwise_order": order}
    results = ops.quantize(a, *quantization.quantizer_args(quantizer), [16, 16], [16, 16], **settings)
    return results[:-1] if quantizer.scaling == "delayed" else results  # an amax is not kept


def write_weights(recipe: str) -> Any:
    """A function of (a, b, *buffers) that writes :func:`joined_weights` into the buffers."""

    def function(a: Tensor, b: Tensor, *buffers: Tensor) -> None:
        for buffer, result in zip(buffers, joined_weights(recipe, a, b), strict=True):
            torch.ops.aten.copy_(buffer, result)

    return function


def quantize_inputs(rows: int, columns: int) -> list[Tensor]:
    like = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
    return [like, like[0], like, torch.empty(4, 2, device="meta")]


def triton_kernels(kernels: Sequence[KernelRecord], *graphs: str) -> list[KernelRecord]:
    return [k for k in kernels if k.kind == "triton" and (not graphs or k.graph in graphs)]


def decoder_layer(
    policy: Any, target: str = "sm_90", tokens: int = 8192, *, cache_weights: Any = "update"
) -> list[KernelRecord]:
    """The kernels launched for one Llama-3-8B layer: forward, backward and its weights."""
    torch._dynamo.reset()
    x = torch.empty(tokens, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    layer = DecoderLayer(device="meta", dtype=torch.bfloat16)
    return fp8graph.explain(layer, x, policy=policy, target=target, cache_weights=cache_weights).kernels


class Experts(nn.Module):
    """The experts of a layer, whose tokens arrive in the order of their experts: gate and up, SwiGLU, down."""

    def __init__(self, hidden: int, inner: int, experts: int, **factory: Any) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, 2 * inner, hidden, **factory))
        self.down = nn.Parameter(torch.empty(experts, hidden, inner, **factory))

    def forward(self, x: Tensor, rows: Tensor, offs: Tensor) -> Tensor:
        gate, up = torch._grouped_mm(x[rows], self.up.transpose(-2, -1), offs=offs).chunk(2, -1)
        return torch._grouped_mm(nn.functional.silu(gate) * up, self.down.transpose(-2, -1), offs=offs)


class Mixture(NamedTuple):
    hidden: int
    inner: int
    experts: int
    chosen: int  # of each token


MIXTURES = {
    "Mixtral-8x7B": Mixture(4096, 14336, 8, 2),
    "Qwen3-30B-A3B": Mixture(2048, 768, 128, 8),
    "DeepSeek-V3": Mixture(7168, 2048, 256, 8),
    "gpt-oss-20b": Mixture(2880, 2880, 32, 4),
}


def report_of_experts(name: str, policy: Any, target: str, tokens: int = 8192) -> fp8graph.Report:
    """On the experts of one layer: forward, backward and their weights."""
    torch._dynamo.reset()
    sizes = MIXTURES[name]
    with torch.device("meta"):
        x = torch.empty(tokens, sizes.hidden, dtype=torch.bfloat16, requires_grad=True)
        rows, offs = (
            torch.empty(tokens * sizes.chosen, dtype=torch.int64),
            torch.empty(sizes.experts, dtype=torch.int32),
        )
        module = Experts(*sizes[:3], dtype=torch.bfloat16)
    return fp8graph.explain(module, x, rows, offs, policy=policy, target=target, cache_weights="update")


def kernels_of_mlp(target: str = "sm_90", policy: fp8graph.Policy = ALL, training: bool = True) -> list[KernelRecord]:
    return report_of_mlp(target, policy, training).kernels


def report_of_mlp(target: str = "sm_90", policy: fp8graph.Policy = ALL, training: bool = True) -> fp8graph.Report:
    x = torch.empty(256, 128, dtype=torch.bfloat16, device="meta", requires_grad=training)
    model = MLP(128, 512).to("meta", torch.bfloat16)
    return fp8graph.explain(model, x, policy=policy, target=target, training=training, cache_weights="update")
