"""The record of one kernel: its launches, the bytes of each, its compiled code."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config

from fp8graph import offline
from generated import (
    generate,
    quantize_after,
    quantize_inputs,
    triton_kernels,
)

pytestmark = pytest.mark.skipif(not offline.available(), reason="triton is not installed")


def test_compiled_kernel_loads_and_stores_vectors() -> None:
    """A cast is stored as it is read along rows, 8 numbers per thread; no load or store is narrower than its tensor."""
    [kernel] = triton_kernels(
        generate(quantize_after("nothing", "delayed", "input", True, False), quantize_inputs(256, 1024)).kernels
    )
    assert kernel.compiled is not None
    assert kernel.compiled.fp8_store in kernel.compiled.stores
    assert kernel.compiled.fp8_store >= 4
    assert max(kernel.compiled.loads) >= 2 * kernel.compiled.fp8_store
    assert kernel.compiled.instructions > 50
    assert kernel.compiled.configuration.startswith("XBLOCK=")
    again = offline.compile_kernel(kernel.source, "sm_90", configuration=kernel.compiled.configuration)
    assert again == [kernel.compiled]
    assert offline.compile_kernel(kernel.source, "sm_90", configuration="XBLOCK=3 num_warps=1 num_stages=1") == []
    assert kernel.to_dict()["instructions"] == kernel.compiled.instructions
    json.dumps(kernel.to_dict())


def test_each_launch_has_its_own_bytes() -> None:
    """A combo node that becomes two launches: the first had the bytes of both."""

    def function(x: Tensor, y: Tensor, amaxes: Tensor) -> list[Tensor]:
        return [x + y, amaxes.amax(-1)]

    like = torch.empty(1024, 1024, device="meta")
    with inductor_config.patch({"combo_kernels": True}):
        found = triton_kernels(generate(function, [like, like, torch.empty(4, 4096, device="meta")]).kernels)
    assert [(kernel.name.split("_")[1], kernel.bytes) for kernel in sorted(found, key=lambda k: k.name)] == [
        ("poi", 3 * 2**22),
        ("red", 4 * 4096 * 4 + 4 * 4),
    ]


def test_bytes_of_what_is_written_in_place() -> None:
    """A buffer that is overwritten is not read, though the scheduler says that the kernel depends on it."""

    def function(x: Tensor, cache: Tensor) -> list[Tensor]:
        cache.copy_(x.to(cache.dtype))
        return []

    inputs = [torch.empty(1024, 512, dtype=dtype, device="meta") for dtype in (torch.float32, torch.bfloat16)]
    [kernel] = triton_kernels(generate(function, inputs).kernels)
    assert kernel.bytes == 1024 * 512 * (4 + 2)
