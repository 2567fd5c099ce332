"""``quant``: the bandwidth of the generated kernels that quantize, under the code generation options that matter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import fp8graph
from benchmarks import measure
from benchmarks.contenders import RECIPES
from benchmarks.measure import DEVICE
from benchmarks.records import Run
from fp8graph.backend.inductor_passes import compile_dialect
from fp8graph.tools.record.machine import MIB

TESTS: Final = Path(__file__).parents[2] / "tests" / "support"
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "as shipped": {},
    "combo kernels": {"combo_kernels": True},
    "no combo kernels": {"combo_kernels": False},
    "exact division": {"eager_numerics.division_rounding": True},
    "approximate division": {"eager_numerics.division_rounding": False},
}
READ: Final = {"silu_mul": 2, "rms_norm": 1, "nothing": 1, "swiglu backward": 3}  # tensors [rows, columns]


def jobs() -> dict[tuple[str, str], Any]:
    """Functions of (x, weight, y, scales) by (what makes the tensor, recipe): those whose kernels the tests count."""
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    from generated import quantize_after, quantize_after_backward

    made: dict[tuple[str, str], Any] = {}
    for recipe in RECIPES:
        for producer in ("silu_mul", "rms_norm", "nothing"):
            made[producer, recipe] = quantize_after(producer, recipe, "input", True, True)
        made["swiglu backward", recipe] = quantize_after_backward("swiglu", recipe)
    return made


def inputs(producer: str, rows: int, columns: int) -> list[torch.Tensor]:
    """Random arguments of a function of :func:`jobs`."""
    x, y, dh = (torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    return [x, dh if "backward" in producer else dh[0].contiguous(), y, torch.ones(4, 2, device=DEVICE)]


def quant(run: Run) -> None:
    """GPU time of each, and the rate at which it would move what it must read and write once."""
    rows, columns = (64, 256) if run.tiny else (8192, 14336)
    functions = dict(list(jobs().items())[:1]) if run.tiny else jobs()
    for (producer, recipe), function in functions.items():
        given = inputs(producer, rows, columns)
        x = given[0]
        for name, options in OPTIONS.items():
            if run.late():
                return run.write("quant", producer=producer, recipe=recipe, stopped="the section's time is over")
            with run.attempt("quant", producer=producer, recipe=recipe, options=name):
                call, made = compiled(function, given, fp8graph.Backend(inductor_options=options))
                moved = READ[producer] * x.nbytes + sum(t.nbytes for t in made)
                ms = measure.replayed_ms(call, 5)
                profile = measure.profile(call) if not options else None
                run.write(
                    "quant", producer=producer, recipe=recipe, options=name, gpu_ms=ms,
                    least_mib=moved / MIB, tb_s=1e-9 * moved / ms, profile=profile,
                )  # fmt: skip
    return None


def compiled(
    function: Any, inputs: list[torch.Tensor], backend: fp8graph.Backend
) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    module = make_fx(function, decomposition_table=select_decomp_table())(*inputs)
    with torch.no_grad():
        run = compile_dialect(module, inputs, backend.settings)
        made = run(*inputs)
    return torch.no_grad()(lambda: run(*inputs)), made
