"""The measurements of a first hour on a GPU: ``python -m benchmarks.first_hour [SECTION ...] [--budget SECONDS]``.

    facts    copy bandwidth, clocks                          linears  the four linears of a layer, beside torchao
    gemm     rates of the GEMMs that the passes emit         layers   two Llama-3-8B layers, causal attention
    quant    bandwidth of the kernels that quantize          decode   one token, with and without CUDA graphs
    sweep    one linear, 256 ... 8192 tokens                 train    steps with fused AdamW
    host     host time of a call against layers (on any machine)
    smallest the narrowest Llama layer whose training step is faster in FP8
    table    Llama-3-8B trained whole: tokens per second, memory, compile time, power; beside torchao

Each measurement is one JSON line of FOLDER/<UTC time>.jsonl, written at once. What fails is a line, and the next goes
on. The sections share the budget evenly; what one leaves, the others get. ``benchmarks.report`` makes tables of the
lines. ``--tiny`` runs everything in small on any machine, to try the scripts: it generates no code without
``--compiler inductor``, and writes no file without ``--out``.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

import fp8graph
from benchmarks import records
from benchmarks.records import RESULTS, Run
from benchmarks.sections import host, inference, limits, quantization, training, whole

SECTIONS: Final[dict[str, Callable[[Run], None]]] = {
    "facts": limits.facts, "gemm": limits.gemm, "quant": quantization.quant, "linears": training.linears,
    "layers": training.layers, "decode": inference.decode, "train": training.train, "sweep": training.sweep,
    "host": host.host, "table": whole.table,
    "smallest": training.smallest,
}  # fmt: skip
ANYWHERE: Final = ("host",)  # the others measure a GPU
RECOMPILE_LIMIT: Final = 256  # contenders share one forward: with torch's 8 the ninth would run in eager, silently


def fp8_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def run_sections(run: Run, names: Sequence[str], sections: dict[str, Callable[[Run], None]] = SECTIONS) -> None:
    """All of ``names``, until the budget is over. Nothing that happens in a section ends the run."""
    with run.attempt("run"), run.limited(), torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
        for index, name in enumerate(names):
            if run.seconds >= run.budget:
                run.write(name, stopped="the run's time is over")
                continue
            if not (run.tiny or fp8_gpu() or name in ANYWHERE):
                run.write(name, skipped="no GPU with FP8 here")
                continue
            run.begin_section(len(names) - index)
            torch._dynamo.reset()
            torch.manual_seed(0)
            start = run.seconds
            with run.attempt(name):
                sections[name](run)
            run.write(name, section_s=round(run.seconds - start, 1))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="benchmarks.first_hour"
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)} (all)")
    parser.add_argument("--budget", type=float, default=560, metavar="SECONDS", help="for everything (560)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="(benchmarks/results/first_hour)")
    parser.add_argument("--tiny", action="store_true", help="small sizes on any machine")
    parser.add_argument("--compiler", choices=("inductor", "eager"), help="eager: no generated code (with --tiny)")
    chosen: Any = parser.parse_args(arguments)
    names = chosen.sections or list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"there is no section {unknown[0]!r}, only {', '.join(SECTIONS)}")
    folder = chosen.out or (None if chosen.tiny else RESULTS / "first_hour")
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    path = None if folder is None else folder / f"{stamp}.jsonl"
    compiler = chosen.compiler or ("eager" if chosen.tiny else "inductor")
    run = Run(path, budget=chosen.budget, tiny=chosen.tiny, compiler=compiler)
    run.write(
        "run", machine=records.machine(), fp8graph=fp8graph.__version__, sections=names, budget_s=chosen.budget,
        tiny=chosen.tiny, compiler=compiler,
    )  # fmt: skip
    run_sections(run, names)
    if path is not None:
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
