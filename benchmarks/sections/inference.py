"""``decode``: one token of each sequence with a static cache, in bf16, in FP8, and from FP8 checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch._dynamo.utils import counters

import fp8graph
from benchmarks import measure
from benchmarks.attention import STOCK, llama_with_head
from benchmarks.contenders import Compile, bf16, coverage, fp8, fresh
from benchmarks.measure import DEVICE
from benchmarks.records import Run
from fp8graph.tools.record.machine import MIB, allocated, baseline

# what CUDA graphs must not do: leave a graph out, or copy weights into it at each replay
COUNTED: Final = {"skips": "cudagraph_skips", "copied_inputs": "cudagraph_recorded_non_static_inputs"}
POSITIONS: Final = 512  # of the cache
STORED: Final = ("rowwise", "blockwise")  # the recipes whose checkpoints engines serve with dynamic scales of inputs
CHECKPOINT: Final = ", FP8 checkpoint"
SMALL: Final = ", small tiles"  # the option, which changes last bits


class Case(NamedTuple):
    """One measurement."""

    batch: int
    cuda_graphs: bool
    contender: str


def names() -> list[str]:
    """Return the contenders: a checkpoint comes after the recipe whose model writes it."""
    stored = [name for recipe in STORED for name in (recipe, recipe + CHECKPOINT)]
    return ["bf16", "tensorwise", "delayed", *stored, "rowwise" + SMALL]


def cases(run: Run) -> Iterator[Case]:
    """Yield the measurements in their order; 32 sequences first, where two recipes were never reached."""
    chosen = [n for n in names() if not run.only or n in run.only or n + CHECKPOINT in run.only]
    for batch in (2,) if run.tiny else (32, 1):
        yield from (Case(batch, True, name) for name in chosen)
    if not run.only:  # the checksums must not depend on CUDA graphs
        yield from (Case(2 if run.tiny else 1, False, name) for name in ("bf16", STORED[0] + CHECKPOINT))


def contender(run: Run, case: Case, folder: Path) -> tuple[nn.Module, Compile]:
    """The model and the way of compiling it; a checkpoint's linears hold its FP8 weights."""
    count, hidden, vocabulary = (1, 128, 256) if run.tiny else (8, 4096, 32_000)
    model: nn.Module = llama_with_head(count, hidden, vocabulary, STOCK, DEVICE).eval()
    options: dict[str, Any] = {"triton.cudagraphs": case.cuda_graphs}
    if case.contender == "bf16":
        return model, bf16(run, **options)
    recipe, small = case.contender.removesuffix(CHECKPOINT).removesuffix(SMALL), case.contender.endswith(SMALL)
    if case.contender.endswith(CHECKPOINT):
        fp8graph.load_checkpoint(model, folder / recipe)
    # with scales of its own, as after training: without, its graphs read every tensor twice
    trained = fp8graph.DelayedScaling(initial_scale="one") if recipe == "delayed" else recipe
    settings: dict[str, Any] = {"inductor_options": options, "small_tiles": small}
    return model, fp8(run, trained, extends="default", **settings)  # the head in bf16


def decode(run: Run) -> None:
    """Eight layers of Llama-3-8B and a head: milliseconds of one token. The checkpoints are what the models wrote."""
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(run):
            if run.late():
                return run.write("decode", **case._asdict(), stopped="the section's time is over")
            with run.attempt("decode", **case._asdict()), fresh(), torch.no_grad():
                _measure(run, case, Path(folder))
    return None


def _measure(run: Run, case: Case, folder: Path) -> None:
    from transformers import StaticCache

    counters.clear()
    before = baseline()
    plain, compile = contender(run, case, folder)
    config: Any = plain.config
    model, backend = compile(plain)
    cache = StaticCache(config=config, max_cache_len=POSITIONS)
    heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    cache.early_initialization(case.batch, heads, size, torch.bfloat16, DEVICE)
    ids = torch.arange(case.batch, device=DEVICE).unsqueeze(1)

    def call() -> Any:
        return model(ids, past_key_values=cache, use_cache=True).logits

    for _ in range(4):
        call()
    run.write(
        "decode", **case._asdict(), layers=config.num_hidden_layers, wall_ms=measure.wall_ms(call, 20),
        host_ms=measure.host_ms(call), events_ms=measure.events_ms(call, 20),
        resident_mib=(allocated() - before) / MIB, **measure.board(call), checksum=float(call().float().abs().sum()),
        profile=measure.profile(call, longest=12),
        **coverage(backend), **{key: counters["inductor"][counter] for key, counter in COUNTED.items()},
    )  # fmt: skip
    if backend is not None and case.contender in STORED and not (folder / case.contender).exists():
        fp8graph.export(model, folder / case.contender, "compressed-tensors")
