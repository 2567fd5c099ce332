"""How many kernels Inductor generates for a quantization, and how many bytes they move: sm_90, no GPU.

A count that grows is a fusion that was lost. Sizes: 8192 x 4096 in bf16 are 64 MiB, an FP8 copy is 32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8graph import offline, ops
from fp8graph.explain import Generating
from fp8graph.policy import Policy
from generated import (
    MIB,
    generate,
    layer_kernels,
    quantize_after,
    quantize_after_backward,
    quantize_inputs,
    triton_kernels,
)

pytestmark = [
    pytest.mark.skipif(not offline.available(), reason="triton is not installed"),
    pytest.mark.skipif(torch.__version__ < "2.13", reason="recorded for torch 2.13: earlier ones fuse less"),
]

# recipe, operand, producer, (rowwise, columnwise) -> kernels, MiB
ROW, COLUMN, BOTH = (True, False), (False, True), (True, True)
COUNTS = [
    ("rowwise", "input", "nothing", ROW, 1, 96),
    ("rowwise", "input", "rms_norm", ROW, 1, 96),
    ("rowwise", "input", "nothing", COLUMN, 3, 161),  # the largest of a column takes a pass of its own
    ("delayed", "input", "nothing", BOTH, 1, 128),
    ("delayed", "input", "rms_norm", ROW, 1, 96),
    ("delayed", "input", "rms_norm", BOTH, 1, 128),
    ("tensorwise", "input", "nothing", BOTH, 3, 192),
    ("tensorwise", "input", "rms_norm", ROW, 3, 160),
    ("tensorwise", "input", "rms_norm", BOTH, 3, 192),
    ("blockwise", "input", "nothing", BOTH, 1, 131),
    ("blockwise", "input", "rms_norm", ROW, 1, 97),
    ("blockwise", "input", "rms_norm", BOTH, 2, 194),
    ("blockwise", "weight", "nothing", ROW, 2, 160),
    ("blockwise", "weight", "nothing", BOTH, 2, 192),
    ("mxfp8", "input", "nothing", BOTH, 1, 134),
    ("mxfp8", "input", "rms_norm", ROW, 1, 97),
    ("mxfp8", "input", "rms_norm", BOTH, 2, 194),
    ("delayed", "input", "silu_mul", ROW, 1, 160),
    ("delayed", "input", "silu_mul", BOTH, 1, 192),
    ("tensorwise", "input", "silu_mul", ROW, 3, 288),
    ("tensorwise", "input", "silu_mul", BOTH, 3, 320),
    ("rowwise", "input", "silu_mul", ROW, 1, 160),
    ("rowwise", "input", "silu_mul", BOTH, 3, 321),
    ("blockwise", "input", "silu_mul", ROW, 1, 161),
    ("blockwise", "input", "silu_mul", BOTH, 2, 323),
    ("mxfp8", "input", "silu_mul", ROW, 1, 161),
    ("mxfp8", "input", "silu_mul", BOTH, 2, 326),
    ("delayed", "input", "add", ROW, 1, 160),
    ("delayed", "input", "add", BOTH, 1, 192),
    ("tensorwise", "input", "add", ROW, 3, 288),
    ("tensorwise", "input", "add", BOTH, 3, 320),
    ("rowwise", "input", "add", ROW, 1, 160),
    ("rowwise", "input", "add", BOTH, 3, 321),
    ("blockwise", "input", "add", ROW, 1, 161),
    ("blockwise", "input", "add", BOTH, 2, 323),
    ("mxfp8", "input", "add", ROW, 1, 161),
    ("mxfp8", "input", "add", BOTH, 2, 326),
    ("delayed", "input", "gelu", ROW, 1, 96),
    ("delayed", "input", "gelu", BOTH, 1, 128),
    ("tensorwise", "input", "gelu", ROW, 3, 160),
    ("tensorwise", "input", "gelu", BOTH, 3, 192),
    ("rowwise", "input", "gelu", ROW, 1, 96),
    ("rowwise", "input", "gelu", BOTH, 3, 193),
    ("blockwise", "input", "gelu", ROW, 1, 97),
    ("blockwise", "input", "gelu", BOTH, 2, 195),
    ("mxfp8", "input", "gelu", ROW, 1, 97),
    ("mxfp8", "input", "gelu", BOTH, 2, 198),
]


@pytest.mark.parametrize(("recipe", "operand", "producer", "layouts", "kernels", "mib"), COUNTS)
def test_kernels_and_bytes_of_one_tensor(
    recipe: str, operand: Any, producer: str, layouts: tuple[bool, bool], kernels: int, mib: int
) -> None:
    found = triton_kernels(
        generate(quantize_after(producer, recipe, operand, *layouts), quantize_inputs(8192, 4096)).kernels
    )
    assert len(found) <= kernels
    assert round(sum(k.bytes for k in found) / MIB) <= mib


@pytest.mark.parametrize("size", [(8192, 4090), (8190, 4096)])
@pytest.mark.parametrize("layouts", [ROW, BOTH])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_padding_costs_no_pass(recipe: str, layouts: tuple[bool, bool], size: tuple[int, int]) -> None:
    """4090 columns become 4096 while they are quantized, 8190 rows 8192: one more kernel, which writes the zeros."""
    aligned, padded = (
        triton_kernels(generate(quantize_after("rms_norm", recipe, "input", *layouts), quantize_inputs(*s)).kernels)
        for s in ((8192, 4096), size)
    )
    assert len(padded) <= len(aligned) + 1
    assert sum(k.bytes for k in padded) <= 1.001 * sum(k.bytes for k in aligned)


@pytest.mark.parametrize(("producer", "layouts"), [("rms_norm", BOTH), ("silu_mul", BOTH), ("nothing", ROW)])
def test_tiles_of_zeros_cost_no_pass(producer: str, layouts: tuple[bool, bool]) -> None:
    """70 tiles become 72, for torch and cuBLASLt to agree on the scales' strides: one more kernel writes zeros."""
    unpadded, padded = (
        triton_kernels(
            generate(
                quantize_after(producer, "blockwise", "input", *layouts, multiple=multiple), quantize_inputs(8192, 8960)
            ).kernels
        )
        for multiple in (128, 512)
    )
    assert len(padded) <= len(unpadded) + 1
    assert sum(k.bytes for k in padded) <= 1.02 * sum(k.bytes for k in unpadded)


