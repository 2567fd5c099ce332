"""fp8graph.lint raises nothing for correct programs, whoever wrote them, and finds the faults of wrong ones."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import fp8graph
from fp8graph import ConfigError
from fp8graph.analysis.products import products_of
from fp8graph.analysis.scales.flow import faults
from fp8graph.analysis.scales.states import Source
from fp8graph.passes.lower import lower_for_torch_alone
from fp8graph.tools import lint_model
from fp8graph.tools.lint_model import traced
from helpers import first_fast
from low_precision import (
    E4M3,
    E5M2,
    PROGRAMS,
    Attended,
    Delayed,
    Exponents,
    History,
    KeyCache,
    Linear,
    Stored,
    cast,
    convolved,
    in_tiles_of_128x4,
    keys_and_position,
    mx,
    of_a_vector,
    product,
    rowwise,
    tensorwise,
)
from low_precision_mutants import NEUTRAL, mutants


@pytest.fixture(autouse=True)
def _start() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def rules(lint: fp8graph.Lint) -> list[str]:
    return [finding.rule for finding in lint]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_correct_program_raises_nothing(name: str) -> None:
    model, args, training = PROGRAMS[name]()
    lint = fp8graph.lint(model, *args, training=training)
    assert list(lint) == []
    assert any("e4m3" in row.casts for row in lint.products)


@pytest.mark.parametrize("emulate", [False, True])
@first_fast("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_torchao_training_raises_nothing(recipe: str, emulate: bool) -> None:
    float8 = pytest.importorskip("torchao.float8")
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).bfloat16()
    float8.convert_to_float8_training(model, config=config)
    lint = fp8graph.lint(model, torch.randn(32, 64).bfloat16())
    assert list(lint) == []
    low = [row for row in lint.products if any(row.casts)]
    assert (len(low), len(lint.products)) == (3 if recipe == "rowwise_with_gw_hp" else 5, 5)


def torchao_weights() -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).bfloat16()
    quantization.quantize_(model, quantization.Float8WeightOnlyConfig())
    return model


def test_torchao_weights_raise_nothing() -> None:
    lint = fp8graph.lint(torchao_weights(), torch.randn(32, 64).bfloat16(), training=False)
    assert list(lint) == []
    assert [row.casts for row in lint.products] == [("", "e4m3")] * 2


def test_a_torchao_weight_without_its_scale_is_an_error() -> None:
    model: Any = torchao_weights()
    model[0].weight.scale.fill_(1.0)
    (finding,) = fp8graph.lint(model, torch.randn(32, 64).bfloat16(), training=False)
    assert (finding.rule, finding.severity, finding.where) == ("scale-lost", "error", "0.weight.qdata")


def transformers_linear(factor: float = 1.0) -> nn.Module:
    layers = pytest.importorskip("transformers.integrations.finegrained_fp8")
    layer = layers.FP8Linear(128, 256, block_size=(128, 128))
    weight = torch.randn(256, 128) * 0.02
    inv = weight.view(2, 128, 1, 128).abs().amax((1, 3)) / 448
    with torch.no_grad():
        layer.weight.copy_(weight / inv.repeat_interleave(128, 0))
        layer.weight_scale_inv.copy_(inv**factor)
    return nn.Sequential(layer)


def test_a_linear_of_transformers_raises_nothing() -> None:
    lint = fp8graph.lint(transformers_linear(), torch.randn(32, 128).bfloat16(), training=False)
    assert list(lint) == []
    assert [row.casts for row in lint.products] == [("", "e4m3")]


def test_an_inverted_scale_of_transformers_is_an_error() -> None:
    (finding,) = fp8graph.lint(transformers_linear(-1.0), torch.randn(32, 128).bfloat16(), training=False)
    assert finding.rule == "scale-inverted"


@first_fast("preset", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK"])
def test_compressed_tensors_raises_nothing(preset: str) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).bfloat16()
    scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
    quantization.apply_quantization_config(model, quantization.QuantizationConfig(config_groups={"group_0": scheme}))
    for name, parameter in model.named_parameters():
        if name.endswith("_scale"):
            parameter.data.fill_(0.001)
    lint = fp8graph.lint(model, torch.randn(32, 128).bfloat16(), training=False)
    assert set(rules(lint)) <= {"not-traced"}  # up to torch 2.13: it calls the linears from a frame that Dynamo skips


@first_fast("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise", "mxfp8"])
def test_our_own_arithmetic_raises_nothing(recipe: str) -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).bfloat16()
    policy = fp8graph.Policy([], default=recipe, min_speedup=0)
    report = fp8graph.explain(model, torch.randn(128, 128).bfloat16(), policy=policy)
    graph = report.graphs[0].module.graph
    lower_for_torch_alone(graph)
    sources = {node: Source(node.name) for node in graph.find_nodes(op="placeholder")}
    raised, operands = faults(graph, sources, products_of(graph, []))
    assert raised == []
    assert sum(dtype is not None for of_product in operands.values() for dtype in of_product.casts) >= 6


# Faults, each in one module.


def inverse_forgotten(x: Tensor, w: Tensor) -> Tensor:
    (xq, xs), (wq, _) = cast(x), cast(w)
    return product(xq, wq.t(), xs.reciprocal(), torch.ones(()))


def scales_not_inverted(x: Tensor, w: Tensor) -> Tensor:
    (xq, xs), (wq, ws) = cast(x), cast(w)
    return product(xq, wq.t(), xs, 1 / ws)


def applied_twice(x: Tensor, w: Tensor) -> Tensor:
    (xq, xs), (wq, ws) = cast(x), cast(w)
    return product(xq, wq.t(), 1 / xs, 1 / ws) * (1 / ws)


def exchanged(x: Tensor, w: Tensor) -> Tensor:
    (xq, xs), (wq, _) = cast(x), cast(w)
    return product(xq, wq.t(), 1 / xs, 1 / xs)


def scale_of_another_tensor(x: Tensor, w: Tensor) -> Tensor:
    (xq, xs), ws = cast(x), 448 / w.abs().amax().float()
    wq, xs = (w * xs).clamp(-448, 448).to(E4M3), xs
    return product(xq, wq.t(), 1 / xs, 1 / xs) + ws.bfloat16() * 0


def along_the_contraction(x: Tensor, w: Tensor) -> Tensor:
    (xq, xs), (wq, ws) = cast(x, dim=0), cast(w, dim=1)  # [1, k]: that of columns
    y = xq.bfloat16() @ wq.bfloat16().t()
    return y / xs.mean() / ws.t()


def for_columns_instead_of_rows(x: Tensor, w: Tensor) -> Tensor:
    (xq, xs), (wq, ws) = cast(x, dim=1), cast(w)  # x has as many rows as w
    return (xq.bfloat16() @ wq.bfloat16().t()) / xs.t() / ws


def read_as_e5m2(x: Tensor, w: Tensor) -> Tensor:
    (xq, xs), (wq, ws) = cast(x), cast(w)
    return product(xq, wq.view(torch.uint8).view(E5M2).t(), 1 / xs, 1 / ws)


def viewed_instead_of_transposed(x: Tensor, w: Tensor) -> Tensor:
    (xq, xs), (wq, ws) = cast(x), cast(w)
    wt = wq.view(w.shape[1], w.shape[0])
    return xq.bfloat16() @ wt.bfloat16() / xs / ws


def without_a_scale(x: Tensor, w: Tensor) -> Tensor:
    one = torch.ones(())
    return product(x.to(E4M3), w.to(E4M3).t(), one, one)


class InvertedInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        (dy,), (x, w) = grad_outputs, ctx.saved_tensors
        (dq, ds), (wq, ws) = cast(dy, E5M2), cast(w)
        return product(dq, wq.t().contiguous().t(), ds.reciprocal(), ws), dy.t() @ x


class Faulty(Stored):
    """A stored weight whose scale ``change`` alters before the product."""

    def __init__(self, kind: str, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(kind, static=True)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        assert self.input_scale is not None
        xq = (x / self.input_scale).clamp(-448, 448).to(E4M3)
        return product(xq, self.weight.t(), self.input_scale, self.change(self.weight_scale))


class CastAgain(Stored):
    """The weight is quantized anew, and its scale is that of the checkpoint."""

    def __init__(self) -> None:
        super().__init__("tensor")
        self.master = nn.Parameter(torch.randn(128, 64).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        (xq, xs), (wq, _) = cast(x), cast(self.master.detach())
        return product(xq, wq.t(), 1 / xs, self.weight_scale)


class LiveScale(CastAgain):
    """The bytes are those of the checkpoint, and the scale is that of the weight now."""

    def forward(self, x: Tensor) -> Tensor:
        (xq, xs), (_, ws) = cast(x), cast(self.master.detach())
        return product(xq, self.weight.t(), 1 / xs, 1 / ws)


class Unclamped(Delayed):
    def forward(self, x: Tensor) -> Tensor:
        (wq, ws) = cast(self.weight.detach())
        return product((x * self.scale).to(E4M3), wq.t(), self.scale_inv, 1 / ws)


class Cache(nn.Module):
    """Keys and values in FP8: the values are decoded by the scale of the keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (kq, ks), (vq, _) = cast(k), cast(v)
        scores = functional.softmax(q @ (kq.float() / ks).to(q.dtype).transpose(1, 2), -1)
        return scores @ (vq.float() / ks).to(q.dtype)


