"""fp8graph.lint on batches: right programs differ from their float64 shadow by rounding, and wrong ones by more."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fp8graph
from fp8graph import ConfigError
from fp8graph.analysis.scales import shadow
from fp8graph.analysis.scales.shadow import ShadowRun
from fp8graph.analysis.scales.states import Source
from fp8graph.passes.lower import lower_for_torch_alone
from fp8graph.tools.lint_data import faults_on
from fp8graph.tools.lint_model import _read, traced
from helpers import first_fast
from low_precision import (
    E4M3,
    PROGRAMS,
    Delayed,
    Linear,
    OneScale,
    Stored,
    cast,
    decoded,
    in_tiles,
    multiplied_after,
    product,
    rowwise,
    tensorwise,
)
from low_precision_mutants import FAULTS, NEUTRAL, mutants


@pytest.fixture(autouse=True)
def _start() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def of(lint: fp8graph.Lint, *rules: str) -> list[fp8graph.Finding]:
    return [finding for finding in lint if finding.rule in (rules or ("unexplained", "saturated", "flushed"))]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape or (32, 64)).bfloat16()


@pytest.fixture
def twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the bound be twice the expected error, so that right programs are far from the one that users have."""
    monkeypatch.setattr(shadow, "UNEXPLAINED", 2.0)


@pytest.mark.usefixtures("twice")
@first_fast("name", sorted({*PROGRAMS} - {"cache"}))  # no CPU writes FP8 at some places of a buffer
def test_a_right_program_is_explained_by_rounding(name: str) -> None:
    model, args, training = PROGRAMS[name]()
    assert faults_on(model, [(args, {})], training, _read) == []


@pytest.mark.usefixtures("twice")
@first_fast("function", [tensorwise, rowwise, decoded, in_tiles])
def test_numbers_that_are_far_from_normal_are_explained(function: Any) -> None:
    x = normal(64, 64)
    outliers, like_one = x.clone(), x[:1].expand(64, 64).contiguous()
    outliers[:, 3] *= 100
    outliers[5] *= 50
    model = Linear(function)
    assert of(fp8graph.lint(model, data=[outliers, like_one, x * 0, x * 1e-20], training=False), "unexplained") == []


@pytest.mark.usefixtures("twice")
@pytest.mark.parametrize("function", [rowwise, decoded, multiplied_after])
def test_equal_numbers_that_are_rounded_alike_are_explained(function: Any) -> None:
    """Their errors add up, and do not cancel."""
    x, model = torch.full((32, 2048), 0.3).bfloat16(), Linear(function, 2048, 64)
    x[:, 0] = 1
    model.weight.data.copy_(x[:1])
    assert of(fp8graph.lint(model, data=[x], training=False)) == []


def test_a_product_of_stored_scales_is_not_judged() -> None:
    assert of(fp8graph.lint(OneScale(), data=[normal()], training=False)) == []


@pytest.mark.usefixtures("twice")
@first_fast("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_torchao_is_explained_by_rounding(recipe: str) -> None:
    float8 = pytest.importorskip("torchao.float8")
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).bfloat16()
    float8.convert_to_float8_training(model, config=config)
    assert list(fp8graph.lint(model, data=[normal(), normal()])) == []


def of_the_last_batch() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64).bfloat16(), Delayed(), nn.GELU(), Linear(decoded, 128, 64))


def test_a_delayed_scale_that_cuts_off_the_second_batch_is_found() -> None:
    lint = fp8graph.lint(of_the_last_batch(), data=[normal(), 50 * normal()], training=False)
    (error,) = lint.errors
    assert (error.rule, error.where) == ("unexplained", "1, _scaled_mm")
    assert error.what.startswith("relative error 0.")
    assert error.what.endswith("(batch 2)")
    (warning,) = of(lint, "saturated")
    assert warning.where == "1, _to_copy"
    assert "% of the numbers are beyond 448 in float8_e4m3fn (batch 2)" in warning.what
    assert of(fp8graph.lint(of_the_last_batch(), data=[normal(), normal()], training=False)) == []


def test_the_state_of_the_model_stays() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(64, momentum=0.5), nn.Dropout(), Linear(tensorwise), nn.BatchNorm1d(128)
    ).bfloat16()
    data = [normal(), normal()]
    before, random = {name: x.clone() for name, x in model.state_dict().items()}, torch.get_rng_state()
    fp8graph.lint(model, data=data)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(x.grad is None for x in model.parameters())


def rounded_for_the_product_alone(x: Tensor, w: Tensor) -> Tensor:
    """The inverse of a scale is rounded to a power of two, after the cast."""
    (xq, xs), (wq, ws) = cast(x.detach(), dim=1), cast(w.detach(), dim=1)
    return product(xq, wq.t(), torch.exp2(torch.floor(torch.log2(1 / xs))), (1 / ws).t())