@pytest.mark.parametrize(("recipe", "kernels", "mib"), [("blockwise", 2, 161), ("mxfp8", 2, 161)])
def test_tiles_at_a_ragged_edge_cost_a_second_read(recipe: str, kernels: int, mib: int) -> None:
    """The norm's loop has 4090 columns, the tiles' 4096: Inductor does not fuse loops of two sizes."""
    function = quantize_after("rms_norm", recipe, "input", *ROW)
    found = triton_kernels(generate(function, quantize_inputs(8192, 4090)).kernels)
    assert len(found) <= kernels
    assert round(sum(k.bytes for k in found) / MIB) <= mib


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_padding_of_a_dynamic_size_costs_no_pass(recipe: str) -> None:
    """wgrad contracts over the tokens: their number is padded to a multiple of 16 when it is known."""
    counts: list[int] = []
    for dynamic in (False, True):
        torch._dynamo.reset()
        backend = Generating(Policy(default=recipe, min_speedup=0), "sm_90")
        model = torch.compile(torch.nn.Linear(64, 128, bias=False).bfloat16(), backend=backend, dynamic=dynamic)
        x = torch.randn(48 if not dynamic else 50, 64, dtype=torch.bfloat16, requires_grad=True)
        model(x).sum().backward()
        counts.append(len(triton_kernels(backend.generator.kernels, "forward", "backward")))
    assert counts[1] <= counts[0] + 2  # the zeros of x and of dy


# (recipe, producer in backward) -> kernels, MiB: what quantizes the gradient that SwiGLU's or a norm's backward makes
BACKWARD = [
    ("delayed", "swiglu", 1, 256),
    ("tensorwise", "swiglu", 4, 384),
    ("rowwise", "swiglu", 3, 386),
    ("blockwise", "swiglu", 2, 390),
    ("mxfp8", "swiglu", 2, 396),
    ("delayed", "norm", 1, 192),
    ("tensorwise", "norm", 3, 320),
    ("rowwise", "norm", 4, 385),
    ("blockwise", "norm", 2, 322),
    ("mxfp8", "norm", 2, 322),
]


@pytest.mark.parametrize(("recipe", "producer", "kernels", "mib"), BACKWARD)
def test_kernels_and_bytes_behind_a_backward(recipe: str, producer: str, kernels: int, mib: int) -> None:
    found = triton_kernels(generate(quantize_after_backward(producer, recipe), quantize_inputs(8192, 4096)).kernels)
    assert len(found) <= kernels
    assert round(sum(k.bytes for k in found) / MIB) <= mib


# recipe -> kernels, MiB of a Llama-3-8B layer with 8192 tokens, forward and backward, all but GEMMs and attention
LAYERS = {
    None: (7, 3394),
    "delayed": (17, 3586),
    "tensorwise": (27, 5186),
    "rowwise": (23, 4873),
    "blockwise": (20, 5263),
}


@pytest.mark.parametrize(("a", "b"), [((), (1,)), ((1,), ()), ((1,), (1,)), ((), ())])
def test_scales_of_both_shapes_are_multiplied(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """An own amax gives [], a table [1]. Inductor's templates for GPUs want both operands' alike."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        data, *_, scale_inv_a = ops.quantize(x, torch.float8_e4m3fn, False, 0.0, [1, 16], [])
        other, *_, scale_inv_b = ops.quantize(y, torch.float8_e4m3fn, False, 0.0, [1, 16], [])
        scales = scale_inv_a.reshape(a), scale_inv_b.reshape(b)
        return ops.scaled_mm(data, other, *scales, None, torch.bfloat16, True)

    offline = generate(function, [torch.empty(256, 256, dtype=torch.bfloat16)] * 2)
    assert "_scaled_mm" in [kernel.name.rpartition(".")[2] for kernel in offline.kernels]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", LAYERS)
def test_kernels_and_bytes_of_a_layer(recipe: Any) -> None:
    found = layer_kernels(Policy(default=recipe))
    kernels, mib = LAYERS[recipe]
    assert len(found) <= kernels
    assert sum(k.bytes for k in found) / MIB <= mib


@pytest.mark.slow
def test_kernels_and_bytes_of_a_layer_on_blackwell() -> None:
    found = layer_kernels(Policy(default="mxfp8"), "sm_100")
    assert len(found) <= 25
    assert sum(k.bytes for k in found) / MIB <= 5382


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise"])
def test_the_kernels_of_a_layer_compile_without_spills(recipe: str) -> None:
    """Every configuration that Inductor would try, for sm_90a; scales are divided exactly."""
    sources = {k.source for k in layer_kernels(Policy(default=recipe))}
    used = [offline.compile_kernel(source, "sm_90") for source in sources]
    assert max(result.registers for results in used for result in results) <= 255
    # a configuration that spills is one that the autotuner will not choose: each kernel has one that does not
    assert all(min(result.spills for result in results) == 0 for results in used)
    assert all(".target sm_90a" in result.ptx for results in used for result in results)
    divides = [source for source in sources if "div_rn" in source]
    assert divides
    assert not [source for source in sources if " / " in source]
