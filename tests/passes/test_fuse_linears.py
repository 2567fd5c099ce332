"""fuse_linears: one GEMM per direction for linears that share their input, and every case in which they stay apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import fp8graph
from fp8graph import DelayedScaling, Policy, Rule
from fp8graph.numerics import sqnr_db
from helpers import ALL, MLP, brief, compiled_step, dialect_counts, eager_backend, first_fast, same_bits, step, view_of


class Projections(nn.Module):
    """q, k and v of one input, in sizes of grouped-query attention, and something of them."""

    def __init__(self, *, bias: bool = False, sizes: tuple[int, ...] = (64, 32, 32), mix: Any = None) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, size, bias=bias) for size in sizes)
        self.mix = mix or (lambda q, k, v: torch.cat([q.tanh(), k.tanh(), v.tanh()], -1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        return self.mix(self.q(x), self.k(x), self.v(x))


def x(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def gemms(text: str) -> list[str]:
    return [line.split(": ")[0] for line in text.splitlines() if "fp8graph.scaled_mm(" in line]


def lines(text: str, op: str) -> list[str]:
    return [line.split(" = ")[1] for line in text.splitlines() if f" = {op}" in line]


def multiplied(module: nn.Module, *args: Tensor, **kwargs: Any) -> int:
    return dialect_counts(view_of(module, *args, **kwargs).after)["scaled_mm"]


def test_before_and_after() -> None:
    view = view_of(MLP(), x(16, 32))
    assert len(gemms(view.stages["share"])) == 9
    after = view.stages["fuse_linears"]
    assert len(gemms(after)) == 6
    assert lines(brief(after), "fp8graph.quantize(primals_1") == [
        "fp8graph.quantize(primals_1, dtype=e4m3, rowwise=[16, 16], columnwise=[16, 16], more=[primals_3], dim=-2)"
    ]
    (fprop,) = [line for line in after.splitlines() if line.startswith("fprop: ")]
    assert "f32[16, 128] = fp8graph.scaled_mm(input_rowwise, weight_rowwise, " in fprop
    assert lines(after, "aten.slice") == [
        "aten.slice.Tensor(fprop, 1, 64, 128)",
        "aten.slice.Tensor(fprop, 1, 0, 64)",
        "aten.slice.Tensor(wgrad_2, 0, 64, 128)",
        "aten.slice.Tensor(wgrad_2, 0, 0, 64)",
    ]
    assert len(lines(view.stages["share"], "aten.add.Tensor(dgrad")) == 1
    assert not lines(after, "aten.add.Tensor(dgrad")  # the GEMM sums


def test_three_of_two_sizes_are_one_gemm_a_direction() -> None:
    view = view_of(Projections(), x(2, 8, 32))
    assert len(gemms(view.stages["share"])) == 9
    assert len(gemms(view.after)) == 3
    assert {g.reason for g in view.gemms if g.fqn == "q"} == {"default; one GEMM with k, v"}


@first_fast("policy", [ALL, Policy(default="rowwise"), Policy(default=DelayedScaling())])
@first_fast("bias", [False, True])
@first_fast("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradients(policy: Policy, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, inputs = Projections(bias=bias).to(dtype), x(2, 8, 32).to(dtype).detach().requires_grad_()
    expected = step(model, inputs, parameters=model.parameters())
    backend = eager_backend(policy)
    got = compiled_step(model, inputs, backend)
    assert dialect_counts(backend.report.graphs[0].after)["scaled_mm"] == 3
    assert [g.shape for g in got] == [e.shape for e in expected]
    assert all(g.is_contiguous() for g in got)
    assert all(sqnr_db(e, g) > 18 for e, g in zip(expected, got, strict=True))


def test_scales_of_rows_are_those_of_the_linears_but_for_what_is_summed() -> None:
    """fprop and wgrad scale each row of the joined operand by itself: the same bits as one by one."""
    torch.manual_seed(0)
    model, inputs = Projections(), x(16, 32)
    recipe = fp8graph.Float8RowwiseScaling(power_2_scale=False)
    one, apart = (
        compiled_step(model, inputs, eager_backend(Policy(default=recipe), fuse_linears=fuse)) for fuse in (True, False)
    )
    assert same_bits([one[0], *one[2:]], [apart[0], *apart[2:]])
    assert not torch.equal(one[1], apart[1])
    assert sqnr_db(apart[1], one[1]) > 25


def test_the_state_of_a_group_is_one_tensors_and_is_known_by_every_name() -> None:
    torch.manual_seed(0)
    model, inputs = Projections(), x(16, 32)
    backend = eager_backend(Policy(default=DelayedScaling(amax_history_len=2)))
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        compiled(inputs).sum().backward()
    state = {
        name: value.tolist() for name, value in backend.state_dict().items() if "weight" in name and "scale" in name
    }
    assert len(state) == 3
    largest = max(p.abs().max() for p in model.parameters())
    assert set(map(tuple, state.values())) == {(torch.tensor(448.0).div(largest).item(),)}


def test_inference() -> None:
    model, inputs = Projections(), torch.randn(16, 32)
    backend = eager_backend()
    with torch.no_grad():
        got = torch.compile(model, backend=backend)(inputs)
        expected = model(inputs)
    assert len(gemms(backend.report.graphs[0].after)) == 1
    assert sqnr_db(expected, got) > 24


class TwoLevels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.ModuleDict({"a": nn.Linear(32, 32)}), nn.ModuleDict({"a": nn.Linear(32, 32)})

    def forward(self, x: Tensor) -> Tensor:
        return self.one["a"](x).tanh() + self.other["a"](x).tanh()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).tanh() + self.b(x).cos()


class Routes(nn.Module):
    """The input reaches b through a view: its gradient is viewed back before it is added to a's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        return (3 * self.a(x) + self.b(x.view(4, 4, 32)).reshape(16, 32)).tanh()


