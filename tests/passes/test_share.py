"""share: one amax per tensor, one cast per tensor and layout; different recipes stay apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import Float8CurrentScaling, Policy, Rule
from fp8graph.passes.share import Group
from helpers import ALL, MLP, Weight, brief, dialect_counts, facts_of, first_fast, same_bits, step, view_of

E4M3 = Float8CurrentScaling(fp8_format=fp8graph.Format.E4M3)
POWER_2 = Float8CurrentScaling(power_2_scale=True)


def x(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def counts(module: nn.Module, *args: Tensor, policy: Policy = ALL) -> tuple[int, int]:
    """(quantize nodes, casts) after sharing, without the grouping that follows."""
    found = dialect_counts(view_of(module, *args, policy=policy, fuse_linears=False).after)
    return found["quantize"], found["casts"]


def test_three_quantize_nodes_of_one_tensor_become_one() -> None:
    view = view_of(nn.Linear(32, 48, bias=False), x(16, 32))
    before, after = (
        [line.split(" = ")[1] for line in brief(text).splitlines() if "fp8graph.quantize(" in line]
        for text in (view.stages["quantize"], view.stages["share"])
    )
    assert len(before) == 6
    assert after == [
        "fp8graph.quantize(primals_2, dtype=e4m3, rowwise=[1, 16], columnwise=[16, 16])",
        "fp8graph.quantize(primals_1, dtype=e4m3, rowwise=[16, 16], columnwise=[16, 16])",
        "fp8graph.quantize(tangents_1, dtype=e5m2, rowwise=[1, 16], columnwise=[1, 16])",
    ]


def test_the_merged_node_gives_each_user_its_own_output() -> None:
    lines = view_of(nn.Linear(32, 48, bias=False), x(16, 32)).after.splitlines()
    gemms = [line.split(", bias=")[0].split(" = ")[1] for line in lines if "fp8graph.scaled_mm(" in line]
    assert gemms == [
        "fp8graph.scaled_mm(input_rowwise, weight_rowwise, input_scale_inv, weight_scale_inv",
        "fp8graph.scaled_mm(grad_output_columnwise, input_columnwise_1, grad_output_scale_inv, input_scale_inv",
        "fp8graph.scaled_mm(grad_output_rowwise_1, weight_columnwise_1, grad_output_scale_inv, weight_scale_inv",
    ]
    for name, position in (("input_rowwise", 0), ("input_columnwise_1", 1), ("input_scale_inv", 2)):
        (line,) = (line for line in lines if line.startswith(f"{name}: "))
        assert line.endswith(f" = quantize_input[{position}]")


class Branches(nn.Module):
    """Two linears on one input, which reaches them by two routes."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.routes = first, second

    def forward(self, h: Tensor) -> Tensor:
        h = h.sin()
        first, second = self.routes
        return (3 * self.a(first(h)) + self.b(second(h)).reshape(h.shape[0], -1, 32).reshape(-1, 32)).sum(0)


SAME = [
    pytest.param(lambda h: h, lambda h: h, id="itself"),
    pytest.param(lambda h: h, lambda h: h.view(4, 4, 32), id="view"),
    pytest.param(lambda h: h, lambda h: h.reshape(2, 8, 32).reshape(4, 4, 32), id="reshapes"),
    pytest.param(lambda h: h.double().float(), lambda h: h.double().float(), id="the same casts"),
]
DIFFERENT = [
    pytest.param(lambda h: h, lambda h: h + 1, id="another value"),
    pytest.param(lambda h: h, lambda h: h.double().float(), id="a cast"),
    pytest.param(lambda h: h, lambda h: h.view(32, 16).t().reshape(16, 32), id="another order"),
]


@first_fast(("first", "second"), SAME)
def test_one_tensor_is_quantized_once(first: Any, second: Any) -> None:
    assert counts(Branches(first, second), x(16, 32)) == (1 + 2 + 2, 2 * 5)


def test_operands_of_einsum_are_quantized_once() -> None:
    """An einsum arrives as a bmm of one matrix, squeezed for each of its GEMMs."""
    assert counts(Weight(lambda w, a: torch.einsum("bsk,nk->bsn", a, w), 48, 32), x(2, 8, 32)) == (3, 6)


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_two_tensors_are_quantized_twice(first: Any, second: Any) -> None:
    assert counts(Branches(first, second), x(16, 32))[0] == 2 + 2 + 2


@pytest.mark.parametrize(("recipe", "inputs"), [(POWER_2, 2), (E4M3, 1)])
def test_recipes_that_quantize_a_tensor_differently_stay_apart(recipe: Any, inputs: int) -> None:
    policy = Policy([Rule("b", recipe)])
    assert counts(Branches(lambda h: h, lambda h: h), x(16, 32), policy=policy)[0] == inputs + 2 + 2


def test_layouts_that_nobody_needs_are_not_made() -> None:
    no_gradient_gemms = Policy([Rule("*", "tensorwise", dgrad=None, wgrad=None)])
    assert counts(MLP(), x(16, 32), policy=no_gradient_gemms) == (5, 5)
    only_wgrad = Policy([Rule("*", None, wgrad="tensorwise")])
    assert counts(MLP(), x(16, 32), policy=only_wgrad) == (5, 5)


def test_sharing_changes_no_bit() -> None:
    from torch._inductor.compile_fx import compile_fx

    from fp8graph.backend.inductor_passes import run_eagerly  # pyright: ignore
    from fp8graph.ir.compilation import Compilation
    from fp8graph.passes import JOINT_PIPELINE, share

    def backend(pipeline: Any) -> Any:
        def run(graph: Any) -> None:
            # Without a map of parameters every matmul is a "matmul" site: the rule asks for all.
            compilation = Compilation(facts=facts_of(Policy([Rule("*", "tensorwise", op="*")])))
            for each in pipeline:
                if each.needed(graph, compilation):
                    each.run(graph, compilation)

        def compiler(module: Any, inputs: Any) -> Any:
            inner: Any = run_eagerly
            patches: dict[str, Any] = {"joint_custom_pre_pass": run, "force_disable_caches": True}
            return compile_fx(module, inputs, inner_compile=inner, config_patches=patches)

        return compiler

    model, h = MLP(), x(16, 32)
    unfused = [each for each in JOINT_PIPELINE if each.name != "fuse_linears"]  # fused linears share a scale
    shared = step(torch.compile(model, backend=backend(unfused)), h, parameters=model.parameters())
    torch._dynamo.reset()
    unshared = [each for each in unfused if each.run is not share]
    apart = step(torch.compile(model, backend=backend(unshared)), h, parameters=model.parameters())
    assert same_bits(shared, apart)


def test_tensors_of_two_recipes_with_state_have_a_state_each() -> None:
    short, long = (fp8graph.DelayedScaling(amax_history_len=length) for length in (4, 16))
    linear = nn.Linear(32, 48, bias=False)
    assert counts(linear, x(16, 32), policy=Policy([Rule("*", short)])) == (3, 6)
    assert counts(linear, x(16, 32), policy=Policy([Rule("*", short, wgrad=long)])) == (5, 6)


def test_one_layout_has_one_padding() -> None:
    group = Group(layouts=[[1, 16], []])
    assert group.takes([[1, 16], []])
    assert group.takes([[], [16, 16]])
    assert not group.takes([[16, 16], []])
    assert not group.takes([[16, 16], [16, 16]])
