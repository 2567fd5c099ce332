"""Every recipe on every kind of linear: it runs, both gradients are right, or the report says why not."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import Float8BlockScaling, Format, NVFP4BlockScaling, Policy, Rule, numerics
from fp8graph.compat.torch_build import ROWS_IN_ALL_DTYPES
from fp8graph.numerics import history
from fp8graph.recipes import GEMM_LAYOUTS, GEMM_OPERANDS, RECIPE_NAMES, GemmName, OperandName, resolve_recipe
from helpers import (
    MLP,
    compiled_step,
    eager_backend,
    first_fast,
    first_slow,
    inputs_of,
    rounding_to_nearest,
    same_bits,
    step,
    view_of,
)

# dB that one GEMM of normal data keeps, by the number of bits of the mantissa of the coarser operand
BOUND = {"tensorwise": 24.0, "delayed": 24.0, "nvfp4": 15.0}
# shape of x, outputs, bias, dtype: every shape in one dtype, and every dtype with a bias and sizes that are padded
LINEARS: list[tuple[tuple[int, ...], int, bool, torch.dtype]] = [
    ((32, 128), 256, False, torch.bfloat16),
    ((2, 16, 128), 128, True, torch.bfloat16),
    ((30, 40), 20, False, torch.bfloat16),  # no size is a multiple of any block
    *(((2, 5, 300), 303, True, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
]


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@first_fast(("shape", "outputs", "bias", "dtype"), LINEARS)
def test_linear(recipe: str, shape: tuple[int, ...], outputs: int, bias: bool, dtype: torch.dtype) -> None:
    module = nn.Linear(shape[-1], outputs, bias=bias).to(dtype)
    x = torch.randn(shape).to(dtype).requires_grad_()
    backend = eager_backend(Policy(default=recipe))
    results = compiled_step(module, x, backend, fullgraph=True)
    for name, got, exact in zip(
        ("fprop", "dgrad", "wgrad"), results, step(module, x, parameters=module.parameters()), strict=False
    ):
        assert numerics.sqnr_db(exact, got) >= BOUND.get(recipe, 26.0), name
    gemms = {g.gemm: g for g in backend.report.gemms}
    assert set(gemms) == {"fprop", "dgrad", "wgrad"}
    for name, gemm in gemms.items():
        if recipe == "rowwise_with_gw_hp" and name == "wgrad":
            assert (gemm.recipe, gemm.reason) == (None, "default: rowwise leaves wgrad in high precision")
        else:
            assert gemm.recipe is not None
            assert gemm.execution == ("native" if "emulated" not in gemm.reason else "emulated")


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8", Float8BlockScaling(x_block=(2, 48))])
@pytest.mark.parametrize("fmt", [Format.E4M3, Format.HYBRID])
def test_operand_dtypes_are_in_the_graph(recipe: Any, fmt: Format) -> None:
    """HYBRID: E4M3 forward, E5M2 gradients; E4M3: everywhere E4M3. From the quantize nodes of the graph."""
    resolved = resolve_recipe(recipe)
    assert resolved is not None
    recipe = dataclasses.replace(resolved, fp8_format=fmt)
    view = view_of(nn.Linear(64, 32), torch.randn(16, 64, requires_grad=True), policy=Policy(default=recipe))
    lines = [line for line in view.after.splitlines() if "fp8graph.quantize(" in line]
    gradient = "e5m2" if fmt is Format.HYBRID else "e4m3"
    assert lines
    for line in lines:
        assert f"dtype={gradient if line.startswith('quantize_grad') else 'e4m3'}" in line


def test_report_says_why_a_gemm_is_emulated() -> None:
    reasons = {
        name: fp8graph.explain(nn.Linear(64, 32), torch.randn(16, 64), policy=Policy(default=name), target=target)
        .gemms[0]
        .reason
        for name, target in [("blockwise", "cpu"), ("mxfp8", "sm_90"), ("nvfp4", "sm_90"), ("rowwise", "sm_80")]
    }
    assert reasons == {
        "blockwise": "default; emulated: cpu has no FP8 GEMM with one scale per tile",
        "mxfp8": "default; emulated: sm_90 has no MXFP8 GEMM",
        "nvfp4": "default; emulated: sm_90 has no NVFP4 GEMM",
        "rowwise": "default; emulated: sm_80 is a GPU without any FP8 GEMM",
    }


ROWS_IN_BF16 = None if ROWS_IN_ALL_DTYPES else "results only on sm_90 with CUDA 12.9 or later, or with torch 2.15"


@first_fast(
    ("recipe", "target", "dtype", "reason"),
    [
        ("rowwise", "sm_90", torch.bfloat16, None),
        ("rowwise", "sm_90", torch.float16, None),
        ("rowwise", "sm_90a", torch.float32, None),
        ("rowwise", "sm_100", torch.bfloat16, None),
        *(("rowwise", "sm_100", dtype, ROWS_IN_BF16) for dtype in (torch.float16, torch.float32)),
        ("blockwise", "sm_90", torch.bfloat16, None),
        (Float8BlockScaling(x_block=(2, 64)), "sm_90", torch.bfloat16, "no GEMM for tiles of 2x64 and 128x128"),
        (Float8BlockScaling(x_block=(128, 128)), "sm_90", torch.bfloat16, "no GEMM for tiles of 128x128 and 128x128"),
        ("blockwise", "sm_100", torch.bfloat16, "sm_100 has no FP8 GEMM with one scale per tile"),
        ("mxfp8", "sm_100", torch.bfloat16, None),
        ("nvfp4", "sm_100", torch.bfloat16, None),
        ("rowwise", "sm_89", torch.bfloat16, None),
        ("rowwise", "sm_120", torch.bfloat16, None),
        ("mxfp8", "sm_120", torch.bfloat16, None),
        ("nvfp4", "sm_121a", torch.bfloat16, None),
        ("delayed", "sm_89", torch.float16, None),
    ],
)
def test_native_where_the_device_can(recipe: Any, target: str, dtype: torch.dtype, reason: str | None) -> None:
    """The reason is in the report; what is native passes spec.py's layout, type and alignment rules."""
    module, x = nn.Linear(60, 44).to(dtype), torch.randn(3, 10, 60).to(dtype)
    backend = eager_backend(Policy(default=recipe, min_speedup=0), target=target)  # weights are quantized in the graph
    with torch.no_grad():
        torch.compile(module, backend=backend)(x)
    report = backend.report
    gemm = report.gemms[0]
    assert (gemm.execution, "emulated" in gemm.reason) == (("native", False) if reason is None else ("emulated", True))
    assert (reason or "") in gemm.reason
    view = report.graphs[0]
    pages = [history.new_page(1024, 2)] if recipe == "delayed" else []
    with torch.no_grad():  # the graph of another device runs here too, and says the same
        (got,) = view.module(*inputs_of(view, module, x), *pages)
    assert numerics.sqnr_db(module(x), got.reshape(3, 10, 44)) >= BOUND.get(
        recipe if isinstance(recipe, str) else "", 26.0
    )


