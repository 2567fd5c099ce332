"""``table``: Llama-3-8B trained on one GPU, four rows: tokens per second, peak memory, seconds to compile, power.

Each row compiles the decoder blocks one by one, and the head, which stays in bf16; the loss is compiled by Inductor.
torchao converts the same linears. AdamW takes twice the memory of the weights: where the GPU has less than
``WITH_ADAMW`` the optimizer is SGD, and each block is checkpointed, for all rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

import fp8graph
from benchmarks import measure
from benchmarks.attention import CAUSAL, llama_with_head
from benchmarks.contenders import converted_by_torchao, coverage, fresh
from benchmarks.measure import DEVICE, GPU, MIB
from benchmarks.records import Run, importable
from fp8graph.backend.entry import regions_of

WITH_ADAMW: Final = 130 * 2**30  # bytes of GPU memory
WARM, TIMED = 3, 6  # steps
Compile = Callable[[nn.Module], fp8graph.Backend | None]


def bf16(run: Run) -> Compile:
    def compile(model: nn.Module) -> None:
        for block in regions_of(model, "auto"):
            block.compile(backend="inductor" if run.compiler == "inductor" else "aot_eager")

    return compile


def torchao(run: Run) -> Compile:
    def compile(model: nn.Module) -> None:
        converted_by_torchao(model, "tensorwise", module_filter_fn=lambda _module, fqn: fqn != "lm_head")
        bf16(run)(model)

    return compile


def ours(run: Run, recipe: str) -> Compile:
    def compile(model: nn.Module) -> fp8graph.Backend:
        policy = fp8graph.Policy([fp8graph.Rule("lm_head", None)], default=recipe)
        return fp8graph.backend_of(fp8graph.compile(model, policy, regions="auto", compiler=run.compiler))

    return compile


def rows(run: Run) -> dict[str, Compile]:
    """With --tiny only two of them."""
    found = {"bf16": bf16(run), "tensorwise": ours(run, "tensorwise")}
    if run.tiny:
        return found
    found["delayed"] = ours(run, "delayed")
    return found | ({"torchao tensorwise": torchao(run)} if importable("torchao") else {})


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def table(run: Run) -> None:
    """Steps of training with random tokens, the same for all rows; the losses show that all of them train."""
    if not importable("torchao"):
        run.write("table", contender="torchao tensorwise", skipped="torchao is not installed")
    for name, compile in rows(run).items():
        if run.late(0.9):
            run.write("table", contender=name, stopped="the section's time is over")
            continue
        with run.attempt("table", contender=name), fresh():
            _row(run, name, compile)


def _row(run: Run, name: str, compile: Compile) -> None:
    count, hidden, vocabulary, tokens = (2, 128, 512, 64) if run.tiny else (32, 4096, 128_256, 8192)
    adamw = run.tiny or torch.cuda.get_device_properties(DEVICE).total_memory >= WITH_ADAMW
    start = time.perf_counter()
    model = llama_with_head(count, hidden, vocabulary, CAUSAL, DEVICE)
    model.train()
    if not adamw:
        model.gradient_checkpointing_enable()
    backend = compile(model)
    loss_function = torch.compile(loss_of, backend="inductor" if run.compiler == "inductor" else "aot_eager")
    parameters = model.parameters()
    optimizer: Any = (
        torch.optim.AdamW(parameters, lr=1e-4, fused=True) if adamw else torch.optim.SGD(parameters, lr=1e-3)
    )
    text = torch.randint(vocabulary, (1, tokens + 1), device=DEVICE)

    def step() -> Tensor:
        loss = loss_function(model(text[:, :-1], use_cache=False).logits, text[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    measure.synchronize()
    built, losses, seconds = time.perf_counter(), list[Tensor](), list[float]()
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    with measure.power() as watts:
        for _ in range(WARM + (1 if run.tiny else TIMED)):
            begin = time.perf_counter()
            losses.append(step())
            measure.synchronize()
            seconds.append(time.perf_counter() - begin)
    middle = statistics.median(seconds[WARM:])
    run.write(
        "table", contender=name, tokens_per_s=tokens / middle, step_s=middle, steps_s=seconds,
        built_s=built - start, compile_s=seconds[0] - middle, losses=[float(loss) for loss in losses],
        optimizer="AdamW" if adamw else "SGD, blocks checkpointed",
        peak_mib=torch.cuda.max_memory_allocated() / MIB if GPU else None,
        watts=statistics.median(watts[-10:]) if watts else None, **coverage(backend),
    )  # fmt: skip
    if not run.late(0.9):
        run.write("table", contender=name, profile=measure.profile(step, calls=1, longest=40))
