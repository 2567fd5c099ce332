"""The pass `connect_scales`: pages found, read once, updated once; what it refuses to record."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config

import fp8graph
from fp8graph import DelayedScaling, Policy, Rule
from fp8graph.numerics import history
from gathers import two_ranks
from helpers import MLP, Weight, around, brief, eager_backend, first_fast, inputs_of, joint, same_bits, step, view_of

RECIPE = DelayedScaling(amax_history_len=4, margin=1, initial_scale="one")


def lines(text: str, *ops: str) -> list[str]:
    return [line for line in text.splitlines() if any(f"= {op}" in line for op in ops)]


def state_lines(module: nn.Module, x: Tensor, policy: Policy | None = None) -> list[str]:
    view = view_of(module, x, policy=policy or Policy(default=RECIPE))
    return lines(around(view, "connect_scales")[1], "fp8graph.read_scales", "fp8graph.update_page", "aten.copy_")


def test_one_read_and_one_update_a_direction() -> None:
    module = Weight(lambda w, x: x @ w.T, 48, 32)
    view = view_of(module, torch.randn(16, 32), policy=Policy(default=RECIPE))
    before, after = view.stages["share"], view.stages["connect_scales"]
    assert "scales" not in before
    assert lines(brief(after), "fp8graph", "aten.copy_") == [
        "scales: f32[2, 4] = fp8graph.read_scales(primals_3, copy=True)",
        "quantize_input: (e4m3[16, 32], e4m3[32, 16], f32[1], f32[16]) = fp8graph.quantize(primals_2, dtype=e4m3, "
        "rowwise=[1, 16], columnwise=[16, 16], scaling=delayed, scales=scales)",
        "quantize_weight: (e4m3[48, 32], f32[1], f32[48]) = fp8graph.quantize(primals_1, dtype=e4m3, "
        "rowwise=[16, 16], columnwise=[], scaling=delayed, scales=scales, row=1)",
        "fprop: f32[16, 48] = fp8graph.scaled_mm(input_rowwise, weight_rowwise, input_scale_inv, weight_scale_inv, "
        "bias=None, out_dtype=f32, use_fast_accum=True, scaling=delayed)",
        "scales_1: f32[1, 4] = fp8graph.read_scales(primals_4, copy=False)",
        "quantize_grad_output: (e5m2[48, 16], f32[1], f32[16]) = fp8graph.quantize(tangents_1, dtype=e5m2, "
        "rowwise=[], columnwise=[1, 16], scaling=delayed, scales=scales_1)",
        "wgrad: f32[48, 32] = fp8graph.scaled_mm(grad_output_columnwise, input_columnwise_1, grad_output_scale_inv, "
        "input_scale_inv, bias=None, out_dtype=f32, use_fast_accum=False, scaling=delayed)",
        "updated_page: f32[2, 8] = fp8graph.update_page(primals_3, amaxes=[amax, amax_1], fp8_max=448.0, margin=1.0, "
        "amax_compute_algo=max)",
        "copy__default: f32[2, 8] = aten.copy_(primals_3, updated_page)",
        "updated_page_1: f32[1, 8] = fp8graph.update_page(primals_4, amaxes=[amax_2], fp8_max=57344.0, margin=1.0, "
        "amax_compute_algo=max)",
        "copy__default_1: f32[1, 8] = aten.copy_(primals_4, updated_page_1)",
    ]


def test_a_page_per_recipe_type_and_direction() -> None:
    other = DelayedScaling(amax_history_len=7, amax_compute_algo="most_recent", fp8_format="E4M3")  # pyright: ignore
    policy = Policy([Rule("up", other)], default=RECIPE)
    found = state_lines(MLP(), torch.randn(16, 32, requires_grad=True), policy)
    sizes = [re.findall(r"f32\[(\d+, \d+)\] = fp8graph.update_page.*fp8_max=(\d+).*algo=(\w+)", line) for line in found]
    # gate and down, up: weights and inputs forward, gradients backward
    assert sorted(match[0] for match in sizes if match) == sorted(
        [
            ("4, 8", "448", "max"),
            ("2, 8", "57344", "max"),
            ("2, 11", "448", "most_recent"),
            ("1, 11", "448", "most_recent"),
        ]
    )


def test_other_recipes_have_no_page() -> None:
    assert state_lines(MLP(), torch.randn(16, 32, requires_grad=True), Policy(default="mxfp8")) == []


def test_a_weight_that_backward_quantizes_once_more_has_the_scale_of_forward() -> None:
    """A weight multiplied twice, of which one dgrad wants another padding: two pages of its row would keep no amax."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(32, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(nn.functional.silu(self.a(x.t())))

    backend = eager_backend(Policy(default=RECIPE))
    model, x = torch.compile(Twice(), backend=backend), torch.randn(32, 32, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
    histories = {key.partition("|")[0]: x for key, x in backend.state_dict().items() if key.endswith("amax_history")}
    assert len(histories) == 6
    assert all(amaxes.any() for amaxes in histories.values())


def test_without_gradients_scales_are_read_and_nothing_is_recorded() -> None:
    backend = eager_backend(Policy(default=RECIPE))
    with torch.no_grad():
        torch.compile(MLP(), backend=backend)(torch.randn(16, 32))
    (view,) = backend.report.graphs
    found = lines(view.after, "fp8graph.read_scales", "fp8graph.update_page", "aten.copy_")
    assert [line.partition(" = ")[2] for line in found] == [
        f"fp8graph.read_scales(arg{len(view.inputs) - 1}_1, copy=False)"
    ]


def test_a_no_grad_region_is_read_only() -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = (x * 2) @ w.T
        return y + x @ w.T

    (line,) = [line for line in state_lines(Weight(body, 32, 32), torch.randn(16, 32)) if "448" in line]
    assert line.startswith("updated_page: f32[2, 8]")  # one input and the weight: the region reads the same rows


def test_amaxes_under_no_grad_are_not_recorded() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.b(x)
            return self.a(x * 2) - target

    module = Teacher()
    backend = eager_backend(Policy(default=RECIPE))
    model = torch.compile(module, backend=backend)
    model(torch.randn(16, 32)).sum().backward()
    state = backend.state_dict()
    scales = {key.partition("|")[0]: value.item() for key, value in state.items() if key.endswith("|scale")}
    assert scales["b.input"] == scales["b.weight"] == 1.0
    assert scales["a.input"] != 1.0


def test_delayed_scaling_is_refused_inside_of_a_higher_order_op() -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x, y: x @ y, lambda x, y: x @ y + 1, (x, x.T * 2)) + x @ w.T

    policy = Policy([Rule("*", RECIPE, op="*")])
    module = Weight(body, 16, 32)
    backend = eager_backend(policy)
    torch.compile(module, backend=backend)(torch.randn(16, 32))
    reasons = {gemm.reason for gemm in backend.report.gemms if gemm.recipe is None}
    assert any("delayed scaling has no state inside a higher-order op" in reason for reason in reasons)
    assert any(gemm.recipe == "delayed" for gemm in backend.report.gemms)


