"""``fp8graph bench record``: whole models trained by each contender in one process, in one file.

Each contender trains the same model from the same weights on the same text, fresh tokens in each step; all compile the
decoder blocks one by one, the loss by Inductor. The file is written anew after each of them: a run that is stopped
keeps what it has. ``benchmarks/sections/whole.py`` measures by the same function.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8graph.backend.backend import Backend
from fp8graph.errors import ConfigError, did_you_mean
from fp8graph.files import write_file
from fp8graph.hardware import bf16_sheet, device_name
from fp8graph.tools.record.contenders import CONTENDERS, why_not
from fp8graph.tools.record.machine import (
    MIB,
    allocated,
    baseline,
    memory_mib,
    peak_mib,
    sampled,
    start_peak,
    synchronize,
    this_machine,
    warm_up,
)
from fp8graph.tools.record.workloads import WORKLOADS, Mode, RecordedModel, text, tiny

STEPS: Final = 33
WARM: Final = 3  # steps that are not timed
SPARE: Final = 4  # steps whose tokens are there for ``afterwards``
Row = dict[str, Any]


def coverage(backend: Backend | None) -> Row:
    """Return how many GEMMs there are, and how many in FP8; nothing for a contender without a report."""
    if backend is None:
        return {}
    gemms = backend.report.gemms
    return {"gemms": len(gemms), "gemms_in_fp8": sum(gemm.recipe is not None for gemm in gemms)}


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _optimizer(mode: Mode, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    if mode.optimizer == "AdamW":
        return torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    return torch.optim.SGD(parameters, lr=1e-3)


def train(
    workload: RecordedModel,
    name: str,
    device: torch.device,
    mode: Mode,
    *,
    steps: int = STEPS,
    compiler: str = "inductor",
    afterwards: Callable[[Callable[[], Any]], None] = lambda step: None,
) -> Row:
    """Train one contender, and return its row.

    Args:
        steps: of which the first ``WARM`` are not timed.
        afterwards: called with the step, which it may call ``SPARE`` times, while the model is there: to profile it.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    before, start = baseline(), time.perf_counter()
    start_peak()
    model = workload.build(device)
    if mode.checkpointed:
        # its name from transformers 5.24 on
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    backend = CONTENDERS[name](model, compiler)
    loss_of = torch.compile(_loss, backend="inductor" if compiler == "inductor" else "aot_eager")
    optimizer = _optimizer(mode, model.parameters())
    tokens, said = text(model.config.vocab_size, (steps + SPARE) * workload.tokens + 1)
    batches = iter(tokens.to(device).unfold(0, workload.tokens + 1, workload.tokens))

    def step() -> Tensor:
        window = next(batches)
        x, labels = (part.view(workload.sequences, workload.sequence) for part in (window[:-1], window[1:]))
        loss = loss_of(model(x, use_cache=False).logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    synchronize()
    built = time.perf_counter() - start
    losses: list[Tensor] = []
    seconds: list[float] = []
    with sampled() as board:
        for _ in range(steps):
            begin = time.perf_counter()
            losses.append(step())
            synchronize()
            seconds.append(time.perf_counter() - begin)
    middle = statistics.median(seconds[WARM:])
    row: Row = {
        "model": workload.name, "contender": name, "optimizer": str(mode), "tokens": workload.tokens, "text": said,
        "sequence": workload.sequence, "tokens_per_s": workload.tokens / middle, "step_s": middle, "steps_s": seconds,
        "built_s": built, "compile_s": sum(seconds[:WARM]) - WARM * middle, "losses": [float(loss) for loss in losses],
        "flop_per_token": workload.flop_per_token(), "peak_flops": bf16_sheet(device_name(device)),
        "peak_mib": peak_mib(before), "before_mib": before / MIB,
        "resident_mib": None if device.type == "cpu" else (allocated() - before) / MIB,
        **board.medians(last=round(5 * sum(seconds[WARM:]))), **coverage(backend),
    }  # fmt: skip
    afterwards(step)
    return row


def choose(chosen: Sequence[str], names: Mapping[str, Any], what: str) -> list[str]:
    """Return ``chosen``, or all names if there is none.

    Raises:
        ConfigError: one of them is no name.
    """
    for name in chosen:
        if name not in names:
            raise ConfigError(f"there is no {what} {name!r}.{did_you_mean(name, names)} There are: {', '.join(names)}.")
    return list(chosen) or list(names)


def rows(
    device: torch.device, models: Sequence[str], contenders: Sequence[str], *, steps: int, is_tiny: bool
) -> Iterator[Row]:
    """Train each model by each contender; what cannot run, or fails, is a row with the reason."""
    compiler = "eager" if is_tiny else "inductor"
    memory = memory_mib(device)
    for model in models:
        workload = tiny(WORKLOADS[model]) if is_tiny else WORKLOADS[model]
        mode = workload.mode(memory)
        for name in contenders:
            row: Row = {"model": workload.name, "contender": name}
            if mode is None:
                yield row | {"skipped": f"{model} does not fit into {memory:,.0f} MiB"}
            elif reason := why_not(name, device):
                yield row | {"skipped": reason}
            else:
                try:
                    done = train(workload, name, device, mode, steps=steps, compiler=compiler)
                except Exception as error:  # a library's, of any kind: the others are measured all the same
                    done = row | {"failed": f"{type(error).__name__}: {str(error).strip()[:600]}"}
                yield done


def record(
    path: Path,
    device: torch.device,
    *,
    models: Sequence[str] = (),
    contenders: Sequence[str] = (),
    steps: int | None = None,
    is_tiny: bool = False,
    show: Callable[[Row], None] = lambda row: None,
) -> dict[str, Any]:
    """Measure, and write ``path`` anew after each row.

    Args:
        steps: None: ``STEPS``.

    Raises:
        ConfigError: there is no such model or contender, or the run is too short to time a step.
    """
    models, contenders = choose(models, WORKLOADS, "model"), choose(contenders, CONTENDERS, "contender")
    steps = STEPS if steps is None else steps
    if steps <= WARM:
        raise ConfigError(f"--steps {steps}: the first {WARM} are not timed; give more.")
    written: dict[str, Any] = {
        "machine": this_machine(),
        "command": " ".join(["fp8graph", *sys.argv[1:]]),
        "tiny": is_tiny,
        "rows": [],
    }
    written["warm_up_s"] = warm_up(device, "aot_eager" if is_tiny else "inductor")
    for row in rows(device, models, contenders, steps=steps, is_tiny=is_tiny):
        written["rows"].append(row)
        write_file(path, json.dumps(written, indent=1) + "\n", str(path))
        show(row)
    return written
