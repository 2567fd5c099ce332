"""A commit of one rank, in a group of its own: names that come late, overflows, forwards without a backward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fp8graph import Backend, DelayedScaling, StateError
from fp8graph.compat.distributed import timeout_of
from fp8graph.numerics.formats import SCALE
from fp8graph.numerics.history import HEADER, new_page
from fp8graph.passes.connect_scales import PageLayout
from fp8graph.passes.connect_scales.amax_reduction import HEAD, Marks, Reduction, StagedPage
from fp8graph.passes.connect_scales.scaling_state import ScalingState

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
CPU = torch.device("cpu")
RECIPE = DelayedScaling(amax_history_len=4)


@pytest.fixture
def reduction(tmp_path: Path) -> Iterator[Reduction]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield Reduction(dist.group.WORLD.group_name, CPU, lambda name, fp8_max: None)
    dist.destroy_process_group()


def page_of(*amaxes: float, names: Any) -> StagedPage:
    page = new_page(4, len(amaxes))
    page[:, HEADER] = torch.tensor(amaxes)
    layout = PageLayout(recipe=RECIPE, fp8_max=448.0, backward=False, device=CPU, rows=((),) * len(amaxes), group="0")
    return StagedPage(tensor=page, layout=layout, names=names)


def history(page: StagedPage, row: int) -> list[float]:
    return page.tensor[row, HEADER:].tolist()


def test_staged_amaxes_enter_scales_and_histories(reduction: Reduction) -> None:
    page = page_of(2.0, 4.0, names=[("a",), ("b",)])
    reduction.commit([page])
    assert page.tensor[:, SCALE].tolist() == [224.0, 112.0]
    assert [history(page, 0), history(page, 1)] == [[0, 0, 0, 2], [0, 0, 0, 4]]
    assert reduction.order == {"a": 0, "b": 1}


def test_a_tensor_of_several_names_takes_the_largest(reduction: Reduction) -> None:
    """q, k and v share their input: on another rank only one of them may have run."""
    page, other = page_of(2.0, names=[("q", "k")]), page_of(8.0, names=[("k",)])
    reduction.order = {"q": 0, "k": 1}
    reduction._record([page, other], torch.tensor([0.0] * HEAD + [2.0, 8.0]))
    assert history(page, 0) == history(other, 0) == [0, 0, 0, 8]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_is_recorded_nowhere_and_forgotten(reduction: Reduction, bad: float) -> None:
    page = page_of(bad, 4.0, names=[("a",), ("b",)])
    reduction.commit([page])
    assert history(page, 0) == [0, 0, 0, 0]
    assert page.tensor[0, SCALE] == 1.0
    assert history(page, 1) == [0, 0, 0, 4]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_survives_a_reduction_that_ignores_nan(
    reduction: Reduction, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    """Another rank staged 3. Whether the larger of it and NaN is NaN depends on the backend and the order of ranks."""

    def with_another(packed: Tensor, *_: Any, **__: Any) -> None:
        packed[HEAD:] = packed[HEAD:].fmax(torch.tensor(3.0))

    page = page_of(2.0, names=[("a",)])
    reduction.commit([page])
    before = page.tensor.clone()
    page.tensor[0, HEADER] = bad
    monkeypatch.setattr(dist, "all_reduce", with_another)
    reduction.commit([page])
    assert torch.equal(page.tensor, before)


def test_names_unknown_to_some_rank_are_not_reduced(reduction: Reduction) -> None:
    """On a GPU new names are awaited no longer after the first steps."""
    page = page_of(2.0, 4.0, names=[("a",), ("new",)])
    reduction.order = {"a": 0}
    reduction._record([page], torch.tensor([1.0] + [0.0] * (HEAD - 1) + [2.0]))
    assert [history(page, 0), history(page, 1)] == [[0, 0, 0, 2], [4, 0, 0, 0]]


def test_a_custom_algorithm_sees_the_reduced_amaxes(reduction: Reduction) -> None:
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=smallest)
    first = page_of(2.0, names=[("a",)])
    layout = PageLayout(recipe=recipe, fp8_max=448.0, backward=False, device=CPU, rows=((),), group="0")
    page = StagedPage(tensor=first.tensor, layout=layout, names=first.names)
    reduction.commit([page])
    page.tensor[0, HEADER] = 1.0
    reduction.commit([page])
    assert history(page, 0) == [0, 0, 2, 1]
    assert page.tensor[0, SCALE] == 448.0


def test_a_function_without_a_name_does_not_travel(reduction: Reduction) -> None:
    """Ranks exchange what they know of new tensors: a lambda cannot be sent."""
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=lambda amaxes: amaxes.amax(0))
    layout = PageLayout(recipe=recipe, fp8_max=448.0, backward=False, device=CPU, rows=((),), group="0")
    page = StagedPage(tensor=page_of(2.0, names=[("a",)]).tensor, layout=layout, names=[("a",)])
    reduction.commit([page])
    assert page.tensor[0, SCALE] == 224.0


@pytest.mark.parametrize("other", [4, 5, 7])
def test_ranks_that_are_out_of_step(reduction: Reduction, monkeypatch: pytest.MonkeyPatch, other: int) -> None:
    """As if another rank, at step ``other``, took part. Nothing is recorded."""

    def with_another(packed: Tensor, *_: Any, **__: Any) -> None:
        torch.maximum(packed[1:3], torch.tensor([other, -other]), out=packed[1:3])

    page = page_of(2.0, names=[("a",)])
    reduction.commit([page], step=6)
    before = page.tensor.clone()
    monkeypatch.setattr(dist, "all_reduce", with_another)
    where = {4: "middle of step 3", 5: "end of step 2", 7: "end of step 3"}[other]
    first, last = ("middle of step 4", where) if other > 6 else (where, "middle of step 4")
    said = f"rank 0 reduced .* in the middle of step 4, but the first of 1 ranks .*{first} and the last .*{last}"
    with pytest.raises(StateError, match=said):
        reduction.commit([page], step=6)
    assert torch.equal(page.tensor, before)


@pytest.mark.parametrize(
    ("place", "said"), [(3, "rank 0 has loaded 2, but .* some have loaded 2 and some 3"), (5, "of its 1. backend")]
)
def test_ranks_of_other_loads_or_backends(
    reduction: Reduction, monkeypatch: pytest.MonkeyPatch, place: int, said: str
) -> None:
    def with_another(packed: Tensor, *_: Any, **__: Any) -> None:
        torch.maximum(packed[place : place + 2], torch.tensor([3, -3]), out=packed[place : place + 2])

    page = page_of(2.0, names=[("a",)])
    monkeypatch.setattr(dist, "all_reduce", with_another)
    with pytest.raises(StateError, match=said):
        reduction.commit([page], loads=2)
    assert page.tensor[0, HEADER] == 2.0


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("Timed out waiting 10ms for recv", StateError, "rank 0 waited at the end of step 3 .*Timed out waiting 10ms"),
        ("Wait timeout", StateError, "All ranks have to call forward, backward and optimizer.step.. equally often"),
        ("Connection closed by peer", RuntimeError, "^Connection closed by peer$"),
    ],
)
def test_ranks_that_do_not_come(
    reduction: Reduction, monkeypatch: pytest.MonkeyPatch, text: str, kind: type, said: str
) -> None:
    """A timeout says what to do; a rank that was killed is torch's error, as without FP8."""

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(dist, "all_reduce", fails)
    with pytest.raises(kind, match=said):
        reduction.commit([page_of(2.0, names=[("a",)])], step=7)


