"""``decode``: forward without gradients, with and without CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks import measure
from benchmarks.attention import CAUSAL, llama
from benchmarks.contenders import Compile, bf16, fp8, fresh
from benchmarks.measure import DEVICE
from benchmarks.records import Run

# what CUDA graphs must not do: leave a graph out, or copy weights into it at each replay
COUNTED = {"skips": "cudagraph_skips", "copied_inputs": "cudagraph_recorded_non_static_inputs"}


def contenders(run: Run, cuda_graphs: bool) -> dict[str, Compile]:
    options: dict[str, Any] = {"triton.cudagraphs": cuda_graphs}
    recipes = ("tensorwise", "delayed", "rowwise")
    return {
        "bf16": bf16(run, **options),
        **{recipe: fp8(run, recipe, inductor_options=options) for recipe in (recipes[:1] if run.tiny else recipes)},
    }


def decode(run: Run) -> None:
    """Eight Llama-3-8B layers, one token of 1 and of 64 sequences. ``checksum`` must not depend on CUDA graphs."""
    count, hidden = (1, 128) if run.tiny else (8, 4096)
    for cuda_graphs in (True, False):
        for batch in (2,) if run.tiny else (1, 64):
            for name, compile in contenders(run, cuda_graphs).items():
                case = {"contender": name, "batch": batch, "cuda_graphs": cuda_graphs, "layers": count}
                if run.late():
                    return run.write("decode", **case, stopped="the section's time is over")
                with run.attempt("decode", **case), fresh(), torch.no_grad():
                    counters.clear()
                    model, _ = compile(llama(count, hidden, CAUSAL, DEVICE))
                    x = torch.randn(batch, 1, hidden, device=DEVICE, dtype=torch.bfloat16)

                    def call(model: Any = model, x: Any = x) -> Any:
                        return model(x)

                    for _ in range(4):
                        call()
                    run.write(
                        "decode", **case, wall_ms=measure.wall_ms(call, 20), host_ms=measure.host_ms(call),
                        events_ms=measure.events_ms(call, 20), resident_mib=measure.allocated() / measure.MIB,
                        checksum=float(call().float().abs().sum()), profile=measure.profile(call, longest=12),
                        **{key: counters["inductor"][counter] for key, counter in COUNTED.items()},
                    )  # fmt: skip
    return None
