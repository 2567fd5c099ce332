"""``fp8graph demo``: trains one small Llama twice from the same seed, in bf16 or FP32 and in FP8, and compares the two.

``demo_choice`` chooses the size, the type and the steps. The training text is in every Python installation: the help
topics of pydoc. Tokens are bytes, so nothing has to be downloaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import matplotlib
import plotext
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fp8graph.backend.backend import Backend
from fp8graph.numerics import sqnr_db
from fp8graph.tools.demo_choice import (
    BATCH,
    SECONDS,
    SEQUENCE,
    SIZES,
    Compiler,
    Dtype,
    choose_again,
    choose_compiler,
    choose_size,
    choose_steps,
)

PROBE_SECONDS: Final = 2.0  # of each type, and of each run's first steps
SAMPLE_SECONDS: Final = 8.0
LINE_SECONDS: Final = 5.0  # between two lines about the training where there is no terminal
LAST: Final = 20  # losses that are averaged for the verdict, of 40 or more; else half of them
RECENT: Final = 5  # steps whose time says how long the others will take
TOLERANCE: Final = 0.02  # relative difference of those averages
DTYPES: Final[Mapping[Dtype, torch.dtype]] = {"bf16": torch.bfloat16, "FP32": torch.float32}


@dataclass(kw_only=True)
class TrainingRun:
    """One training run: the model, what was compiled of it, its times and its losses."""

    name: str
    model: Any
    compiled: Callable[..., Any]
    compile_seconds: float
    step_seconds: float  # of a step before the training
    losses: list[float] = field(default_factory=list[float])
    seconds: list[float] = field(default_factory=list[float])  # of each step of the training

    @property
    def mean(self) -> float:
        """The mean of the last losses."""
        return mean_of_last(self.losses)


def corpus() -> Tensor:
    """Return the training text as ASCII bytes: pydoc's help topics, in every installation of Python."""
    import pydoc_data.topics

    texts = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    return torch.tensor(list("\n\n".join(texts).encode("ascii", "ignore")), dtype=torch.long)


def batches(text: Tensor, steps: int, seed: int, size: int = BATCH) -> list[Tensor]:
    """``steps`` batches [size, SEQUENCE] of random windows, the same for both runs."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - SEQUENCE, (steps, size), generator=generator)
    return [torch.stack([text[s : s + SEQUENCE] for s in row.tolist()]) for row in starts]


def build_model(seed: int, layers: int = 2, *, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Any:
    """Return a Llama of the largest size (3.3 million parameters): ``SIZES[0]``, 256 byte tokens; ``sizes``: other
    ones.
    """
    torch.manual_seed(seed)
    values: dict[str, Any] = {
        "vocab_size": 256,
        "num_hidden_layers": layers,
        "max_position_embeddings": SEQUENCE,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    values |= dataclasses.asdict(SIZES[0]) | sizes
    config: Any = LlamaConfig(**values)
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype)


def rates(tokens: Tensor) -> dict[Dtype, float]:
    """Weights times tokens per second of the largest model on this machine, forward and backward, by type.

    ``tokens``: one sequence [1, SEQUENCE]. Larger batches are multiplied a little faster.
    """
    result: dict[Dtype, float] = {}
    for name, dtype in DTYPES.items():
        step = functools.partial(_gradients, build_model(0, dtype=dtype), tokens)
        seconds = [_seconds(step)]
        while len(seconds) < 3 or sum(seconds) < PROBE_SECONDS:  # others may use the machine: the best moment counts
            seconds.append(_seconds(step))
        result[name] = SIZES[0].weights * tokens.numel() / min(seconds)
    return result


def _gradients(model: Callable[..., Any], tokens: Tensor) -> Tensor:
    """Forward and backward; returns the loss."""
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss


def _seconds(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def prepare(name: str, model: Any, backend: Any, tokens: Tensor) -> TrainingRun:
    """Compile ``model`` through ``torch.compile(backend=backend)``, and time a few steps that change no weight."""
    compiled = torch.compile(model, backend=backend)
    compile_seconds = _seconds(lambda: _gradients(compiled, tokens))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    step_seconds = [_seconds(lambda: _step(compiled, optimizer, tokens))]
    while len(step_seconds) < 3 and sum(step_seconds) < PROBE_SECONDS:
        step_seconds.append(_seconds(lambda: _step(compiled, optimizer, tokens)))
    return TrainingRun(
        name=name,
        model=model,
        compiled=compiled,
        compile_seconds=compile_seconds,
        step_seconds=statistics.median(step_seconds),
    )


def _step(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    """Take one training step, and return its loss."""
    optimizer.zero_grad()
    loss = _gradients(compiled, tokens)
    optimizer.step()
    return loss.item()


def train(
    runs: Sequence[TrainingRun],
    data: Sequence[Tensor],
    advance: Callable[[str, int], None],
    choose: Callable[[int, float], int],
) -> None:
    """Train the models of ``runs`` side by side, on the same batches: AdamW, linear warm-up, cosine decay.

    Args:
        advance: see :func:`progress`.
        choose: called after each step, with their number and the seconds that a step of all runs takes now. It returns
            the number of steps for both, which is not larger than the last one.
    """
    steps = len(data)
    optimizers = [optimizer_of(run.model, lambda: steps) for run in runs]
    for done, tokens in enumerate(data, 1):
        for run, (optimizer, rate) in zip(runs, optimizers, strict=True):
            started = time.monotonic()
            run.losses.append(_step(run.compiled, optimizer, tokens))
            rate.step()
            run.seconds.append(time.monotonic() - started)
        losses = ", ".join(f"{run.name} {run.losses[-1]:.3f}" for run in runs)
        steps = choose(done, sum(statistics.median(run.seconds[-RECENT:]) for run in runs))
        advance(f"step {done} of {steps}: loss {losses}", steps)
        if done >= steps:
            break


def optimizer_of(
    model: Any, steps: Callable[[], int], learning_rate: float = 1e-3
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW, and a tenth of the steps in which its rate grows from a tenth of it, before it decays to that.

    Args:
        steps: how many there are, which may become fewer.
    """

    def factor(step: int) -> float:
        warm_up = max(1, steps() // 10)
        if step < warm_up:
            return 0.1 + 0.9 * step / warm_up
        share = min(1.0, (step - warm_up) / max(1, steps() - warm_up))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * share))

    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@contextlib.contextmanager
