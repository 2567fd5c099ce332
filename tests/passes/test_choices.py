"""choices: which GEMMs are judged as one, with which sizes; the device and the mode decide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8graph
from fp8graph import Policy, Rule
from fp8graph.ir.settings import Settings
from fp8graph.passes import STORES
from fp8graph.passes.assign.profit import Choice, choices
from helpers import Two, first_fast, passed
from predicted import BF16


def choices_of(module: nn.Module, *, policy: Policy | None = None, rows: int = 16, **settings: Any) -> list[Choice]:
    """Those of a training step on [rows, 32], decided for sm_90."""
    known = Settings(target="sm_90", **settings)
    args = torch.randn(rows, 32, dtype=BF16, requires_grad=True)
    policy = policy or Policy(default="tensorwise", min_speedup=0)
    return list(choices(passed(module.to(BF16), args, last="assign", policy=policy, settings=known)[1]))


def sizes(found: list[Choice]) -> list[tuple[str, list[tuple[int, int, int]]]]:
    return [(choice.gemms[0].gemm, [(p.m, p.n, p.k) for p in choice.products]) for choice in found]


class Added(Two):
    """Results that can be slices of one."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.gate(x).tanh(), self.up(x).tanh()], dim=-1)


def test_siblings_are_one_product_each_way() -> None:
    found = choices_of(Added(48))
    joined = [("fprop", [(16, 112, 32)]), ("dgrad", [(16, 32, 112)]), ("wgrad", [(112, 32, 16)])]
    assert sorted(sizes(found)) == sorted(joined)
    assert [len(choice.gemms) for choice in found] == [2, 2, 2]
    fprop = next(choice for choice in found if choice.gemms[0].gemm == "fprop")
    assert fprop.before == ((16, 64, 32), (16, 48, 32))
    assert [quantized.elements for quantized, _ in fprop.products[0].reads] == [16 * 32, 112 * 32]


def test_results_that_leave_the_graph_are_multiplied_one_by_one() -> None:
    """And are still judged together: their weights are quantized as one."""

    class Results(Two):
        def forward(self, x: Tensor) -> Any:
            return torch.cat([torch.zeros_like(x), x], -1).sum() + self.gate(x).tanh(), self.up(x)

    found = dict(sizes(choices_of(Results())))
    assert found["fprop"] == [(16, 64, 32), (16, 64, 32)]
    assert found["dgrad"] == [(16, 32, 128)]


APART = [
    pytest.param(Added(48), {"fuse_linears": False}, id="switched off"),
    pytest.param(Added(40), {}, id="no multiple of 16"),
    pytest.param(
        Added(), {"policy": Policy([Rule("up", "rowwise")], default="tensorwise", min_speedup=0)}, id="another recipe"
    ),
    pytest.param(Added(bias=True), {}, id="a bias of one"),
]


@first_fast(("module", "settings"), APART)
def test_gemms_that_cannot_be_fused_are_judged_alone(module: nn.Module, settings: dict[str, Any]) -> None:
    found = choices_of(module, **settings)
    assert [len(choice.gemms) for choice in found] == [1] * 6


def test_a_weight_with_two_uses_is_judged_alone() -> None:
    module = Added()
    module.up.weight = module.gate.weight
    assert [len(choice.gemms) for choice in choices_of(module)] == [1] * 6


def test_gemm_without_recipe_is_not_a_choice() -> None:
    policy = Policy([Rule("up", None)], default="tensorwise", min_speedup=0)
    assert len(choices_of(Added(), policy=policy)) == 3
    assert choices_of(Added(), policy=Policy(default=None)) == []


def test_there_is_nothing_to_choose_without_a_speed() -> None:
    _, compilation = passed(Added(), torch.randn(16, 32, requires_grad=True), last="assign")
    assert len(compilation.decisions) == 6
    assert list(choices(compilation)) == []


def test_emulated_gemm_has_no_speed() -> None:
    """Beside one that is native: it runs in FP8 whatever it takes."""
    policy = Policy([Rule("up", "mxfp8")], default="tensorwise", min_speedup=0)
    found = {choice.gemms[0].node.name: choice.speed for choice in choices_of(Added(), policy=policy)}
    assert sorted(speed is None for speed in found.values()) == [False] * 3 + [True] * 3


