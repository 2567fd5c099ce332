"""Train a small Llama in NVFP4, with its forward in bf16 from a step on, and measure the loss around that step.

``python -m benchmarks.change_of_precision``: a Llama of 0.1 million parameters on the text of ``fp8graph demo``, the
head in bf16 throughout. Beside the run that changes: all of it in NVFP4, which is the same run up to the change, and
all of it in bf16. Around the change each run also evaluates one batch that no run trains on, before each update and in
the precision of that step: losses of one batch can be compared from step to step. Graphs run node by node, a minute or
two per run on one core; nothing is said about speed. Losses are in ``results/change_of_precision_cpu.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor

import fp8graph
from benchmarks.train_recipes import BATCH, BF16, RESULTS, batches, loss_of, split, versions
from fp8graph import Policy, Rule
from fp8graph.tools import demo

PATH: Final = RESULTS / "change_of_precision_cpu.json"
STEPS, CHANGE, SEEDS = 140, 120, (0, 1, 2)
BEFORE: Final = 10  # steps before the change, whose median the losses from the change on are compared with
LEARNING_RATE: Final = 2e-3
NVFP4, CHANGED = "NVFP4", "NVFP4, then fprop in bf16"
HEAD: Final = Rule("lm_head", None)
POLICIES: Final[dict[str, Policy]] = {
    CHANGED: Policy([HEAD, Rule("*", "nvfp4", fprop=None, steps=(CHANGE, None))], default="nvfp4"),
    NVFP4: Policy([HEAD], default="nvfp4"),
    BF16: Policy(default=None),
}
Run = dict[str, list[float]]


def train(policy: Policy, steps: int, seed: int) -> Run:
    """The loss of each step, and that of the batch apart; weights, batches and rounding depend on ``seed`` alone."""
    torch._dynamo.reset()
    model = demo.build_model(seed, hidden_size=64, intermediate_size=192, num_attention_heads=4)
    compiled = torch.compile(model, backend=fp8graph.Backend(policy, compiler="eager"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, max(1, steps // 10))
    text, (apart, *_) = split()
    found: Run = {"losses": [], "apart": []}
    for step, tokens in enumerate(batches(text, steps, seed)):
        if step >= CHANGE - BEFORE:  # by the graph that trains: no backward follows
            found["apart"].append(value(loss_of(compiled, apart)))
        loss = loss_of(compiled, tokens)
        loss.backward()
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        found["losses"].append(value(loss))
    return found


def value(loss: Tensor) -> float:
    return round(loss.item(), 5)


def read(path: Path = PATH) -> dict[str, Any]:
    """The results that were written."""
    return json.loads(path.read_text(encoding="utf-8"))


def rises(run: Run) -> list[float]:
    """The losses of the batch apart from the change on, relative to the median of those before."""
    median = statistics.median(run["apart"][:BEFORE])
    return [loss / median - 1 for loss in run["apart"][BEFORE:]]


def differences(runs: dict[str, Run]) -> list[float]:
    """The same losses of the run that changes, relative to NVFP4's; the first is of the same weights."""
    both = zip(runs[CHANGED]["apart"], runs[NVFP4]["apart"], strict=True)
    return [own / other - 1 for own, other in both][BEFORE:]


def lines(by_seed: dict[str, dict[str, Run]]) -> list[str]:
    """The table's rows, over all seeds: the first loss from the change on, the highest and the last."""
    found = [row(name, [rises(runs[name]) for runs in by_seed.values()]) for name in POLICIES]
    return [*found, row(f"{CHANGED}, beside {NVFP4}", [differences(runs) for runs in by_seed.values()])]


def row(name: str, every: Sequence[Sequence[float]]) -> str:
    columns = [[x[0] for x in every], [max(x) for x in every], [x[-1] for x in every]]
    return f"| {' | '.join([name, *map(spread, columns)])} |"


def spread(values: Sequence[float]) -> str:
    return f"{100 * min(values):+.2f} % to {100 * max(values):+.2f} %"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--out", type=Path, default=PATH)
    arguments = parser.parse_args()
    by_seed: dict[str, dict[str, Run]] = {}
    for seed in arguments.seeds:
        for name, policy in POLICIES.items():
            by_seed.setdefault(str(seed), {})[name] = train(policy, arguments.steps, seed)
        about: dict[str, Any] = {"steps": arguments.steps, "change": CHANGE, "batch": BATCH, **versions()}
        arguments.out.write_text(json.dumps(about | {"seeds": by_seed}) + "\n")  # after each seed: it may be stopped
        Console().print(f"seed {seed}: {differences(by_seed[str(seed)])[0]:+.2%} at the change", highlight=False)
    Console().print("\n".join(lines(by_seed)), highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
