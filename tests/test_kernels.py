"""How many kernels Inductor generates for a quantization, and how many bytes they move: sm_90, no GPU.

A count that grows is a fusion that was lost. Sizes: 8192 x 4096 in bf16 are 64 MiB, an FP8 copy is 32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8graph import offline
from fp8graph.policy import Policy
from generated import MIB, generate, layer_kernels, quantize_after, quantize_inputs, triton_kernels

pytestmark = [
    pytest.mark.skipif(not offline.available(), reason="triton is not installed"),
    pytest.mark.skipif(torch.__version__ < "2.13", reason="recorded for torch 2.13: earlier ones fuse less"),
]

# recipe, operand, producer, (rowwise, columnwise) -> kernels, MiB
ROW, COLUMN, BOTH = (True, False), (False, True), (True, True)
COUNTS = [
    ("rowwise", "input", "nothing", ROW, 1, 96),
    ("rowwise", "input", "rms_norm", ROW, 1, 96),
    ("rowwise", "input", "silu_mul", ROW, 1, 160),
    ("rowwise", "input", "nothing", COLUMN, 3, 161),  # the largest of a column takes a pass of its own
    ("delayed", "input", "nothing", BOTH, 1, 128),
    ("delayed", "input", "rms_norm", ROW, 1, 96),
    ("delayed", "input", "rms_norm", BOTH, 1, 128),
    ("delayed", "input", "silu_mul", BOTH, 1, 192),
    ("delayed", "input", "add", BOTH, 1, 192),
    ("delayed", "input", "gelu", BOTH, 1, 128),
    ("tensorwise", "input", "nothing", BOTH, 3, 192),
    ("tensorwise", "input", "rms_norm", ROW, 3, 160),
    ("tensorwise", "input", "rms_norm", BOTH, 3, 192),
    ("tensorwise", "input", "silu_mul", BOTH, 3, 320),
    ("tensorwise", "input", "add", BOTH, 3, 320),
    ("blockwise", "input", "nothing", BOTH, 1, 131),
    ("blockwise", "input", "rms_norm", ROW, 1, 97),
    ("blockwise", "input", "rms_norm", BOTH, 2, 194),
    ("blockwise", "input", "silu_mul", ROW, 1, 161),
    ("blockwise", "input", "silu_mul", BOTH, 2, 323),
    ("blockwise", "weight", "nothing", ROW, 2, 160),
    ("blockwise", "weight", "nothing", BOTH, 2, 192),
    ("mxfp8", "input", "nothing", BOTH, 1, 134),
    ("mxfp8", "input", "rms_norm", ROW, 1, 97),
    ("mxfp8", "input", "rms_norm", BOTH, 2, 194),
    ("mxfp8", "input", "silu_mul", BOTH, 2, 326),
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


# recipe -> kernels, MiB of a Llama-3-8B layer with 8192 tokens, forward and backward, all but GEMMs and attention
LAYERS = {
    None: (7, 3394),
    "delayed": (17, 3586),
    "tensorwise": (27, 5186),
    "rowwise": (23, 4873),
    "blockwise": (20, 5259),
}


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
    assert sum(k.bytes for k in found) / MIB <= 5365


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise"])
def test_the_kernels_of_a_layer_compile_without_spills(recipe: str) -> None:
    """Every configuration that Inductor would try, for sm_90a; scales are divided exactly."""
    sources = {k.source for k in layer_kernels(Policy(default=recipe))}
    used = [offline.compile_kernel(source, "sm_90") for source in sources]
    assert max(result["registers"] for results in used for result in results) <= 255
    # a configuration that spills is one that the autotuner will not choose: each kernel has one that does not
    assert all(min(result["spills"] for result in results) == 0 for results in used)
    assert all(".target sm_90a" in result["ptx"] for results in used for result in results)
    divides = [source for source in sources if "div_rn" in source]
    assert divides
    assert not [source for source in sources if " / " in source]
