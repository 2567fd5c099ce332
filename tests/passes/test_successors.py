"""A tensor keeps its amaxes when its recipe changes: in one run, in a resumed one, and apart from other rows."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import Backend, DelayedScaling, Format, Policy, Rule
from fp8graph.compat import distributed
from fp8graph.ir.sites import Use
from fp8graph.passes.connect_scales import PageLayout
from fp8graph.passes.connect_scales.pages import RowKey, RowOwner
from fp8graph.passes.connect_scales.saved import SavedRow
from fp8graph.passes.connect_scales.scaling_state import ScalingState
from fp8graph.passes.connect_scales.successors import Phases, Successors
from fp8graph.runtime.policies import Policies
from helpers import eager_backend, first_fast, in_one_test
from ranks import run_ranks

RECIPE = DelayedScaling(amax_history_len=8)
CHANGES: dict[str, dict[str, Any]] = {
    "shorter": {"amax_history_len": 2},
    "longer": {"amax_history_len": 16},
    "no history": {"amax_history_len": 1},
    "margin": {"margin": 1},
    "algorithm": {"amax_compute_algo": "most_recent"},
    "function": {"amax_compute_algo": lambda amaxes: amaxes.amax(0)},
    "ranks": {"reduce_amax": False},
    "accumulation": {"use_fast_accum": (False, False, False)},
    "backward": {"backward_override": "dequantized"},
    "format": {"fp8_format": Format.E4M3},
}
TINY = 1e-4  # nothing is left of it at scale 1


def changed(name: str) -> DelayedScaling:
    return dataclasses.replace(RECIPE, **CHANGES[name])


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(32, 32, bias=False)


def train(model: Any, *amaxes: float) -> None:
    """One step for each of ``amaxes``, the largest number of its input."""
    for amax in amaxes:
        x = torch.rand(16, 32) * amax
        x[0, 0] = amax
        (model(x).sum() * TINY).backward()


def rows(state: Any) -> dict[str, tuple[float, list[float]]]:
    """The rows of a state by tensor and recipe: scale, and the amaxes of the history that are not 0."""
    names = {key.rpartition("|")[0] for key in state if "|" in key}
    return {
        name: (state[f"{name}|scale"].item(), [x for x in state[f"{name}|amax_history"].tolist() if x])
        for name in names
    }


def inputs(backend: Backend, of: str = "input") -> dict[str, list[float]]:
    return {name.partition("|")[2]: each[1] for name, each in rows(backend.state_dict()).items() if of in name}


def error(module: nn.Linear, model: Any) -> float:
    """The larger relative error of one step's output and weight gradient."""
    results: list[list[Tensor]] = []
    for function in (module, model):
        module.zero_grad()
        torch.manual_seed(1)
        y = function(torch.randn(16, 32) * TINY)
        (y * torch.randn(16, 32) * TINY).sum().backward()
        assert module.weight.grad is not None
        results.append([y.detach(), module.weight.grad.clone()])
    return max(float((a - b).norm() / a.norm()) for a, b in zip(*results, strict=True))


@first_fast("name", CHANGES)
def test_a_changed_policy_keeps_the_scales(name: str) -> None:
    module, backend = layer(), eager_backend(Policy(default=RECIPE))
    model = torch.compile(module, backend=backend)
    error(module, model)
    assert error(module, model) < 0.1
    backend.set_policy(Policy(default=changed(name)))
    assert error(module, model) < 0.1


@first_fast("name", CHANGES)
def test_a_resumed_run_with_another_recipe_keeps_the_scales(name: str) -> None:
    module, backend = layer(), eager_backend(Policy(default=RECIPE))
    error(module, torch.compile(module, backend=backend))
    torch._dynamo.reset()
    resumed = eager_backend(Policy(default=changed(name)))
    resumed.load_state_dict(backend.state_dict())
    assert error(module, torch.compile(module, backend=resumed)) < 0.1
    unused = {name.partition("|")[0].rpartition(".")[2] for name in resumed.report.unused_state}
    assert unused == ({"grad_output"} if name == "backward" else set())  # its backward quantizes no gradient


