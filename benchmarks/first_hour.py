"""The measurements of a first hour on a GPU: ``python -m benchmarks.first_hour [SECTION[:SECONDS] ...] [--only NAME]``.

    facts    copy bandwidth, clocks                          linears  the four linears of a layer, beside torchao
    gemm     rates of the GEMMs that the passes emit         layers   two Llama-3-8B layers, causal attention
    quant    bandwidth of the kernels that quantize          decode   one token, with and without CUDA graphs
    sweep    one linear, 256 ... 8192 tokens                 train    steps with fused AdamW
    host     host time of a call against layers (on any machine)
    smallest one narrow Llama layer, with and without CUDA graphs
    table    Llama-3-8B trained whole on text: tokens per second, memory, compile time, power; beside torchao

Each measurement is one JSON line of FOLDER/<UTC time>.jsonl, written at once. What fails is a line, and the next goes
on. CUDA, cuDNN and Inductor's workers are started before anything is timed. A section takes its SECONDS; those without
share what the budget leaves. ``benchmarks.report`` makes tables of the lines. A checkout with changed files is refused:
no commit would reproduce its numbers. ``--tiny`` runs everything in small on any machine, to try the scripts: it
generates no code without ``--compiler inductor``, and writes no file without ``--out``.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

import fp8graph
from benchmarks.measure import DEVICE
from benchmarks.records import RESULTS, Run
from benchmarks.sections import host, inference, limits, quantization, training, whole
from fp8graph.errors import ConfigError, did_you_mean
from fp8graph.tools.record.contenders import CONTENDERS
from fp8graph.tools.record.machine import refuse_changed_tree, this_machine, warm_up

SECTIONS: Final[dict[str, Callable[[Run], None]]] = {
    "facts": limits.facts, "gemm": limits.gemm, "quant": quantization.quant, "linears": training.linears,
    "layers": training.layers, "decode": inference.decode, "train": training.train, "sweep": training.sweep,
    "host": host.host, "table": whole.table,
    "smallest": training.smallest,
}  # fmt: skip
# the names that --only takes, by section
OF_SECTION: Final[dict[str, Callable[[Run], Iterable[str]]]] = {
    "linears": training.linears_contenders, "layers": training.layers_contenders, "table": lambda _: CONTENDERS,
    "decode": lambda _: inference.names(), "sweep": training.sweep_contenders, "train": training.train_contenders,
    "smallest": training.smallest_contenders,
}  # fmt: skip
ANYWHERE: Final = ("host",)  # the others measure a GPU
RECOMPILE_LIMIT: Final = 256  # contenders share one forward: with torch's 8 the ninth would run in eager, silently


def fp8_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def run_sections(
    run: Run, shares: dict[str, float | None], sections: dict[str, Callable[[Run], None]] = SECTIONS
) -> None:
    """Run the sections of ``shares`` (their seconds) until the budget is over; no error in a section ends the run."""
    names = list(shares)
    with run.attempt("run"), run.limited(), torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
        for index, name in enumerate(names):
            if run.seconds >= run.budget:
                run.write(name, stopped="the run's time is over")
                continue
            if not (run.tiny or fp8_gpu() or name in ANYWHERE):
                run.write(name, skipped="no GPU with FP8 here")
                continue
            run.begin_section(len(names) - index, shares[name])
            torch.compiler.reset()
            torch.manual_seed(0)
            start = run.seconds
            with run.attempt(name):
                sections[name](run)
            run.write(name, section_s=round(run.seconds - start, 1))


def shares_of(texts: Sequence[str]) -> dict[str, float | None]:
    """Return the seconds of each section: "layers:115" has them, and "layers" shares what is left.

    Raises:
        ConfigError: there is no such section, or its seconds are no number.
    """
    shares: dict[str, float | None] = {}
    for text in texts:
        name, _, seconds = text.partition(":")
        if name not in SECTIONS:
            raise ConfigError(
                f"there is no section {name!r}.{did_you_mean(name, SECTIONS)} There are: {', '.join(SECTIONS)}."
            )
        try:
            shares[name] = float(seconds) if seconds else None
        except ValueError:
            raise ConfigError(f"{text}: the seconds of a section are a number, like layers:115.") from None
    return shares or dict.fromkeys(SECTIONS)


def check_only(run: Run, names: Iterable[str]) -> None:
    """Raise ConfigError for a contender that no section of ``names`` has: it would measure nothing, silently."""
    contenders = {contender for name in names if name in OF_SECTION for contender in OF_SECTION[name](run)}
    for name in run.only:
        if name not in contenders:
            have = ", ".join(sorted(contenders))
            raise ConfigError(
                f"no section here has a contender {name!r}.{did_you_mean(name, contenders)} They have: {have}."
            )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="benchmarks.first_hour"
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION[:SECONDS]", help=f"of {', '.join(SECTIONS)} (all)")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a contender; repeatable (all)")
    parser.add_argument("--widths", type=int, nargs="+", default=[], metavar="N", help="the hidden sizes of smallest")
    parser.add_argument("--budget", type=float, default=560, metavar="SECONDS", help="for everything (560)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="(benchmarks/results/first_hour)")
    parser.add_argument("--any-tree", action="store_true", help="measure changed files too; it is not published")
    parser.add_argument("--tiny", action="store_true", help="small sizes on any machine")
    parser.add_argument("--compiler", choices=("inductor", "eager"), help="eager: no generated code (with --tiny)")
    chosen: Any = parser.parse_args(arguments)
    folder = chosen.out or (None if chosen.tiny else RESULTS / "first_hour")
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    path = None if folder is None else folder / f"{stamp}.jsonl"
    compiler = chosen.compiler or ("eager" if chosen.tiny else "inductor")
    run = Run(path, budget=chosen.budget, tiny=chosen.tiny, compiler=compiler, only=chosen.only, widths=chosen.widths)
    try:
        shares = shares_of(chosen.sections)
        check_only(run, shares)
        if not (chosen.tiny or chosen.any_tree):
            refuse_changed_tree()
    except ConfigError as error:
        parser.error(str(error))
    run.write(
        "run", machine=this_machine(), fp8graph=fp8graph.__version__, sections=shares, only=run.only,
        budget_s=chosen.budget, tiny=chosen.tiny, compiler=compiler,
    )  # fmt: skip
    if any(name not in ANYWHERE for name in shares):
        run.write("warm_up", seconds=warm_up(DEVICE, "inductor" if compiler == "inductor" else "aot_eager"))
    run_sections(run, shares)
    if path is not None:
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