APART: dict[str, tuple[nn.Module, dict[str, Any], int]] = {
    "switched off": (Projections(), {"fuse_linears": False}, 9),
    "another recipe": (
        Projections(),
        {"policy": Policy([Rule("q", fp8graph.Float8CurrentScaling(power_2_scale=True)), Rule("k", None)])},
        6,
    ),
    "another recipe for one gemm": (
        Projections(),
        {"policy": Policy([Rule("k", "tensorwise", wgrad=None)])},
        3 + 2,
    ),
    "no multiple of 16": (Projections(sizes=(64, 40, 24)), {}, 9),
    "modules of their own": (TwoLevels(), {}, 6),
    "a weight with two uses": (Tied(), {}, 6),
}


@pytest.mark.parametrize("case", APART)
def test_linears_that_are_not_fused(case: str) -> None:
    torch._dynamo.reset()
    model, settings, count = APART[case]
    assert multiplied(model, x(16, 32), **settings) == count


def test_a_bias_of_some() -> None:
    model = Projections()
    model.q.bias = nn.Parameter(torch.randn(64))
    assert multiplied(model, x(16, 32)) == 3 + 3


def test_frozen_linears_have_a_group_of_their_own() -> None:
    model = Projections()
    model.v.requires_grad_(False)
    assert multiplied(model, x(16, 32)) == 3 + 2


def test_an_input_without_gradient_has_no_sum() -> None:
    assert multiplied(MLP(), torch.randn(16, 32)) == 2 + 3


def test_gradients_that_are_viewed_before_they_are_added() -> None:
    torch.manual_seed(0)
    model, inputs = Routes(), x(16, 32)
    backend = eager_backend()
    got = compiled_step(model, inputs, backend)
    assert dialect_counts(backend.report.graphs[0].after)["scaled_mm"] == 6  # one by one
    assert all(sqnr_db(e, g) > 20 for e, g in zip(step(model, inputs, parameters=model.parameters()), got, strict=True))


def test_results_that_leave_the_graph_are_not_slices() -> None:
    """The caller may view them as he likes; and a slice would keep the others alive."""
    model = Projections(mix=lambda q, k, v: (q, k.tanh(), v))
    backend = eager_backend()
    q, _, v = torch.compile(model, backend=backend)(x(16, 32))
    assert q.is_contiguous()
    assert v.untyped_storage().nbytes() == v.nbytes
    after = backend.report.graphs[0].after
    assert len(gemms(after)) == 3 + 1 + 1  # fprop alone is one by one
    assert "aten.slice.Tensor(weight_rowwise, 0, 64, 96)" in after
    assert backend.report.graphs[0].gemms[0].reason == "default"


