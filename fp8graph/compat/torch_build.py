"""The abilities of this build of torch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Final

import torch

# ``_scaled_grouped_mm`` is called in one way from torch 2.11 on: 2.14 and 2.15 also want contiguous offsets, which
# ``_grouped_mm`` of the program wants then, too. Kinds of scaling without a grouped GEMM, and why, in 2.11, 2.13,
# 2.14.1 and 2.15: their sources, and the texts in the libraries of the wheels.
WHY_NOT_GROUPED: Final[Mapping[str, str]] = {
    "block": "torch 2.11 to 2.15 has none (pytorch#177038 is one for CUDA 13.4)",
}

# Whether torch's CUTLASS kernels for one scale per row write results in fp16 and FP32. Before pytorch#187569 a result
# without a bias was bf16 whatever its tensor is, so that fp16 was silently wrong: the library of torch 2.11 has kernels
# without a bias for bf16 alone, that of 2.15 for all three. 2.13 and 2.14 count as 2.11: they were not looked at.
ROWS_IN_ALL_DTYPES: Final = torch.__version__ >= "2.15"
# Whether they are built (``BUILD_ROWWISE_FP8_KERNEL`` in RowwiseScaledMM.cu).
HAS_ROWS: Final = sys.platform != "win32"

# Whether AOTInductor's C++ for a CPU compiles with FP8 tensors: torch 2.11's does not declare their types.
PACKAGES_FP8_ON_CPU: Final = torch.__version__ >= "2.13"

# Whether C++ that Inductor generates rounds between fused operations (``emulate_precision_casts``).
CPP_ROUNDS_BETWEEN: Final = torch.__version__ >= "2.13"


@functools.cache
def multiplies_bf16_on_cpu() -> bool:
    """Return whether oneDNN has a bf16 GEMM for this CPU (AVX-512 or later; some Arm). torch's own loop takes far
    longer.
    """
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _numbers(version: str | None) -> tuple[int, ...] | None:
    return None if version is None else tuple(int(part) for part in version.split(".")[:2])


# The toolkits that torch was built with; None for a CPU build, which generates code for official CUDA builds.
CUDA_VERSION: Final = _numbers(torch.version.cuda)
ROCM_VERSION: Final = _numbers(torch.version.hip)


def traceable(device: torch.device) -> torch.device:
    """``device``, or meta in place of a GPU that this build of torch knows by name only.

    Indexing, ``.contiguous()`` and other Python-level methods of a fake CUDA tensor need a device guard, which a
    CPU build does not have (torch 2.11 to 2.15). Meta tensors follow a GPU's rules.
    """
    built = torch.accelerator.current_accelerator()
    is_there = device.type in ("cpu", "meta") or (built is not None and device.type == built.type)
    return device if is_there else torch.device("meta")