def test_kept_weights_cost_nothing_and_gathered_ones_are_not_kept() -> None:
    module, x = nn.Linear(32, 32, bias=False).to(BF16), torch.randn(16, 32, dtype=BF16, requires_grad=True)
    kept: list[bool] = []
    cases: list[Any] = [(True, (), STORES), (False, (), STORES), (True, {0}, STORES), (True, (), ())]  # nothing keeps
    for cache_weights, gathered, stores in cases:
        torch._dynamo.reset()
        more: dict[str, Any] = {
            "parameter_facts": {store.name: {} for store in stores},
            "gathered": frozenset(gathered),
        }
        settings = Settings(target="sm_90", cache_weights=cache_weights)
        policy = Policy(default="tensorwise", min_speedup=0)
        _, found = passed(module, x, last="assign", policy=policy, settings=settings, **more)
        (fprop,) = [choice for choice in choices(found) if choice.gemms[0].gemm == "fprop"]
        kept.append(fprop.products[0].reads[1][0].kept)
    assert kept == [True, False, False, False]


@pytest.mark.parametrize("size", [2**17 - 1, 2**17])
def test_a_large_weight_is_read_again_in_backward(size: int) -> None:
    """Of 2**22 numbers: `save_for_backward` has it cast twice."""
    for choice in choices_of(nn.Linear(32, size, bias=False)):
        for product in choice.products:
            for quantized, _ in product.reads:
                assert quantized.again == (size == 2**17 and quantized.elements == 32 * size and not quantized.fused)


def test_a_dynamic_size_counts_as_it_was_traced() -> None:
    model = nn.Linear(4096, 4096, bias=False).to(BF16)
    policy = Policy([Rule("*", "tensorwise")])
    backend = fp8graph.Backend(policy, compiler="eager", target="sm_90")
    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=True)(torch.randn(32, 4096, dtype=BF16))
    (gemm,) = backend.report.gemms
    assert isinstance(gemm.m, str)
    assert gemm.speedup is not None


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_mode_decides(mode: str) -> None:
    """64 rows: the host would take longer to launch FP8's kernels than FP8 saves; in a CUDA graph it launches none."""
    options: dict[str, Any] = {"recipe": "rowwise", "compiler": "eager", "target": "sm_90", "mode": mode}
    model = torch.compile(nn.Linear(2048, 8192, bias=False, dtype=BF16), backend="fp8graph", options=options)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model(torch.empty(64, 2048, dtype=BF16))
    (gemm,) = fp8graph.backend_of(model).report.gemms
    assert (gemm.recipe is not None) == (mode == "reduce-overhead")


class Attention(nn.Module):
    """q, k and v of a Llama-3-8B layer, or something that keeps them apart."""

    def __init__(self, how: str) -> None:
        super().__init__()
        sizes = {"q": 4096, "k": 1024, "v": 1000 if how == "uneven" else 1024}
        factory: dict[str, Any] = {"device": "meta", "dtype": BF16}
        self.q, self.k, self.v = (nn.Linear(4096, size, bias=False, **factory) for size in sizes.values())
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        other = x.sin() if self.how == "two inputs" else x
        q, k, v = self.q(x), self.k(other), self.v(x)
        return torch.cat([q.tanh(), k.tanh(), v.tanh()], -1)


HOW = {
    "one input": {("q", "k", "v")},
    "two inputs": {("q", "v"), ("k",)},
    "uneven": {("q", "k"), ("v",)},
}


@pytest.mark.parametrize("how", HOW)
def test_gemms_judged_together_are_fused(how: str) -> None:
    x = torch.empty(8192, 4096, device="meta", dtype=BF16, requires_grad=True)
    report = fp8graph.explain(Attention(how), x, policy=Policy(default="tensorwise", min_speedup=0), target="sm_90")
    judged: dict[tuple[str, float | None], list[str]] = {}
    for g in report.gemms:
        judged.setdefault((g.gemm, g.speedup), []).append(g.fqn)
    assert {tuple(names) for names in judged.values()} == HOW[how]
    for g in report.gemms:
        (others,) = [set(names) - {g.fqn} for names in HOW[how] if g.fqn in names]
        *_, last = g.reason.split("; ")
        multiplied_with = set(last.removeprefix("one GEMM with ").split(", ")) if "one GEMM" in last else set[str]()
        assert multiplied_with == others, (g.name, g.gemm)


@pytest.mark.parametrize(("how", "pays"), [("one input", [True] * 3), ("two inputs", [True, False, True])])
def test_siblings_share_a_decision(how: str, pays: list[bool]) -> None:
    """128 rows: three launches become one, beside those that quantize. k by itself does not pay."""
    x = torch.empty(128, 4096, device="meta", dtype=BF16)
    settings: Any = {"policy": Policy(default="tensorwise"), "inductor_options": {"triton.cudagraphs": True}}
    report = fp8graph.explain(Attention(how), x, target="sm_90", training=False, **settings)
    assert [g.recipe is not None for g in report.gemms] == pays
    assert len({g.speedup for g in report.gemms}) == len(HOW[how])
