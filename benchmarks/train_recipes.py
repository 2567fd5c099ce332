"""Train one small Llama per recipe and seed, evaluated on held-out text: ``make train-recipes``.

Per seed: the same initial weights and the same batches for every run. "bf16, eager" is bf16 again without a compiler:
the same mathematics with other roundings, so its distance from "bf16" is how far two bf16 runs of one seed drift apart.
All weights are evaluated alike, in FP32, on the same 8,192 bytes, which no run trains on; at the end also in their own
precision. Runs on a CPU (about two minutes per run on one core) and says nothing about speed.

Each run is one JSON file in the folder ``results/train_recipes_cpu``. What is there is not run again, so a benchmark
that was stopped goes on where it was. ``benchmarks/recipe_evidence.py`` makes the table and the picture.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor
from transformers import LlamaForCausalLM

import fp8graph
from fp8graph.tools import demo
from fp8graph.tools.demo import SEQUENCE, corpus, quiet

RESULTS: Final = Path(__file__).parent / "results"
BATCH, HELD_OUT = 4, 16  # windows per batch, batches that are evaluated
LEARNING_RATE: Final = 1e-3
BF16, BF16_AGAIN = "bf16", "bf16, eager"
# without any ingredient
PLAIN_FP4: Final = fp8graph.NVFP4BlockScaling(
    disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
)
BACKENDS: Final[dict[str, Callable[[], Any]]] = {
    BF16: lambda: "inductor",
    BF16_AGAIN: lambda: "aot_eager",
    "tensorwise": lambda: fp8graph.Backend(recipe="tensorwise"),
    "delayed": lambda: fp8graph.Backend(recipe="delayed"),
    "blockwise": lambda: fp8graph.Backend(recipe="blockwise"),
    "rowwise": lambda: fp8graph.Backend(recipe="rowwise"),
    # each kind of scaling with the other kind of scale: what powers of two cost
    "tensorwise, 2^n": lambda: fp8graph.Backend(recipe=fp8graph.Float8CurrentScaling(power_2_scale=True)),
    "blockwise, FP32": lambda: fp8graph.Backend(recipe=fp8graph.Float8BlockScaling(power_2_scale=False)),
    "rowwise, FP32": lambda: fp8graph.Backend(recipe=fp8graph.Float8RowwiseScaling(power_2_scale=False)),
    "mxfp8": lambda: fp8graph.Backend(recipe="mxfp8"),
    "rowwise_with_gw_hp": lambda: fp8graph.Backend(recipe="rowwise_with_gw_hp"),
    "nvfp4": lambda: fp8graph.Backend(recipe="nvfp4"),
    "nvfp4, no transform": lambda: fp8graph.Backend(recipe=fp8graph.NVFP4BlockScaling(disable_rht=True)),
    "nvfp4, to nearest": lambda: fp8graph.Backend(recipe=fp8graph.NVFP4BlockScaling(disable_stochastic_rounding=True)),
    "nvfp4, 1x16 weights": lambda: fp8graph.Backend(recipe=fp8graph.NVFP4BlockScaling(disable_2d_quantization=True)),
    "nvfp4, plain": lambda: fp8graph.Backend(recipe=PLAIN_FP4),
}


def build_model(seed: int) -> Any:
    """A Llama of 1.6 million parameters in bf16, of the demo's kind: two layers."""
    return demo.build_model(seed, hidden_size=256, intermediate_size=704, num_attention_heads=4)


def split(windows: int = BATCH * HELD_OUT) -> tuple[Tensor, list[Tensor]]:
    """The text to train on, and the batches to evaluate on: windows spread evenly over the last tenth of the text."""
    text = corpus()
    cut = len(text) - len(text) // 10
    starts = torch.linspace(cut, len(text) - SEQUENCE, windows).long().tolist()
    return text[:cut], list(torch.stack([text[s : s + SEQUENCE] for s in starts]).split(BATCH))


