"""``fp8graph demo``: trains one small Llama twice from the same seed, in bf16 and in FP8, and compares the two.

The training text is in every Python installation: the help topics of pydoc. Tokens are bytes, so nothing has to be
downloaded.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import plotext
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fp8graph.backend.backend import Backend
from fp8graph.numerics import sqnr_db

SEQUENCE, BATCH = 128, 8
LAST = 20  # losses that are averaged for the verdict
TOLERANCE = 0.02  # relative difference of those averages


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run: the model, its losses and its times."""

    model: Any
    losses: list[float]
    compile_seconds: float
    train_seconds: float


def corpus() -> Tensor:
    """The training text as ASCII bytes: pydoc's help topics, in every installation of Python."""
    import pydoc_data.topics

    texts = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    return torch.tensor(list("\n\n".join(texts).encode("ascii", "ignore")), dtype=torch.long)


def batches(text: Tensor, steps: int, seed: int, size: int = BATCH) -> list[Tensor]:
    """``steps`` batches [size, SEQUENCE] of random windows, the same for both runs."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - SEQUENCE, (steps, size), generator=generator)
    return [torch.stack([text[s : s + SEQUENCE] for s in row.tolist()]) for row in starts]


def build_model(seed: int, layers: int = 2, **sizes: int) -> Any:
    """A Llama of 3.4 million parameters: grouped-query attention, SwiGLU, 256 byte tokens; ``sizes``: other ones."""
    torch.manual_seed(seed)
    values: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": SEQUENCE,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    values |= sizes
    config: Any = LlamaConfig(**values)
    return LlamaForCausalLM(config).bfloat16()


def train(name: str, model: Any, backend: Any, data: Sequence[Tensor], console: Console) -> Run:
    """Train ``model`` through ``torch.compile(backend=backend)``: AdamW, linear warm-up, cosine decay."""
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = max(1, len(data) // 10)
    rate = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, warm_up),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, len(data) - warm_up), 1e-4),
        ],
        [warm_up],
    )
    started = time.perf_counter()
    with console.status(f"{name}: compiling forward and backward (about a minute on two cores)"):
        compiled(input_ids=data[0], labels=data[0]).loss.backward()
    optimizer.zero_grad()
    compile_seconds = time.perf_counter() - started
    losses: list[float] = []
    started = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=len(data))
        for tokens in data:
            loss = compiled(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            rate.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.update(task, advance=1, description=f"{name} loss {losses[-1]:.3f}")
    train_seconds = time.perf_counter() - started
    return Run(model=model, losses=losses, compile_seconds=compile_seconds, train_seconds=train_seconds)


def verdict(bf16: Sequence[float], fp8: Sequence[float]) -> tuple[float, bool]:
    """The relative difference of the mean of the last losses, and whether it is within the tolerance."""
    a, b = (sum(losses[-LAST:]) / len(losses[-LAST:]) for losses in (bf16, fp8))
    difference = (b - a) / a
    return difference, abs(difference) <= TOLERANCE


def plot_png(bf16: Sequence[float], fp8: Sequence[float], path: Path) -> None:
    """Both loss curves in one picture."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(bf16, label="bf16", linewidth=2.5, alpha=0.6)
    axes.plot(fp8, label="FP8", linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="The same Llama, the same seed")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_terminal(bf16: Sequence[float], fp8: Sequence[float], width: int) -> str:
    """Both loss curves as text."""
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(min(width - 2, 100), 18)
    plotext.plot(list(range(len(bf16))), list(bf16), label="bf16", marker="o")
    plotext.plot(list(range(len(fp8))), list(fp8), label="FP8", marker="x")
    plotext.xlabel("step")
    plotext.title("loss (nats per byte)")
    return plotext.uncolorize(str(plotext.build()))


def sample(model: Any, prompt: str, length: int, seed: int) -> str:
    """Text from ``model``, one byte after the other, at temperature 0.7."""
    torch.manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode())])
    with torch.no_grad():
        for _ in range(length):
            logits = model(input_ids=tokens[:, -SEQUENCE:]).logits[0, -1].float()
            choice = torch.multinomial(torch.softmax(logits / 0.7, -1), 1)
            tokens = torch.cat([tokens, choice[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def run_demo(
    *,
    steps: int,
    seed: int,
    recipe: str,
    compiler: Any,
    out: Path,
    judge: Callable[[Sequence[float], Sequence[float]], tuple[float, bool]] = verdict,
) -> int:
    """Run the demo and print the results; returns the exit code: 1 if the two runs differ too much."""
    console = Console()
    backend = Backend(recipe=recipe, compiler=compiler)
    out.mkdir(parents=True, exist_ok=True)
    data = batches(corpus(), steps, seed)
    parameters = sum(p.numel() for p in build_model(seed).parameters())
    console.print(
        f"[bold]fp8graph demo[/]: a Llama of {parameters / 1e6:.1f} million parameters, {steps} steps of "
        f"{BATCH} x {SEQUENCE} bytes of Python's help texts, in bf16 and in FP8 ({recipe}).\n"
        "On a CPU this shows the numbers, not the speed: FP8 is slower than bf16 there."
    )
    plain: Any = "inductor" if compiler == "inductor" else "aot_eager"
    with quiet():
        bf16 = train("bf16", build_model(seed), plain, data, console)
        fp8 = train("FP8 ", build_model(seed), backend, data, console)

    console.rule("What runs in FP8, and why the rest does not")
    console.print(str(backend.report), markup=False, highlight=False, soft_wrap=True)
    backend.report.check()

    console.rule("Loss")
    console.print(plot_terminal(bf16.losses, fp8.losses, console.width), markup=False, highlight=False)
    picture = out / "loss.png"
    plot_png(bf16.losses, fp8.losses, picture)
    console.print(f"wrote {picture}")

    with torch.no_grad():
        reference = fp8.model(input_ids=data[-1]).logits
        with quiet():
            quantized = torch.compile(fp8.model, backend=Backend(recipe=recipe, compiler="eager"))(input_ids=data[-1])
    difference, good = judge(bf16.losses, fp8.losses)
    console.rule("Result")
    for name, run in (("bf16", bf16), ("FP8 ", fp8)):
        mean = sum(run.losses[-LAST:]) / len(run.losses[-LAST:])
        console.print(
            f"{name}  mean of the last {min(LAST, steps)} losses {mean:.4f}   "
            f"compile {run.compile_seconds:.0f} s, {steps} steps {run.train_seconds:.0f} s",
            highlight=False,
        )
    console.print(f"difference {difference:+.2%} (at most {TOLERANCE:.0%} is fine)", highlight=False)
    # Most of a trained model's logits is their mean over all tokens, which survives any rounding.
    common = reference.float().mean((0, 1))
    varying = sqnr_db(reference - common, quantized.logits - common)
    console.print(
        "logits of the FP8-trained model, FP8 against bf16: SQNR "
        f"{sqnr_db(reference, quantized.logits):.1f} dB, {varying:.1f} dB without their mean over all tokens",
        highlight=False,
    )
    console.rule("A sample from the FP8-trained model")
    console.print(sample(fp8.model, "The ", 240, seed), markup=False, highlight=False)
    if not good:
        console.print("[bold red]FP8 and bf16 losses differ too much.[/]")
    return 0 if good else 1


@contextlib.contextmanager
def quiet() -> Any:
    """Hide warnings of torch and transformers, which would tear the progress bars."""
    import logging
    import warnings

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
