"""The kernels of one configuration: what they compute, in Triton's interpreter, and what they need of a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8graph import offline
from helpers import first_fast

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not offline.available(), reason="triton is not installed")


@first_fast(("cases", "count"), [("some", 2 + 1), ("all", 20 + 12)])
@pytest.mark.skipif(torch.__version__ < "2.13", reason="triton 3.6's interpreter fails with numpy 2.4")
def test_kernels_compute_what_a_cpu_does_and_a_row_alike_in_any_batch(cases: str, count: int) -> None:
    """GEMMs of all scalings and orders of scales, groups, sums, and attention with its gradients."""
    path = os.pathsep.join(map(str, (ROOT / "tests" / "support", ROOT, os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "interpreted_rows", cases],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == count
    assert [each["case"] for each in results if not each["same"]] == []
    assert [each["case"] for each in results if each["error"] > (1e-2 if "bfloat16" in each["case"] else 1e-6)] == []


# a kernel, types of its pointers, its constants; others are integers of any size
FP8, BF16, FP32, INT32 = "*fp8e4nv", "*bf16", "*fp32", "*i32"
ATTENTION = {
    **dict.fromkeys(("q", "k", "v", "out", "grad", "dq", "dk", "dv"), BF16),
    **{"mask": FP32, "logsumexp": FP32, "firsts": INT32, "ends": INT32, "stops": INT32, "scale": "fp32"},
}
OF_MASKS = {"causal": True, "masked": True, "key_mask": 1}
GEMM = {"out": BF16, "bias": BF16, "scales_a": FP32, "scales_b": FP32, "ends": INT32}
TILES = {"biased": True, "lines_a": 1, "depth_a": 1}
OF_BATCHES = ("rows", "groups", "queries", "keys", "row_mask", "head_mask", "batch_mask", "batch_first")


def gemm(kind: str, scales: str, step: int, *, of_b: str = "", **more: Any) -> tuple[str, Any, Any]:
    constants = {"grouped": False, "scales": scales, "step": step, "lines_b": 128 if step == 128 else 1, **TILES}
    return "_multiply", {"a": kind, "b": of_b or kind, **GEMM}, constants | more


KERNELS: dict[str, tuple[str, Any, Any]] = {
    "bf16": gemm(BF16, "", 64, depth_b=1),
    "bf16, dgrad": gemm(BF16, "", 64, column_b=1),
    "rowwise, dgrad": gemm("*fp8e5", "row", 128, of_b=FP8, depth_b=1),
    "rowwise, groups": gemm(FP8, "row", 128, grouped=True, depth_b=1),
    "blockwise": gemm(FP8, "tile", 128, depth_b=1),
    "mxfp8": gemm(FP8, "tile", 32, depth_b=1),
    "attention": ("_attend", ATTENTION, {**OF_MASKS, "backward": False}),
    "dq": ("_attend", ATTENTION, {**OF_MASKS, "backward": True}),
    "dk and dv": ("_attend_to_keys", ATTENTION, OF_MASKS),
    "sum": ("_sum", {"x": FP32, "out": FP32}, {}),
}
UNITS = {90: "wgmma.mma_async", 89: "mma.sync", 100: "tcgen05.mma", 120: "mma.sync"}  # instructions of the tensor cores


OF_ALL = ("rowwise, dgrad", "blockwise", "dk and dv")  # on all GPUs; the others on sm_90


@first_fast(("name", "capability"), [(x, gpu) for gpu in UNITS for x in (KERNELS if gpu == 90 else OF_ALL)])
def test_kernels_are_compiled_for_tensor_cores(name: str, capability: int) -> None:
    """They fit into the shared memory of a card. Registers go to the stack in the backward of attention alone."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fp8graph.numerics import row_kernels
    from fp8graph.offline.kernels import _read

    attribute, types, constants = KERNELS[name]
    kernel, attends = getattr(row_kernels, attribute), attribute.startswith("_attend")
    launch = row_kernels.of_heads(128, 128, 2) if attends else row_kernels.SUM if name == "sum" else row_kernels.GEMM
    options = {option: value for option, value in launch.items() if option not in kernel.arg_names}
    constants = constants | {each: value for each, value in launch.items() if each in kernel.arg_names}
    assert {each for each in OF_BATCHES if each in kernel.arg_names} == set(kernel.do_not_specialize or ())
    signature = {each: "constexpr" if each in constants else types.get(each, "i32") for each in kernel.arg_names}
    aligned = [each for each, kind in signature.items() if kind != "constexpr" and each not in (*OF_BATCHES, "scale")]
    attributes = {(kernel.arg_names.index(each),): [["tt.divisibility", 16]] for each in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    made: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    given = [kind for kind in signature.values() if kind != "constexpr"]
    code = _read(made.asm["cubin"], made.asm["ptx"], given, shared=made.metadata.shared, configuration="")
    assert code.shared <= 101_376  # of sm_89 and sm_12x; sm_90 and sm_100 have more than twice as much
    assert bool(re.search(UNITS[capability], code.ptx)) == (name != "sum")
    assert not re.findall(r"^\s*(?:@\S+ )?(?:red|atom)\.", code.ptx, re.MULTILINE)
    assert code.spills <= (512 if attends else 64)