def test_a_policy_that_comes_back_goes_on_from_the_other() -> None:
    module, backend = layer(), eager_backend(Policy(default=RECIPE))
    model = torch.compile(module, backend=backend)
    train(model, 1.0, 2.0)
    backend.set_policy(Policy(default=changed("margin")))
    train(model, 3.0)
    assert inputs(backend) == {"delayed(margin=1,amax_history_len=8)": [1.0, 2.0, 3.0]}  # the other is outdated
    backend.set_policy(Policy(default=RECIPE))
    train(model, 4.0)
    assert inputs(backend) == {"delayed(amax_history_len=8)": [1.0, 2.0, 3.0, 4.0]}


def test_a_schedule_keeps_the_scales() -> None:
    module = layer()
    rules = [Rule("*", changed("shorter"), steps=(2, 3))]
    backend = eager_backend(Policy(rules, default=RECIPE))
    model, optimizer = torch.compile(module, backend=backend), torch.optim.SGD(module.parameters(), lr=0.0)
    for amax in (1.0, 2.0, 3.0, 4.0):
        train(model, amax)
        optimizer.step()
    # two slots kept the first two of eight, zeros then; the six zeros that follow push out what stood first
    assert inputs(backend) == {"delayed(amax_history_len=8)": [4.0]}


def test_two_recipes_of_one_layer_stay_apart_when_others_change() -> None:
    """fprop has one and wgrad another: each records on its own, also after the policy of another layer changes."""
    module = nn.Sequential(layer(), layer())
    rules = [Rule("0", RECIPE, wgrad=changed("shorter"))]
    backend = eager_backend(Policy(rules, default=None))
    model = torch.compile(module, backend=backend)
    train(model, 1.0, 2.0, 3.0)
    before = inputs(backend)
    assert before == {"delayed(amax_history_len=8)": [1.0, 2.0, 3.0], "delayed(amax_history_len=2)": [3.0]}
    backend.set_policy(Policy(rules, default="tensorwise"))
    train(model, 4.0)
    assert inputs(backend) == {
        "delayed(amax_history_len=8)": [1.0, 2.0, 3.0, 4.0],
        "delayed(amax_history_len=2)": [4.0],
    }


def test_two_regions_of_one_step_stay_apart() -> None:
    """Each sees other numbers, in every step; neither follows the other but for its first step."""
    backend = eager_backend(Policy(default=None))
    model = torch.compile(layer(), backend=backend)
    for _ in range(2):
        for recipe, amax in ((RECIPE, 1.0), (changed("longer"), 64.0)):
            with fp8graph.autocast(recipe=recipe):
                train(model, amax)
    found = inputs(backend)
    assert found["delayed(amax_history_len=8)"] == [1.0, 1.0]
    assert found["delayed(amax_history_len=16)"] == [1.0, 64.0, 64.0]


def test_evaluation_under_another_recipe_follows_training_and_records_nothing() -> None:
    module = layer()
    backend = eager_backend(Policy(default=RECIPE))
    model = torch.compile(module, backend=backend)
    for amax in (1.0, 1e-3):
        train(model, *[amax] * 8)
        before = rows(backend.state_dict())
        x = torch.rand(16, 32) * amax
        with torch.no_grad(), fp8graph.autocast(recipe=changed("margin")):
            assert torch.dist(model(x), module(x)) < 0.1 * module(x).norm()
        assert rows(backend.state_dict()) == before


def test_layers_that_share_code_change_their_recipes_apart() -> None:
    """Compiled one by one: the first layer's amaxes stay with it, and the second's with that."""
    net = nn.Sequential(layer(), layer())
    policies = [
        Policy([Rule("0", a)], default=b) for a, b in ((RECIPE, changed("margin")), (changed("margin"), RECIPE))
    ]
    backend = eager_backend(policies[0])
    backend.bind(net)
    models = [torch.compile(each, backend=backend) for each in net]
    for policy in policies:
        backend.set_policy(policy)
        for model, amax in zip(models, (1.0, 2.0), strict=True):
            train(model, amax)
    assert inputs(backend, "0.input") == {"delayed(margin=1,amax_history_len=8)": [1.0, 1.0]}
    assert inputs(backend, "1.input") == {"delayed(amax_history_len=8)": [2.0, 2.0]}


