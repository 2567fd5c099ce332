"""Train a small Llama at rates at which SwiGLU's product has outliers, with and without ``smooth_input=True``.

``python -m benchmarks.smooth_swiglu``: 300 steps of the model, text and evaluation of ``benchmarks/train_recipes.py``.
The higher the learning rate, the larger the product of SwiGLU that ``down_proj`` reads: after each run its amax and its
root mean square are measured, layer by layer, on a batch that no run trains on. Runs on a CPU, and says nothing about
speed. Each run is one JSON file in ``results/smooth_swiglu_cpu``; what is there is not run again. The table comes last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor, nn

import fp8graph
from benchmarks.recipe_evidence import differences, interval, text
from benchmarks.train_recipes import BF16, RESULTS, train_missing
from fp8graph import DelayedScaling, Policy, Rule

FOLDER: Final = RESULTS / "smooth_swiglu_cpu"
RATES: Final = (1e-2, 3e-2)
STEPS, SEEDS = 300, (0, 1, 2, 3, 4)
# for the linears that read the product; the rest as under recipe="delayed"
SMOOTH: Final = Policy([Rule("*.down_proj", DelayedScaling(smooth_input=True))], default="delayed", extends="default")
BACKENDS: Final[dict[str, Callable[[], Any]]] = {
    BF16: lambda: "inductor",
    "delayed": lambda: fp8graph.Backend(recipe="delayed"),
    "delayed, smooth_input": lambda: fp8graph.Backend(policy=SMOOTH),
}
Run = dict[str, Any]


@torch.no_grad()
def products(model: nn.Module, tokens: Tensor) -> list[tuple[float, float]]:
    """The amax and the root mean square of what each ``down_proj`` reads."""
    found: list[tuple[float, float]] = []

    def measure(_module: nn.Module, inputs: tuple[Tensor]) -> None:
        x = inputs[0].float()  # [sequences, tokens, intermediate]
        found.append((x.abs().max().item(), x.square().mean().sqrt().item()))

    hooks = [m.register_forward_pre_hook(measure) for name, m in model.named_modules() if name.endswith("down_proj")]
    model(input_ids=tokens)
    for hook in hooks:
        hook.remove()
    return found


def measure(model: nn.Module, tokens: Tensor) -> dict[str, Any]:
    """The record of a run beside its losses."""
    return {"products": products(model, tokens)}


def file_of(folder: Path, name: str, rate: float, seed: int) -> Path:
    """Where a run is kept."""
    return folder / f"{name.replace(', ', '_')}-rate{rate:g}-seed{seed}.json"


def read(folder: Path = FOLDER) -> dict[tuple[float, str], dict[int, Run]]:
    """All runs by rate and name, then by seed, in the order of the benchmark."""
    found: dict[tuple[float, str], dict[int, Run]] = {}
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text())
        found.setdefault((run["learning_rate"], run["name"]), {})[run["seed"]] = run
    names = list(BACKENDS)
    return dict(sorted(found.items(), key=lambda item: (item[0][0], names.index(item[0][1]))))


def held_out(run: Run) -> float:
    """The loss after the last step, of the weights in FP32."""
    return run["evaluations"][str(run["steps"])]


def lines(runs: dict[tuple[float, str], dict[int, Run]]) -> list[str]:
    """The table's rows: the loss, its difference from the bf16 run of its seed, and the largest product."""
    found: list[str] = []
    for (rate, name), by_seed in runs.items():
        both = {BF16: runs.get((rate, BF16), {}), name: by_seed}
        losses = [held_out(run) for run in by_seed.values()]
        largest = max(amax for run in by_seed.values() for amax, _ in run["products"])
        ratio = max(amax / size for run in by_seed.values() for amax, size in run["products"])
        beside = differences(both, name, held_out) if name != BF16 else []
        difference = text(*interval(beside)) if beside else ""
        cells = (f"{rate:g}", name, f"{min(losses):.3f} to {max(losses):.3f}", difference, f"{largest:,.0f}")
        found.append(f"| {' | '.join([*cells, f'{ratio:.0f}'])} |")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--runs", nargs="+", default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument("--out", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    console = Console()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.runs:
        wanted = [
            (file_of(arguments.out, name, rate, seed), seed, rate)
            for rate in arguments.rates
            for seed in arguments.seeds
        ]
        train_missing(name, BACKENDS[name], wanted, arguments.steps, console, measure)
    console.print("| rate | run | held-out loss | beside bf16 | largest product | over its root mean square |")
    for line in lines(read(arguments.out)):
        console.print(line, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