class Halved(nn.Linear):
    """Its weight is computed where it runs."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight / 2)


def test_no_weight_is_quantized_twice_where_results_are_not_slices() -> None:
    """Nothing is one GEMM then, but the weights are one tensor: what quantized them one by one goes."""
    model = Projections(mix=lambda q, k, v: (q, k, v))
    model.v = Halved(32, 32, bias=False)
    backend = eager_backend(cache_weights="update")
    with torch.no_grad():
        torch.compile(model, backend=backend)(torch.randn(16, 32))
    after = backend.report.graphs[0].stages["fuse_linears"]
    assert len(gemms(after)) == 3
    assert [text.count("more=") for text in lines(after, "fp8graph.quantize(")] == [0, 1]  # x; q, k and v
    assert backend.weights.bytes == 128 * 32 + 4


def test_parts_of_a_joined_weight_have_its_global_scale() -> None:
    """They were encoded with it: that of one part would decode them to other numbers."""
    model = Projections(sizes=(64, 64, 64), mix=lambda q, k, v: (q, k, v)).bfloat16()
    policy = Policy(default="nvfp4", min_speedup=0)
    with torch.no_grad():
        found = view_of(model, torch.randn(32, 32, dtype=torch.bfloat16), policy=policy, target="sm_100")
    after = found.stages["fuse_linears"]
    assert len(gemms(after)) == 3
    assert after.count("global_scale_inv_b=weight_rowwise_global_scale_inv)") == 3
    assert len(lines(after, "fp8graph.quantize(")) == 2  # x; q, k and v


def test_a_result_that_backward_keeps_does_not_keep_its_neighbours() -> None:
    kept = Projections(mix=lambda q, k, v: torch.cat([q * 2, k * 3, v.square()], -1))
    assert multiplied(kept, x(16, 32)) == 3 + 1 + 1
    all_kept = Projections(mix=lambda q, k, v: torch.cat([q.square(), k.square(), v.square()], -1))
    assert multiplied(all_kept, x(16, 32)) == 3


def test_rows_and_columns_that_a_view_merges() -> None:
    torch.manual_seed(0)
    model = Projections(
        sizes=(32, 32, 32), mix=lambda q, k, v: q.view(-1).tanh() + k.reshape(-1).cos() + v.view(-1).sin()
    )
    inputs = x(16, 32)
    got = compiled_step(model, inputs, eager_backend())
    assert all(sqnr_db(e, g) > 18 for e, g in zip(step(model, inputs, parameters=model.parameters()), got, strict=True))


@first_fast(
    ("recipe", "target", "uneven"), [("blockwise", "sm_90", 192), ("mxfp8", "sm_100", 48), ("nvfp4", "sm_100", 40)]
)
def test_tiles_are_not_cut(recipe: str, target: str, uneven: int) -> None:
    """A group of results that are multiples of tiles; one by one where a tile would span two linears."""
    counts: dict[int, int] = {}
    for size in (256, uneven):
        torch._dynamo.reset()
        model = Projections(sizes=(size,) * 3).to(torch.bfloat16)
        inputs = torch.randn(256, 32, dtype=torch.bfloat16, requires_grad=True)
        report = fp8graph.explain(model, inputs, policy=Policy(default=recipe, min_speedup=0), target=target)
        counts[size] = len(gemms(report.graphs[0].after))
    assert counts == {256: 3, uneven: 9}


def test_parts_of_a_tensor_subclass_are_multiplied_apart() -> None:
    """Gradients of fused linears are slices of one tensor: TwoTensor refuses parts of different offsets."""
    weight = nn.Parameter(TwoTensor(torch.randn(16, 32), torch.randn(16, 32)))
    backend = eager_backend()
    torch.compile(lambda x: nn.functional.linear(x, weight), backend=backend)(torch.randn(8, 32)).sum().backward()
    assert weight.grad is not None
    (graph,) = backend.report.graphs
    assert {(row.what, "a tensor subclass holds its weight" in row.reason) for row in graph.refusals} == {
        ("one GEMM", True)
    }


def test_weight_gradients_of_fused_linears_are_slices_of_one_tensor() -> None:
    model = Projections()
    torch.compile(model, backend=eager_backend())(torch.randn(8, 32)).sum().backward()
    assert len({p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}) == 1
