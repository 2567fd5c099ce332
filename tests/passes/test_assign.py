"""assign: the recipe of every GEMM or the reason why it has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from benchmarks.decoder_layer import DecoderLayer
from fp8graph import Policy, Rule
from fp8graph.ir.sites import Decision
from fp8graph.passes.assign import with_speedup
from fp8graph.recipes import GEMMS, resolve_recipe
from fp8graph.recipes.rules import Resolution
from helpers import ALL, MLP, eager_backend, first_fast


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(dtype.is_floating_point)


class Product(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


MATMUL = Policy([Rule("*", "tensorwise", op="matmul")])


@pytest.mark.parametrize(
    ("module", "args", "policy", "reason"),
    [
        pytest.param(Product(), (x(8, 16), x(16, 8)), ALL, 'no rule: op="matmul" is left alone', id="matmul"),
        pytest.param(Product(), (x(2, 8, 16), x(2, 16, 8)), ALL, 'no rule: op="matmul" is left alone', id="bmm"),
        pytest.param(MLP(), (x(8, 32),), Policy(default=None), "default -> high precision", id="default None"),
        pytest.param(MLP(), (x(8, 32),), Policy([Rule("*", None)]), 'rule "*" -> high precision', id="rule None"),
    ],
)  # fmt: skip
def test_left_alone_with_a_reason(module: nn.Module, args: tuple[Any, ...], policy: Policy, reason: str) -> None:
    report = fp8graph.explain(module, *args, policy=policy, training=args[0].requires_grad)
    assert report.gemms
    for gemm in report.gemms:
        assert gemm.recipe is None
        assert gemm.execution == "high precision"
        assert gemm.reason.startswith(reason)


class Batched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 32, 16))

    def forward(self, a: Tensor) -> Tensor:
        return torch.bmm(a, self.w)


def test_a_batched_linear_is_left_alone_unless_a_rule_names_it() -> None:
    by_default = fp8graph.explain(Batched(), x(3, 8, 32), policy=ALL)
    assert {g.recipe for g in by_default.gemms} == {None}
    assert by_default.gemms[0].reason.startswith("batched matmul: torch has no scaled bmm")
    named = fp8graph.explain(Batched(), x(3, 8, 32), policy=Policy([Rule("w", "tensorwise")]))
    assert {(g.recipe, g.execution) for g in named.gemms} == {("tensorwise", "emulated")}


@pytest.mark.parametrize(
    ("a", "b", "execution"),
    [((2, 8, 16), (2, 16, 8), "emulated"), ((1, 8, 16), (1, 16, 8), "native"), ((8, 16), (16, 8), "native")],
)
def test_a_rule_for_matmuls(a: tuple[int, ...], b: tuple[int, ...], execution: str) -> None:
    report = fp8graph.explain(Product(), x(*a), x(*b), policy=MATMUL, training=True)
    assert [(g.op, g.gemm, g.execution) for g in report.gemms] == [
        ("matmul", gemm, execution) for gemm in ("fprop", "dgrad", "wgrad")
    ]


@first_fast(
    ("target", "execution"),
    [("sm_80", "emulated"), ("sm_89", "native"), ("sm_90", "native"), ("sm_90a", "native"), ("sm_100", "native")],
)
def test_hardware(target: str, execution: str) -> None:
    report = fp8graph.explain(MLP(), x(16, 32), policy=ALL, target=target)
    assert {g.execution for g in report.gemms} == {execution}


def test_per_gemm_overrides() -> None:
    policy = Policy([Rule("up", None, dgrad="tensorwise"), Rule("*", "tensorwise", wgrad=None)])
    report = fp8graph.explain(MLP(), x(16, 32), policy=policy)
    fp8 = {(g.fqn, g.gemm) for g in report.gemms if g.recipe}
    assert fp8 == {("up", "dgrad"), *((n, g) for n in ("gate", "down") for g in ("fprop", "dgrad"))}


def test_padding_is_in_the_reason() -> None:
    report = fp8graph.explain(nn.Linear(20, 40), x(7, 20), policy=ALL)
    assert [g.reason for g in report.gemms] == [
        "default; n 40 padded to 48; k 20 padded to 32",
        "default; n 20 padded to 32; k 40 padded to 48",
        "default; n 20 padded to 32; k 7 padded to 16",
    ]


def test_padding_of_a_dynamic_size_is_in_the_reason() -> None:
    """FP8 GEMMs take m of any size."""
    backend = eager_backend(ALL)
    torch.compile(nn.Linear(32, 32), backend=backend, dynamic=True)(x(50, 32).requires_grad_())
    by_gemm = {gemm.gemm: gemm for gemm in backend.report.gemms}
    assert by_gemm["fprop"].reason == by_gemm["dgrad"].reason == "default"
    wgrad = by_gemm["wgrad"]
    assert wgrad.reason == f"default; k {wgrad.k} padded to a multiple of 16"


def test_fp4_is_called_fp4() -> None:
    """Two numbers of four bits are one uint8."""
    report = fp8graph.explain(nn.Linear(32, 32), x(32, 32), policy=Policy(default="nvfp4", min_speedup=0))
    assert {gemm.dtypes for gemm in report.gemms} == {("fp4", "fp4", "fp32")}


def test_four_tiles_along_k_where_one_side_has_square_ones() -> None:
    """fprop and dgrad multiply the weight's 128x128 tiles; wgrad has 1x128 on both sides. Emulated: no padding."""
    module, policy = nn.Linear(384, 128), Policy(default="blockwise", min_speedup=0)
    native, emulated = (
        [g.reason for g in fp8graph.explain(module, x(384, 384), policy=policy, target=target).gemms]
        for target in ("sm_90", "cpu")
    )
    assert [reason.partition("; predicted")[0] for reason in native] == [
        "default; k 384 padded to 512",
        "default; k 128 padded to 512",
        "default",
    ]
    assert {"padded" in reason for reason in emulated} == {False}