def of_one_row(x: Tensor, w: Tensor) -> Tensor:
    """A row of the input is beyond the largest scale that is allowed."""
    xs = (448 / x.detach().abs().amax(1, keepdim=True).float()).clamp(min=100.0)
    wq, ws = cast(w.detach(), dim=1)
    return product((x.detach() * xs).clamp(-448, 448).to(E4M3), wq.t(), 1 / xs, (1 / ws).t())


def from_the_mean(x: Tensor, w: Tensor) -> Tensor:
    """The largest number of a row is far beyond the mean."""
    xs = 448 / x.detach().abs().float().mean()
    wq, ws = cast(w.detach())
    return product((x.detach() * xs).clamp(-448, 448).to(E4M3), wq.t(), 1 / xs, 1 / ws)


def overflowing(x: Tensor, w: Tensor) -> Tensor:
    (xq, xs), (wq, ws) = cast(x.detach()), cast(w.detach())
    return ((xq.half() @ wq.half().t()).float() / xs / ws).bfloat16()


@first_fast(
    ("function", "text"),
    [
        (rounded_for_the_product_alone, "relative error 0."),
        (of_one_row, "relative error 0."),
        (from_the_mean, "relative error 0."),
        (overflowing, "infinite or NaN"),
    ],
)
def test_a_fault_of_numbers_alone_is_found(function: Any, text: str) -> None:
    model = nn.Sequential(Linear(decoded, 64, 64), Linear(function))
    x = normal(32, 64)
    x[7] *= 50
    assert fp8graph.lint(model, x, training=False)  # it has no fault of the program
    (error,) = fp8graph.lint(model, training=False, data=[x]).errors
    assert error.rule == "unexplained"
    assert error.where.startswith("1, ")
    assert error.what.startswith(text)


def test_the_first_layer_is_named_and_later_ones_are_counted() -> None:
    model = nn.Sequential(Linear(decoded, 64, 64), Linear(from_the_mean, 64, 64), Linear(from_the_mean, 64, 64))
    (error,) = fp8graph.lint(model, training=False, data=[normal()]).errors
    assert error.where.startswith("1, ")
    assert "; 1 later product as well" in error.what


class CutOffInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        (dy,), (x, w) = grad_outputs, ctx.saved_tensors
        scale = 448 / dy.abs().float().mean()
        (dq, ds), (wq, ws) = ((dy * scale).clamp(-448, 448).to(E4M3), scale), cast(w)
        return product(dq, wq.t().contiguous().t(), 1 / ds, 1 / ws), dy.t() @ x


def test_backward_is_judged() -> None:
    model = nn.Sequential(nn.Linear(64, 64).bfloat16(), Linear(lambda x, w: CutOffInBackward.apply(x, w)))
    (error,) = fp8graph.lint(model, data=[normal()]).errors
    assert (error.rule, error.where) == ("unexplained", "1, _scaled_mm (backward)")


def test_numbers_that_become_zero_are_a_warning() -> None:
    model: Any = Stored("tensor", static=True)
    model.input_scale.fill_(1e4)
    lint = fp8graph.lint(model, data=[normal()], training=False)
    assert [(x.rule, x.severity, x.where) for x in lint] == [("flushed", "warning", "the model, _to_copy")]
    assert lint.findings[0].what == "100 % of the numbers are 0 in float8_e4m3fn (batch 1)"


def test_batches_are_tensors_tuples_or_keywords_beside_those_of_the_call() -> None:
    class Model(Linear):
        def forward(self, x: Tensor, *, factor: float = 0.0) -> Tensor:
            assert factor == 2.0
            return super().forward(x * factor)

    model = Model(decoded)
    for batch in (normal(), (normal(),), {"x": normal()}):
        assert list(fp8graph.lint(model, data=[batch], factor=2.0, training=False)) == []
    shapes = [normal(32, 64), normal(16, 64)]
    assert list(fp8graph.lint(model, normal(8, 64), data=iter(shapes), factor=2.0, training=False)) == []


class Attributed(nn.Module):
    """Bytes whose scale is an attribute of their parameter."""

    def __init__(self) -> None:
        super().__init__()
        codes, scale = cast(torch.randn(64, 64) * 0.02)
        weight: Any = nn.Parameter(codes, requires_grad=False)
        weight.inverse = 1 / scale
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.weight.inverse.to(x.dtype)).t()


def test_attributes_of_parameters_are_those_of_the_copy() -> None:
    assert list(fp8graph.lint(Attributed(), data=[normal(32, 64)], training=False)) == []


def test_runs_leave_the_compilations_of_a_program_to_its_limit() -> None:
    model, x = nn.Linear(64, 64).bfloat16(), normal(32, 64)
    faults_on(model, [((x,), {})], False, _read)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        torch.compile(model, backend="eager")(x)