def mx_exchanged(x: Tensor, w: Tensor) -> Tensor:
    (xq, xe), (wq, _) = mx(x), mx(w)
    return product(xq, wq.t(), in_tiles_of_128x4(xe), in_tiles_of_128x4(xe))


def mx_in_rows(x: Tensor, w: Tensor) -> Tensor:
    """Scales in rows, where the GEMM reads tiles."""
    (xq, xe), (wq, we) = mx(x), mx(w)
    return product(xq, wq.t(), xe.view(torch.float8_e8m0fnu).flatten(), in_tiles_of_128x4(we))


class WritesWithoutScale(KeyCache):
    def cast(self, k: Tensor) -> Tensor:
        return k.clamp(-448, 448).to(E4M3)


class WritesMultiplied(KeyCache):
    def cast(self, k: Tensor) -> Tensor:
        return (k * self.key_scale).clamp(-448, 448).to(E4M3)


@pytest.mark.parametrize(("kind", "rule"), [(WritesWithoutScale, "scale-twice"), (WritesMultiplied, "scale-inverted")])
def test_a_fault_in_a_cache_is_found(kind: type[KeyCache], rule: str) -> None:
    model = kind(lambda keys, position, new: keys.index_copy_(0, position, new))
    assert rule in rules(fp8graph.lint(model, *keys_and_position(), training=False))


