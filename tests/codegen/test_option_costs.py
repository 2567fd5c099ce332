"""The cost of recipes' options on a GPU: kernels and bytes of the code for sm_90 and sm_100, counted without a GPU.

Bytes are those of Triton's kernels; GEMMs and attention are not counted. One linear behind SwiGLU, 2048 tokens and
4096 x 4096: gate, up and the product are 16 MiB each, the weight 32. An attention with 32 heads of 128 and 8 heads of
keys: q is 16 MiB, k and v 4 each.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from attentions import Attention, asking, sdpa
from fp8graph import (
    DelayedScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    Policy,
    Rule,
    offline,
)
from fp8graph.compat import attention
from fp8graph.compat.attention import HAS_QUANTIZED_ATTENTION
from generated import MIB, OF_ONE_INDUCTOR, triton_kernels
from helpers import first_slow

pytestmark = pytest.mark.skipif(not offline.available(), reason="triton is not installed")
SLACK = 1.02  # of bytes: scales, and what versions of torch store between


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Linear(4096, 4096, bias=False, device="meta", dtype=torch.bfloat16)

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(gate) * up)


def of_linear(recipe: Any, target: str) -> dict[str, tuple[int, float]]:
    """Kernels and MiB of one step, forward, backward and what makes its weight once per update."""
    torch._dynamo.reset()
    gate, up = (torch.empty(2048, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(2))
    policy = Policy([Rule("*", recipe)], min_speedup=0)
    settings: dict[str, Any] = {"policy": policy, "target": target, "training": True, "cache_weights": "update"}
    found = fp8graph.explain(Down(), gate, up, **settings).kernels
    counted = {graph: triton_kernels(found, graph) for graph in ("forward", "backward", "weights")}
    return {graph: (len(some), sum(kernel.bytes for kernel in some) / MIB) for graph, some in counted.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "kernels", "mib"),
    [
        pytest.param(Float8CurrentScaling(), (3, 4), (80, 128), id="tensorwise"),
        pytest.param(DelayedScaling(), (5, 5), (48, 112), id="delayed", marks=pytest.mark.release),
    ],
)
def test_a_linear_behind_swiglu(recipe: Any, kernels: tuple[int, int], mib: tuple[float, float]) -> None:
    found = of_linear(recipe, "sm_90")
    for graph, most, bound in zip(("forward", "backward"), kernels, mib, strict=True):
        assert found[graph][0] <= most
        assert found[graph][1] <= SLACK * bound


@pytest.mark.release
@OF_ONE_INDUCTOR
def test_square_tiles_of_mxfp8_cost_less() -> None:
    """Both layouts of the weight hold the same numbers: one read makes them, 96 MiB per update in place of 131."""
    lines, squares = (of_linear(MXFP8BlockScaling(enable_2d_quantization=square), "sm_100") for square in (False, True))
    assert squares["weights"][0] <= 2 < lines["weights"][0]
    assert squares["weights"][1] <= SLACK * 96.2
    assert lines["weights"][1] == pytest.approx(131, rel=0.05)
    for graph, bound in (("forward", 82.5), ("backward", 131)):
        assert squares[graph][0] <= lines[graph][0]
        assert squares[graph][1] <= lines[graph][1] <= SLACK * bound


def heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.view(1, 2048, -1, 128).transpose(1, 2) for x in (q, k, v))
    return sdpa(is_causal=True, enable_gqa=True)(q, k, v).transpose(1, 2).reshape(1, 2048, -1)


def of_attention(recipe: Any, *, training: bool, execution: str) -> list[tuple[int, float]]:
    """Kernels and MiB beside those of attention, forward and backward."""
    torch._dynamo.reset()
    given = [torch.empty(1, 2048, n * 128, dtype=torch.bfloat16, requires_grad=training) for n in (32, 8, 8)]
    report = fp8graph.explain(Attention(heads), *given, policy=asking(recipe), target="sm_90", training=training)
    assert report.attention[0].execution == execution
    found = [triton_kernels(report.kernels, graph) for graph in ("forward", "backward")]
    return [(len(some), sum(kernel.bytes for kernel in some) / MIB) for some in found]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_QUANTIZED_ATTENTION, reason="this torch has no op for FP8 attention")
@pytest.mark.parametrize(
    ("recipe", "kernels", "mib"),
    [
        ("tensorwise", 8, 60),  # the floor: 24 read for the amaxes, and to be cast, 12 written
        # heads lie beside each other in memory: they are put in order first
        pytest.param("rowwise", 8, 84, marks=pytest.mark.release),
        pytest.param(Float8CurrentScaling(hadamard_qk=True), 10, 60, marks=pytest.mark.release),  # GEMMs read q and k
        pytest.param(Float8RowwiseScaling(hadamard_qk=True), 12, 124, marks=pytest.mark.release),
    ],
    ids=["tensorwise", "rowwise", "tensorwise, transformed", "rowwise, transformed"],
)
def test_native_attention(recipe: Any, kernels: int, mib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "active_implementation", lambda: "FA3")
    (forward, _) = of_attention(recipe, training=False, execution="native")
    assert forward[0] <= kernels
    assert forward[1] <= SLACK * mib


@OF_ONE_INDUCTOR
@first_slow(
    ("recipe", "kernels", "mib"),
    [
        ("tensorwise", (8, 3), (84, 36.5)),  # 24 more: the decoded numbers, which backward decodes once more
        # scores in FP32 are 512 MiB: attention in matmuls is for numerics, not for speed
        (Float8CurrentScaling(attention_backward=True), (12, 10), (1750, 3950)),
    ],
)
def test_emulated_attention(recipe: Any, kernels: tuple[int, int], mib: tuple[float, float]) -> None:
    found = of_attention(recipe, training=True, execution="emulated")
    for (launched, moved), most, bound in zip(found, kernels, mib, strict=True):
        assert launched <= most
        assert moved <= SLACK * bound
