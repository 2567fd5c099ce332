"""Experts: grouped matmuls in FP8, forward and backward, beside one FP8 linear a group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph.backend.multiplied import multiplied_by
from fp8graph.numerics import sqnr_db
from fp8graph.report.tree import print_tree
from helpers import eager_backend, first_fast, first_slow, same_bits, step

moe = pytest.importorskip("transformers.integrations.moe")

RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
BLACKWELL = {"mxfp8": "mxfp8", "nvfp4": fp8graph.NVFP4BlockScaling(disable_stochastic_rounding=True)}
SIZES = ([10, 0, 3, 19], [0, 32, 0, 0])


def offsets(sizes: Sequence[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


class Experts(nn.Module):
    """[t, 32] -> [t, 48], four experts; bf16 goes through torch's grouped matmul, FP32 through Hugging Face's."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 48, 32, dtype=dtype))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        w = self.w.transpose(-2, -1)
        if x.dtype == torch.bfloat16:
            return torch._grouped_mm(x, w, offs=offs)
        return torch.ops.transformers.grouped_mm_fallback(x, w, offs)


class Loop(nn.Module):
    """The same with one linear a group of fixed size."""

    def __init__(self, w: nn.Parameter, sizes: Sequence[int]) -> None:
        super().__init__()
        self.w, self.sizes = w, sizes

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        spans = enumerate(pairwise([0, *torch.tensor(self.sizes).cumsum(0).tolist()]))
        return torch.cat([x[a:b] @ self.w[expert].t() for expert, (a, b) in spans if b > a])


def policy(recipe: Any, **gemms: Any) -> fp8graph.Policy:
    return fp8graph.Policy([fp8graph.Rule("*", recipe, op="*", **gemms)], default=None)


