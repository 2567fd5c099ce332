"""MADE-UP results, to test ``benchmarks.report``: no number in here was measured anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

R = 1.7
MACHINE = {
    "gpu": "made up", "torch": "0.0", "triton": "0.0", "transformers": "0.0", "torchao": "missing",
    "date": "2000-01-01T00:00:00", "commit": "made up", "cpu": "made up",
}  # fmt: skip
# contender -> (times as fast as bf16, after an update)
LINEARS = {
    "tensorwise": (1.55, 1.49), "delayed": (1.60, 1.57), "rowwise": (1.42, 1.38), "blockwise": (1.37, 1.33),
    "torchao tensorwise": (1.40, None), "tensorwise, no groups": (1.50, 1.45),
}  # fmt: skip
LAYERS = {
    "tensorwise": (1.36, 1.33), "delayed": (1.40, 1.38), "rowwise": (1.27, 1.24), "blockwise": (1.19, 1.16),
    "torchao tensorwise": (1.31, None),
}  # fmt: skip


def profile(ms: float, gemm: float) -> dict[str, Any]:
    shares = {"gemm": gemm, "triton": 0.9 - gemm, "attention": 0.08, "copy": 0.015, "other": 0.005}
    kernels = [
        ["nvjet_made_up", 6, 0.3 * ms],
        ["triton_red_fused_made_up_0", 2, 0.06 * ms],
        ["flash_made_up", 1, 0.05 * ms],
    ]
    return {
        "gpu_ms": ms, "launches": 40, "kernels": kernels,
        "by_kind_ms": {kind: share * ms for kind, share in shares.items()},
    }  # fmt: skip


def comparison(
    section: str, found: Mapping[str, tuple[float, float | None]], bf16_ms: float
) -> Iterator[dict[str, Any]]:
    yield {"section": section, "measure": "gemms", "scaling": "tensor", "bf16_ms": R, "fp8_ms": 1.0, "R": R}
    for name, (kept, updated) in {"bf16": (1.0, None), **found}.items():
        yield {
            "section": section, "contender": name, "measure": "alone", "host_ms": 1.0, "resident_mib": 100.0,
            "peak_mib": 200.0, "profile": profile(bf16_ms / kept, 0.75 if name == "bf16" else 0.62),
        }  # fmt: skip
        for weights, speedup in (("kept", kept), ("updated", updated)):
            if speedup:
                yield {
                    "section": section, "contender": name, "measure": "rounds", "weights": weights,
                    "wall_ms": bf16_ms / speedup, "speedup": speedup,
                }  # fmt: skip


def lines(*, worst: float = 0.97) -> Iterator[dict[str, Any]]:
    """One run; ``worst``: the lowest ratio of its sweep."""
    yield {"section": "run", "tiny": False, "machine": MACHINE}
    yield from comparison("linears", LINEARS, 27.0)
    yield from comparison("layers", LAYERS, 33.0)
    yield {"section": "layers", "contender": "torchao rowwise", "failed": "RuntimeError: made up"}
    for name, rate in (("bf16", 1000.0), ("tensorwise", 1310.0), ("torchao tensorwise", 1210.0)):
        yield {
            "section": "table", "contender": name, "tokens_per_s": rate, "peak_mib": 2000.0, "compile_s": 12.3,
            "watts": None, "losses": [2.0, 1.5],
        }  # fmt: skip
    for hidden, speedup in ((1024, 0.9), (1536, 1.1)):
        case = {"hidden": hidden, "tokens": 8192, "speedup": speedup, "predicted": {"a": 1.2, "b": 0.9}}
        yield {"section": "smallest", **case}
    yield {"section": "smallest", "tokens": 8192, "narrowest": 1536}
    for batch in (1, 32):
        for name, ms in (("bf16", 4.0), ("tensorwise", 3.2), ("rowwise", 3.0)):
            yield {
                "section": "decode", "contender": name, "batch": batch, "cuda_graphs": True, "layers": 8,
                "wall_ms": ms, "host_ms": 0.2, "skips": 0, "copied_inputs": 1, "checksum": 1.5,
            }  # fmt: skip
    for size in (2048, 4096, 14336):
        for index, tokens in enumerate((256, 1024, 8192)):
            for step, name in enumerate(("bf16", "tensorwise", "delayed", "rowwise")):
                ratio = 1.0 if name == "bf16" else worst + 0.25 * index + 0.08 * (step - 1) * (size / 8192)
                case = {"tokens": tokens, "inputs": 4096, "outputs": size, "contender": name}
                yield {"section": "sweep", **case, "gpu_ms": 1.0 / ratio}
    for mode in ("no_grad", "training forward"):
        for layers in (2, 8, 32):
            names = ("plain", "nothing in FP8", "tensorwise", "delayed, names bound")
            for extra, name in enumerate(names):
                us = 30 + (3 + 0.4 * extra) * layers
                case = {"layers": layers, "mode": mode, "contender": name}
                yield {"section": "host", **case, "us": us, "more_us": us - 30 - 3 * layers, "times_plain": 1.0}


def write(folder: Path, **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "20000101-000000.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines(**settings)), encoding="utf-8")
    return folder
