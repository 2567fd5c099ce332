"""``fp8graph tune``: a policy chosen by measurement, for a causal language model on text of one's own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fp8graph.cli.arguments import command, positive, writable

_ABOUT = "choose a policy by measuring what FP8 changes in each layer of a model, on your text"


def add(commands: Any) -> None:
    """What the command takes."""
    tune = command(commands, "tune", run, _ABOUT)
    tune.add_argument("model", type=Path, help="a folder with a causal language model and its tokenizer")
    tune.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="text like what it trains on")
    tune.add_argument("--recipe", nargs="+", help="the candidates (default: those that the target multiplies)")
    tune.add_argument("--target", help="the GPU to predict times for: sm_90, sm_100, ...")
    goal = tune.add_mutually_exclusive_group()
    goal.add_argument(
        "--budget", type=float, default=0.5, help="share of the error that FP8 everywhere makes (default 0.5)"
    )
    goal.add_argument("--min-speedup", type=float, help="the least error at which the GEMMs are this much faster")
    tune.add_argument("--batches", type=positive, default=8, help="batches that are measured (default 8)")
    tune.add_argument("--batch", type=positive, default=4, help="sequences per batch (default 4)")
    tune.add_argument("--seq", type=positive, default=512, help="tokens per sequence (default 512)")
    tune.add_argument("--seed", type=int, default=0, help="of the places in the text (default 0)")
    tune.add_argument("--resume", type=Path, metavar="FILE", help="keep what was measured there, and go on from it")
    tune.add_argument("--out", type=Path, default=Path("policy.toml"), help="(default policy.toml)")
    tune.add_argument("--plot", type=Path, metavar="FILE.png", help="draw error against time, too")


def run(options: argparse.Namespace) -> int:
    """Measure, print the scores, and write the policy."""
    from fp8graph.planning.tune import tune
    from fp8graph.tools.text import batches_of, language_model

    writable(options.out)
    if options.plot is not None:
        writable(options.plot, ".png", ".svg", ".pdf")
    model, tokenizer = language_model(options.model)
    batches = batches_of(tokenizer, options.text, options.batches, options.batch, options.seq, options.seed)
    goal = {"budget": options.budget} if options.min_speedup is None else {"min_speedup": options.min_speedup}
    settings = {name: getattr(options, name) for name in ("target", "seed", "resume")}
    device = next(model.parameters()).device
    inputs = [{"input_ids": tokens.to(device), "labels": tokens.to(device), "use_cache": False} for tokens in batches]
    found = tune(model, inputs, recipes=options.recipe, **settings, **goal)
    print(found)
    found.save(options.out)
    print(f"fp8graph: wrote {options.out}", file=sys.stderr)
    if options.plot is not None:
        found.plot(options.plot)
        print(f"fp8graph: wrote {options.plot}", file=sys.stderr)
    return 0
