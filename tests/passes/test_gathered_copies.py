"""gathered_copies: what fprop and dgrad read, and the memory that is there for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8graph import Policy
from fp8graph.passes.gather_weights.gathered_copies import GatheredCopies
from fp8graph.passes.hoist_weights import KeptWeight
from helpers import passed

CPU = torch.device("cpu")
SCALES = torch.tensor([[64.0, 1 / 64]])


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(256, 256, bias=False), nn.Linear(256, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).sum() * self.b(x).sum()


def weight_of(module: nn.Module, recipe: Any, *, training: bool = True) -> KeptWeight:
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=training)
    with torch.set_grad_enabled(training):
        _, found = passed(module.bfloat16(), x, last="hoist_weights", policy=Policy(default=recipe, min_speedup=0))
    (weight,) = found.extra_inputs
    assert isinstance(weight, KeptWeight)
    return weight


def gathered(rows: int) -> list[Tensor]:
    """What comes of a weight [rows, 256]: bytes, and the scales of tiles of 128."""
    generator = torch.Generator().manual_seed(rows)
    return [
        torch.randint(0, 100, (rows, 256), dtype=torch.uint8, generator=generator),
        torch.rand(rows // 128, 2, generator=generator),
    ]


def as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def size(x: Tensor) -> int:
    return x.untyped_storage().nbytes()


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_forward_reads_what_was_gathered_and_backward_its_transpose(recipe: str) -> None:
    copies = GatheredCopies(weight_of(nn.Linear(256, 256, bias=False), recipe), [256], CPU)
    outs = gathered(256)
    data, scales = outs[0].clone(), outs[1].clone()
    copies.receive(0, outs, SCALES, backward=False)
    found = dict(copies.tensors)
    assert found["rowwise"].data_ptr() == outs[0].data_ptr()
    assert [size(x) for x in copies.kept(backward=False)] == [256 * 256]
    assert size(found["columnwise"]) == 0
    copies.receive(0, outs, SCALES, backward=True)
    assert [size(x) for x in copies.kept(backward=True)] == [256 * 256] * 2
    assert torch.equal(as_bytes(found["columnwise"]), data.t())
    if recipe == "blockwise":
        assert torch.equal(found["rowwise_scale_inv"], scales)
        assert torch.equal(found["columnwise_scale_inv"], scales.t())
    else:
        assert found["scale_inv"].item() == 1 / 64
    assert all(copies.tensors[name] is x for name, x in found.items())


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_parts_come_one_after_the_other(recipe: str) -> None:
    copies = GatheredCopies(weight_of(Joined(), recipe), [256, 128], CPU)
    parts = [gathered(256), gathered(128)]
    data = torch.cat([part[0] for part in parts])
    for index, outs in enumerate(parts):
        copies.receive(index, outs, SCALES, backward=True)
        assert size(outs[0]) == 0  # what was joined is not needed any more
    assert torch.equal(as_bytes(copies.tensors["rowwise"]), data)
    assert torch.equal(as_bytes(copies.tensors["columnwise"]), data.t())


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_a_graph_for_training_comes_after_one_for_evaluation(recipe: str) -> None:
    linear = nn.Linear(256, 256, bias=False)
    copies = GatheredCopies(weight_of(linear, recipe, training=False), [256], CPU)
    outs = gathered(256)
    copies.receive(0, outs, SCALES, backward=True)
    assert "columnwise" not in copies.tensors
    rowwise = copies.tensors["rowwise"]
    copies.widen(weight_of(linear, recipe), backward=True)
    assert copies.tensors["rowwise"] is rowwise
    assert torch.equal(as_bytes(copies.tensors["columnwise"]), outs[0].t())
