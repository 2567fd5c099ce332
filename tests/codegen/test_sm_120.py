"""Block scales on Blackwell's GPUs that are not for data centers: their generated kernels, compiled without a GPU.

That these compute the reference: tests/codegen/test_interpreted.py.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8graph import NVFP4BlockScaling, offline
from fp8graph.ir import ops
from fp8graph.numerics import quantization
from fp8graph.offline.fake_gpu import fake_gpu
from generated import generate, quantize_after, quantize_inputs, triton_kernels
from helpers import first_slow

SHARED = 99 * 1024  # bytes of shared memory per block of compute capability 12.x (CUDA's programming guide)
NEEDS_TRITON = pytest.mark.skipif(not offline.available(), reason="triton is not installed")


def quantize_gradient(x: Tensor, _weight: Tensor, _y: Tensor, _scales: Tensor, seed: Tensor) -> list[Tensor]:
    """Both layouts in FP4, rounded stochastically."""
    quantizer = NVFP4BlockScaling(disable_rht=True).quantizer("grad_output")
    assert quantizer.stochastic
    args, settings = quantization.quantizer_args(quantizer), quantization.quantizer_kwargs(quantizer)
    return list(ops.quantize(x, *args, [1, 32], [16, 32], **settings, seed=seed))


CASES: dict[str, tuple[Any, list[Tensor]]] = {
    "mxfp8": (quantize_after("rms_norm", "mxfp8", "input", True, True), []),
    "nvfp4": (quantize_gradient, [torch.empty(1, dtype=torch.int64)]),
}


@NEEDS_TRITON
@first_slow(("recipe", "target"), [("nvfp4", "sm_120"), ("mxfp8", "sm_120"), ("mxfp8", "sm_121"), ("nvfp4", "sm_121")])
def test_kernels_compile_and_fit(recipe: str, target: str) -> None:
    """For sm_120a and sm_121a, of which neither has ``cvt.rs``, the instruction that rounds stochastically."""
    function, more = CASES[recipe]
    kernels = triton_kernels(generate(function, [*quantize_inputs(2048, 1024), *more], target).kernels)
    assert kernels
    for kernel in kernels:
        (compiled,) = offline.compile_kernel(kernel.source, target, configuration="first")
        assert f".target {target}a" in compiled.ptx
        assert "cvt.rs" not in compiled.ptx
        assert compiled.spills == 0
        assert compiled.shared <= SHARED


def body(source: str) -> str:
    """The code of a kernel without what describes the GPU and the process."""
    return re.sub(r"DeviceProperties\([^)]*\)|'backend_hash': '\w+'", "", source)


@NEEDS_TRITON
@first_slow("recipe", ["mxfp8", "nvfp4"])
def test_kernels_are_those_of_sm_100(recipe: str) -> None:
    function, more = CASES[recipe]
    texts = [
        [body(k.source) for k in triton_kernels(generate(function, [*quantize_inputs(256, 512), *more], name).kernels)]
        for name in ("sm_100", "sm_120", "sm_121")
    ]
    assert texts[0] == texts[1] == texts[2]


@NEEDS_TRITON
def test_a_fake_gpu_has_the_limits_of_its_architecture() -> None:
    """Inductor reads them for the size of its tiles."""
    found: dict[str, tuple[int, int]] = {}
    for target in ("sm_89", "sm_90", "sm_100", "sm_120", "sm_121"):
        with fake_gpu(target):
            gpu: Any = torch.cuda.get_device_properties(0)
            found[target] = gpu.max_threads_per_multi_processor, gpu.shared_memory_per_block_optin
    small, large = (1536, SHARED), (2048, 227 * 1024)
    assert found == {"sm_89": small, "sm_90": large, "sm_100": large, "sm_120": small, "sm_121": small}
