"""Let Inductor and triton find a GPU that is not there."""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Generator
from typing import Any, Final
from unittest import mock

import torch
import torch.cuda

from fp8graph.compat import dynamo, inductor
from fp8graph.errors import Fp8GraphError

# The properties that Inductor reads from torch.cuda.get_device_properties, of L40S, H100/H200 SXM, B200, RTX 5090.
_MULTIPROCESSORS: Final = {8: 142, 9: 132, 10: 148, 12: 170}
# Threads per multiprocessor and bytes of shared memory per block of compute capability 8.9 and 12.x (CUDA's programming
# guide, "Technical Specifications per Compute Capability"), and of 9.0 and 10.x.
_SMALL: Final = {"max_threads_per_multi_processor": 1536, "shared_memory_per_block_optin": 101_376}
_LARGE: Final = {"max_threads_per_multi_processor": 2048, "shared_memory_per_block_optin": 232_448}


def capability(target: str) -> tuple[int, int]:
    """9 and 0 of "sm_90".

    Raises:
        Fp8GraphError: for other vendors' GPUs.
    """
    match = re.fullmatch(r"sm_(\d+)(\d)a?", target)
    if match is None:
        raise Fp8GraphError(
            f"kernels for {target} cannot be generated without that GPU, only those for NVIDIA's (target='sm_90'). "
            f"The decisions and the graphs of the report are for {target}."
        )
    return int(match[1]), int(match[2])


@contextlib.contextmanager
def fake_gpu(target: str) -> Generator[None]:
    """Let Inductor and triton find a GPU of kind ``target`` inside a ``with``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    major, minor = capability(target)
    properties = types.SimpleNamespace(
        name=target,
        major=major,
        minor=minor,
        multi_processor_count=_MULTIPROCESSORS.get(major, 132),
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_block=1024,
        shared_memory_per_block=49152,
        total_memory=80 << 30,
        L2_cache_size=50 << 20,
        gcnArchName="",
        **(_SMALL if (major, minor) == (8, 9) or major == 12 else _LARGE),
    )

    def answer(result: Any) -> Any:
        return staticmethod(lambda *_, **__: result)  # pyright: ignore[reportUnknownLambdaType]

    cuda = dynamo.cuda_interface()

    class Worker(cuda.Worker):
        current_device: Any = answer(0)
        get_device_properties: Any = answer(properties)

    members = {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_properties": properties,
        "get_compute_capability": 10 * major + minor,
        "is_bf16_supported": True,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
    }
    functions = {name: answer(result) for name, result in members.items()}
    interface = type("OfflineCuda", (cuda,), {**functions, "Worker": Worker})

    class Driver(CudaDriver):  # it knows its target, but cannot load or launch anything
        def __init__(self) -> None: ...

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 10 * major + minor, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: Any = None) -> int:
            return 0

    driver = triton.runtime.driver
    active = driver._active
    with contextlib.ExitStack() as stack:
        replacements = {
            "get_device_properties": properties,
            "get_device_capability": (major, minor),
            "get_device_name": target,
        }
        for name, result in replacements.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer(result)))
        stack.enter_context(inductor.without_triton_driver())
        stack.enter_context(dynamo.cuda_answered_by(interface))
        try:
            driver.set_active(Driver())
            inductor.forget_device_facts()
            yield
        finally:
            driver._active = active
            inductor.forget_device_facts()