def stage(name: str, console: Console) -> Generator[None]:
    """Show work of unknown length: a moving line on a terminal, elsewhere its name."""
    if console.is_terminal:
        with console.status(name):
            yield
    else:
        console.print(name, highlight=False, soft_wrap=True)
        yield


@contextlib.contextmanager
def progress(steps: int, console: Console) -> Generator[Callable[[str, int], None]]:
    """A function to call after each step, with a text about it, and how many steps there are now: a bar on a terminal.

    Elsewhere it prints a line when ``LINE_SECONDS`` have gone by since the last one. Both show the time left.
    """
    if console.is_terminal:
        with Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task("", total=steps)
            yield lambda text, steps: bar.update(task, advance=1, total=steps, description=text)
        return
    started = last = time.monotonic()
    done = 0

    def line(text: str, steps: int) -> None:
        nonlocal done, last
        done, now = done + 1, time.monotonic()
        if now - last >= LINE_SECONDS:
            last = now
            left = (now - started) / done * (steps - done)
            console.print(f"{text}, about {left:.0f} s left", highlight=False, soft_wrap=True)

    yield line


def mean_of_last(losses: Sequence[float]) -> float:
    """Return the mean of the last ``LAST`` losses, or of the second half of few."""
    last = losses[-max(1, min(LAST, len(losses) // 2)) :]
    return sum(last) / len(last)


def verdict(plain: Sequence[float], fp8: Sequence[float]) -> tuple[float, bool]:
    """Return the relative difference of the mean of the last losses, and whether it is within the tolerance."""
    a, b = mean_of_last(plain), mean_of_last(fp8)
    difference = (b - a) / a
    return difference, abs(difference) <= TOLERANCE


def plot_png(plain: TrainingRun, fp8: TrainingRun, path: Path) -> None:
    """Draw both loss curves in one picture."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(plain.losses, label=plain.name, linewidth=2.5, alpha=0.6)
    axes.plot(fp8.losses, label=fp8.name, linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="The same Llama, the same seed")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_terminal(plain: TrainingRun, fp8: TrainingRun, width: int) -> str:
    """Return both loss curves as text."""
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(min(width - 2, 100), 18)
    for run, marker in ((plain, "o"), (fp8, "x")):
        steps = [step for step, loss in enumerate(run.losses) if math.isfinite(loss)]
        if steps:  # plotext draws neither NaN nor nothing
            plotext.plot(steps, [run.losses[step] for step in steps], label=run.name, marker=marker)
    plotext.xlabel("step")
    plotext.title("loss (nats per byte)")
    return plotext.uncolorize(str(plotext.build()))


def sample(model: Any, prompt: str, length: int, seed: int, seconds: float) -> str:
    """Text from ``model``, one byte after the other, at temperature 0.7: ``length`` bytes, or for some seconds."""
    torch.manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode())])
    started = time.monotonic()
    with torch.no_grad():
        while length and time.monotonic() - started < seconds:
            length -= 1
            logits = model(input_ids=tokens[:, -SEQUENCE:]).logits[0, -1].float()
            choice = torch.multinomial(torch.softmax(logits / 0.7, -1), 1)
            tokens = torch.cat([tokens, choice[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def run_demo(
    *,
    steps: int | None,
    seed: int,
    recipe: str,
    compiler: Compiler | None,
    out: Path,
    started: float,
    judge: Callable[[Sequence[float], Sequence[float]], tuple[float, bool]] = verdict,
) -> int:
    """Run the demo and print the results; returns the exit code: 1 if the two runs differ too much.

    Args:
        steps, compiler: None: chosen so that it ends in three minutes (``demo_choice``).
        started: the value of ``time.monotonic()`` when the command was started.
    """
    console, errors = Console(), Console(stderr=True)
    out.mkdir(parents=True, exist_ok=True)
    text = corpus()

    def left() -> float:
        return SECONDS - (time.monotonic() - started)

    console.print(
        f"[bold]fp8graph demo[/]: a small Llama learns Python's help texts twice from one seed, in high precision and "
        f"in FP8 ({recipe}).\nOn a CPU this shows the numbers, not the speed: FP8 is slower there.",
        soft_wrap=True,
    )
    with quiet(), stage("timing bf16 and FP32 (of about three minutes)", errors):
        speed = rates(batches(text, 1, seed, 1)[0])
    size, dtype = choose_size(speed, left(), steps)
    build = functools.partial(build_model, seed, dtype=DTYPES[dtype], **dataclasses.asdict(size))
    parameters = sum(p.numel() for p in build().parameters())
    console.print(
        f"Chosen for this machine: {parameters / 1e6:.1f} million parameters in {dtype} (FP32 is "
        f"{speed['FP32'] / speed['bf16']:.1f} times as fast as bf16 here).",
        highlight=False,
        soft_wrap=True,
    )
    first = batches(text, 1, seed)[0]
    plain_backend: Any = "aot_eager" if compiler == "eager" else "inductor"
    with quiet(), stage(f"compiling forward and backward of {dtype}", errors):
        plain = prepare(dtype, build(), plain_backend, first)
    compiler = compiler or choose_compiler(plain.compile_seconds, plain.step_seconds, left())
    backend = Backend(recipe=recipe, compiler=compiler)
    with quiet(), stage("compiling forward and backward of FP8", errors):
        fp8 = prepare("FP8", build(), backend, first)
    pair = plain.step_seconds + fp8.step_seconds
    fixed = steps is not None
    steps = steps or choose_steps(pair, left())
    console.print(
        f"Chosen: {steps} steps of {BATCH} x {SEQUENCE} bytes in {dtype} and in FP8"
        f"{', node by node' if compiler == 'eager' else ''}: about {steps * pair:.0f} s.",
        highlight=False,
        soft_wrap=True,
    )
    data, chosen = batches(text, steps, seed), steps

    def choose(done: int, step: float) -> int:
        nonlocal chosen
        if not fixed and done >= RECENT:
            chosen = choose_again(chosen, done=done, step=step, before=pair, seconds=left())
        return chosen

    with quiet(), progress(steps, errors) as advance:
        train((plain, fp8), data, advance, choose)
    if (trained := len(fp8.losses)) < steps:
        console.print(f"{trained} steps in place of {steps}: this machine became slower.", highlight=False)

    console.rule("What runs in FP8, and why the rest does not")
    console.print(str(backend.report), markup=False, highlight=False, soft_wrap=True)
    backend.report.check()

    console.rule("Loss")
    console.print(plot_terminal(plain, fp8, console.width), markup=False, highlight=False)
    picture = out / "loss.png"
    plot_png(plain, fp8, picture)
    console.print(f"wrote {picture}")

    with torch.no_grad():
        reference = fp8.model(input_ids=data[-1]).logits
        with quiet():
            quantized = torch.compile(fp8.model, backend=Backend(recipe=recipe, compiler="eager"))(input_ids=data[-1])
    difference, good = judge(plain.losses, fp8.losses)
    console.rule("Result")
    for run in (plain, fp8):
        console.print(
            f"{run.name:4}  mean of the last {max(1, min(LAST, trained // 2))} losses {run.mean:.4f}   "
            f"compile {run.compile_seconds:.0f} s, {trained} steps {sum(run.seconds):.0f} s",
            highlight=False,
        )
    console.print(
        f"difference of FP8 from {dtype} {difference:+.2%} (at most {TOLERANCE:.0%} is fine)", highlight=False
    )
    # Most of a trained model's logits is their mean over all tokens, which survives any rounding.
    common = reference.float().mean((0, 1))
    varying = sqnr_db(reference - common, quantized.logits - common)
    console.print(
        f"logits of the FP8-trained model, FP8 against {dtype}: SQNR "
        f"{sqnr_db(reference, quantized.logits):.1f} dB, {varying:.1f} dB without their mean over all tokens",
        highlight=False,
    )
    console.rule("A sample from the FP8-trained model")
    console.print(sample(fp8.model, "The ", 240, seed, SAMPLE_SECONDS), markup=False, highlight=False)
    if not good:
        console.print(f"[bold red]FP8 and {dtype} losses differ too much.[/]")
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