def test_another_fp8_type_rescales_the_scale() -> None:
    module, backend = layer(), eager_backend(Policy(default=RECIPE))
    model = torch.compile(module, backend=backend)
    train(model, 1.0, 1.0)
    (before,) = [row[0] for name, row in rows(backend.state_dict()).items() if "grad_output" in name]
    resumed = eager_backend(Policy(default=changed("format")))
    resumed.load_state_dict(backend.state_dict())
    torch._dynamo.reset()
    train(torch.compile(module, backend=resumed), 1.0)
    (after,) = [row[0] for name, row in rows(resumed.state_dict()).items() if "grad_output" in name]
    assert after == pytest.approx(before * 448 / 57344)


def test_another_length_is_logged_once_for_all_rows(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(layer(), layer())
    backend = eager_backend(Policy(default=RECIPE))
    model = torch.compile(module, backend=backend)
    train(model, 1.0)
    with caplog.at_level("WARNING", "fp8graph"):
        for name in ("margin", "accumulation", "shorter"):
            assert caplog.records == []
            backend.set_policy(Policy(default=changed(name)))
            train(model, 1.0)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "have another length now" in message
    assert "8 before, 2 now" in message


@pytest.mark.slow
def test_a_state_with_rows_of_earlier_recipes_is_loaded() -> None:
    """States used to keep them all: each recipe finds its own, another one the last."""
    module, backend = layer(), eager_backend(Policy(default=RECIPE))
    train(torch.compile(module, backend=backend), 1.0)
    state = dict(backend.state_dict())
    (name,) = [name for name in rows(state) if "input" in name]
    other = name.replace("len=8", "len=4")
    state |= {f"{other}|scale": torch.tensor([7.0]), f"{other}|amax_history": torch.tensor([0.0, 0.0, 0.0, 64.0])}
    for recipe, expected in ((RECIPE, [1.0, 2.0]), (changed("margin"), [1.0, 2.0]), (changed("longer"), [64.0, 2.0])):
        torch._dynamo.reset()
        resumed = eager_backend(Policy(default=recipe))
        resumed.load_state_dict(state)
        train(torch.compile(module, backend=resumed), 2.0)
        assert expected in inputs(resumed).values()


@pytest.mark.slow
def test_a_pickled_backend_has_the_newest_rows_alone() -> None:
    backend = Backend(Policy(default=RECIPE), compiler="eager")
    model = torch.compile(layer(), backend=backend)
    train(model, 1.0)
    backend.set_policy(Policy(default=changed("margin")))
    train(model, 2.0)
    again: Backend = pickle.loads(pickle.dumps(backend))
    assert rows(again.state_dict()) == rows(backend.state_dict())
    assert inputs(again) == {"delayed(margin=1,amax_history_len=8)": [1.0, 2.0]}


# the parts

_OWNER = RowOwner()


def key(recipe: DelayedScaling) -> RowKey:
    return RowKey(owner=_OWNER, site=None, use=0, operand="input", recipe=recipe)


def layout_of(recipe: DelayedScaling, group: str | None = None) -> PageLayout:
    row = Use(fqn="a", index=0, use=0, parameter=0, operand="input", recipe=recipe)
    device = torch.device("cpu")
    return PageLayout(recipe=recipe, fp8_max=448.0, backward=False, device=device, rows=((row,),), group=group)


def test_the_same_policy_set_again_begins_no_phase() -> None:
    policies = Policies(None)
    phases = Phases(policies)
    found: list[int] = []
    for recipe in (RECIPE, RECIPE, changed("margin"), RECIPE):
        policies.set(Policy(default=recipe))
        found.append(phases.now())
    assert found == [1, 1, 2, 3]


@in_one_test(
    ("used", "expected"),
    [
        ({"first": [1], "second": [1]}, None),  # at once
        ({"first": [1], "second": [1, 2]}, None),  # in this phase, too: both may be in use
        ({"first": [1], "second": [2]}, None),
        ({"first": [1, 3], "second": [2]}, None),  # it has followed already
    ],
)
def test_a_row_in_use_follows_no_other(used: Mapping[str, list[int]], expected: None) -> None:
    known = {"first": key(RECIPE), "second": key(changed("margin"))}
    successors = Successors()
    for each in known.values():
        successors.add(each, copied=False)
    for phase in (1, 2, 3):
        for name, phases in used.items():
            if phase in phases:
                successors.used(known[name], phase)
    last = max(max(phases) for phases in used.values())
    assert successors.newer(known["first"], last) is expected


def test_an_outdated_row_follows_the_newest() -> None:
    first, second = key(RECIPE), key(changed("margin"))
    successors = Successors()
    for each in (first, second):
        successors.add(each, copied=False)
    successors.used(first, 1)
    successors.used(second, 2)
    assert successors.outdated(first)
    assert successors.newer(first, 3) == second
    assert successors.newer(second, 3) is None
    successors.restart()  # a state was loaded for the second, and for the first none
    assert successors.outdated(first)
    assert successors.newer(first, 3) == second


def test_scales_of_one_rank_do_not_become_those_of_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    successors, name = Successors(), "a.input|delayed()"
    own = SavedRow(torch.tensor([8.0]), torch.ones(8), 448.0, reduced=False)
    assert successors.converted(own, layout_of(RECIPE), name, 1) is not None  # one rank
    monkeypatch.setattr(distributed, "number_of_ranks", lambda group: 2)
    with caplog.at_level("WARNING", "fp8graph"):
        assert all(successors.converted(own, layout_of(RECIPE), name, 1) is None for _ in range(2))
        assert successors.converted(own, layout_of(changed("ranks")), name, 1) is not None
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("delayed scaling now reduces amaxes over the ranks (a.input, and perhaps more)")


def test_a_row_that_other_ranks_have_copied_is_copied_here() -> None:
    """This rank has not run the layer under the new recipe, and all ranks have to have one scale."""
    state, weight = Backend().store(ScalingState), nn.Parameter(torch.ones(2, 2))
    page = state.pages((layout_of(RECIPE),), [weight])[0].tensor
    page[0, 1] = 16.0
    copied = state._of_other_ranks("a.input|delayed(margin=1,amax_history_len=8)", layout_of(changed("margin")))
    assert copied is not None
    assert copied[0].tolist() == [16.0]
    assert state._of_other_ranks("b.input|delayed()", layout_of(RECIPE)) is None


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = layer(), layer()

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.b(self.a(x)) if both else self.a(x)


def on_a_rank(rank: int) -> list[dict[str, Any]]:
    torch._dynamo.reset()
    net, short = Skipping(), DelayedScaling(amax_history_len=4)
    backend = eager_backend(Policy(default=short))
    backend.bind(net)
    model, optimizer = torch.compile(net, backend=backend), torch.optim.SGD(net.parameters(), lr=0.0)
    states: list[dict[str, Any]] = []
    # rank 1 does not run b in the first step of the longer history; then ranks go apart, and together again
    for recipe in (short, short, RECIPE, RECIPE, changed("ranks"), RECIPE):
        backend.set_policy(Policy(default=recipe))
        (model(torch.ones(16, 32) * (1 + rank), rank == 0 or len(states) != 2).sum() * TINY).backward()
        optimizer.step()
        states.append({name: row for name, row in rows(backend.state_dict()).items() if "len=8" in name})
    return states


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_ranks_have_one_scale_after_the_recipe_changed(tmp_path: Path) -> None:
    first, second = run_ranks(on_a_rank, 2, tmp_path)
    assert len(first[3]) == 6
    assert first[3] == second[3]
    assert {len(amaxes) for _, amaxes in first[3].values()} == {3}  # the oldest of four is gone: it stood first
    assert first[4] != second[4]  # each rank has its own
    assert first[5] == second[5]
    assert {len(amaxes) for _, amaxes in first[5].values()} == {3}  # of the steps in which they had one scale
