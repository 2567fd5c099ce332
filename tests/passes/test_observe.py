"""observe: before and after, and what it leaves out."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8graph import Backend, Policy, Rule
from fp8graph.report import GraphView
from helpers import ALL, MLP, mixtral


def observed_view(
    module: nn.Module, *args: Any, policy: Any = ALL, what_if: Any = (), settings: Any = None, **asked: Any
) -> GraphView:
    """The variant of the only graph that measures."""
    torch._dynamo.reset()
    arguments: dict[str, Any] = settings or {}
    backend = Backend(policy, compiler="eager", **arguments)
    backend.observe(every=1, what_if=what_if, **asked)
    compiled = torch.compile(module, backend=backend)
    compiled(*args)
    (program,) = backend.programs
    (variant,) = [variant for (situation, _), variant in program._variants.items() if situation.conditions]
    return variant.view


def measuring(view: GraphView, stage: str = "observe") -> list[str]:
    lines = view.stages[stage].splitlines()
    return [line for line in lines if re.search(r"_statistics\(|copy_|^statistics", line)]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


X = torch.zeros(16, 32, dtype=torch.bfloat16)


def test_each_operand_and_result_is_measured_once() -> None:
    view = observed_view(Layer(), X)
    assert measuring(view, "fuse_linears") == []
    text = "\n".join(measuring(view))
    assert len(re.findall(r"fp8graph\.tensor_statistics", text)) == 5  # x, w, y, dy, dw; x has no gradient
    assert (
        len(re.findall(r"fp8graph\.quantization_statistics", text)) == 4
    )  # x: both layouts; w: rowwise; dy: columnwise
    assert [line for line in measuring(view) if "copy_" in line] == [
        "copy__default: f32[75] = aten.copy_(primals_3, statistics)",
        "copy__default_1: f32[36] = aten.copy_(primals_4, statistics_1)",
    ]
    assert view.inputs[-3:] == ("statistics of forward", "statistics of backward", "tangents_1")


def test_observation_does_not_change_saved_tensors() -> None:
    """Forward makes the columnwise copies, to measure them, and backward makes them again, from what is kept in FP8."""
    settings: dict[str, Any] = {"save": "memory", "save_activations_in_fp8": True}
    torch._dynamo.reset()
    backend = Backend(ALL, compiler="eager", **settings)
    torch.compile(MLP(), backend=backend)(torch.zeros(16, 32))
    (plain,), view = backend.report.graphs, observed_view(MLP(), torch.zeros(16, 32), settings=settings)
    kept = [re.findall(r"^kept\w*: .*", of.after, re.MULTILINE) for of in (plain, view)]
    assert kept[0] == kept[1] != []
    layouts = re.compile(r"quantize_input\w*: .*rowwise=(\[.*?\]), columnwise=(\[.*?\])")
    made = [sorted(layouts.findall(of.after)) for of in (plain, view)]
    again, rows, both = ("[]", "[16, 16]"), ("[1, 16]", "[]"), ("[1, 16]", "[16, 16]")
    assert made == [[rows, rows, again, again], [both, both, again, again]]
    assert [r for r in view.refusals if r.what == "FP8 activation"] == []
    types = {re.findall(rf"^{name}: (\S+\[.*?\])", view.after, re.MULTILINE)[0] for name in view.saved}
    assert "e4m3[16, 128]" in types  # gate and up; in high precision, nothing of SwiGLU
    assert not types & {"f32[16, 128]", "f32[16, 64]"}


def test_other_recipes() -> None:
    text = "\n".join(measuring(observed_view(Layer(), X, what_if=["tensorwise", "mxfp8"])))
    assert len(re.findall(r"fp8graph\.what_if_statistics", text)) == 4  # tensorwise is what the GEMMs read
    assert text.count("scaling=mxfp8") == 4


def test_tensors_alone() -> None:
    text = "\n".join(measuring(observed_view(Layer(), X, stats=["max", "cur_amax"])))
    assert "quantization_statistics" not in text
    assert "block_size=32" not in text  # which would read each tensor twice more
    assert len(re.findall(r"fp8graph\.tensor_statistics", text)) == 5


@pytest.mark.slow
def test_the_gemms_and_their_operands_stay() -> None:
    """The part of the graph that measures nothing computes the same as the other variant."""
    module = MLP().bfloat16()
    backend = Backend(ALL, compiler="eager")
    torch.compile(module, backend=backend)(X)
    plain, view = backend.report.graphs[0], observed_view(module, X)

    def gemms(view: GraphView) -> list[str]:
        lines = view.after.splitlines()
        return [re.sub(r"primals_\d+", "input", line) for line in lines if "scaled_mm(" in line]

    assert gemms(view) == gemms(plain)
    assert [row.recipe for row in view.gemms] == [row.recipe for row in plain.gemms]


def test_layers_that_nobody_asked_for() -> None:
    view = observed_view(MLP().bfloat16(), X, layers=["nothing"])
    assert measuring(view) == []
    assert not [name for name in view.inputs if name.startswith("statistics")]


def test_a_layer_that_stays_in_high_precision() -> None:
    text = "\n".join(measuring(observed_view(Layer(), X, policy=Policy([Rule("*", None)]), what_if=["mxfp8"])))
    assert len(re.findall(r"fp8graph\.tensor_statistics", text)) == 5
    assert len(re.findall(r"fp8graph\.what_if_statistics", text)) == 3


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_rows_that_the_data_choose_are_left_out() -> None:
    """Nothing is known of no row, which a mask may choose; what has a size is measured."""
    layer, backend = nn.Linear(32, 16), Backend(ALL, compiler="eager")
    statistics = backend.observe(every=1)
    model = torch.compile(lambda x, mask: layer(x[mask]), backend=backend, fullgraph=True)
    for rows in (5, 0):
        model(torch.randn(16, 32), torch.arange(16) < rows).sum().backward()
        assert {r.operand for r in statistics} == {"weight", "wgrad"}


@pytest.mark.slow
def test_copies_of_experts_are_left_out() -> None:
    """Their tensors and results are measured."""
    model = mixtral(num_hidden_layers=1).bfloat16()
    torch._dynamo.reset()
    backend = Backend(ALL, compiler="eager")
    statistics = backend.observe(every=1)
    model.compile(backend=backend)
    model(torch.arange(16)[None]).logits.sum().backward()
    experts = {r.layout for r in statistics if "experts" in r.site}
    assert experts == {""}
    assert {r.operand for r in statistics if "experts" in r.site} >= {"input", "weight", "grad_output", "wgrad"}
    assert {r.layout for r in statistics if "q_proj" in r.site} == {"", "rowwise", "columnwise"}