def batches(text: Tensor, steps: int, seed: int) -> list[Tensor]:
    """``steps`` batches [BATCH, SEQUENCE] of random windows."""
    return demo.batches(text, steps, seed, BATCH)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def pretrained(model: Any, data: Sequence[Tensor]) -> Any:
    """``model``, in bf16, after it has learned something: scores of random weights say little."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    for tokens in data:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def take_gradients(model: Any) -> dict[str, Tensor]:
    """Of all matrices, which have none then. Those of some vectors (the bias of a key) are zero but for rounding."""
    gradients = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None and p.ndim > 1}
    model.zero_grad(set_to_none=True)
    return gradients


@torch.no_grad()
def evaluate(model: Any, held_out: Sequence[Tensor]) -> float:
    """The loss in nats per byte of ``model``'s weights in FP32, without a compiler."""
    exact = LlamaForCausalLM(model.config).float()
    exact.load_state_dict(model.state_dict())
    return loss_of(exact, torch.cat(list(held_out))).item()


def is_evaluated(step: int, steps: int) -> bool:
    """Often at the start, where recipes were seen to differ, then every hundred steps."""
    return step in (20, 40, 60) or step % 100 == 0 or step == steps


class Trained:
    """One model and its compiled code, which all seeds of a backend without a state share."""

    def __init__(self, backend: Any) -> None:
        torch._dynamo.reset()
        self.model = build_model(0)
        self.compiled = torch.compile(self.model, backend=backend)

    def run(
        self, seed: int, text: Tensor, held_out: Sequence[Tensor], steps: int, learning_rate: float = LEARNING_RATE
    ) -> dict[str, Any]:
        """Train from ``seed``: AdamW, linear warm-up over a tenth of the steps, cosine decay to a tenth of the rate."""
        self.model.load_state_dict(build_model(seed).state_dict())
        optimizer, rate = demo.optimizer_of(self.model, lambda: steps, learning_rate)
        losses: list[float] = []
        evaluations: dict[int, float] = {}
        started = time.perf_counter()
        for step, tokens in enumerate(batches(text, steps, seed), 1):
            loss = loss_of(self.compiled, tokens)
            loss.backward()
            optimizer.step()
            rate.step()
            optimizer.zero_grad()
            losses.append(round(loss.item(), 5))
            if is_evaluated(step, steps):
                evaluations[step] = evaluate(self.model, held_out)
        seconds = time.perf_counter() - started
        # the graph that trained, so that nothing is compiled again; no backward follows
        own = sum(loss_of(self.compiled, tokens).item() for tokens in held_out) / len(held_out)
        return {"losses": losses, "evaluations": evaluations, "own_precision": own, "seconds": round(seconds, 1)}


def file_of(folder: Path, name: str, seed: int) -> Path:
    """Where the run of one recipe and seed is kept."""
    return folder / f"{name.replace(', ', '_').replace('^', '')}-seed{seed}.json"


def versions() -> dict[str, str]:
    """Where a run was made, and with what."""
    return {
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fp8graph": fp8graph.__version__,
    }


def train_missing(
    name: str,
    backend: Callable[[], Any],
    wanted: Sequence[tuple[Path, int, float]],
    steps: int,
    console: Console,
    measure: Callable[[Any, Tensor], dict[str, Any]] = lambda _model, _tokens: {},
) -> None:
    """The runs of one backend that are not there yet: of ``wanted``, each with its file, seed and learning rate.

    ``measure`` takes the trained model and a batch that no run trains on; what it returns is kept beside the losses.
    """
    text, held_out = split()
    trained: Trained | None = None
    for path, seed, rate in wanted:
        if path.exists() and json.loads(path.read_text())["steps"] == steps:
            continue
        with quiet():
            if trained is None or name.startswith("delayed"):  # scaling state belongs to one run
                trained = Trained(backend())
            result = trained.run(seed, text, held_out, steps, rate)
            result |= measure(trained.model, held_out[0])
        about = {"name": name, "learning_rate": rate, "seed": seed, "steps": steps, **versions()}
        path.write_text(json.dumps(about | result) + "\n")
        loss = result["evaluations"][steps]
        console.print(f"{path.stem}: held-out loss {loss:.4f}, {result['seconds']} s", highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--recipes", nargs="+", default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument("--out", type=Path, default=RESULTS / "train_recipes_cpu")
    arguments = parser.parse_args()
    console = Console()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.recipes:
        wanted = [(file_of(arguments.out, name, seed), seed, LEARNING_RATE) for seed in arguments.seeds]
        train_missing(name, BACKENDS[name], wanted, arguments.steps, console)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
