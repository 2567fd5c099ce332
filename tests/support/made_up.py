"""MADE-UP results, to test ``benchmarks.report``: no number in here was measured anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Line = dict[str, Any]

R = 1.7
MACHINE = {
    "gpu": "made up", "torch": "0.0", "triton": "0.0", "transformers": "0.0", "torchao": "0.0",
    "date": "2000-01-01T00:00:00", "commit": "made up", "cpu": "made up",
}  # fmt: skip
# contender -> times as fast as bf16
LINEARS = {
    "tensorwise": 1.55, "delayed": 1.60, "rowwise": 1.42, "blockwise": 1.37, "torchao tensorwise": 1.40,
    "tensorwise, no groups": 1.50,
}  # fmt: skip
LAYERS = {"tensorwise": 1.36, "delayed": 1.40, "rowwise": 1.27, "blockwise": 1.19, "torchao tensorwise": 1.31}
TRAINED = {"bf16": 1000.0, "tensorwise": 1310.0, "torchao tensorwise": 1210.0}  # tokens per second


def profile(ms: float, gemm: float) -> Line:
    """Return the kernels of ``ms`` milliseconds, of which GEMMs take the share ``gemm``."""
    shares = {"gemm": gemm, "triton": 0.9 - gemm, "attention": 0.08, "copy": 0.015, "other": 0.005}
    kernels = [
        ["nvjet_made_up", 6, 0.3 * ms],
        ["triton_red_fused_made_up_0", 2, 0.06 * ms],
        ["cudnn_made_up", 1, 0.05 * ms],
    ]
    return {
        "gpu_ms": ms, "launches": 40, "kernels": kernels, "cpu": [["aten::made_up", 3, 0.25]],
        "by_kind_ms": {kind: share * ms for kind, share in shares.items()},
    }  # fmt: skip


def run(**machine: Any) -> Line:
    """Return the first line of a run."""
    return {"section": "run", "tiny": False, "machine": MACHINE | machine}


def comparison(section: str, ratios: Mapping[str, float], bf16_ms: float) -> Iterator[Line]:
    """Yield ``linears`` or ``layers``, bf16 first."""
    yield {"section": section, "measure": "gemms", "scaling": "tensor", "bf16_ms": R, "fp8_ms": 1.0, "R": R}
    for name in ("bf16", "tensor"):
        yield {"section": section, "contender": f"GEMMs alone, {name}", "measure": "rounds", "wall_ms": 1.0}
    for name, ratio in {"bf16": 1.0, **ratios}.items():
        ms = bf16_ms / ratio
        yield {
            "section": section, "contender": name, "measure": "alone", "host_ms": 1.0, "events_ms": 0.99 * ms,
            "resident_mib": 100.0, "peak_mib": 200.0, "profile": profile(ms, 0.75 if name == "bf16" else 0.62),
        }  # fmt: skip
        yield {
            "section": section, "contender": name, "measure": "rounds", "rounds_ms": [0.98 * ms, ms, 1.029 * ms],
            "wall_ms": ms, "low_ms": 0.98 * ms, "high_ms": 1.029 * ms, "watts": 650.4, "sm_mhz": 1500.0,
        }  # fmt: skip


def trained(rates: Mapping[str, float], **values: Any) -> Iterator[Line]:
    """Yield the rows of a whole model: tokens per second by contender."""
    for name, rate in rates.items():
        yield {
            "section": "table", "model": "llama-3-8b", "contender": name, "tokens": 8192, "tokens_per_s": rate,
            "peak_mib": 2000.0, "resident_mib": 1000.0, "compile_s": 12.3, "watts": 690.0, "sm_mhz": None,
            "optimizer": "AdamW", "text": "made up", "losses": [9.0 - step / 10 for step in range(33)],
            "flop_per_token": {"titan": 6e9, "megatron": 5e9}, "peak_flops": 1e13, **values,
        }  # fmt: skip


def lines(*, worst: float = 0.97) -> Iterator[Line]:
    """Yield one run; ``worst``: the lowest ratio of its sweep."""
    yield run()
    yield from comparison("linears", LINEARS, 27.0)
    yield from comparison("layers", LAYERS, 33.0)
    yield {"section": "layers", "contender": "torchao rowwise", "failed": "RuntimeError: made up"}
    yield {"section": "layers", "contender": "made up", "skipped": "it is not installed"}
    yield {"section": "layers", "contender": "tensorwise, save memory", "stopped": "the section's time is over"}
    yield from trained(TRAINED)
    for hidden, ratio in ((1024, 0.9), (1536, 1.1)):
        for graphs, ms in (("", 4.0), (", CUDA graphs", 2.0)):
            case = {"section": "smallest", "hidden": hidden, "tokens": 8192}
            measured = {"events_ms": ms, "host_ms": 1.0, "launches": 40}
            yield {**case, "contender": f"bf16{graphs}", "wall_ms": ms, **measured}
            yield {**case, "contender": f"tensorwise{graphs}", "wall_ms": ms / ratio, **measured}
        yield {**case, "contender": "tensorwise, where it pays", "wall_ms": 4.0 / max(ratio, 0.99), **measured}
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
                yield {"section": "sweep", **case, "wall_ms": 2.0 / ratio, "gpu_ms": 1.0 / ratio}
    for mode in ("no_grad", "training forward"):
        for layers in (2, 8, 32):
            names = ("plain", "nothing in FP8", "tensorwise", "delayed, names bound")
            for extra, name in enumerate(names):
                us = 30 + (3 + 0.4 * extra) * layers
                case = {"layers": layers, "mode": mode, "contender": name}
                times = us / (30 + 3 * layers)
                yield {"section": "host", **case, "us": us, "more_functions": 9 * extra, "times_plain": times}


def write_lines(folder: Path, name: str, of_run: Iterable[Line]) -> None:
    """Write the file of one run."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in of_run)
    (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def write(folder: Path, **settings: Any) -> Path:
    """Write a folder with one run."""
    write_lines(folder, "20000101-000000", lines(**settings))
    return folder