def test_padding_to_four_tiles_changes_no_bit() -> None:
    """k = 384 on sm_90 is 512, nothing on a CPU: small integers, whose sums are exact, give the same bits of all GEMMs.

    Nor does it cost a quantization: each operand is made once, in the layouts that it had.
    """
    module = nn.Linear(384, 384, bias=False)
    module.weight.data = torch.randint(-4, 5, (384, 384)).float()
    x = torch.randint(-4, 5, (128, 384)).float().requires_grad_()
    results: list[list[Tensor]] = []
    quantized: list[int] = []
    for target in ("sm_90", "cpu"):
        torch._dynamo.reset()
        backend = eager_backend(Policy(default="blockwise", min_speedup=0), target=target)
        model = torch.compile(module, backend=backend)
        x.grad = module.weight.grad = None
        y = model(x)
        y.backward((y % 7).detach())
        results.append([y.detach(), cast(Tensor, x.grad), cast(Tensor, module.weight.grad)])
        padded = {g.gemm for g in backend.report.gemms if "padded to 512" in g.reason}
        assert padded == ({"fprop", "dgrad"} if target == "sm_90" else set())
        quantized.append(sum(view.after.count("= fp8graph.quantize(") for view in backend.report.graphs))
    assert same_bits(*results)
    assert quantized == [3, 3]


def test_recipes_mix_within_a_site() -> None:
    """fprop, dgrad and wgrad each under another recipe, layer by layer."""
    rules = [
        Rule("gate", "rowwise", dgrad="tensorwise", wgrad="blockwise"),
        Rule("up", "nvfp4", wgrad=None),
        Rule("down", "delayed", dgrad="mxfp8"),
    ]
    backend = eager_backend(Policy(rules))
    module, x = MLP(), torch.randn(16, 32, requires_grad=True)
    compiled_step(module, x, backend)
    got = {(g.fqn, g.gemm): g.recipe for g in backend.report.gemms}
    assert got == {
        ("gate", "fprop"): "rowwise",
        ("gate", "dgrad"): "tensorwise",
        ("gate", "wgrad"): "blockwise",
        ("up", "fprop"): "nvfp4",
        ("up", "dgrad"): "nvfp4",
        ("up", "wgrad"): None,
        ("down", "fprop"): "delayed",
        ("down", "dgrad"): "mxfp8",
        ("down", "wgrad"): "delayed",
    }