@pytest.mark.parametrize("function", [mx_exchanged, mx_in_rows])
def test_a_fault_in_scales_in_tiles_is_found(function: Any) -> None:
    model = Linear(function, 128, 128)
    assert rules(fp8graph.lint(model, torch.randn(128, 128).bfloat16(), training=False)) == ["scale-axis"]


def linear(function: Callable[[Tensor, Tensor], Tensor], inputs: int = 64) -> nn.Module:
    return Linear(lambda x, w: function(x.detach(), w.detach()), inputs, 32)


FAULTS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "inverse forgotten": (lambda: linear(inverse_forgotten), "scale-lost", "error"),
    "not inverted": (lambda: linear(scales_not_inverted), "scale-inverted", "error"),
    "applied twice": (lambda: linear(applied_twice), "scale-twice", "error"),
    "exchanged": (lambda: linear(exchanged), "scale-swapped", "error"),
    "of another tensor": (lambda: linear(scale_of_another_tensor), "scale-foreign", "error"),
    "along the contraction": (lambda: linear(along_the_contraction), "scale-axis", "error"),
    "for columns": (lambda: linear(for_columns_instead_of_rows), "scale-axis", "error"),
    "read as E5M2": (lambda: linear(read_as_e5m2), "format", "error"),
    "viewed": (lambda: linear(viewed_instead_of_transposed), "bytes-transposed", "error"),
    "without a scale": (lambda: linear(without_a_scale), "scale-constant-1", "warning"),
    "stored, not applied": (lambda: Faulty("tensor", torch.ones_like), "scale-lost", "error"),
    "stored, inverted": (lambda: Faulty("tensor", torch.reciprocal), "scale-inverted", "error"),
    "stored, squared": (lambda: Faulty("tensor", torch.square), "scale-twice", "error"),
    "exponents, inverted": (lambda: Exponents(lambda e: torch.exp2(127 - e.float())), "scale-inverted", "error"),
    "exponents, not applied": (lambda: Exponents(lambda e: e.float().sign()), "scale-axis", "error"),
    "cast again": (CastAgain, "scale-stale", "error"),
    "live scale": (LiveScale, "scale-stale", "error"),
    "unclamped": (Unclamped, "no-saturation", "warning"),
    "largest of history": (lambda: History(torch.amax, torch.positive), "scale-inverted", "error"),
    "last of history": (lambda: History(lambda window: window[0], torch.positive), "scale-inverted", "error"),
    "convolved": (lambda: linear(lambda x, w: convolved(x, w, torch.positive)), "scale-inverted", "error"),
    "vector": (lambda: linear(lambda x, w: of_a_vector(x, w, torch.positive)), "scale-inverted", "error"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    make, rule, severity = FAULTS[name]
    lint = fp8graph.lint(make(), torch.randn(32, 64).bfloat16(), training=False)
    assert (rule, severity) in {(finding.rule, finding.severity) for finding in lint}
    assert bool(lint) == (severity == "warning")


def test_a_fault_behind_attention_is_found() -> None:
    (finding,) = fp8graph.lint(Attended(torch.positive), *(torch.randn(1, 4, 16, 32).bfloat16() for _ in range(3)))
    assert finding.rule == "scale-inverted"


def test_a_bias_is_added_to_a_product_that_is_scaled_already() -> None:
    def biased(x: Tensor, w: Tensor) -> Tensor:
        (xq, xs), (wq, ws) = cast(x[0]), cast(w)
        return torch.addmv(w[:, 0], wq.to(x.dtype), xq.to(x.dtype)) / (xs * ws)

    (finding,) = fp8graph.lint(linear(biased), torch.randn(32, 64).bfloat16(), training=False)
    assert (finding.rule, finding.severity) == ("scale-lost", "error")


def test_several_scales_are_not_followed_through_a_convolution() -> None:
    model = linear(lambda x, w: convolved(x, w, dim=1))
    (finding,) = fp8graph.lint(model, torch.randn(32, 64).bfloat16(), training=False)
    assert (finding.rule, finding.severity) == ("opaque", "info")
    assert "aten.convolution multiplies decoded numbers, through which their scales are not followed" in finding.what


def test_tracing_leaves_the_compilations_of_a_program_to_its_limit() -> None:
    """Dynamo counts what it compiled of one function, whoever had it do so."""
    model, x = nn.Linear(64, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    assert fp8graph.lint(model, x)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        torch.compile(model, backend="eager")(x)


def test_a_fault_in_backward_is_found() -> None:
    model = nn.Sequential(nn.Linear(64, 64).bfloat16(), Linear(lambda x, w: InvertedInBackward.apply(x, w)))
    (finding,) = fp8graph.lint(model, torch.randn(32, 64).bfloat16())
    assert finding.rule == "scale-inverted"
    assert finding.where.startswith("1, ")
    assert finding.where.endswith("(backward)")


class Calibrated(nn.Module):
    """A weight that trains, cast by a scale that nothing updates."""

    weight_scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64).bfloat16())
        self.register_buffer("weight_scale", torch.tensor(0.01))

    def forward(self, x: Tensor) -> Tensor:
        codes = (self.weight.detach() / self.weight_scale).clamp(-448, 448).to(E4M3)
        rounded = self.weight + ((codes.float() * self.weight_scale).bfloat16() - self.weight).detach()
        return functional.linear(x, rounded)


