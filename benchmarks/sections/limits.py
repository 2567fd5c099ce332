"""``facts``, ``gemm``: what the machine can do; and the GEMMs of a model alone, in bf16 and in FP8."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.measure import DEVICE
from benchmarks.records import Run
from fp8graph.recipes import GEMMS, resolve_recipe
from fp8graph.tools.record.machine import MIB, clocks

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
Scaling = Literal["tensor", "row", "block"]
RECIPE_OF: Final[dict[Scaling, str]] = {"tensor": "tensorwise", "row": "rowwise", "block": "blockwise"}

# (m, n, k) of one Llama-3-8B layer, 8192 tokens: fprop of q (o is the same), gate and up, down; dgrad of down, gate and
# up, and of q, k and v; wgrad of gate and up, down, and of q, k and v; k or v alone
LAYER: Final = (
    (8192, 4096, 4096), (8192, 28672, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (8192, 4096, 28672),
    (8192, 4096, 6144), (28672, 4096, 8192), (4096, 14336, 8192), (6144, 4096, 8192), (8192, 1024, 4096),
)  # fmt: skip
LINEARS: Final = ((15872, 12288, 4096), (15872, 4096, 16384), (15872, 16384, 4096), (16384, 4096, 15872))
SQUARE: Final = ((8192, 8192, 8192), (8192, 28672, 8192))
FEW_ROWS: Final = tuple(
    (m, n, k)
    for n, k in ((4096, 4096), (28672, 4096), (4096, 14336), (6144, 4096), (2048, 2048))
    for m in (1, 8, 16, 64, 128, 256, 512, 1024, 2048)
)


def facts(run: Run) -> None:
    """Clocks, and the bandwidth of a copy."""
    size = 2**12 if run.tiny else 2**29
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    ms = measure.replayed_ms(lambda: target.copy_(source))
    run.write("facts", copied_mib=size / MIB, copy_tb_s=2e-9 * size / ms, clocks=clocks())


def fp8_data(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * 20).to(dtype)


def bf16_gemm(m: int, n: int, k: int, count: int = 2) -> Callable[[], Any]:
    """``count`` GEMMs [m, k] x [n, k] of random numbers, with operands of their own."""
    pairs = [tuple(torch.randn(rows, k, device=DEVICE, dtype=BF16) for rows in (m, n)) for _ in range(count)]
    return lambda: [a @ b.t() for a, b in pairs]


def fp8_gemm(
    m: int,
    n: int,
    k: int,
    scaling: Scaling,
    fast: bool,
    *,
    dtype: torch.dtype = E4M3,
    tiles_of_b: bool = True,
    count: int = 2,
) -> Callable[[], Any]:
    """The same in FP8, by torch's own op and with the layouts that ``numerics.scaled_mm`` gives it.

    Args:
        fast: accumulate inside the tensor cores, in fewer bits.
        dtype: of a.
        tiles_of_b: under block scaling: 128x128, as weights have them; False: 1x128, as in wgrad.
    """
    pairs = [(fp8_data(m, k, dtype=dtype), fp8_data(n, k)) for _ in range(count)]
    if DEVICE.type == "cpu" and scaling != "tensor":  # torch multiplies no tiles there, and before 2.12 no rows
        return lambda: [a.to(BF16) @ b.to(BF16).t() for a, b in pairs]
    tiles = -(-k // 128)
    if scaling == "tensor":
        scales = (torch.ones((), device=DEVICE),) * 2
    elif scaling == "row":
        scales = torch.ones(m, 1, device=DEVICE), torch.ones(1, n, device=DEVICE)
    else:
        of_b = torch.ones(-(-n // 128), tiles, device=DEVICE).t()  # [k / 128, n / 128], strides (1, k / 128)
        if not tiles_of_b:
            of_b = torch.ones(tiles, n, device=DEVICE)  # [k / 128, n] row-major
        scales = torch.ones(tiles, m, device=DEVICE).t(), of_b  # [m, k / 128], strides (1, m)
    return lambda: [
        torch._scaled_mm(a, b.t(), *scales, out_dtype=BF16, use_fast_accum=fast)  # b: [k, n] column-major
        for a, b in pairs
    ]


def variants(m: int, n: int, k: int) -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
    yield "bf16", lambda: bf16_gemm(m, n, k)
    for fast in (True, False):
        name = "fast" if fast else "split"
        yield f"tensor {name}", lambda fast=fast: fp8_gemm(m, n, k, "tensor", fast)
        yield f"tensor e5m2 {name}", lambda fast=fast: fp8_gemm(m, n, k, "tensor", fast, dtype=E5M2)
        yield f"row {name}", lambda fast=fast: fp8_gemm(m, n, k, "row", fast)
    if m % 4 == 0:
        yield "block 1x128, 128x128", lambda: fp8_gemm(m, n, k, "block", False)
        yield "block 1x128, 1x128", lambda: fp8_gemm(m, n, k, "block", False, tiles_of_b=False)


def gemm(run: Run) -> None:
    """Rates of what the passes emit."""
    for m, n, k in ((64, 64, 128),) if run.tiny else LAYER + LINEARS + SQUARE + FEW_ROWS:
        for name, make in variants(m, n, k):
            if run.late():
                return run.write("gemm", m=m, n=n, k=k, stopped="the section's time is over")
            with run.attempt("gemm", m=m, n=n, k=k, variant=name):
                ms = measure.replayed_ms(make(), 4 if m > 2048 else 20) / 2
                run.write("gemm", m=m, n=n, k=k, variant=name, gpu_ms=ms, tflops=2e-9 * m * n * k / ms)
    return None


Gemms = Callable[[], dict[str, Callable[[], Any]]]  # makes operands, and returns the calls


def gemms_of(tokens: int, sizes: Sequence[tuple[int, int]], recipes: Collection[str]) -> dict[str, Gemms]:
    """Return, by the scalings of ``recipes``, the GEMMs of linears [tokens, inputs] -> [tokens, outputs] alone.

    In bf16 and in FP8, each GEMM with the accumulation and the dtypes of the scaling's recipe. Their ratio, R, is the
    limit of what FP8 can gain where nothing else takes time.
    """
    bf16: list[Callable[[], Any]] = []

    def made(scaling: Scaling) -> dict[str, Callable[[], Any]]:
        recipe: Any = resolve_recipe(RECIPE_OF[scaling])
        calls: list[Callable[[], Any]] = []
        is_first = not bf16
        for inputs, outputs in sizes:
            shapes = (tokens, outputs, inputs), (tokens, inputs, outputs), (outputs, inputs, tokens)
            for (m, n, k), gemm, fast in zip(shapes, GEMMS, recipe.use_fast_accum, strict=True):
                dtype = recipe.quantizer("input" if gemm == "fprop" else "grad_output").dtype
                tiles = gemm != "wgrad"
                calls.append(fp8_gemm(m, n, k, scaling, fast, dtype=dtype, tiles_of_b=tiles, count=1))
                if is_first:
                    bf16.append(bf16_gemm(m, n, k, count=1))
        return {"bf16": lambda: [call() for call in bf16], scaling: lambda: [call() for call in calls]}

    chosen = {scaling for scaling, name in RECIPE_OF.items() if any(r.partition(",")[0] == name for r in recipes)}
    if "delayed" in recipes:
        chosen.add("tensor")
    return {scaling: lambda scaling=scaling: made(scaling) for scaling in RECIPE_OF if scaling in chosen}
