"""benchmarks/smooth_swiglu.py: its arithmetic, and that the page says what the committed runs say."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.records import RESULTS
from benchmarks.smooth_swiglu import BACKENDS, lines, products, read
from tiny_models import causal_lm


def test_products_are_what_down_proj_reads() -> None:
    model: Any = causal_lm("Llama")(2)
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data.zero_()
    ids = torch.arange(16).reshape(1, 16)
    assert products(model, ids) == [(0.0, 0.0)] * 2
    assert all(not module._forward_pre_hooks for module in model.modules())
    found = products(causal_lm("Llama")(1), ids)
    assert len(found) == 1
    assert found[0][0] > found[0][1] > 0


def test_runs_are_compared_with_bf16_of_their_rate_and_seed() -> None:
    def run(loss: float, amax: float) -> dict[str, Any]:
        return {"steps": 10, "evaluations": {"10": loss}, "products": [[amax, 2.0], [1.0, 1.0]]}

    runs = {(0.01, "bf16"): {0: run(1.0, 4.0)}, (0.01, "delayed"): {0: run(1.1, 8.0), 1: run(3.0, 6.0)}}
    assert lines(runs) == [
        "| 0.01 | bf16 | 1.000 to 1.000 |  | 4 | 2 |",
        "| 0.01 | delayed | 1.100 to 3.000 | +10.00 % | 8 | 4 |",
    ]
    del runs[0.01, "bf16"]
    assert lines(runs) == ["| 0.01 | delayed | 1.100 to 3.000 |  | 8 | 4 |"]  # nothing to compare with


def test_the_results_are_in_the_documents() -> None:
    runs = read()
    assert {name for _, name in runs} == BACKENDS.keys()
    assert {len(by_seed) for by_seed in runs.values()} == {5}
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert [line for line in lines(runs) if line not in page] == []
