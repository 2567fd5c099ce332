"""Asynchronous tensor parallelism: Inductor finds our gathers and reduce-scatters beside their scaled GEMMs.

Not run: what it puts in their place needs several GPUs with symmetric memory. Only its pattern matcher is asked.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import fp8graph
from fp8graph import DelayedScaling
from fp8graph.hardware.device import CPU
from gathers import Sequence, two_ranks

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)


class _Seen(Exception):
    """Enough is known."""


def fused(monkeypatch: pytest.MonkeyPatch, recipe: Any) -> list[tuple[str, str]]:
    """The ops in which Inductor puts a collective and a scaled GEMM of the forward graph, with A's dtype."""
    import torch.distributed._symmetric_memory as symmetric_memory
    from torch._inductor.fx_passes import micro_pipeline_tp, post_grad

    found: list[tuple[str, str]] = []

    def look(graph: fx.Graph) -> None:
        micro_pipeline_tp.micro_pipeline_tp_pass(graph)
        for node in graph.nodes:
            if str(node.target).startswith("symm_mem."):
                a = node.args[0].args[0]  # restrided
                found.append((str(node.target).split(".")[1], str(a.meta["val"].dtype).removeprefix("torch.")))
        raise _Seen

    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(symmetric_memory, "is_symm_mem_enabled_for_group", lambda _: True)
    monkeypatch.setattr(post_grad, "micro_pipeline_tp_pass", look)
    monkeypatch.setattr(CPU, "custom_gemm", classmethod(lambda *_: None))  # torch's op, as on a GPU
    monkeypatch.setattr(CPU, "alignments", {"tensor": (1, 16, 16), "row": (1, 16, 16)})
    backend = fp8graph.Backend(recipe=recipe, inductor_options={"_micro_pipeline_tp": True})
    with two_ranks(), pytest.raises(Exception, match="_Seen"):
        torch.compile(Sequence(), backend=backend)(torch.randn(16, 128).bfloat16().float())
    return found


@pytest.mark.filterwarnings("ignore:erase_node:UserWarning")  # of torch 2.11, by its own pass
@pytest.mark.parametrize("recipe", ["tensorwise", DelayedScaling(initial_scale="one")])
def test_gathers_and_scatters_are_fused_with_their_gemms(monkeypatch: pytest.MonkeyPatch, recipe: Any) -> None:
    """gate and up are one GEMM behind one gather, down is one before the reduce-scatter; parts are FP8, not bytes."""
    assert fused(monkeypatch, recipe) == [
        ("fused_all_gather_scaled_matmul", "float8_e4m3fn"),
        ("fused_scaled_matmul_reduce_scatter", "float8_e4m3fn"),
    ]
