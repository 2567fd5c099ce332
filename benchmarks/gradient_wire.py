"""Train one small Llama on two ranks with gradients sent in bf16, E4M3 and E5M2, and write the curves.

Per seed, the same initial weights and batches. Layers compute in bf16, so that the wire is the only difference; the
losses of a fixed held-out set are measured every 10 steps. Runs on CPUs with gloo (about ten minutes on two cores), and
says nothing about speed.

    python -m benchmarks.gradient_wire
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, multiprocessing
from torch.nn.parallel import DistributedDataParallel

from fp8graph.extras.gradients import send_gradients_in_fp8
from fp8graph.tools.demo import batches, build_model, corpus
from fp8graph.tools.record.machine import this_machine

WIRES: dict[str, torch.dtype | None] = {"bf16": None, "E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
RANKS, EVERY, HELD_OUT = 2, 10, 8  # held out: batches
PATH = Path(__file__).parent / "results" / "gradient_wire_cpu.json"


def train(rank: int, folder: str, steps: int, seeds: list[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    text = corpus()
    known, held_out = text[: len(text) * 9 // 10], batches(text[len(text) * 9 // 10 :], HELD_OUT, 1000)
    runs: dict[str, dict[int, Any]] = {}
    for name, dtype in WIRES.items():
        for seed in seeds:
            runs.setdefault(name, {})[seed] = run(rank, dtype, batches(known, steps, seed), held_out, seed)
            if rank == 0:
                Console().print(name, seed, runs[name][seed]["losses"][-1])
    if rank == 0:
        Path(folder, "runs.json").write_text(json.dumps(runs))
    dist.destroy_process_group()


def run(rank: int, dtype: torch.dtype | None, data: list[Tensor], held_out: list[Tensor], seed: int) -> dict[str, Any]:
    """One training: losses on the held-out set, and the bytes of gradients that a rank sent for each number."""
    model = DistributedDataParallel(build_model(seed))
    wire = None if dtype is None else send_gradients_in_fp8(model, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(data), 1e-4)
    losses: list[float] = []
    for step, tokens in enumerate(data, 1):
        own = tokens.chunk(RANKS)[rank]
        model(input_ids=own, labels=own).loss.backward()
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            with torch.no_grad():
                losses.append(sum(model.module(input_ids=x, labels=x).loss.item() for x in held_out) / HELD_OUT)
    numbers = sum(p.numel() for p in model.parameters()) * len(data) * (RANKS - 1) / RANKS
    return {"losses": losses, "bytes_per_number": 4.0 if wire is None else wire.bytes_sent / numbers}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, default=PATH)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train, (folder, arguments.steps, arguments.seeds), RANKS)  # pyright: ignore
        runs = json.loads(Path(folder, "runs.json").read_text())
    found = {"machine": this_machine(), "ranks": RANKS, "steps": arguments.steps, "every": EVERY, "runs": runs}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    plot(runs, arguments.out.with_suffix(".png"))
    for name, distance in distances(runs).items():
        Console().print(f"{name}: {distance:+.2%} from bf16's last held-out losses, mean of the seeds")
    return 0


def distances(runs: dict[str, dict[str, Any]]) -> dict[str, float]:
    """By wire: how far its last held-out loss is from that of bf16, relative, as a mean over the seeds."""
    last = {name: [one["losses"][-1] for one in by_seed.values()] for name, by_seed in runs.items()}
    pairs = {name: zip(losses, last["bf16"], strict=True) for name, losses in last.items() if name != "bf16"}
    return {name: sum(a / b - 1 for a, b in both) / len(last["bf16"]) for name, both in pairs.items()}


def plot(runs: dict[str, dict[str, Any]], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for index, (name, by_seed) in enumerate(runs.items()):
        mean = torch.tensor([one["losses"] for one in by_seed.values()]).mean(0)
        axes.plot(range(EVERY, EVERY * len(mean) + 1, EVERY), mean, label=f"gradients in {name}", color=f"C{index}")
    axes.set(xlabel="step", ylabel="held-out loss (nats per byte)", title="two ranks, DDP; mean over the seeds")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    raise SystemExit(main())