def test_a_scale_that_stays_while_its_weight_trains_is_found() -> None:
    x = torch.randn(32, 64).bfloat16()
    (finding,) = fp8graph.lint(Calibrated(), x)
    assert (finding.rule, finding.severity) == ("scale-stale", "warning")
    assert "weight trains, and its scale weight_scale is not updated" in finding.what
    assert list(fp8graph.lint(Calibrated(), x, training=False)) == []


class InputScaleTwice(Stored):
    """The scale of the weight has no name in the program, and that of the input is applied for it."""

    def __init__(self) -> None:
        super().__init__("tensor", static=True)

    def forward(self, x: Tensor) -> Tensor:
        assert self.input_scale is not None
        xq = (x / self.input_scale).clamp(-448, 448).to(E4M3)
        return product(xq, self.weight.t(), self.input_scale, self.input_scale)


def test_the_scale_of_an_input_is_not_that_of_a_weight() -> None:
    lint = fp8graph.lint(InputScaleTwice(), torch.randn(32, 64).bfloat16(), training=False)
    assert [(finding.rule, finding.severity) for finding in lint] == [("scale-twice", "error")]


@pytest.mark.parametrize("inverted", [False, True])
def test_a_scale_near_1_is_taken_as_the_program_does(inverted: bool) -> None:
    class Generic(nn.Module):
        codes: Tensor
        s: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(64, 64).to(E4M3))
            self.register_buffer("s", torch.tensor(1.2))

        def forward(self, x: Tensor) -> Tensor:
            scale = 1 / self.s if inverted else self.s
            return functional.linear(x, (self.codes.float() * scale).bfloat16())

    assert list(fp8graph.lint(Generic(), torch.randn(32, 64).bfloat16(), training=False)) == []


