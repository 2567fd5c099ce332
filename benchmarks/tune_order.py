"""Hold the order of ``fp8graph.tune``'s scores against what happens: ``make tune-order``.

A small Llama is trained, and ``tune`` scores each GEMM of each linear on eight batches. Then one GEMM of one linear at
a time is switched to FP8, and the change is measured on other text, from which neither the weights nor the scores
come. Everything that is compared is compiled alike.

* fprop: the mean, over 32 batches of 4 windows, of the square of the change of the loss. A batch is one sample of a
  random number, so the file has the change of each window: how well one half of the batches predicts the other half
  says how good any score could be.
* dgrad and wgrad: the mean over all matrices of the relative square error of a matrix' gradient, over 8 batches.

The same weights are measured twice: in bf16, where a change of one number also changes how all later ones are rounded,
and in FP32, where quantization is all that differs. Runs on a CPU and says nothing about speed.

Each run is one JSON file in the folder ``results/tune_order_cpu``. What is there is not run again, so a benchmark that
was stopped goes on where it was. ``benchmarks/order_evidence.py`` makes the table.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor

import fp8graph
from benchmarks import train_recipes
from benchmarks.train_recipes import BATCH, RESULTS, batches, pretrained, take_gradients
from fp8graph import Policy, Rule
from fp8graph.extras.planning.tune import Score
from fp8graph.recipes import GEMMS
from fp8graph.tools import demo
from fp8graph.tools.demo import quiet
from fp8graph.tools.record.machine import this_machine

HIDDEN: Final = 128
SCORED: Final = 8  # batches that tune() sees
WINDOWS: Final = 128  # of held-out text, in batches of BATCH: for the loss
GRADIENTS: Final = 8  # of those batches: for gradients, of which each has thousands of numbers
DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}
HIGH_PRECISION: Final = Policy(default=None)
Gradients = dict[str, Tensor]


def build_model(seed: int, layers: int) -> Any:
    return demo.build_model(
        seed,
        layers,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN * 11 // 4,
        num_attention_heads=HIDDEN // 64,
        num_key_value_heads=max(1, HIDDEN // 128),
    )


def split() -> tuple[Tensor, list[Tensor]]:
    """The text to train and score on, and batches [BATCH, SEQUENCE] of windows, spread over the last tenth of it."""
    text, held_out = train_recipes.split(WINDOWS)
    order = torch.randperm(WINDOWS, generator=torch.Generator().manual_seed(0))  # a batch is of no one topic
    return text, list(torch.cat(held_out)[order].split(BATCH))


def window_losses(model: Any, tokens: Tensor) -> Tensor:
    """[BATCH]: the loss of each window; their mean is that of the batch."""
    logits = model(input_ids=tokens).logits[:, :-1].float()  # [BATCH, SEQUENCE - 1, vocabulary]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    return losses.mean(1)


def gradients(model: Any, tokens: Tensor) -> Gradients:
    window_losses(model, tokens).mean().backward()
    return take_gradients(model)


def relative_errors(found: Sequence[Gradients], exact: Sequence[Gradients]) -> list[float]:
    """The relative square error that each batch adds to a matrix' gradient, mean over all matrices.

    Of each matrix alone, because Adam scales the gradient of each. The mean over the batches is the sum of all square
    errors over the sum of all squares.
    """
    total = [0.0] * len(exact)
    for name in exact[0]:
        mean_square = sum(float(batch[name].square().sum()) for batch in exact) / len(exact)
        for index, (own, reference) in enumerate(zip(found, exact, strict=True)):
            total[index] += float((own[name] - reference[name]).square().sum()) / mean_square / len(exact[0])
    return total


def only(linear: str, gemm: str, recipe: str) -> Policy:
    """The policy under which one GEMM of one linear of a layer runs in ``recipe``, and the others in high precision."""
    others: dict[str, Any] = {other: None for other in GEMMS if other != gemm}
    return Policy([Rule(f"model.layers.*.{linear}", recipe, **others)], default=None, min_speedup=0)


def scores_of(model: Any, text: Tensor, seed: int, recipe: str) -> tuple[list[Score], dict[tuple[str, str], Any]]:
    """The result of tune(); and, by site and GEMM, the sums that its scores come from, batch by batch."""
    data = [{"input_ids": tokens, "labels": tokens} for tokens in batches(text, SCORED, 1000 + seed)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        found = fp8graph.tune(model, data, recipes=[recipe], target="sm_100", resume=path, progress=False)
        saved = json.loads(path.read_text())["batches"]
    sums: dict[tuple[str, str], Any] = {}
    for row in (row for batch in saved for row in batch):
        own = sums.setdefault((row["site"], row["gemm"]), {})
        for part in ("weighted_error", "square_error", "square_reference"):
            own.setdefault(part, []).append(short(row[part]))
    return [score for score in found.scores if score.recipe == recipe], sums


def short(value: float) -> float:
    """Four digits: the files are kept."""
    return float(f"{value:.4g}")


class Switched:
    """A model of which one layer at a time is exchanged for its twin in FP8, which has the same parameters.

    Layers are compiled one by one, so each GEMM in FP8 compiles once, whatever the number of layers and seeds.
    """

    def __init__(self, layers: int, dtype: str, recipe: str) -> None:
        torch._dynamo.reset()
        self.recipe = recipe
        self.model = build_model(0, layers).to(DTYPES[dtype])
        twin = copy.deepcopy(self.model, {id(p): p for p in self.model.parameters()})
        fp8graph.compile(self.model, policy=HIGH_PRECISION, compiler="eager", regions="auto")
        fp8graph.compile(twin, policy=HIGH_PRECISION, compiler="eager", regions="auto")
        self.backend = fp8graph.backend_of(twin)
        self.layers, self.own, self.twins = self.model.model.layers, list(self.model.model.layers), twin.model.layers
        self.policies: dict[tuple[str, str], Policy] = {}

    @contextlib.contextmanager
    def switched(self, site: str, gemm: str) -> Generator[None]:
        """One GEMM of one linear, a full name such as "model.layers.3.mlp.up_proj", in FP8."""
        layer, linear = site.removeprefix("model.layers.").split(".", 1)
        policy = self.policies.setdefault((linear, gemm), only(linear, gemm, self.recipe))
        self.backend.set_policy(policy)
        self.layers[int(layer)] = self.twins[int(layer)]
        try:
            yield
        finally:
            self.layers[int(layer)] = self.own[int(layer)]
        if (site, gemm) not in {(g.fqn, g.gemm) for g in self.backend.report.gemms if g.recipe is not None}:
            raise RuntimeError(f"{site}, {gemm}: it was switched to {self.recipe}, and nothing ran in it.")

    def losses(self, held_out: Sequence[Tensor]) -> Tensor:
        """[batches, BATCH]: of all windows; in the graph that also has a backward, so that nothing compiles again."""
        return torch.stack([window_losses(self.model, tokens).detach() for tokens in held_out])

    def run(self, held_out: Sequence[Tensor], scores: Sequence[Score]) -> tuple[float, list[dict[str, Any]]]:
        """The loss in high precision; and what each of ``scores`` came to."""
        few = held_out[:: len(held_out) // GRADIENTS]
        losses = self.losses(held_out)
        exact: list[Gradients] = []
        rows: list[dict[str, Any]] = []
        for score in scores:
            row: dict[str, Any] = {"site": score.site, "score": score.measured}
            if score.gemm != "fprop" and not exact:
                exact = [gradients(self.model, tokens) for tokens in few]
            with self.switched(score.site, score.gemm):
                if score.gemm == "fprop":
                    change = self.losses(held_out) - losses
                    row["measured"] = change.mean(1).square().mean().item()  # of a batch
                    row["window_changes"] = [short(value) for value in change.flatten().tolist()]
                else:
                    each = relative_errors([gradients(self.model, tokens) for tokens in few], exact)
                    row["measured"] = sum(each) / len(each)
                    row["batch_errors"] = [short(value) for value in each]
            rows.append(row)
        return losses.mean().item(), rows


def file_of(folder: Path, *parts: Any) -> Path:
    """Where the run of a number of layers, a recipe, a dtype, a seed and a GEMM is kept."""
    layers, recipe, dtype, seed, gemm = parts
    return folder / f"{layers}layers-{recipe}-{dtype}-seed{seed}-{gemm}.json"


def measure(
    layers: int, recipe: str, dtype: str, missing: dict[int, list[tuple[str, Path]]], steps: int, console: Console
) -> None:
    """Write the missing files of one model: by seed, the GEMMs and where they are kept."""
    text, held_out = split()
    switched = Switched(layers, dtype, recipe)
    for seed, files in missing.items():
        switched.model.load_state_dict(pretrained(build_model(seed, layers), batches(text, steps, seed)).state_dict())
        scores, sums = scores_of(switched.model, text, seed, recipe)
        for gemm, path in files:
            started = time.perf_counter()
            loss, rows = switched.run(held_out, [score for score in scores if score.gemm == gemm])
            seconds = round(time.perf_counter() - started, 1)
            head = {"layers": layers, "recipe": recipe, "dtype": dtype, "seed": seed, "gemm": gemm, "steps": steps}
            head |= {"fp8graph": fp8graph.__version__, **this_machine(), "seconds": seconds, "loss": loss}
            rows = [row | sums[row["site"], gemm] for row in rows]
            path.write_text(json.dumps({**head, "rows": rows}) + "\n")
            console.print(f"{path.name}: {seconds} s", highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--recipes", nargs="+", default=["tensorwise"])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--gemms", nargs="+", default=list(GEMMS), choices=list(GEMMS))
    parser.add_argument("--steps", type=int, default=200, help="of training in bf16, before anything is measured")
    parser.add_argument("--out", type=Path, default=RESULTS / "tune_order_cpu")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for layers, recipe, dtype in itertools.product(arguments.layers, arguments.recipes, arguments.dtypes):
        missing: dict[int, list[tuple[str, Path]]] = {}
        for seed, gemm in itertools.product(arguments.seeds, arguments.gemms):
            path = file_of(arguments.out, layers, recipe, dtype, seed, gemm)
            if not path.exists() or json.loads(path.read_text())["steps"] != arguments.steps:
                missing.setdefault(seed, []).append((gemm, path))
        if missing:
            with quiet():
                measure(layers, recipe, dtype, missing, arguments.steps, Console())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