def test_the_general_policy_keeps_heads_and_routers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = MLP()
            self.router = nn.Linear(32, 4)
            self.moe = nn.ModuleDict({"router": nn.ModuleDict({"gate": nn.Linear(32, 32)})})  # torchtitan's
            self.lm_head = nn.Linear(32, 64)

        def forward(self, a: Tensor) -> Tensor:
            gate: Any = self.get_submodule("moe.router.gate")
            return self.lm_head(gate(self.mlp(a)) * self.router(a).sum(-1, keepdim=True))

    report = fp8graph.explain(Model(), x(16, 32))
    assert {g.fqn for g in report.gemms if not g.recipe} == {"router", "lm_head", "mlp.gate", "moe.router.gate"}
    report.check()


def test_grouped_matmuls_take_the_default_recipe() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(2, 32, 16).bfloat16())

        def forward(self, a: Tensor, offsets: Tensor) -> Tensor:
            return torch._grouped_mm(a, self.w, offs=offsets)

    offsets = torch.tensor([8, 16], dtype=torch.int32)
    report = fp8graph.explain(Experts(), x(16, 32, dtype=torch.bfloat16), offsets)
    assert [(g.op, g.gemm, g.recipe, g.k) for g in report.gemms] == [
        ("grouped_mm", "fprop", "tensorwise", 32),
        ("grouped_mm", "dgrad", "tensorwise", 16),
        ("grouped_mm", "wgrad", "tensorwise", 16),
    ]
    assert {g.reason for g in report.gemms} == {"default; emulated: cpu has no grouped FP8 GEMM"}


@pytest.mark.parametrize(
    ("target", "recipe"),
    [("sm_89", "tensorwise"), ("sm_90", "tensorwise"), ("sm_100", "mxfp8"), ("sm_120", "mxfp8"), ("sm_121", "mxfp8")],
)
def test_the_recipe_where_none_is_named_is_the_hardwares(target: str, recipe: str) -> None:
    model = nn.Linear(4096, 4096, device="meta", dtype=torch.bfloat16)
    rows = torch.empty(65536, 4096, device="meta", dtype=torch.bfloat16)
    report = fp8graph.explain(model, rows, target=target)
    assert {g.recipe for g in report.gemms} == {recipe}
    named = fp8graph.explain(model, rows, target=target, policy=fp8graph.Policy())
    assert {g.recipe for g in named.gemms} == {"tensorwise"}


@first_fast(("target", "least"), [("sm_120", 2.5), ("sm_121", 1.1)])
def test_a_llama_without_a_recipe_is_in_mxfp8_on_cards_that_people_own(target: str, least: float) -> None:
    """One layer of Llama-3-8B, 8192 tokens: native and faster, most where GeForce halves bf16. Each says by what."""
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    report = fp8graph.explain(DecoderLayer(device="meta", dtype=torch.bfloat16), x, target=target)
    assert len(report.gemms) == 7 * 3
    assert {(gemm.recipe, gemm.execution) for gemm in report.gemms} == {("mxfp8", "native")}
    for gemm in report.gemms:
        evidence, predicted = gemm.reason.split("; ")[1:3]
        assert evidence == "native by others' measurement and the sources, not by our run"
        assert float(predicted.removeprefix("predicted ").removesuffix("x")) >= least


def test_a_speedup_below_the_bar_does_not_round_up_to_it() -> None:
    recipe = resolve_recipe("tensorwise")
    resolution = Resolution(dict.fromkeys(GEMMS, recipe), source="default")
    decision = Decision(recipe=recipe, reason="default", execution="native", resolution=resolution)
    refused = with_speedup(decision, 1.0499, 1.05)
    assert (refused.recipe, refused.execution, refused.by_profitability) == (None, "high precision", True)
    assert refused.reason.startswith("not faster in FP8: predicted 1.04x, min_speedup is 1.05 ")
    kept = with_speedup(decision, 1.05, 1.05)
    assert (kept.recipe, kept.reason) == (recipe, "default; predicted 1.05x")
