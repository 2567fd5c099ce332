"""Inductor's code for a GPU that need not be present: kernels, their launches, their machine code."""

from fp8graph.offline.fake_gpu import fake_gpu
from fp8graph.offline.generate import OfflineInductor, available
from fp8graph.offline.kernels import KernelRecord, compile_kernel

__all__ = ["KernelRecord", "OfflineInductor", "available", "compile_kernel", "fake_gpu"]