@first_fast("sizes", SIZES, ids=str)
@first_fast("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@first_fast("recipe", [*RECIPES, "nvfp4"])
def test_an_expert_is_a_linear_of_its_own(recipe: str, dtype: torch.dtype, sizes: list[int]) -> None:
    module, asked = Experts(dtype), policy(BLACKWELL.get(recipe, recipe))
    x = torch.randn(32, 32, dtype=dtype, requires_grad=True)
    loop = torch.compile(Loop(module.w, sizes), backend=eager_backend(asked))
    expected = step(loop, x, offsets(sizes), parameters=[module.w])
    backend = eager_backend(asked)
    got = step(torch.compile(module, backend=backend, fullgraph=True), x, offsets(sizes), parameters=[module.w])
    assert [(g.gemm, g.recipe, g.execution) for g in backend.report.gemms] == [
        (gemm, recipe, "emulated") for gemm in ("fprop", "dgrad", "wgrad")
    ]
    for a, b in zip(expected, got, strict=True):
        # the same FP8 numbers, summed in another order; bf16: the last bit
        assert sqnr_db(a.float(), b.float()) > (100 if dtype == torch.float32 else 50)


@first_fast("recipe", [*RECIPES, "delayed", "nvfp4"])
def test_an_infinity_shows_in_its_rows_and_its_expert(recipe: str) -> None:
    """As in high precision; nvfp4 loses a tile, of 16 outputs of the expert and of 16 tokens."""
    module, offs = Experts(), offsets(SIZES[0])
    compiled = torch.compile(module, backend=eager_backend(policy(recipe)), fullgraph=True)
    for operand in ("input", "weight"):
        x = torch.randn(32, 32)
        with torch.no_grad():
            (x[20] if operand == "input" else module.w[3, 17])[5] = torch.inf
        exact, got = (step(model, x.requires_grad_(), offs, parameters=[module.w]) for model in (module, compiled))
        for one, other in zip(exact, got, strict=True):
            lost = ~one.isfinite()
            assert not other[lost].isfinite().any()
            assert recipe == "nvfp4" or other[~lost].isfinite().all()
        assert got[0][:13].isfinite().all()  # the other experts


@first_fast("recipe", [*RECIPES, "delayed"])
def test_saving_memory_changes_nothing(recipe: str) -> None:
    """Backward keeps the FP8 copies of weights that are quantized in the graph, whatever ``save`` says."""
    module = Experts()
    x = torch.randn(32, 32, requires_grad=True)
    results: list[list[Any]] = []
    for save in ("speed", "memory"):
        torch._dynamo.reset()
        compiled = torch.compile(module, backend=eager_backend(policy(recipe), save=save, cache_weights=False))
        results.append([*step(compiled, x, offsets(SIZES[0]), parameters=[module.w])])
    assert same_bits(*results)


@first_slow("recipe", [*RECIPES, "delayed"])
def test_generated_code_computes_the_same(recipe: str) -> None:
    module, sizes = Experts(), SIZES[0]
    x = torch.randn(32, 32, requires_grad=True)
    results: list[list[Tensor]] = []
    for compiler in ("eager", "inductor"):
        torch._dynamo.reset()
        backend = fp8graph.Backend(policy(recipe), compiler=compiler)
        compiled = torch.compile(module, backend=backend, fullgraph=True)
        results.append(step(compiled, x, offsets(sizes), parameters=[module.w]))
    assert all(map(torch.equal, *results))


@first_fast("recipe", [*RECIPES, "delayed"])
def test_token_counts_change_without_a_recompile(recipe: str) -> None:
    module, backend = Experts(), eager_backend(policy(recipe))
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    x = torch.randn(32, 32, requires_grad=True)
    for sizes in SIZES:
        exact = step(module, x, offsets(sizes), parameters=[module.w])
        got = step(compiled, x, offsets(sizes), parameters=[module.w])
        for a, b in zip(exact, got, strict=True):
            assert sqnr_db(a, b) > 22
        gradient = got[2]
        for expert, tokens in enumerate(sizes):
            assert gradient[expert].any() == (tokens > 0)  # an expert without tokens learns nothing
    assert len(backend.report.graphs) == 1


class Routed(Experts):
    def forward(self, x: Tensor, offs: Tensor, mask: Tensor) -> Tensor:  # pyright: ignore
        return super().forward(x[mask], offs)


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@first_fast("recipe", [*RECIPES, "delayed", "nvfp4"], others=pytest.mark.release)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_the_data_decide_how_many_tokens_there_are(recipe: str, compiler: Any) -> None:
    """Also that there is none: as on ranks to which an all-to-all sends none."""
    module = Experts(torch.bfloat16)
    routed = Routed(torch.bfloat16)
    routed.w = module.w
    backends = [fp8graph.Backend(policy(recipe), compiler=compiler) for _ in range(2)]
    known = torch.compile(module, backend=backends[0], fullgraph=True, dynamic=True)
    compiled = torch.compile(routed, backend=backends[1], fullgraph=True)
    x = torch.randn(32, 32, dtype=torch.bfloat16, requires_grad=True)
    for sizes in ([10, 0, 3, 4], [0, 0, 0, 0], [0, 9, 0, 23]):
        mask, offs = torch.arange(32) < sum(sizes), offsets(sizes)
        got = step(compiled, x, offs, mask, parameters=[module.w])
        if sum(sizes):
            chosen = x.detach()[mask].requires_grad_()
            expected = step(known, chosen, offs, parameters=[module.w])
            assert recipe == "nvfp4" or same_bits([got[0], got[1][mask], got[2]], expected)  # rounded stochastically
        assert not got[1][~mask].any()
        assert all(part.isfinite().all() for part in got)
    (graph,) = backends[1].report.graphs
    assert [gemm.recipe for gemm in graph.gemms] == [recipe] * 3


def test_one_gemm_can_stay_in_high_precision() -> None:
    module = Experts()
    x = torch.randn(32, 32, requires_grad=True)
    exact = step(module, x, offsets(SIZES[0]), parameters=[module.w])
    backend = eager_backend(policy("tensorwise", wgrad=None))
    got = step(torch.compile(module, backend=backend), x, offsets(SIZES[0]), parameters=[module.w])
    assert [g.recipe for g in backend.report.gemms] == ["tensorwise", "tensorwise", None]
    torch.testing.assert_close(got[2], exact[2])
    assert not torch.equal(got[1], exact[1])


def test_weights_of_experts_are_quantized_once_per_update() -> None:
    module, backend = Experts(), eager_backend(policy("tensorwise"), cache_weights="update")
    compiled = torch.compile(module, backend=backend)
    x = torch.randn(32, 32, requires_grad=True)
    first = step(compiled, x, offsets(SIZES[0]), parameters=[module.w])
    with torch.no_grad():
        module.w.mul_(2)
    second = step(compiled, x, offsets(SIZES[0]), parameters=[module.w])
    assert torch.equal(first[0] * 2, second[0])  # a power of two: the same FP8 numbers
    (view,) = backend.report.graphs
    assert "quantize_weight" not in view.after
    assert backend.report.weights == 1


@pytest.mark.parametrize(
    ("target", "recipe", "execution", "reason"),
    [
        ("sm_90", "rowwise", ["native"] * 3, "default"),
        ("sm_90", "tensorwise", ["native", "high precision", "high precision"], "grouped FP8 GEMMs only take E4M3"),
        ("sm_90", "mxfp8", ["high precision"] * 3, "sm_90 has no grouped MXFP8 GEMM"),
        ("sm_100", "rowwise", ["high precision"] * 3, "sm_100 has no grouped FP8 GEMM with one scale per row"),
        ("sm_100", "mxfp8", ["native"] * 3, "default; native by the sources of torch and MSLK"),
        ("sm_103", "mxfp8", ["native"] * 3, "default; native by the sources of torch and MSLK"),
        ("sm_100", "blockwise", ["high precision"] * 3, "one scale per tile: torch 2.11 to 2.15 has none (pytorch#17"),
        ("sm_100", "nvfp4", ["native"] * 3, "default; native by the sources of torch and MSLK"),
        ("sm_90", "nvfp4", ["high precision"] * 3, "sm_90 has no grouped NVFP4 GEMM"),
    ],
)
def test_grouped_gemms_by_gpu_and_recipe(
    target: str, recipe: str, execution: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with torch.device("meta"):
        module = Experts(torch.bfloat16)
        x, offs = torch.empty(32, 32, dtype=torch.bfloat16, requires_grad=True), torch.empty(4, dtype=torch.int32)
    asked = fp8graph.Policy(default=recipe, min_speedup=0)
    report = fp8graph.explain(module, x, offs, target=target, policy=asked)
    assert [g.execution for g in report.gemms] == execution
    assert reason in report.gemms[-1].reason
    print_tree(report, "experts")  # as the command does: by what a kernel is known that no GPU has run
    assert ("[1] native by the sources" in capsys.readouterr().out) == ("native by" in reason)
    named = fp8graph.Policy([fp8graph.Rule("*", recipe, op="grouped_mm")], default=None, min_speedup=0)
    report = fp8graph.explain(module, x, offs, target=target, policy=named)
    assert all(g.recipe == recipe for g in report.gemms)  # a rule that names them gets the rest emulated
    report.check()


class Mixture(nn.Module):
    """[t, 160] -> [t, 160]: gate and up, SwiGLU and down of four experts, in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 128, 160, dtype=torch.bfloat16) / 8)
        self.down = nn.Parameter(torch.randn(4, 160, 64, dtype=torch.bfloat16) / 8)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        gate, up = torch._grouped_mm(x, self.up.transpose(-2, -1), offs=offs).chunk(2, -1)
        return torch._grouped_mm(nn.functional.silu(gate) * up, self.down.transpose(-2, -1), offs=offs)


@pytest.mark.parametrize("recipe", BLACKWELL)
@first_fast("kept", [True, False], ids=["kept weights", "quantized in the graph"])
@first_fast("sizes", [[10, 0, 3, 19], [0, 200, 0, 0], [130, 1, 0, 33]], ids=str)
def test_experts_of_a_blackwell_gpu_compute_what_emulated_ones_do(sizes: list[int], kept: bool, recipe: str) -> None:
    """Its graph, scales in blocks included, run on this CPU; some tokens are of no expert."""
    module, tokens = Mixture(), sum(sizes) + 5
    asked = fp8graph.Policy([fp8graph.Rule("*", BLACKWELL[recipe], op="*")], default=None, min_speedup=0)
    x = torch.randn(tokens, 160, dtype=torch.bfloat16, requires_grad=True)
    results: list[list[Tensor]] = []
    for target in (None, "sm_100"):
        torch._dynamo.reset()
        backend = eager_backend(asked, target=target, cache_weights="update" if kept else False)
        compiled = torch.compile(module, backend=backend, fullgraph=True)
        results.append(step(compiled, x, offsets(sizes), parameters=[*module.parameters()]))
        assert {gemm.execution for gemm in backend.report.gemms} == {"native" if target else "emulated"}
        text = backend.report.graphs[0].after
        assert text.count("order_a=128x4") == text.count("order_b=128x4") == (6 if target else 0)
        made = multiplied_by(backend, module)
        results[-1] += [x for weight in made for x in (weight.data, weight.scale_inv)]  # as exported: no blocks
    assert len(results[0]) == 4 + 4
    if recipe == "nvfp4":  # tokens are padded to 32, emulated to 16: FP32 sums of wgrad in another order
        gradients = [[found.pop(2).float() for _ in range(2)] for found in results]
        assert all(sqnr_db(one, other) > 85 for one, other in zip(*gradients, strict=True))  # a few last bits of bf16
    assert same_bits(*results)


@first_slow("recipe", ["tensorwise", "rowwise"])
def test_code_for_a_gpu_calls_its_grouped_gemm(recipe: str) -> None:
    pytest.importorskip("triton")
    with torch.device("meta"):
        module = Experts(torch.bfloat16)
        x, offs = torch.empty(32, 32, dtype=torch.bfloat16, requires_grad=True), torch.empty(4, dtype=torch.int32)
    report = fp8graph.explain(module, x, offs, target="sm_90", policy=fp8graph.Policy(default=recipe, min_speedup=0))
    names = [kernel.name for kernel in report.kernels]
    assert names.count("extern_kernels._scaled_grouped_mm") == (3 if recipe == "rowwise" else 1)
