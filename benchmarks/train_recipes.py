"""Train one small Llama per recipe and seed beside bf16, and write the table: ``make train-recipes``.

Per seed: the same initial weights and the same batches for every run. "bf16, eager" is bf16 again without a compiler:
the same mathematics with other roundings, so its distance from "bf16" is how far two bf16 runs of one seed drift apart.
Runs on a CPU (about 40 minutes on two cores) and on a GPU; says nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import matplotlib
import torch
from rich.console import Console
from rich.table import Table

import fp8graph
from fp8graph.tools.demo import Run, batches, build_model, corpus, quiet, train

BF16, BF16_AGAIN = "bf16", "bf16, eager"
RECIPES = ("tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "nvfp4")
# relative difference of the mean of the last losses from bf16's
BOUND = dict.fromkeys(RECIPES, 0.01) | {"nvfp4": 0.04}


def backend_for(name: str) -> Any:
    if name == BF16:
        return "inductor"
    return "aot_eager" if name == BF16_AGAIN else fp8graph.Backend(recipe=name)


def last_mean(losses: list[float], last: int) -> float:
    return statistics.mean(losses[-last:])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--last", type=int, default=50, help="losses in the mean that is compared")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    console = Console()
    runs: dict[str, dict[int, Run]] = {}
    for name in (BF16, BF16_AGAIN, *arguments.recipes):
        for seed in arguments.seeds:
            torch._dynamo.reset()
            data = [batch.to(arguments.device) for batch in batches(corpus(), arguments.steps, seed)]
            model = build_model(seed).to(arguments.device)
            with quiet():
                run = train(f"{name} seed {seed}", model, backend_for(name), data, console)
            runs.setdefault(name, {})[seed] = run
    rows: dict[str, dict[str, dict[int, Any]]] = {
        name: {
            "last_mean": {seed: last_mean(run.losses, arguments.last) for seed, run in by_seed.items()},
            "difference": {
                seed: last_mean(run.losses, arguments.last) / last_mean(runs[BF16][seed].losses, arguments.last) - 1
                for seed, run in by_seed.items()
            },
            "losses": {seed: [round(loss, 4) for loss in run.losses] for seed, run in by_seed.items()},
        }
        for name, by_seed in runs.items()
    }
    machine = {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fp8graph": fp8graph.__version__,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / f"train_recipes_{arguments.device}"
    settings = {"steps": arguments.steps, "last": arguments.last, "seeds": arguments.seeds}
    stem.with_suffix(".json").write_text(json.dumps({"machine": machine, **settings, "runs": rows}, indent=1) + "\n")
    plot(runs, stem.with_suffix(".png"))
    table = Table(title=f"mean of the last {arguments.last} of {arguments.steps} losses, and its distance from bf16's")
    table.add_column("run")
    for seed in arguments.seeds:
        table.add_column(f"seed {seed}", justify="right")
    table.add_column("mean", justify="right")
    table.add_column("bound", justify="right")
    good = True
    for name, row in rows.items():
        mean = statistics.mean([row["difference"][seed] for seed in arguments.seeds])
        bound = BOUND.get(name)
        inside = bound is None or abs(mean) <= bound
        good &= inside
        cells = [f"{row['last_mean'][seed]:.4f} {row['difference'][seed]:+.2%}" for seed in arguments.seeds]
        limit = "" if bound is None else f"{bound:.0%}{'' if inside else ' MISSED'}"
        table.add_row(name, *cells, f"{mean:+.2%}", limit)
    console.print(table)
    return 0 if good else 1


def plot(runs: dict[str, dict[int, Run]], path: Path) -> None:
    """Every recipe's loss minus bf16's, smoothed, over the seeds; above it the losses of the first seed."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 8), layout="constrained", sharex=True)
    for index, (name, by_seed) in enumerate(runs.items()):
        seed = next(iter(by_seed))
        style: dict[str, Any] = {"color": "black", "linewidth": 2} if name == BF16 else {"color": f"C{index}"}
        top.plot(by_seed[seed].losses, label=name, alpha=0.8, **({"linewidth": 0.9} | style))
        if name == BF16:
            continue
        differences = torch.tensor(
            [[a - b for a, b in zip(run.losses, runs[BF16][s].losses, strict=True)] for s, run in by_seed.items()]
        ).mean(0)
        window = min(20, len(differences))
        smooth = differences.unfold(0, window, 1).mean(1)
        bottom.plot(range(window - 1, window - 1 + len(smooth)), smooth, label=name, **style)
    top.set(ylabel="loss (nats per byte)", title=f"seed {next(iter(runs[BF16]))}")
    bottom.set(xlabel="step", ylabel="loss - loss of bf16", title="mean over the seeds, 20 steps smoothed")
    bottom.axhline(0, color="black", linewidth=1)
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