def test_values_decoded_by_the_scale_of_keys_are_found() -> None:
    q, k, v = torch.randn(3, 2, 16, 32).bfloat16()
    assert rules(fp8graph.lint(Cache(), q, k, v)) == ["scale-swapped"]


def test_the_layer_is_named() -> None:
    faulty = Stored("row", inputs=128)
    faulty.weight_scale.fill_(1.0)
    model = nn.Sequential(Stored("tensor"), nn.GELU(), faulty)
    (finding,) = fp8graph.lint(model, torch.randn(32, 64).bfloat16(), training=False)
    assert (finding.rule, finding.where) == ("scale-lost", "2.weight")
    assert "weight_scale = 1, and has codes up to 448" in finding.what


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.0, -0.01])
def test_a_scale_that_is_no_positive_number_is_found(number: float) -> None:
    model = Stored("row")
    model.weight_scale[3] = number
    found = fp8graph.lint(model, torch.randn(32, 64).bfloat16(), training=False)
    assert "scale-value" in rules(found)
    assert found.errors[0].where == "weight_scale"


def test_a_custom_op_is_opaque() -> None:
    @torch.library.custom_op("lint_tests::gemm", mutates_args=())
    def gemm(x: Tensor, w: Tensor) -> Tensor:
        return x @ w.t()

    @gemm.register_fake
    def _(x: Tensor, w: Tensor) -> Tensor:
        return x.new_empty(x.shape[0], w.shape[0])

    lint = fp8graph.lint(Linear(lambda x, w: gemm(x, w)), torch.randn(32, 64).bfloat16(), training=False)
    assert [(finding.rule, finding.severity) for finding in lint] == [("opaque", "info")]
    assert [row.op for row in lint.products] == ["lint_tests.gemm"]
    assert lint


def test_an_op_without_a_backward_is_traced_forward() -> None:
    model = nn.Sequential(nn.Linear(64, 64).bfloat16(), Linear(scales_not_inverted))
    lint = fp8graph.lint(model, torch.randn(32, 64).bfloat16())
    assert rules(lint) == ["scale-inverted", "no-backward"]
    assert "derivative for aten::_scaled_mm is not implemented" in lint.findings[1].what
    with pytest.raises(ConfigError, match="derivative for aten::_scaled_mm is not implemented"):
        fp8graph.lint(model, torch.randn(32, 64).bfloat16(), training=True)


