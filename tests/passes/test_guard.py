"""Guards on models that train: one bad layer is found, and no other; its rule is proposed, or applied."""

from __future__ import annotations

import copy
import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import torch as safetensors
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fp8graph
from fp8graph import Backend, Policy, Rule
from fp8graph.errors import ConfigError, StateError
from fp8graph.passes.observe.observation import Observation
from fp8graph.recipes import GEMMS
from guarding import BAD, Block, scales, sharded
from helpers import Counting, in_one_test, same_bits
from ranks import run_ranks

RULES = Policy(default="tensorwise", min_speedup=0)
MIDDLE = Rule("middle", "tensorwise", dgrad=None, wgrad=None, optional=True)


def run(
    backend: Backend,
    steps: int,
    *,
    at: int = 0,
    block: Block | None = None,
    bad: Any = lambda step: True,
    rows: slice = slice(None),
) -> tuple[Block, list[Tensor]]:
    """Train from step ``at``; returns the model and the losses."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = block or Block()
    optimizer, compiled = torch.optim.SGD(block.parameters(), 0.1), torch.compile(block, backend=backend)
    losses: list[Tensor] = []
    for step in range(at, at + steps):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
        loss = compiled(x[rows], (scales() if bad(step) else torch.ones(64, 1))[rows]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return block, losses


def test_the_bad_layer_is_found_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    backend = Backend(RULES, compiler="eager")
    guard = backend.guard(every=1, start=0)
    run(backend, 4)
    (finding,) = guard.findings
    assert (finding.site, finding.operand, finding.layout, finding.stat) == (
        "middle",
        "grad_output",
        "both",
        "underflows%",
    )
    assert finding.value == pytest.approx(75, abs=3)
    assert (finding.step, finding.gemms, finding.rule) == (0, ("dgrad", "wgrad"), MIDDLE)
    logged = [r.getMessage() for r in caplog.records if "guard" in r.getMessage()]
    assert len(logged) == 1
    assert 'Rule("middle", "tensorwise", dgrad=None, wgrad=None, optional=True)' in logged[0]
    assert '[[rules]]\npattern = "middle"\nrecipe = "tensorwise"\ndgrad = "high_precision"' in logged[0]
    assert caplog.records[-1].levelno == logging.WARNING
    assert backend.policy == RULES  # it is proposed, not applied
    assert guard.policy == Policy([MIDDLE], default="tensorwise", min_speedup=0)
    assert backend.report.guard == []
    assert Policy.from_dict(guard.policy.to_dict()) == guard.policy


def test_a_huge_outlier_in_a_weight() -> None:
    """Per tensor, all other numbers of the weight underflow; per row, only those of its row and of its column."""
    block = Block()
    with torch.no_grad():
        block.last.weight[3, 5] = 3e5
    backend = Backend(RULES, compiler="eager")
    guard = backend.guard(every=1, start=0, recipe=["rowwise", None])
    run(backend, 2, block=block)
    weight = [f for f in guard.findings if f.operand == "weight"]
    assert [(f.site, f.stat, f.layout) for f in weight] == [("last", "underflows%", "both")]
    assert weight[0].rule == Rule("last", "tensorwise", fprop="rowwise", dgrad="rowwise", optional=True)


@pytest.mark.slow
def test_healthy_training_is_left_alone() -> None:
    for recipe in ("tensorwise", "rowwise", "delayed", "blockwise", "mxfp8", "nvfp4"):
        backend = Backend(Policy(default=recipe, min_speedup=0), compiler="eager")
        guard = backend.guard(every=1, start=2)  # the first scales of "delayed" are 1
        run(backend, 4, bad=lambda _: False)
        assert guard.findings == []


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_inf_and_nan_are_reported_in_words(value: float) -> None:
    backend = Backend(RULES, compiler="eager")
    guard = backend.guard(every=1, start=0, layers="first", apply=True)
    torch._dynamo.reset()
    block = Block()
    x = torch.randn(64, 64)
    x[0, 0] = value
    compiled, optimizer = torch.compile(block, backend=backend), torch.optim.SGD(block.parameters(), 0.1)
    for _ in range(2):
        compiled(x, scales()).sum().backward()
        optimizer.step()
    assert ("input", 0) in {(f.operand, f.step) for f in guard.findings}
    assert {f.rule for f in guard.findings} == {None}
    assert all("holds inf or NaN before it is quantized" in str(f) for f in guard.findings)
    assert backend.policy == RULES


def test_a_rule_is_applied_once_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    backend = Backend(RULES, compiler="eager")
    guard = backend.guard(every=1, start=1, apply=True)
    run(backend, 5)
    assert len(guard.findings) == 1
    assert backend.policy == guard.policy == Policy([MIDDLE], default="tensorwise", min_speedup=0)
    recipes = {g.gemm: g.recipe for g in backend.report.graphs[-1].gemms if g.fqn == "middle"}
    assert recipes == {"fprop": "tensorwise", "dgrad": None, "wgrad": None}
    (text,) = backend.report.guard
    assert text.startswith("guard: step 1: middle dgrad and wgrad left FP8: 7")
    assert "% of grad_output became zero (tensorwise, both layouts; more than 10 %)" in text
    assert text in str(backend.report)
    assert backend.report.to_dict()["guard"] == [text]
    assert sum("The rule is applied from now on" in r.getMessage() for r in caplog.records) == 1
    backend.set_policy(RULES)  # replaces the whole policy
    assert backend.report.guard == []
    assert "fp8graph.guard" not in backend.state_dict()


@pytest.mark.slow
def test_a_schedule_goes_on() -> None:
    policy = Policy([Rule("*", None, steps=(0, 3))], default="tensorwise", min_speedup=0)
    backend = Backend(policy, compiler="eager")
    guard = backend.guard(every=1, start=0, apply=True)
    run(backend, 6)
    assert [f.step for f in guard.findings] == [3]
    whole = Policy([MIDDLE, *policy.rules], default="tensorwise", min_speedup=0)
    assert guard.policy == whole
    assert backend.policy == whole.at_step(5)


def test_a_guard_takes_a_forward_out_of_four_bits() -> None:
    """From the step on at which the input's copy loses too much; dgrad and wgrad stay, and so does the other layer."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    backend = Counting(Policy(default="nvfp4", min_speedup=0))
    guard = backend.guard(sqnr=16.5, every=1, start=1, apply=True)
    compiled, optimizer = torch.compile(model, backend=backend), torch.optim.SGD(model.parameters(), 1e-3)
    halfway = torch.tensor([6.0, *[2.5] * 15]).repeat(64, 4)  # 2.5 lies between 2 and 3
    generated: list[int] = []
    for step in range(7):
        x = torch.randn(64, 64) if step < 3 else halfway * torch.randn(64, 64).sign()
        compiled(x.requires_grad_()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        generated.append(len(backend.generated))
    (finding,) = guard.findings
    assert (finding.step, finding.site, finding.gemms) == (3, "0", ("fprop",))
    assert backend.policy.rules == (Rule("0", "nvfp4", fprop=None, optional=True),)
    recipes = {(g.fqn, g.gemm): g.recipe for g in backend.report.graphs[-1].gemms}
    assert recipes == {(n, g): None if (n, g) == ("0", "fprop") else "nvfp4" for n in "01" for g in GEMMS}
    assert generated[-1] - generated[3] == 2  # forward and backward, once


def test_unobserved_steps_run_what_they_ran() -> None:
    plain, watched = Backend(RULES, compiler="eager"), Backend(RULES, compiler="eager")
    watched.guard(every=2, start=1)
    watched.observe(every=3, stats="max", layers="first")
    runs = [run(backend, 6) for backend in (plain, watched)]
    assert same_bits(*(losses for _, losses in runs))
    assert same_bits(*([p.detach() for p in block.parameters()] for block, _ in runs))
    graphs = [[(v.before, v.stages, v.after) for v in backend.report.graphs] for backend in (plain, watched)]
    assert graphs[0] == graphs[1]
    (program,) = watched.programs
    assert len({situation.conditions for situation, _ in program._variants}) == 2  # one variant measures for both


def test_a_guard_and_statistics_have_steps_and_layers_of_their_own() -> None:
    backend = Backend(RULES, compiler="eager")
    statistics = backend.observe(every=3, stats=["max", "sqnr"], layers="first")
    guard = backend.guard(every=2, start=1, layers=["middle", "last"])
    run(backend, 6)
    assert {(r.step, r.site) for r in statistics} == {(0, "first"), (3, "first")}
    assert {r.stat for r in statistics} == {"max", "sqnr"}
    assert [(f.step, f.site) for f in guard.findings] == [(1, "middle")]
    assert {*backend.store(Observation)._by_step} == {0, 3, 5}  # 1 was judged; nobody wants it any more
    guard.stop()
    statistics.stop()
    assert backend.store(Observation).condition(gradients=True) is None


def test_micro_batches_are_judged_together() -> None:
    """One of four micro-batches underflows; all together do not."""
    backend = Backend(RULES, compiler="eager")
    guard = backend.guard(every=1, start=0, underflows=30, sqnr=None)
    torch.manual_seed(0)
    torch._dynamo.reset()
    block = Block()
    optimizer, compiled = torch.optim.SGD(block.parameters(), 0.1), torch.compile(block, backend=backend)
    for step in range(2):
        for batch in range(4):
            scale = scales() if batch == 0 else torch.ones(64, 1)
            compiled(torch.randn(64, 64), scale).square().mean().backward()
        optimizer.step()
        assert len(guard.findings) == 0, step


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torch.save", "safetensors"])
def test_a_resumed_run_has_the_same_policy(how: str, tmp_path: Path) -> None:
    backend = Backend(RULES, compiler="eager")
    backend.guard(every=2, start=1, apply=True)
    block, _ = run(backend, 4)
    state = backend.state_dict()
    saved = copy.deepcopy(block.state_dict())
    _, losses = run(backend, 3, at=4, block=block)
    if how == "torch.save":
        file = io.BytesIO()
        torch.save(state, file)
        state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    else:
        safetensors.save_file(dict(state), tmp_path / "state.safetensors")
        state = safetensors.load_file(tmp_path / "state.safetensors")
    resumed = Backend(RULES, compiler="eager")
    guard = resumed.guard(every=2, start=1, apply=True)
    resumed.load_state_dict(state)
    other = Block()
    other.load_state_dict(saved)
    _, again = run(resumed, 3, at=4, block=other)
    assert same_bits(again, losses)
    assert resumed.policy == backend.policy
    assert guard.findings == []
    assert resumed.report.guard == backend.report.guard
    resumed.load_state_dict(resumed.state_dict())
    assert resumed.policy == backend.policy  # not applied twice
    copied = copy.deepcopy(dict(state)) | {"fp8graph.guard": torch.tensor([1, 2], dtype=torch.uint8)}
    with pytest.raises(StateError, match="'fp8graph.guard' is not a list of rules"):
        resumed.load_state_dict(copied)


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_checkpoint_of_dcp_has_the_rules(compiled_before: bool, tmp_path: Path) -> None:
    """DCP takes the backend itself, whose first steps with the rule are those of the run that was saved."""
    backend = Backend(RULES, compiler="eager")
    backend.guard(every=2, start=1, apply=True)
    block, _ = run(backend, 4)
    dcp.save({"model": block.state_dict(), "fp8graph": backend}, checkpoint_id=tmp_path)
    other, resumed = Block(), Backend(RULES, compiler="eager")
    guard = resumed.guard(every=2, start=1, apply=True)
    if compiled_before:  # calls of both kinds of steps, whose graphs have the policy without the rule
        run(resumed, 2, block=other, bad=lambda _: False)
    parts: dict[str, Any] = {"model": other.state_dict(), "fp8graph": resumed}
    dcp.load(parts, checkpoint_id=tmp_path)
    assert resumed.policy == backend.policy == Policy([MIDDLE], default="tensorwise", min_speedup=0)
    assert resumed.report.guard == backend.report.guard
    assert resumed.state_dict().keys() == backend.state_dict().keys()
    assert same_bits(resumed.state_dict().values(), backend.state_dict().values())
    other.load_state_dict(parts["model"])
    expected, got = (run(each, 3, at=4, block=of)[1] for each, of in ((backend, block), (resumed, other)))
    assert same_bits(got, expected)
    assert {g.recipe for g in resumed.report.graphs[-1].gemms if g.fqn == "middle"} == {"tensorwise", None}
    assert guard.findings == []


@pytest.mark.release
@pytest.mark.timeout(900)
def test_generated_code_is_guarded_as_the_graph_is() -> None:
    """The same finding and rule at the same step; then from the compile cache, where no pass runs."""
    found: list[tuple[Any, Any, list[str], list[Tensor]]] = []
    hits: list[int] = []
    for compiler in ("eager", "inductor", "inductor"):
        counters.clear()
        backend = Backend(Policy(default="delayed", min_speedup=0), compiler=compiler)
        guard = backend.guard(every=2, start=1, end=2, apply=True)
        _, losses = run(backend, 4)
        (finding,) = guard.findings
        found.append((finding, backend.policy, backend.report.guard, losses))
        hits.append(counters["inductor"]["fxgraph_cache_hit"])
        assert {g.recipe for g in backend.report.graphs[-1].gemms if g.fqn == "middle"} == {"delayed", None}
    assert hits[0] == 0
    assert hits[2] >= 6  # forward and backward of three variants: plain, observed, with the rule
    (expected, policy, report, losses), *others = found
    assert (expected.site, expected.operand, expected.gemms) == ("middle", "grad_output", ("dgrad", "wgrad"))
    for finding, of_generated, told, got in others:
        assert (finding.step, finding.stat, finding.layout, finding.rule) == (
            expected.step, expected.stat, expected.layout, expected.rule
        )  # fmt: skip
        assert finding.value == pytest.approx(expected.value, abs=0.1)  # of 4096 numbers
        assert (of_generated, told) == (policy, report)
        torch.testing.assert_close(got, losses, rtol=1e-5, atol=0.0)
    assert same_bits(others[0][3], others[1][3])


def test_layers_that_do_not_exist(caplog: pytest.LogCaptureFixture) -> None:
    backend = Backend(RULES, compiler="eager")
    backend.guard(every=1, start=0, layers=["last", "*.midle"])
    run(backend, 3)
    logged = [r.getMessage() for r in caplog.records if "matches no layer" in r.getMessage()]
    assert logged == [
        "guard(layers=['*.midle']) matches no layer, so nothing is measured for it. Layers: first, last, middle."
    ]


def test_a_region_is_stronger_than_rules() -> None:
    backend = Backend(Policy(default=None, min_speedup=0), compiler="eager")
    guard = backend.guard(every=1, start=0, apply=True)
    with fp8graph.autocast(recipe="tensorwise"):
        run(backend, 2)
    (finding,) = guard.findings
    assert finding.rule is None
    assert "autocast region" in finding.reason
    assert backend.policy == Policy(default=None, min_speedup=0)


@in_one_test(
    ("asked", "message"),
    [
        ({"every": 0}, r"guard\(every=0\): expected a whole number of steps >= 1\."),
        ({"apply": "yes"}, r"guard\(apply='yes'\): expected True or False\."),
        ({"reduce": 1}, r"guard\(reduce=1\): expected True or False\."),
        ({"recipe": []}, r"guard\(recipe=\[\]\): expected a recipe, or a list"),
        ({"recipe": ["fp7"]}, "unknown recipe 'fp7'"),
        ({"layers": 3}, r"guard\(layers=3\): expected a string or a list of strings\."),
        ({"underflows": 200}, r"guard\(underflows=200\)"),
    ],
)
def test_wrong_arguments(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Backend(RULES, compiler="eager").guard(**asked)


def _rank(rank: int) -> Any:
    """Only the rows of rank 1 underflow."""
    with pytest.raises(ConfigError, match=r"guard\(apply=True\) on several ranks would give each its own policy"):
        Backend(RULES, compiler="eager").guard(apply=True)
    backend = Backend(RULES, compiler="eager")
    guard = backend.guard(every=2, start=1, apply=True, reduce=True)
    alone = backend.guard(every=2, start=1)
    _, losses = run(backend, 6, bad=lambda step: rank == 1)
    return [str(f) for f in guard.findings], len(alone.findings), backend.policy.to_dict(), len(losses)


@pytest.mark.slow
def test_ranks_decide_together(tmp_path: Path) -> None:
    first, second = run_ranks(_rank, 2, tmp_path)
    assert first[0] == second[0]
    assert len(first[0]) == 1
    assert first[2] == second[2] == Policy([MIDDLE], default="tensorwise", min_speedup=0).to_dict()
    assert (first[1], second[1]) == (0, 1)  # without reduce, each rank finds its own


@pytest.mark.release
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
@pytest.mark.timeout(900)
@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_a_guard_under_fsdp2(recipe: str, tmp_path: Path) -> None:
    """Sharded layers, weights gathered in FP8: one policy on both ranks, and the losses of a run that was given it.

    The checkpoint that DCP saves on both goes on where it was saved.
    """
    policies = {recipe: Policy(default=recipe, min_speedup=0)}
    first, second = run_ranks(sharded, 2, tmp_path, policies, str(tmp_path), seconds=800, collective_seconds=300)
    rule = Rule(BAD, recipe, dgrad=None, wgrad=None, optional=True)
    policy = Policy([rule], default=recipe, min_speedup=0).to_dict()
    assert first[recipe]["findings"] == second[recipe]["findings"]
    assert same_bits(first[recipe]["weights"].values(), second[recipe]["weights"].values())
    for found in (first[recipe], second[recipe]):
        assert len(found["findings"]) == 1
        assert found["findings"][0].startswith(f"step 2: {BAD}: 75 % of grad_output became zero ({recipe}, ")
        assert found["policy"] == policy
        assert found["recipes"] == {"fprop": recipe, "dgrad": None, "wgrad": None}
        assert found["sent"] == [6, 15]  # once per step; not in step 3, which follows an observed one, nor `middle`
        assert found["losses"] == found["told"]["losses"]
        assert same_bits(found["weights"].values(), found["told"]["weights"].values())
        resumed = found["resumed"]
        assert resumed["loaded"].keys() == found["saved"].keys() > {"fp8graph.guard"}
        assert same_bits(resumed["loaded"].values(), found["saved"].values())
        assert resumed["policy"] == policy
        assert resumed["report"] == found["report"]
        assert resumed["findings"] == 0
        assert resumed["losses"] == found["losses"][5:]
        assert same_bits(resumed["weights"].values(), found["weights"].values())