def test_a_reduction_has_a_group_of_its_own(reduction: Reduction) -> None:
    """Made once for all backends, which send as many numbers; it is less patient than the group that it stands for."""
    assert dist.group.WORLD is not None
    reduction.commit([page_of(2.0, 3.0, names=[("a",), ("b",)])])
    other = Reduction(dist.group.WORLD.group_name, CPU, lambda name, fp8_max: None)
    other.commit([page_of(2.0, names=[("a",)])])
    meeting = reduction._meeting
    assert meeting is not None
    assert other._meeting is meeting
    own = meeting.group
    assert own is not dist.group.WORLD
    assert own.group_desc == "fp8graph: amaxes of delayed scaling"
    assert dist.get_backend(own) == dist.get_backend()
    assert timeout_of(own, CPU) == 0.9 * timeout_of(dist.group.WORLD, CPU)
    assert (reduction._lane, other._lane) == (1, 2)
    assert other._reduced([], Marks(0, 0, 2), meeting).shape == (HEAD + 2,)
    reduction.forget()
    assert reduction._reduced([], Marks(0, 0, 1), meeting).shape == (HEAD + 2,)


def test_a_group_that_was_destroyed_is_made_again(reduction: Reduction, tmp_path: Path) -> None:
    page = page_of(2.0, names=[("a",)])
    reduction.commit([page])
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/another", rank=0, world_size=1)
    page.tensor[0, HEADER] = 4.0
    reduction.commit([page])
    assert history(page, 0) == [0, 0, 2, 4]


def test_steps_beyond_the_integers_of_fp32(reduction: Reduction) -> None:
    for step in ((1 << 24) - 1, (1 << 24) + 1, 1 << 40):
        reduction.commit([page_of(2.0, names=[("a",)])], step=step)


def smallest(amaxes: Tensor) -> Tensor:
    """[tensors]: of the steps that were seen."""
    return torch.where(amaxes > 0, amaxes, torch.inf).amin(0)


def test_forwards_without_backward_are_a_step_when_they_come_again() -> None:
    state, result = Backend().store(ScalingState), torch.ones(1)
    first, second = [torch.zeros(1, 3)], [torch.zeros(1, 3)]
    state.watch([result], first)
    state.watch([result], second)  # another layer of the same graph
    assert not state._step_is_over
    state.watch([result], first)
    assert state._step_is_over
    state.commit()
    state.watch([result], first)
    assert not state._step_is_over


def test_a_backward_ends_the_step_of_its_forwards() -> None:
    state, x = Backend().store(ScalingState), torch.ones(1, requires_grad=True)
    y = x * 2
    state.watch([y], [])
    assert not state._step_is_over
    y.backward()
    assert state._step_is_over
