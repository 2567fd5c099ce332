"""The records of one graph."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from fp8graph.hardware.roofline import gemm_seconds
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.nodes import GROUPED, matmul_arguments, size_hint, value
from fp8graph.ir.sites import Gemm, Site
from fp8graph.records import GemmRecord


def gemm_records(compilation: Compilation) -> list[GemmRecord]:
    """The rows of one graph. Called before the matmul nodes are replaced."""
    return [_record(site, gemm, compilation) for site in compilation.sites for gemm in site.gemms]


def with_groups(records: Sequence[GemmRecord], compilation: Compilation) -> list[GemmRecord]:
    """The records of one graph, each with the GEMMs that it was fused with, and the gradient that it is added to."""
    result: list[GemmRecord] = []
    for record in records:
        others = compilation.fused.get((record.fqn, record.index, record.gemm), ())
        more = f"; one GEMM with {', '.join(others)}" if others else ""
        if record.gemm == "wgrad" and (added := compilation.accumulated.get((record.fqn, record.index))):
            record = dataclasses.replace(record, dtypes=(*record.dtypes[:2], "fp32"))
            more += f"; {added}"
        result.append(dataclasses.replace(record, reason=record.reason + more))
    return result


def _record(site: Site, gemm: Gemm, compilation: Compilation) -> GemmRecord:
    decision = compilation.decisions[gemm.node]
    out = value(gemm.node)
    a, b = map(value, matmul_arguments(gemm.node))
    dtypes = [short(a.dtype), short(b.dtype)]
    bits = [8 * a.itemsize, 8 * b.itemsize]
    if decision.recipe is not None:
        device = compilation.hardware_of(gemm.node)
        stored = [device.quantizer(decision.recipe, view.operand).dtype for view in (gemm.a, gemm.b)]
        dtypes = ["fp4" if dtype == torch.uint8 else short(dtype) for dtype in stored]  # two in one uint8
        bits = [4 if dtype == torch.uint8 else 8 for dtype in stored]
    sizes = [size if isinstance(size, int) else str(size) for size in (*out.shape[-2:], a.shape[-1])]
    m, n, k = map(size_hint, (*out.shape[-2:], a.shape[-1]))
    batch = 1 if gemm.node.target in GROUPED else math.prod(map(size_hint, out.shape[:-2]))  # groups share k or m
    return GemmRecord(
        fqn=site.fqn,
        index=site.index,
        op=site.op,
        gemm=gemm.gemm,
        m=sizes[0],
        n=sizes[1],
        k=sizes[2],
        flops=2 * batch * m * n * k,
        recipe=decision.recipe.name if decision.recipe is not None else None,
        reason=decision.reason,
        dtypes=(dtypes[0], dtypes[1], short(out.dtype)),
        execution=decision.execution,
        required=decision.required,
        by_profitability=decision.by_profitability,
        speedup=decision.speedup,
        rule=decision.resolution.rule,
        seconds=_seconds(gemm, (m, n, k), batch, compilation),
        bytes_read=sum(math.prod(map(size_hint, x.shape)) * of // 8 for x, of in zip((a, b), bits, strict=True)),
    )


def _seconds(gemm: Gemm, sizes: tuple[int, int, int], batch: int, compilation: Compilation) -> float | None:
    """The predicted time in high precision, if the device has a speed model and FP8 is not emulated."""
    speed, dtype = compilation.hardware_of(gemm.node).speed, value(gemm.node).dtype
    emulated = compilation.decisions[gemm.node].execution == "emulated"
    if speed is None or emulated or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    if compilation.known.settings.cuda_graphs:
        speed = speed.replayed()
    return gemm_seconds(speed, *sizes, dtype, batch=batch)


def short(dtype: torch.dtype) -> str:
    """A dtype as reports write it: e4m3, bf16, fp32."""
    name = str(dtype).removeprefix("torch.").removeprefix("float8_")
    return {"e4m3fn": "e4m3", "bfloat16": "bf16"}.get(name, name.replace("float", "fp"))
