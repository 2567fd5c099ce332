"""Weights that arrive quantized and are stored [K, N], or multiplied transposed: square ones have the same shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8graph
from fp8graph import Policy, Rule
from fp8graph.numerics import sqnr_db
from fp8graph.recipes import Float8CurrentScaling, Format
from helpers import eager_backend, first_fast, first_slow, view_of
from stored_weights import stored

DEFAULT = Policy(extends="default")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def spread(scale: Tensor, tile: tuple[int, int]) -> Tensor:
    return scale.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)


# By form: the elements that share a scale (rows, columns; 0: all), and whether scales are bytes of E8M0.
FORMS: Final[dict[str, tuple[tuple[int, int], bool]]] = {
    "tensor": ((0, 0), False),
    "rows": ((1, 0), False),
    "128x128": ((128, 128), False),
    "64x64": ((64, 64), False),
    "64x128": ((64, 128), False),
    "1x32": ((1, 32), False),
    "E8M0 1x32": ((1, 32), True),
    "E8M0 128x128": ((128, 128), True),
}
# The ways to multiply a weight [R, C], and whether they contract its columns.
WAYS: Final[dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]]] = {
    "x @ w": (lambda x, w: x @ w, False),
    "linear(x, w)": (functional.linear, True),
    "linear(x, w.t())": (lambda x, w: functional.linear(x, w.t()), False),
    "addmm": (lambda x, w: torch.addmm(x.new_zeros(w.shape[1]), x, w), False),
    "w @ x.t()": (lambda x, w: (w @ x.t()).t(), True),
    "w.t() @ x.t()": (lambda x, w: (w.t() @ x.t()).t(), False),
}
SHAPES: Final = ((256, 256), (256, 384), (384, 256))


class Used(nn.Module):
    """A weight [R, C] in FP8 that the program decodes itself, and multiplies in one of ``WAYS``."""

    def __init__(self, form: str, way: str, rows: int, columns: int, dtype: torch.dtype = E4M3) -> None:
        super().__init__()
        torch.manual_seed(rows + columns)
        (down, across), in_e8m0 = FORMS[form]
        self.tile = down or rows, across or columns
        w = torch.randn(rows, columns) / 16
        tiles = w.view(rows // self.tile[0], self.tile[0], columns // self.tile[1], self.tile[1])
        scale = tiles.abs().amax((1, 3)) / torch.finfo(dtype).max
        if in_e8m0:
            scale = torch.exp2(scale.log2().ceil())
        data = (w / spread(scale, self.tile)).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
        self.weight = nn.Parameter(data, requires_grad=False)
        self.register_buffer("scale", scale.to(torch.float8_e8m0fnu) if in_e8m0 else scale)
        self.multiply, self.contracts_columns = WAYS[way]

    def decoded(self) -> Tensor:
        return self.weight.float() * spread(self.get_buffer("scale").float(), self.tile)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.decoded().to(x.dtype))

    def inputs(self, rows: int = 32) -> Tensor:
        columns = self.weight.shape[1 if self.contracts_columns else 0]
        return torch.randn(rows, columns, dtype=torch.bfloat16, requires_grad=True)


def check(model: Used, backend: Any, *, training: bool = True, bound: float = 30) -> None:
    """Compare two calls of the compiled model, and its gradient, with the dequantized program in float64."""
    x = model.inputs()
    exact = x.detach().double().requires_grad_()
    expected = model(exact)
    dy = torch.randn_like(expected).to(x.dtype)
    (expected_dx,) = torch.autograd.grad(expected, exact, dy.double())
    compiled: Any = torch.compile(model, backend=backend)
    for _ in range(2):  # the second call reads what is kept
        with torch.set_grad_enabled(training):
            y = compiled(x)
        assert sqnr_db(expected, y) > bound
        if training:
            assert sqnr_db(expected_dx, *torch.autograd.grad(y, x, dy)) > bound - 5


CASES: Final = [(form, way, shape) for shape in SHAPES for way in WAYS for form in FORMS]


@pytest.mark.parametrize(
    ("form", "way", "shape"),
    [pytest.param(*case, marks=[] if place < len(FORMS) else pytest.mark.slow) for place, case in enumerate(CASES)],
)
def test_numbers(form: str, way: str, shape: tuple[int, int]) -> None:
    backend = eager_backend(DEFAULT)
    check(Used(form, way, *shape), backend)
    contracts_rows = not WAYS[way][1]
    reasons = {gemm.gemm: gemm.reason for gemm in backend.report.gemms}
    dequantized = "dgrad" if not contracts_rows else "fprop"
    (rows, columns), _ = FORMS[form]
    if rows != columns and columns:
        what = "one row" if rows == 1 else f"{rows}x{columns} numbers"
        said = f"{dequantized} contracts the weight's rows, and each of its scales is for {what}: it is dequantized"
        assert reasons.pop(dequantized) == said
    assert all(reason.startswith("weight stored in E4M3FN with") for reason in reasons.values())


def test_forward_multiplies_the_transposed_copy_and_dgrad_the_bytes() -> None:
    model = Used("128x128", "x @ w", 512, 512)
    after = view_of(model, model.inputs(), policy=DEFAULT, target="sm_90").after
    fprop, dgrad = (line for line in after.splitlines() if "fp8graph.scaled_mm" in line)
    assert "columnwise_default: e4m3[512, 512] = fp8graph.columnwise(primals_1, multiples=[512, 512])" in after
    assert "columnwise_default_1: f32[4, 4] = fp8graph.columnwise(view_default, multiples=[4, 4])" in after
    assert "scaled_mm(input_rowwise, columnwise_default, input_rowwise_scale_inv, columnwise_default_1," in fprop
    assert "scaled_mm(grad_output_rowwise, primals_1, grad_output_rowwise_scale_inv, view_default," in dgrad
    assert "stored_weight" not in after


def test_scales_of_rows_go_into_the_input() -> None:
    model = Used("rows", "x @ w", 256, 384)
    after = view_of(model, model.inputs(), policy=DEFAULT).after
    (quantized,) = (line for line in after.splitlines() if line.startswith("quantize_input"))
    assert "fp8graph.quantize(mul_tensor," in quantized
    assert "= aten.full([384, 1], 1.0" in after


def test_a_static_scale_leaves_those_of_rows_out() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.known = stored("row", 256, 256, input_scale_inv=0.02)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.known.high_precision(x.dtype)

    x = torch.randn(32, 256, dtype=torch.bfloat16, requires_grad=True)
    fprop, dgrad = view_of(Transposed(), x, policy=DEFAULT).gemms
    assert (fprop.recipe, dgrad.recipe) == (None, "rowwise")
    assert "whose scales the static scale of the activations leaves out" in fprop.reason


@first_fast("training", [False, True])
@pytest.mark.parametrize(("cache_weights", "kept"), [(False, (0, 0)), (True, (1, 0)), ("update", (1, 1))])
def test_the_transposed_copy_is_made_once(cache_weights: Any, kept: tuple[int, int], training: bool) -> None:
    backend = fp8graph.Backend(policy=DEFAULT, compiler="eager", cache_weights=cache_weights, strict=True)
    model = Used("tensor", "x @ w", 256, 384)
    check(model, backend, training=training)
    assert backend.weights.quantized == kept[training]
    assert backend.weights.bytes == kept[training] * 256 * 384


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cache_weights", [True, "update"])
@pytest.mark.parametrize("training", [False, True])
def test_strict_mode_and_kept_copies_change_no_numbers(form: str, cache_weights: Any, training: bool) -> None:
    backend = fp8graph.Backend(policy=DEFAULT, compiler="eager", cache_weights=cache_weights, strict=True)
    check(Used(form, "x @ w", 256, 384), backend, training=training)


@first_slow("form", ["tensor", "rows", "128x128"])
def test_generated_code_multiplies_the_same(form: str) -> None:
    check(Used(form, "x @ w", 256, 256), fp8graph.Backend(policy=DEFAULT, compiler="inductor", strict=True))


@first_fast("form", FORMS)
def test_a_tied_decoder_multiplies_the_transpose(form: str) -> None:
    class Tied(Used):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.decoded().to(x.dtype)
            return functional.linear(functional.silu(functional.linear(x, weight)), weight.t())

    check(Tied(form, "linear(x, w)", 256, 256), eager_backend(DEFAULT), bound=27)  # two products


@first_fast("kind", ["row", "block", "mxfp8"])
@pytest.mark.parametrize("flipped", [False, True])
def test_experts_are_multiplied_as_they_lie(kind: str, flipped: bool) -> None:
    experts = [stored(kind, 256, 256) for _ in range(2)]

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            data = torch.stack([expert.weight.view(torch.uint8) for expert in experts]).view(E4M3)
            self.weight = nn.Parameter(data, requires_grad=False)
            self.register_buffer("scale", torch.stack([x.get_parameter("scale_inv").detach() for x in experts]))

        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            settings: Any = experts[0].settings
            w = torch.ops.fp8graph.stored_weight(self.weight, self.get_buffer("scale"), x.dtype, **settings)
            return torch.nn.functional.grouped_mm(x, w if flipped else w.transpose(-2, -1), offs=offs)

    model, backend = Experts(), eager_backend(DEFAULT)
    x = torch.randn(32, 256, dtype=torch.bfloat16, requires_grad=True)
    offs = torch.tensor([16, 32], dtype=torch.int32)
    y = torch.compile(model, backend=backend)(x, offs)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    weights = [expert.dequantized() if flipped else expert.dequantized().t() for expert in experts]
    parts = list(zip(x.detach().double().chunk(2), dy.double().chunk(2), weights, strict=True))
    assert sqnr_db(torch.cat([part @ w for part, _, w in parts]), y) > 30
    assert sqnr_db(torch.cat([part @ w.t() for _, part, w in parts]), dx) > 30
    (left,) = (gemm for gemm in backend.report.gemms if gemm.recipe is None)
    assert left.gemm == ("fprop" if flipped else "dgrad")
    assert "of experts would need a transposed copy of each" in left.reason


@pytest.mark.parametrize("way", ["linear(x, w)", "x @ w"])
def test_a_gradient_is_not_quantized_to_four_bits(way: str) -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.known = stored("nvfp4", 256, 256)

        def forward(self, x: Tensor) -> Tensor:
            return WAYS[way][0](x, self.known.high_precision(x.dtype))

    view = view_of(Linear(), torch.randn(32, 256, dtype=torch.bfloat16, requires_grad=True), policy=DEFAULT)
    assert [gemm.recipe for gemm in view.gemms] == (["nvfp4", None] if WAYS[way][1] else [None, None])


def test_a_scale_that_is_trained_has_a_gradient() -> None:
    """The weight then has a wgrad, which does not read it."""
    model = Used("tensor", "x @ w", 256, 256)
    scale = nn.Parameter(model.get_buffer("scale").detach().clone())
    del model.scale
    model.scale = scale
    model.get_buffer = lambda name: getattr(model, name)  # type: ignore[method-assign]
    x, backend = model.inputs(), eager_backend(DEFAULT)
    expected = torch.autograd.grad(model(x).float().square().sum(), [x, scale])
    found = torch.autograd.grad(torch.compile(model, backend=backend)(x).float().square().sum(), [x, scale])
    assert {gemm.gemm: gemm.recipe for gemm in backend.report.gemms} == dict.fromkeys(
        ("fprop", "dgrad", "wgrad"), "tensorwise"
    )
    assert sqnr_db(expected[0], found[0]) > 20
    assert sqnr_db(expected[1], found[1]) > 20


RECIPES: Final = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4")


@first_fast(
    ("form", "way", "recipe"),
    [
        ("tensor", "linear(x, w)", "tensorwise"),
        *(("tensor", "linear(x, w)", recipe) for recipe in RECIPES[1:]),
        ("tensor", "linear(x, w)", Float8CurrentScaling(fp8_format=Format.E4M3)),
        *((form, way, "tensorwise") for form in FORMS for way in ("linear(x, w)", "x @ w")),
    ],
)
def test_gradients_pass_a_weight_in_e5m2(form: str, way: str, recipe: Any) -> None:
    """E5M2 by E5M2 is multiplied nowhere: the gradient is quantized to E4M3."""
    backend = eager_backend(Policy(default=recipe))
    check(Used(form, way, 256, 256, E5M2), backend)
    assert {dtype for gemm in backend.report.gemms for dtype in gemm.dtypes[:1]} <= {"e4m3", "bf16"}


@pytest.mark.slow
@pytest.mark.parametrize("rule", [*RECIPES[:5], Float8CurrentScaling(fp8_format=Format.E4M3)])
def test_a_rule_quantizes_a_weight_in_e5m2_again(rule: Any) -> None:
    backend = eager_backend(Policy([Rule("*", rule)]))
    check(Used("tensor", "linear(x, w)", 256, 256, E5M2), backend, bound=22 if rule == "delayed" else 24)
    assert all(gemm.reason.startswith("rule") for gemm in backend.report.gemms)


@first_fast(
    ("target", "form", "dtype", "executions"),
    [
        ("sm_100", "E8M0 1x32", E5M2, ("emulated: MXFP8 GEMMs only take E4M3",)),
        ("sm_90", "tensor", E5M2, ()),
        ("sm_90", "rows", E5M2, ()),
        ("sm_100", "rows", E5M2, ("E5M2 as the second operand only on sm_90",)),
        ("gfx950", "rows", E5M2, ("only take E4M3 as the second operand",)),
        ("gfx942", "tensor", E4M3, ("emulated: gfx942 does not multiply e4m3fnuz by e4m3",)),
    ],
)
def test_the_type_that_is_stored_decides_who_multiplies(
    target: str, form: str, dtype: torch.dtype, executions: tuple[str, ...]
) -> None:
    model = Used(form, "linear(x, w)", 256, 256, dtype)
    view = view_of(model, model.inputs(), policy=Policy(default="tensorwise", min_speedup=0), target=target)
    fprop = view.gemms[0]
    assert fprop.execution == ("emulated" if executions else "native")
    assert fprop.dtypes[1] == ("e5m2" if dtype == E5M2 else "e4m3")
    assert all(text in fprop.reason for text in executions)