@first_fast("use_reentrant", [False, True])
def test_inside_a_checkpointed_region_one_update_a_direction(use_reentrant: bool) -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(lambda x: (x @ w.T).relu() @ w, x, use_reentrant=use_reentrant)  # pyright: ignore

    found = state_lines(Weight(body, 32, 32), torch.randn(16, 32, requires_grad=True))
    assert sum("update_page" in line for line in found) == 2


def in_a_region(budget: float) -> Any:
    """The model in a region of its own memory budget."""

    class Region(MLP):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.region_activation_memory_budget(budget):
                return super().forward(x)

    return Region


@pytest.mark.parametrize(
    ("make", "option"),
    [
        pytest.param(MLP, {"aggressive_recomputation": True}, id="aggressive"),
        pytest.param(MLP, {"activation_memory_budget": 0.5}, id="half"),
        pytest.param(MLP, {"activation_memory_budget": 0.0}, id="none"),
        pytest.param(
            in_a_region(0.0),
            {},
            id="none in a region",
            marks=pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 knows no regions of a budget"),
        ),
    ],
)
def test_a_partitioner_that_recomputes_whatever_it_can_saves_the_scales_of_forward(make: Any, option: Any) -> None:
    """Read again in backward they would be those of the next step: the page was updated at the end of forward."""
    results: list[list[Tensor]] = []
    for kind, options in ((MLP, {}), (make, option)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = kind(), torch.randn(16, 32)
        run = torch.compile(model, backend=eager_backend(Policy(default=RECIPE), save="memory"))
        results.append([])
        for scale in (1.0, 5.0):
            with functorch_config.patch(options):
                results[-1] += step(run, (x * scale).requires_grad_(), parameters=model.parameters())
    assert same_bits(*results)


def test_the_view_of_a_graph_with_state_runs() -> None:
    """One tensor for each of ``inputs``, the pages included."""
    module, x = nn.Linear(32, 48), torch.randn(16, 32)
    backend = eager_backend(Policy(default=RECIPE))
    with torch.no_grad():
        expected = torch.compile(module, backend=backend)(x)  # scales 1
        (view,) = backend.report.graphs
        for scale in (1.0, 8.0):
            page = history.new_page(4, 2)
            history.write_scale(page, torch.tensor(scale))
            (got,) = view.module(*inputs_of(view, module, x), page)
            assert torch.equal(got, expected) == (scale == 1.0)


def test_explain_shows_the_state() -> None:
    report = fp8graph.explain(MLP(), torch.randn(16, 32), policy=Policy(default=RECIPE), training=True)
    text: Any = report.graphs[0].after
    assert "fp8graph.update_page(" in text


def test_a_matmul_of_the_root_has_rows_of_its_own() -> None:
    """The matmul has no weight and no name; the first weight of the model, which stands for the model, has rows too."""
    backend = eager_backend(Policy([Rule("*", "delayed", op="matmul")], default="delayed"))
    module = Weight(lambda w, a: (a @ a.t()) @ w, 16, 8)
    torch.compile(module, backend=backend)(torch.ones(16, 4)).sum().backward()
    scales = {name.partition("|")[0]: x.item() for name, x in backend.state_dict().items() if name.endswith("scale")}
    assert (scales[".input"], scales["w.input"]) == (448.0, 448.0 / 4)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
@pytest.mark.parametrize(("reduced", "op"), [(True, "fp8graph.stage_amaxes("), (False, "fp8graph.update_page(")])
def test_amaxes_are_staged_where_ranks_reduce_them(reduced: bool, op: str) -> None:
    recipe = DelayedScaling(amax_history_len=4, reduce_amax=reduced)
    with two_ranks():
        view = view_of(Weight(lambda w, x: x @ w.T, 48, 32), torch.randn(16, 32), policy=Policy(default=recipe))
    text = view.stages["connect_scales"]
    found = re.findall(r"fp8graph\.(?:stage_amaxes|update_page)\(", text)
    assert found == [op] * 2  # forward, backward


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_amaxes_are_reduced_in_a_graph_that_no_backend_runs() -> None:
    module, x = Weight(lambda w, x: x @ w.T, 48, 32), torch.randn(16, 32)
    graph = joint(module, x.clone().requires_grad_())
    with two_ranks():
        rewritten, _ = fp8graph.rewrite(graph, [module.w, x, torch.randn(16, 48)], ["w"], recipe="delayed")
    (view,) = rewritten.meta["fp8graph_report"].graphs
    text = re.sub(r": \S+\[[\d, ]*\] =", " =", view.stages["connect_scales"])
    text = re.sub(r"max, \w+\)", "max, group)", text)
    for lines in (
        """
        all_reduce_default = _c10d_functional.all_reduce(where, max, group)
        reduced_amaxes = _c10d_functional.wait_tensor(all_reduce_default)
        select_int = aten.select.int(reduced_amaxes, 0, 0)
        select_int_1 = aten.select.int(reduced_amaxes, 0, 1)
        updated_page = fp8graph.update_page(fp8graph_input_0, amaxes=[select_int, select_int_1], fp8_max=448.0,""",
        """
        all_reduce_default_1 = _c10d_functional.all_reduce(where_1, max, group)
        reduced_amaxes_1 = _c10d_functional.wait_tensor(all_reduce_default_1)
        select_int_2 = aten.select.int(reduced_amaxes_1, 0, 0)
        updated_page_1 = fp8graph.update_page(fp8graph_input_1, amaxes=[select_int_2], fp8_max=57344.0,""",
    ):
        assert textwrap.dedent(lines) in text