class _CastsAgain(torch.autograd.Function):
    """Backward casts the input of forward once more, along its other axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        (xq, xs), (wq, ws) = cast(x, dim=1), cast(w, dim=1)
        return product(xq, wq.t(), 1 / xs, (1 / ws).t())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        (dy,), (x, w) = grad_outputs, ctx.saved_tensors
        (dq, ds), (xq, xs) = cast(dy.t().contiguous(), E5M2, dim=1), cast(x, dim=0)
        return dy @ w, product(dq, xq.t().contiguous().t(), 1 / ds, 1 / xs)


@pytest.mark.parametrize(
    ("function", "kept"),
    [(tensorwise, "e4m3"), (rowwise, "bf16"), (lambda x, w: _CastsAgain.apply(x, w), "bf16")],
    ids=["bytes", "input", "cast again"],
)
def test_a_row_says_what_is_kept_for_backward(function: Any, kept: str) -> None:
    forward, *backward = fp8graph.lint(Linear(function), torch.randn(32, 64).bfloat16()).products
    assert (forward.kept, forward.casts) == ((kept, ""), ("e4m3", "e4m3"))  # the weight is there anyway
    assert all(row.kept == () for row in backward)


class Broken(nn.Module):
    """Its layers are traced in frames of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Linear(scales_not_inverted), nn.Linear(128, 64).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(y)


def test_a_product_has_the_full_name_of_its_module_behind_graph_breaks() -> None:
    lint = fp8graph.lint(nn.Sequential(nn.Sequential(Broken())), torch.randn(32, 64).bfloat16(), training=False)
    assert [(row.name, row.kind) for row in lint.products] == [
        ("0.0.first", "scaled matmul"), ("0.0.second", "matmul"),
    ]  # fmt: skip
    assert [finding.where for finding in lint] == ["0.0.first, _scaled_mm"]


def test_a_step_without_a_gradient_says_so() -> None:
    x = torch.randn(32, 64).bfloat16()
    (finding,) = fp8graph.lint(linear(lambda x, w: x @ w.t()), x)  # it detaches its weight
    assert (finding.rule, finding.what) == ("no-backward", "no gradient is computed in the graphs that Dynamo traced")
    assert list(fp8graph.lint(linear(lambda x, w: x @ w.t()), x, training=False)) == []


untraced: Any = torch._dynamo.disable(functional.linear)


def test_products_that_are_not_traced_are_named() -> None:
    model = nn.Sequential(nn.Linear(64, 64).bfloat16(), Linear(untraced))
    lint = fp8graph.lint(model, torch.randn(32, 64).bfloat16(), training=False)
    assert [(finding.rule, finding.what) for finding in lint] == [  # the frame of the Sequential is skipped, too
        ("not-traced", "1 aten.addmm outside of the graphs that Dynamo traced"),
        ("not-traced", "1 aten.mm outside of the graphs that Dynamo traced"),
    ]
    assert lint.products == ()


def test_every_rule_is_on_the_page() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "lint_model.md").read_text(encoding="utf-8")
    assert {*re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)} == {*lint_model._RULES}


def test_a_lint_reads_as_text() -> None:
    text = str(fp8graph.lint(linear(inverse_forgotten), torch.randn(32, 64).bfloat16(), training=False))
    assert text.splitlines() == [
        "1 product, 1 in low precision (100 % of the FLOPs): 1 error",
        "error [scale-lost]",
        "  weight, _scaled_mm: cast by the amax at amax_1, which the product does not undo: "
        "results are as many times too large or too small",
        "  -> Multiply the product by the inverse of the scale, or pass it as scale_a or scale_b.",
    ]


@pytest.mark.slow
def test_a_checkpointed_llama_is_traced() -> None:
    """Its dropout is a higher-order op, which has no rule for a mode of a class of ours."""
    settings: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 64,
        "attention_dropout": 0.1,
    }  # fmt: skip
    model: Any = LlamaForCausalLM(LlamaConfig(**settings))
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    ids = torch.arange(32)[None]
    lint = fp8graph.lint(model.bfloat16().train(), input_ids=ids, labels=ids, use_cache=False)
    assert (lint.findings, len(lint.products) > 8) == ((), True)


