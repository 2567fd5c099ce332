"""From the tensors that observed graphs fill to numbers per step."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fp8graph.numerics.stats import TENSOR_PARTS, finished, tensor_parts
from fp8graph.passes.observe import observation as module
from fp8graph.passes.observe.measuring import Observed, ObservedTensor, StatisticsPage
from fp8graph.passes.observe.observation import Measured, Observation, Request


class Clock:
    """In place of a schedule."""

    now, counts = 0, False

    def step_of_call(self) -> int:
        return self.now


def page(operand: str = "input", *, backward: bool = False) -> StatisticsPage:
    tensor = ObservedTensor(
        names=(("layer", 0), ("layer", 1)), tensor=operand, layout="", recipe="", what_if=False, parts=TENSOR_PARTS
    )
    return StatisticsPage(backward=backward, device=torch.device("cpu"), tensors=(tensor,))


def started() -> tuple[Observation, Clock]:
    observation, clock, _ = with_request()
    return observation, clock


def with_request() -> tuple[Observation, Clock, Request]:
    clock: Any = Clock()
    observation = Observation(cast(Any, SimpleNamespace(schedule=clock)))
    return observation, clock, observation.measure(Observed(), lambda step: step % 2 == 0)


def key(step: int, site: str = "layer", operand: str = "input") -> Measured:
    return Measured(step=step, site=site, operand=operand, layout="", recipe="", what_if=False)


def test_only_on_steps_that_are_due() -> None:
    observation, clock, request = with_request()
    assert observation.condition(gradients=True) is not None
    clock.now = 1
    assert observation.condition(gradients=True) is None
    clock.now = 2
    assert observation.condition(gradients=True) is not None
    assert observation.condition(gradients=False) is None  # an evaluation
    observation.stop(request)
    assert observation.condition(gradients=True) is None


def test_each_call_has_tensors_of_its_own_and_they_are_merged() -> None:
    observation, _ = started()
    x = torch.randn(4, 8)
    for part in x.split(2):
        (tensor,) = observation.tensors([page()])
        assert tensor.isnan().all()
        tensor.copy_(tensor_parts(part))
    observation.tensors([page("grad_output", backward=True)])  # never filled
    found = observation.measurements()
    assert found.keys() == {key(0), key(0, "layer[1]")}
    assert finished(found[key(0)])["std"] == pytest.approx(x.std().item(), rel=1e-5)
    assert observation.measurements() == found


def test_weights_are_the_same_in_each_micro_batch() -> None:
    observation, _ = started()
    for _ in range(3):
        observation.tensors([page("weight")])[0].copy_(tensor_parts(torch.ones(4, 8)))
    assert observation.measurements()[key(0, operand="weight")]["numel"] == 32


def test_tensors_that_nobody_reads_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_PENDING", 4)
    observation, clock = started()
    for clock.now in range(20):
        observation.tensors([page()])[0].copy_(tensor_parts(torch.full((2, 2), float(clock.now))))
        assert len(observation._pending) <= 5
    assert [parts["max"] for k, parts in observation.measurements().items() if k.site == "layer"] == list(range(20))


def measure(observation: Observation) -> None:
    if observation.condition(gradients=True) is not None:
        observation.tensors([page()])[0].copy_(tensor_parts(torch.ones(2, 2)))


def test_two_readers_have_one_variant_and_steps_of_their_own() -> None:
    observation, clock, first = with_request()
    over: list[int] = []
    second = observation.measure(
        Observed(layers=("layer",), copies=False, block_size=0),
        lambda step: step in (1, 2),
        over.append,
        keeps=False,
    )
    asked = {observation.condition(gradients=True)}
    for clock.now in range(5):
        asked.add(observation.condition(gradients=True))
        measure(observation)
    assert asked == {Observed(layers=("*", "layer")), None}
    assert over == [2, 3]
    assert {key.step for key in observation.measurements()} == {0, 1, 2, 4}
    assert {key.step for key in observation.measurements() if first.takes(key)} == {0, 2, 4}
    assert {key.step for key in observation.measurements() if second.takes(key)} == {1, 2}
    observation.stop(first)
    assert observation.condition(gradients=True) is None
    assert {key.step for key in observation.measurements() if first.takes(key)} == {0, 2, 4}


def test_the_step_of_now_is_not_read_and_what_nobody_wants_is_forgotten() -> None:
    clock: Any = Clock()
    observation = Observation(cast(Any, SimpleNamespace(schedule=clock)))
    request = observation.measure(Observed(), lambda _: True, keeps=False)
    for clock.now in range(3):
        measure(observation)
    assert observation.unread(request, 2) == [0, 1]
    assert [pending[0] for pending in observation._pending] == [2]
    observation.forget_steps([0, 1])
    assert observation.unread(request, 2) == []
    assert observation.unread(request, None) == [2]
    assert {key.step for key in observation.measurements()} == {2}
    assert not request.takes(_what_if())


def test_a_reader_that_keeps_and_one_that_has_not_read_yet() -> None:
    observation, clock, _ = with_request()
    early, late = (observation.measure(Observed(), lambda _: True, keeps=False) for _ in range(2))
    for clock.now in range(2):
        measure(observation)
    observation.forget_steps(observation.unread(early, None))
    assert observation.measurements().keys() >= {key(0), key(1)}
    observation.forget_steps(observation.unread(late, None))
    assert {key.step for key in observation.measurements()} == {0}  # of the first reader, which keeps them


def _what_if() -> Measured:
    """The copy of a recipe that nobody asked for."""
    return Measured(step=2, site="layer", operand="input", layout="rowwise", recipe="mxfp8", what_if=True)


@pytest.mark.parametrize("trains", [False, True])
def test_calls_of_a_step_that_never_ends_do_not_pile_up(
    trains: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server has no optimizer. With gradients, its backwards never come."""
    monkeypatch.setattr(module, "_MOST_CALLS", 4)
    observation, _ = started()
    pages = [page(), page("gradient", backward=True)] if trains else [page()]
    with caplog.at_level(logging.WARNING, "fp8graph"):
        for call in range(50):
            observation.condition(gradients=trains)
            observation.tensors(pages)[0].copy_(tensor_parts(torch.full((2, 2), float(call))))
            assert len(observation._pending) <= 15
            assert all(len(vectors) <= 6 for vectors in observation._by_step.get(0, {}).values())
    found = observation.measurements()[key(0)]
    assert (found["numel"], found["min"], found["max"]) == (200, 0, 49)
    (text,) = [record.getMessage() for record in caplog.records]
    assert "call step() of the object that backend.observe() returned" in text


def test_many_micro_batches_of_a_step_are_all_in_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The backward of a few comes late: it is waited for."""
    monkeypatch.setattr(module, "_MOST_CALLS", 4)
    observation, _ = started()
    late: list[torch.Tensor] = []
    pages = [page(), page("gradient", backward=True)]
    for call in range(20):
        observation.condition(gradients=True)
        forward, backward = observation.tensors(pages)
        forward.copy_(tensor_parts(torch.full((2, 2), float(call))))
        late.append(backward)
        if len(late) > 2:
            late.pop(0).copy_(tensor_parts(torch.ones(2, 2)))
    for backward in late:
        backward.copy_(tensor_parts(torch.ones(2, 2)))
    found = observation.measurements()
    assert (found[key(0)]["numel"], found[key(0, operand="gradient")]["numel"]) == (80, 80)
    assert not caplog.records
