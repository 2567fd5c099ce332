"""Whether parameters have changed: steps of optimizers, versions, addresses, memory that is another's."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8graph.compat.anchors import anchor, remember_modules
from fp8graph.runtime import staleness
from fp8graph.runtime.staleness import Unchanged, WeightUpdates, identities, storage_of, version
from helpers import in_one_test


def unchanged_since(steps: WeightUpdates, positions: list[int], args: list[Any]) -> Unchanged:
    return Unchanged(lambda: (steps.count, steps.refreshes), positions, args)


def parameters(count: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(8)) for _ in range(count)]


def step(held: list[Any], **kwargs: Any) -> None:
    for p in held:
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(held, lr=0.1, **kwargs).step()


@in_one_test("count", [0, 1, 2, 300])
def test_identities_are_the_ids_in_order(count: int) -> None:
    objects = tuple(object() for _ in range(count))
    assert struct.unpack(f"{count}N", identities(objects)) == tuple(map(id, objects))


def test_python_keeps_the_addresses_of_a_tuples_items_in_a_row() -> None:
    """Otherwise each id is read by itself, which takes three times as long for hundreds of parameters."""
    assert staleness.identities is staleness._pointers


def test_a_step_counts_for_what_its_optimizer_holds() -> None:
    steps, (a, b) = WeightUpdates(), parameters()
    step([a])
    step([b])
    step([a])
    assert steps.count == 3
    assert (steps.all.of(a), steps.all.of(b)) == (steps.all.of(b) + 1, steps.all.of(a) - 1)
    assert (steps.of_optimizers([a]), steps.of_optimizers([b]), WeightUpdates().of_optimizers([a])) == (2, 1, 0)
    assert (steps.count, WeightUpdates().count) == (3, 0)


def test_a_step_counts_for_what_no_optimizer_was_seen_to_hold() -> None:
    """An optimizer may hold slices of a parameter; none changes a parameter that does not train."""
    steps, (a, b) = WeightUpdates(), parameters()
    b.requires_grad_(False)
    before = steps.all.of(a)
    step(parameters(1))
    assert (steps.all.of(a) - before, steps.all.of(b)) == (1, 0)


def replace_memory(p: nn.Parameter) -> None:
    p.data = p.data.clone()


CHANGES: dict[str, Callable[[WeightUpdates, list[nn.Parameter]], Any]] = {
    "in place": lambda steps, ps: ps[1].requires_grad_(False).add_(1),
    "other memory": lambda steps, ps: replace_memory(ps[1]),
    "a step that bumps no version": lambda steps, ps: step([ps[1]], fused=True),
    "the user says so": lambda steps, ps: steps.refresh(),
}


@in_one_test("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    steps, args = WeightUpdates(), [*parameters(), torch.zeros(1)]
    unchanged = unchanged_since(steps, [0, 1], args)
    assert unchanged(args)
    args[2] = torch.ones(3)  # not among the positions
    assert unchanged(args)
    CHANGES[change](steps, args[:2])  # pyright: ignore[reportArgumentType]
    assert not unchanged(args)


def test_memory_at_the_same_address_is_other_memory() -> None:
    steps, args = WeightUpdates(), [*parameters()]
    unchanged = unchanged_since(steps, [0, 1], args)
    address = args[0].data_ptr()
    args[0].data = torch.empty(1)
    news: list[Tensor] = [torch.ones(8) for _ in range(50)]
    args[0].data = next((new for new in news if new.data_ptr() == address), news[0])
    assert not unchanged(args)


def test_views_have_one_storage() -> None:
    a, b = torch.zeros(8), torch.zeros(8)
    assert storage_of(a) == storage_of(a[2:])
    assert storage_of(a) != storage_of(b)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
@pytest.mark.usefixtures("group_of_two")
def test_writes_to_a_dtensor_are_seen() -> None:
    """They change its own version, and not that of its shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    weight: Any = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    unchanged = unchanged_since(WeightUpdates(), [0], [weight])
    assert unchanged([weight])
    before = version(weight)
    weight.mul_(2)
    assert version(weight) != before
    assert not unchanged([weight])
    before = version(weight)
    weight.to_local().add_(1)
    assert version(weight) != before


def test_memory_that_was_freed_and_is_used_again() -> None:
    """The address, the version and the numbers are the same; the storage is another."""
    memory = bytearray(64)
    args = [torch.frombuffer(memory, dtype=torch.float32)]
    unchanged = Unchanged(lambda: 0, [0], args)
    assert unchanged(args)
    args[0] = torch.frombuffer(memory, dtype=torch.float32)
    assert not unchanged(args)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
@pytest.mark.usefixtures("group_of_two")
def test_steps_of_a_parameter_that_torch_swaps_are_counted_on() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    model: nn.Module = distribute_module(nn.Linear(4, 4), init_device_mesh("cpu", (2,)))
    remember_modules(model)
    updates, optimizer = WeightUpdates(), torch.optim.SGD(model.parameters())
    for _ in range(3):
        optimizer.step()
        model.to("cpu")
    assert updates.of_optimizers([anchor(parameter) for parameter in model.parameters()]) == 3
    assert [updates.all.of(parameter) for parameter in model.parameters()] == [updates.all.count] * 2