def test_rowwise_scales_are_those_of_the_contracted_rows() -> None:
    """Each gemm against float64 with the scales written out: rows of x and w, of dy and w.T, of dy.T and x.T."""
    module, x = nn.Linear(48, 32, bias=False), torch.randn(16, 48, requires_grad=True)
    backend = eager_backend(Policy(default="rowwise"))
    got = compiled_step(module, x, backend)
    dy = torch.linspace(-1.0, 1.0, 16 * 32).reshape(16, 32)

    def quantized(t: torch.Tensor) -> torch.Tensor:
        scale = torch.exp2(torch.floor(torch.log2(448.0 / t.abs().amax(1, keepdim=True).double())))
        return ((t.double() * scale).float().to(torch.float8_e4m3fn)).double() / scale

    w = module.weight.detach()
    pairs = [(x.detach(), w), (dy, w.T), (dy.T, x.detach().T)]
    for result, (a, b) in zip(got, pairs, strict=True):
        exact = quantized(a) @ quantized(b).T
        assert (result.double() - exact).abs().max() <= 64 * 2.0**-24 * exact.abs().max()


ROW_SCALED = NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True, disable_stochastic_rounding=True)


@pytest.mark.parametrize(
    "rule",
    [
        Rule("*", ROW_SCALED),
        Rule("*", ROW_SCALED, dgrad=None, wgrad=None),
        Rule("*", ROW_SCALED, dgrad="mxfp8", wgrad="mxfp8"),
    ],
    ids=["all", "backward in high precision", "backward in MXFP8"],
)
def test_nvfp4_with_a_scale_per_token(rule: Rule) -> None:
    """The products of decoded operands: x with a scale per token in fprop, per channel in wgrad; ragged sizes."""
    module = nn.Linear(72, 40)
    x = (torch.randn(50, 72) * torch.logspace(-3, 3, 50).unsqueeze(1)).requires_grad_()
    y, dx, dw, _ = compiled_step(module, x, eager_backend(Policy([rule])))

    def operand(tensor: Tensor, gemm: GemmName, of: OperandName) -> Tensor:
        if (recipe := rule.recipe_for(gemm)) is None:
            return tensor.detach().double()
        layout = GEMM_LAYOUTS[gemm][GEMM_OPERANDS[gemm].index(of)]
        return numerics.dequantize(numerics.quantize(tensor.detach(), recipe, of, layout)).double()

    dy = torch.linspace(-1.0, 1.0, y.numel()).reshape(y.shape)
    w = module.weight
    assert module.bias is not None
    products = {
        "fprop": operand(x, "fprop", "input") @ operand(w, "fprop", "weight").T + module.bias.detach().double(),
        "dgrad": operand(dy, "dgrad", "grad_output") @ operand(w, "dgrad", "weight"),
        "wgrad": operand(dy, "wgrad", "grad_output").T @ operand(x, "wgrad", "input"),
    }
    for (name, expected), got in zip(products.items(), (y, dx, dw), strict=True):
        assert numerics.sqnr_db(expected, got.double()) > 100, name
    assert numerics.sqnr_db(module(x)[:5], y[:5]) > 20  # the smallest tokens


@first_slow("recipe", ["rowwise", "blockwise", "mxfp8", "nvfp4"])
def test_compiled_is_eager_bit_for_bit(recipe: str) -> None:
    """Operands that are graph inputs, ragged tiles, both layouts: Inductor's code and the dialect agree."""
    module, x = nn.Linear(150, 70).bfloat16(), torch.randn(2, 35, 150).bfloat16().requires_grad_()
    policy = Policy(default=rounding_to_nearest(recipe))  # each run draws a seed
    eager = compiled_step(module, x, eager_backend(policy))
    inductor = compiled_step(module, x, fp8graph.Backend(policy))
    for name, a, b in zip(("fprop", "dgrad", "wgrad"), eager, inductor, strict=False):
        # emulated GEMMs are FP32 matmuls: their order of summation is the library's choice
        assert numerics.sqnr_db(a, b) >= 50, name
