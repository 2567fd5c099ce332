"""From the tensors that observed graphs fill to numbers per step."""

from __future__ import annotations

import pytest
import torch

from fp8graph.ir.extra_inputs import ObservedTensor, StatisticsPage
from fp8graph.ir.observed import Observed
from fp8graph.numerics.finished_statistics import finished
from fp8graph.numerics.statistic_parts import TENSOR_PARTS, tensor_parts
from fp8graph.runtime import observation as module
from fp8graph.runtime.observation import Measured, Observation


class Clock:
    now = 0


def page(operand: str = "input", *, backward: bool = False) -> StatisticsPage:
    tensor = ObservedTensor(
        names=(("layer", 0), ("layer", 1)), tensor=operand, layout="", recipe="", what_if=False, parts=TENSOR_PARTS
    )
    return StatisticsPage(backward=backward, device=torch.device("cpu"), tensors=(tensor,))


def started() -> tuple[Observation, Clock]:
    observation, clock = Observation(), Clock()
    observation.start(Observed(), lambda step: step % 2 == 0, lambda: clock.now)
    return observation, clock


def key(step: int, site: str = "layer", operand: str = "input") -> Measured:
    return Measured(step=step, site=site, operand=operand, layout="", recipe="", what_if=False)


def test_only_on_steps_that_are_due() -> None:
    observation, clock = started()
    assert observation.asked(gradients=True) is not None
    clock.now = 1
    assert observation.asked(gradients=True) is None
    clock.now = 2
    assert observation.asked(gradients=True) is not None
    assert observation.asked(gradients=False) is None  # an evaluation
    observation.stop()
    assert observation.asked(gradients=True) is None


def test_each_call_has_tensors_of_its_own_and_they_are_merged() -> None:
    observation, _ = started()
    x = torch.randn(4, 8)
    for part in x.split(2):
        (tensor,) = observation.tensors([page()])
        assert tensor.isnan().all()
        tensor.copy_(tensor_parts(part))
    observation.tensors([page("grad_output", backward=True)])  # never filled
    found = observation.found()
    assert found.keys() == {key(0), key(0, "layer[1]")}
    assert finished(found[key(0)])["std"] == pytest.approx(x.std().item(), rel=1e-5)
    assert observation.found() == found


def test_weights_are_the_same_in_each_micro_batch() -> None:
    observation, _ = started()
    for _ in range(3):
        observation.tensors([page("weight")])[0].copy_(tensor_parts(torch.ones(4, 8)))
    assert observation.found()[key(0, operand="weight")]["numel"] == 32


def test_tensors_that_nobody_reads_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_PENDING", 4)
    observation, clock = started()
    for clock.now in range(20):
        observation.tensors([page()])[0].copy_(tensor_parts(torch.full((2, 2), float(clock.now))))
        assert len(observation._pending) <= 5
    assert [parts["max"] for k, parts in observation.found().items() if k.site == "layer"] == list(range(20))