def test_wrong_data_is_a_config_error() -> None:
    model = Linear(decoded)
    with pytest.raises(ConfigError, match=r"lint\(data=\.\.\.\): data must be a list of batches, .*Write \[batch\]"):
        fp8graph.lint(model, data=normal())
    with pytest.raises(ConfigError, match=r"lint\(data=3\): data must be a list of batches"):
        fp8graph.lint(model, data=3)  # pyright: ignore
    with pytest.raises(ConfigError, match=r"batch=3\): data=\[\.\.\.\], batch must be a dict, a tuple or a tensor"):
        fp8graph.lint(model, data=[3])
    with pytest.raises(ConfigError, match=r"lint\(data=\[\]\): data must have at least one batch"):
        fp8graph.lint(model, data=[])
    with pytest.raises(ConfigError, match=r"Linear does not run with batch 2"):
        fp8graph.lint(model, data=[normal(), normal(32, 63)])
    with pytest.raises(ConfigError, match=r"Linear is on the meta device, without numbers"):
        fp8graph.lint(Linear(decoded).to("meta"), data=[normal()])
    with pytest.raises(ConfigError, match=r"or the folder of a checkpoint alone"):
        fp8graph.lint("model", data=[normal()])  # pyright: ignore


def numbers_of(graph: fx.Graph, seed: int) -> list[Tensor]:
    """Inputs of a graph: normal matrices, and 0.5 for scales and state."""
    generator, numbers = torch.Generator().manual_seed(seed), list[Tensor]()
    for node in graph.find_nodes(op="placeholder"):
        val = node.meta["val"]
        drawn = torch.randn(val.shape, generator=generator) if val.ndim > 1 and min(val.shape) > 8 else None
        numbers.append((torch.full(val.shape, 0.5) if drawn is None else drawn).to(val.dtype))
    return numbers


@first_fast("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise", "mxfp8"])
def test_our_own_arithmetic_is_explained_by_rounding(recipe: str) -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).bfloat16()
    policy = fp8graph.Policy([], default=recipe, min_speedup=0)
    module = fp8graph.explain(model, normal(128, 128), policy=policy).graphs[0].module
    lower_for_torch_alone(module.graph)
    run = ShadowRun(module, {node: Source(node.name) for node in module.graph.find_nodes(op="placeholder")})
    run(numbers_of(module.graph, 0))
    assert (run.unexplained, run.lost) == ([], [])
    assert len(run.ratios) >= 5
    assert all(0.85 < ratio < 1.1 for ratio in run.ratios)


# The scales of these are computed in the graph. Nothing saturates, and views of bytes are what the program says.
COMPUTED = (
    "tensorwise",
    "rowwise",
    "square rowwise",
    "stack",
    "decoded",
    "multiplied after",
    "tiles",
    "e8m0",
    "attention",
)
SEEN = {name: fault for name, fault in FAULTS.items() if name not in ("no clamp", "transposed bytes")}


@pytest.fixture(scope="module")
def graphs() -> dict[str, list[tuple[fx.Graph, dict[fx.Node, Source]]]]:
    graphs: dict[str, list[tuple[fx.Graph, dict[fx.Node, Source]]]] = {}
    for name in COMPUTED:
        torch._dynamo.reset()
        model, args, training = PROGRAMS[name]()
        graphs[name] = traced(model, args, {}, training)
    return graphs


def unexplained(graph: fx.Graph, sources: Any) -> list[float]:
    run = ShadowRun(fx.GraphModule(nn.Module(), graph), sources)
    run(numbers_of(graph, 0))
    return [each.error for each in run.unexplained]


def test_mutants_are_unexplained(graphs: Any) -> None:
    missed = [name for name, graph, sources in mutants(graphs, 150, 0, SEEN) if not unexplained(graph, sources)]
    assert missed == []


def test_changes_that_keep_the_result_are_explained(graphs: Any) -> None:
    raised = [name for name, graph, sources in mutants(graphs, 80, 0, NEUTRAL) if unexplained(graph, sources)]
    assert raised == []


def with_another_scale_for_one_row(x: Tensor, w: Tensor) -> Tensor:
    (xq, xs), (wq, ws) = cast(x.detach(), dim=1), cast(w.detach(), dim=1)
    inv = 1 / xs
    return product(xq, wq.t(), torch.cat([inv[:7], inv[7:8] * 1.5, inv[8:]]), (1 / ws).t())


def test_one_row_of_many_is_judged() -> None:
    """Its error is too small a part of that of all rows."""
    lint = fp8graph.lint(Linear(with_another_scale_for_one_row), training=False, data=[normal(512, 64)])
    (error,) = of(lint, "unexplained")
    assert re.fullmatch(
        r"relative error 0.[45]\d? in row 7, where rounding explains 0.0[34]\d? \(batch 1\)", error.what
    )
