"""Report, explain, check and strict mode: the proof of what ran in FP8."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from helpers import ALL, MLP, dialect_counts, eager_backend, graph_text, same_bits, step
from tiny_models import llama_config


def test_every_gemm_has_a_row_with_shape_recipe_dtypes_and_reason() -> None:
    policy = fp8graph.Policy([fp8graph.Rule("down", "tensorwise", wgrad=None)])
    report = fp8graph.explain(MLP(), torch.randn(8, 32), policy=policy)
    rows = {(g.fqn, g.gemm): g for g in report.gemms}
    assert list(rows) == [
        ("gate", "fprop"), ("gate", "wgrad"),
        ("up", "fprop"), ("up", "wgrad"),
        ("down", "fprop"), ("down", "dgrad"), ("down", "wgrad"),
    ]  # fmt: skip
    fprop, dgrad, wgrad = (rows["down", gemm] for gemm in ("fprop", "dgrad", "wgrad"))
    assert (fprop.m, fprop.n, fprop.k) == (8, 32, 64)
    assert (dgrad.m, dgrad.n, dgrad.k) == (8, 64, 32)
    assert (wgrad.m, wgrad.n, wgrad.k) == (32, 64, 8)
    assert fprop.dtypes == ("e4m3", "e4m3", "fp32")
    assert dgrad.dtypes == ("e5m2", "e4m3", "fp32")
    assert wgrad.dtypes == ("fp32", "fp32", "fp32")
    assert (fprop.recipe, fprop.execution, fprop.reason) == ("tensorwise", "native", 'rule "down" -> tensorwise')
    assert (wgrad.recipe, wgrad.execution) == (None, "high precision")
    assert wgrad.reason == 'rule "down" -> high precision'
    assert rows["up", "wgrad"].reason == "default; k 8 padded to 16; one GEMM with gate"
    assert "6 of 7 GEMMs in FP8, 85 % of the FLOPs of all products, in 1 graph" in str(report)


def test_reports_survive_json_and_become_html(tmp_path: Path) -> None:
    from fp8graph.report import GraphView

    report = fp8graph.explain(MLP(), torch.randn(8, 32), policy=ALL)
    data = json.loads(json.dumps(report.to_dict()))
    assert GraphView.from_dict(data["graphs"][0]) == report.graphs[0]
    report.to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert '"site":"down"' in page
    assert report.summary() in page


def test_a_report_can_be_pickled() -> None:
    """A process that trains sends it to one that watches. Its text survives, the modules do not."""
    report = fp8graph.explain(MLP(), torch.randn(16, 32))
    loaded = pickle.loads(pickle.dumps(report))
    assert str(loaded) == str(report)
    assert loaded.to_dict() == report.to_dict()
    with pytest.raises(ValueError, match="has text but no module"):
        _ = loaded.graphs[0].module


def test_stages_are_the_text_after_each_pass() -> None:
    view = fp8graph.explain(MLP(), torch.randn(8, 32), policy=ALL, cache_weights="update").graphs[0]
    assert list(view.stages) == [
        "match",
        "assign",
        "quantize",
        "share",
        "fuse_linears",
        "hoist_weights",
        "note_weights",
        "save_for_backward",
    ]
    assert view.before == view.stages["assign"]
    assert view.after == view.stages["note_weights"]
    assert view.before.count("aten.mm(") == 7
    assert "aten.mm(" not in view.after
    assert view.stages["quantize"].count("fp8graph.quantize(") == 14
    assert view.after.count("fp8graph.quantize(") == 4  # x, h, 2 gradients (gate and up are one); the weights outside
    assert view.after.count("fp8graph.scaled_mm(") == 5


def test_the_module_of_a_view_runs_eagerly() -> None:
    model, x = MLP(), torch.randn(8, 32, requires_grad=True)
    backend = eager_backend()
    got = step(torch.compile(model, backend=backend), x, parameters=model.parameters())
    module = backend.report.graphs[0].module
    assert dialect_counts(graph_text(module.graph)) == {"quantize": 6, "scaled_mm": 6, "casts": 12}
    dy = torch.linspace(-1.0, 1.0, x.numel()).reshape(x.shape)
    inputs = {"x": x, "gate": model.gate.weight, "up": model.up.weight, "down": model.down.weight}
    by_source = {f"'{name}'": tensor for name, tensor in inputs.items()}
    *order, tangent = backend.report.graphs[0].inputs
    assert tangent == "tangents_1"
    values = [next(t for name, t in by_source.items() if name in source) for source in order]
    y, *gradients = module(*values, dy)
    assert same_bits([y], got[:1])
    assert len(gradients) == 4


@pytest.mark.slow
def test_explain_needs_neither_weights_nor_the_target() -> None:
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config()).bfloat16()
    tokens = torch.zeros(2, 16, dtype=torch.long)
    legal = fp8graph.models.general_policy("tensorwise")
    legal = fp8graph.Policy(legal.rules, default="tensorwise", min_speedup=0)
    native = fp8graph.explain(model, input_ids=tokens, labels=tokens, target="sm_90", policy=legal)
    assert native.summary() == "42 of 45 GEMMs in FP8, 79 % of the FLOPs of all products, in 1 graph"
    emulated = fp8graph.explain(model, input_ids=tokens, target="sm_80", training=False)
    assert emulated.summary() == "14 of 15 GEMMs in FP8, 80 % of the FLOPs of all products, in 1 graph (14 emulated)"
    assert "emulated: sm_80 is a GPU without any FP8 GEMM" in emulated.gemms[0].reason
    note = "sm_80 is a GPU without any FP8 GEMM: FP8 is emulated there, for its numerics; bf16 is faster"
    assert str(emulated).splitlines().count(note) == 1
    radeon = fp8graph.explain(nn.Linear(64, 64), torch.zeros(16, 64), target="gfx1100")
    assert "gfx1100 is a GPU without any FP8 GEMM: FP8 is emulated there" in str(radeon)
    assert next(model.parameters()).device.type == "meta"


def test_explain_leaves_the_model_alone() -> None:
    model = MLP()
    before = {name: parameter for name, parameter in model.named_parameters()}
    fp8graph.explain(model, torch.randn(8, 32), policy=ALL)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    model.compile(backend=eager_backend())
    out = model(torch.ones(8, 32))
    assert len(fp8graph.explain(model, torch.randn(8, 32)).gemms) == 7
    assert same_bits([out], [model(torch.ones(8, 32))])


@pytest.mark.slow
def test_in_a_notebook() -> None:
    """The last expression of a cell is shown by its repr."""
    report = fp8graph.explain(MLP(), torch.randn(8, 32))
    assert repr(report) == "<Report: 7 of 7 GEMMs in FP8, 100 % of the FLOPs of all products, in 1 graph>"
    of_graph = "7 of 7 GEMMs in FP8, 100 % of the FLOPs of all products"
    assert repr(report.graphs) == f"[<GraphView 'Linear training': {of_graph}>]"


def test_flops_of_dynamic_sizes_are_those_that_were_traced() -> None:
    torch._dynamo.reset()
    backend = eager_backend(fp8graph.Policy([fp8graph.Rule("0", None)]))
    model = nn.Sequential(nn.Linear(32, 96, bias=False), nn.Linear(96, 32, bias=False))
    torch.compile(model, backend=backend, dynamic=True)(torch.randn(16, 32))
    report = backend.report
    assert any(isinstance(size, str) for g in report.gemms for size in (g.m, g.n, g.k))
    assert {g.flops for g in report.gemms} == {2 * 16 * 32 * 96}
    assert report.summary() == "3 of 5 GEMMs in FP8, 60 % of the FLOPs of all products, in 1 graph"


def test_flops_of_batches_and_of_groups() -> None:
    class Product(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a @ b

    class Experts(nn.Module):
        def forward(self, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
            return torch._grouped_mm(x, w, offs=ends)

    bmm = fp8graph.explain(Product(), torch.randn(2, 8, 16), torch.randn(2, 16, 4))
    assert [g.flops for g in bmm.gemms] == [2 * 2 * 8 * 16 * 4]
    assert bmm.summary() == "0 of 1 GEMMs in FP8, 0 % of the FLOPs of all products, in 1 graph"
    rows, experts = torch.randn(16, 32).bfloat16(), torch.randn(4, 32, 48).bfloat16()
    ends = torch.tensor([4, 8, 8, 16], dtype=torch.int32)
    grouped = fp8graph.explain(Experts(), rows.requires_grad_(), experts.requires_grad_(), ends, training=True)
    assert [(g.gemm, g.flops) for g in grouped.gemms] == [(g, 2 * 16 * 32 * 48) for g in ("fprop", "dgrad", "wgrad")]


def test_the_module_takes_its_inputs_by_name() -> None:
    """FP8 copies of weights among them, and none that nothing reads."""
    model, x = MLP(), torch.randn(16, 32, requires_grad=True)
    view = fp8graph.explain(model, x, cache_weights="update").graphs[0]
    names = [node.name for node in view.module.graph.find_nodes(op="placeholder")]
    assert names == [
        "gate_weight", "x", "up_weight", "down_weight",
        *(f"gate_weight_up_weight_{output}" for output in ("rowwise", "scale_inv", "columnwise")),
        *(f"down_weight_{output}" for output in ("rowwise", "scale_inv", "columnwise")),
        "tangents_1",
    ]  # fmt: skip
    assert view.inputs[4] == "gate.weight, up.weight rowwise"
    assert len(view.inputs) == len(names)
    torch._dynamo.reset()
    backend = eager_backend(cache_weights=False)
    got = step(torch.compile(model, backend=backend), x, parameters=model.parameters())
    inputs = {f"{name}_weight": getattr(model, name).weight for name in ("gate", "up", "down")}
    dy = torch.linspace(-1.0, 1.0, x.numel()).reshape(x.shape)
    results = backend.report.graphs[0].module(x=x, **inputs, tangents_1=dy)
    assert same_bits([results[0]], got[:1])


def test_a_users_rule_that_matched_nothing_is_reported() -> None:
    policy = fp8graph.Policy([fp8graph.Rule("dwon", None), fp8graph.Rule("router", None, optional=True)])
    report = fp8graph.explain(MLP(), torch.randn(8, 32), policy=policy)
    assert report.unused_rules == ['rule "dwon" -> high precision']
    assert 'rule "dwon" -> high precision matched nothing' in str(report)
    with pytest.raises(
        fp8graph.Fp8CoverageError, match=r"rule \"dwon\" -> high precision matched nothing\. Sites: down, gate, up"
    ):
        report.check()


def test_check_passes_when_the_rules_got_what_they_asked() -> None:
    policy = fp8graph.Policy([fp8graph.Rule("*", "tensorwise", wgrad=None)])
    fp8graph.explain(MLP(), torch.randn(8, 32), policy=policy).check()


def test_check_names_the_gemm_that_a_rule_asked_for() -> None:
    policy = fp8graph.Policy([fp8graph.Rule("*", "tensorwise")])
    report = fp8graph.explain(MLP().double(), torch.randn(8, 32, dtype=torch.float64), policy=policy)
    with pytest.raises(fp8graph.Fp8CoverageError, match="gate fprop: not in FP8: FP8 cannot multiply float64"):
        report.check()
    fp8graph.explain(MLP().double(), torch.randn(8, 32, dtype=torch.float64), policy=ALL).check()


def test_strict_mode_raises_while_compiling() -> None:
    policy = fp8graph.Policy([fp8graph.Rule("*", "tensorwise")])
    model = torch.compile(MLP().double(), backend=eager_backend(policy, strict=True))
    with pytest.raises(fp8graph.Fp8CoverageError, match="9 GEMMs that a rule asks for cannot run in FP8"):
        model(torch.randn(8, 32, dtype=torch.float64, requires_grad=True))


def test_strict_mode_raises_for_an_unused_rule_at_the_second_call() -> None:
    backend = eager_backend(fp8graph.Policy([fp8graph.Rule("dwon", None)]), strict=True)
    model = torch.compile(MLP(), backend=backend)
    model(torch.randn(8, 32))
    with pytest.raises(fp8graph.Fp8CoverageError, match="matched nothing"):
        model(torch.randn(8, 32))


def test_before_the_first_call_it_says_why_it_is_empty() -> None:
    report = fp8graph.Backend(compiler="eager").report
    assert report.summary() == "no graph: the model has not been called yet, or Dynamo compiled nothing of it"
    assert str(report).startswith(report.summary())
    assert report.notes() == []


def test_summary_counts_graphs_of_the_current_policy() -> None:
    """After a warm-up in high precision, a schedule's or the user's: what ran before is listed, and not counted."""
    model, x = MLP(), torch.randn(8, 32)
    backend = eager_backend(fp8graph.Policy([fp8graph.Rule("down", "rowwise")], default=None))
    compiled = torch.compile(model, backend=backend)
    compiled(x).sum().backward()
    assert backend.report.summary() == "3 of 7 GEMMs in FP8, 42 % of the FLOPs of all products, in 1 graph"
    backend.set_policy(ALL)
    report = backend.report
    waiting = "no graph: the model has not been called under this policy yet, or Dynamo compiled nothing of it"
    assert report.summary() == f"{waiting}; 1 graph of an earlier policy, not counted"
    assert report.notes() == []
    report.check()
    compiled(x).sum().backward()
    report = backend.report
    expected = (
        "7 of 7 GEMMs in FP8, 100 % of the FLOPs of all products, in 1 graph; 1 graph of an earlier policy, not counted"
    )
    assert report.summary() == str(report).splitlines()[0] == expected
    assert {gemm.recipe for gemm in report.gemms} == {"tensorwise"}
    assert "rowwise" not in str(report)
    assert [graph in report.in_force for graph in report.graphs] == [False, True]
    assert report.to_dict()["in_force"] == [1]


def test_the_summary_says_what_runs_in_eager() -> None:
    report = fp8graph.explain(MLP(), torch.randn(8, 32))
    eager = dataclasses.replace(report, eager_frames=["frame 0: new shapes run in eager", "frame 1: so do these"])
    assert eager.summary() == f"{report.summary()}; not compiled: frame 0: new shapes run in eager, and 1 more"