@pytest.mark.parametrize("recipe", ["mxfp8", "blockwise", "rowwise"])
def test_our_stored_weights_raise_nothing(recipe: str) -> None:
    net = nn.Sequential(nn.Linear(128, 128)).bfloat16()
    lint = fp8graph.lint(fp8graph.quantize_weights(net, recipe=recipe), torch.randn(32, 128).bfloat16())
    assert (list(lint), [row.casts for row in lint.products]) == ([], [("", "e4m3")])


def test_exponents_that_an_op_decodes_are_named_and_not_judged() -> None:
    @torch.library.custom_op("lint_tests::decode", mutates_args=())
    def decode(w: Tensor, e: Tensor) -> Tensor:
        return w.to(torch.bfloat16)

    decode.register_fake(lambda w, e: torch.empty_like(w, dtype=torch.bfloat16))

    class Decoded(Exponents):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, decode(self.weight, self.weight_scale))

    lint = fp8graph.lint(Decoded(torch.exp2), torch.randn(32, 64).bfloat16(), training=False)
    assert {(finding.rule, finding.severity) for finding in lint} == {("opaque", "info")}


def test_a_fault_before_attention_is_found() -> None:
    class Attention(nn.Module):
        def forward(self, q: Tensor, v: Tensor) -> Tensor:
            scale = 448 / v.abs().amax().float()
            v = ((v * scale).to(torch.float8_e4m3fn).float() * scale).to(q.dtype)
            return functional.scaled_dot_product_attention(q, q, v)

    (finding,) = fp8graph.lint(Attention(), *torch.randn(2, 1, 2, 32, 16).bfloat16()).errors
    assert finding.rule == "scale-inverted"


def test_a_model_that_cannot_be_traced_says_so() -> None:
    with pytest.raises(ConfigError, match=r"LazyLinear cannot be traced with these inputs"):
        fp8graph.lint(nn.LazyLinear(4), torch.randn(4, 16))


def test_a_meta_model_is_traced() -> None:
    model = Faulty("tensor", torch.reciprocal).to("meta")
    assert rules(fp8graph.lint(model, torch.randn(32, 64).bfloat16(), training=False)) == ["scale-inverted"]


def test_inputs_that_do_not_fit_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"lint\(model, ...\): Linear does not run with these inputs"):
        fp8graph.lint(nn.Linear(8, 8), torch.randn(4, 9))
    with pytest.raises(ConfigError, match=r"lint\(model='model'\): model must be a model"):
        fp8graph.lint("model", torch.randn(4, 9))  # pyright: ignore
    with pytest.raises(ConfigError, match=r"or the folder of a checkpoint alone"):
        fp8graph.lint("model", training=True)  # pyright: ignore


def test_a_folder_is_judged_as_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(fp8graph.CheckpointError):
        fp8graph.lint(tmp_path)


@pytest.fixture(scope="module")
def programs() -> dict[str, list[tuple[fx.Graph, dict[fx.Node, Source]]]]:
    graphs: dict[str, list[tuple[fx.Graph, dict[fx.Node, Source]]]] = {}
    for name, make in PROGRAMS.items():
        torch._dynamo.reset()
        model, args, training = make()
        graphs[name] = traced(model, args, {}, training)
    return graphs


@pytest.mark.slow
def test_mutants_are_found(programs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    count, missed = 200, list[str]()
    for name, graph, sources in mutants(programs, count, seed=0):
        raised, _ = faults(graph, sources, products_of(graph, []))
        if all(fault.severity == "info" for fault in raised):
            missed.append(name)
    with capsys.disabled():
        print(f"\n{count - len(missed)} of {count} mutants of low-precision graphs are found")
    assert len(missed) <= count // 20, missed


@pytest.mark.slow
def test_changes_that_keep_the_result_raise_nothing(programs: Any) -> None:
    raised = [
        name
        for name, graph, sources in mutants(programs, 100, 0, NEUTRAL)
        if faults(graph, sources, products_of(graph, []))[0]
    ]
    assert raised == []
