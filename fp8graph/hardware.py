"""What a device can multiply: native FP8 GEMMs or emulation.

Per-tensor FP8 from sm_89 (Ada). On CPU torch has a reference ``_scaled_mm``: right numbers, no speed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from fp8graph.errors import PolicyError


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device, as far as FP8 is concerned."""

    name: str  # "cpu", "sm_90", "sm_100", or the device type
    tensorwise_fp8: bool  # torch._scaled_mm with one FP32 scale per tensor
    why_not: str = ""  # the reason for emulation, for the report


def from_target(target: str) -> Hardware:
    """The hardware named by ``target``: "cpu" or "sm_XX".

    Raises:
        PolicyError: (a ``ValueError``) for anything else.
    """
    if target == "cpu":
        return Hardware(name="cpu", tensorwise_fp8=True)
    match = re.fullmatch(r"sm_(\d+)(\d)a?", target) if isinstance(target, str) else None
    if match is None:
        raise PolicyError(f"target must be 'cpu' or like 'sm_90', not {target!r}.")
    capability = (int(match[1]), int(match[2]))
    if capability >= (8, 9):
        return Hardware(name=target, tensorwise_fp8=True)
    return Hardware(name=target, tensorwise_fp8=False, why_not=f"{target} has no FP8 GEMM")


def of_device(device: torch.device) -> Hardware:
    """The hardware behind ``device``."""
    if device.type == "cpu":
        return from_target("cpu")
    if device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        return from_target(f"sm_{major}{minor}")
    return Hardware(name=device.type, tensorwise_fp8=False, why_not=f"no FP8 GEMM known for device {device.type!r}")
