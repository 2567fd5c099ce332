"""gathered_copies: what fprop and dgrad read, and the memory that is there for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oracle
from fp8graph import Policy
from fp8graph.ir import ops
from fp8graph.ir.nodes import nodes
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.numerics.formats import table_of
from fp8graph.passes.gather_weights.gathered_copies import GatheredCopies, quantizes_rows
from fp8graph.passes.hoist_weights import CachedWeight
from fp8graph.recipes import resolve_recipe
from helpers import passed

CPU = torch.device("cpu")
SCALES = table_of(torch.tensor([64.0]), torch.tensor([1 / 64]))


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(256, 256, bias=False), nn.Linear(256, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).sum() * self.b(x).sum()


def weight_of(module: nn.Module, recipe: Any, *, training: bool = True) -> CachedWeight:
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=training)
    with torch.set_grad_enabled(training):
        _, found = passed(module.bfloat16(), x, last="hoist_weights", policy=Policy(default=recipe, min_speedup=0))
    (weight,) = found.extra_inputs
    assert isinstance(weight, CachedWeight)
    return weight


def gathered(rows: int) -> list[Tensor]:
    """The parts of a quantized weight [rows, 256]: bytes, and the scales of tiles of 128."""
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
    assert [size(x) for x in copies.kept(["rowwise"])] == [256 * 256]
    assert size(found["columnwise"]) == 0
    copies.receive(0, outs, SCALES, backward=True)
    assert [size(x) for x in copies.kept(["rowwise", "columnwise"])] == [256 * 256] * 2
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


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_two_layouts_of_shards_are_those_of_the_whole_weight(recipe: str) -> None:
    """Each rank quantizes its rows in both ways. One gather brings one layout, and the other's memory is free."""
    weight = weight_of(nn.Linear(256, 128, bias=False), recipe)
    (node,) = nodes(weight.quantizing, (ops.quantize,))
    resolved = resolve_recipe(recipe)
    assert resolved is not None
    asked, quantizer = QuantizeNode(node).arguments, resolved.quantizer("weight")
    whole = torch.randn(128, 256, dtype=torch.bfloat16) * torch.logspace(-2, 2, 256).bfloat16()
    scales: list[Tensor] = []
    if recipe == "rowwise":  # of columns: from all ranks
        amaxes = whole.abs().amax(0).float()
        scales = [ops.scales(amaxes, asked.dtype, asked.power_2_scale, asked.amax_epsilon).t().reshape(1, 2, -1, 1)]
    ranks: list[list[Tensor]] = []
    for rows in whole.split(64):
        data = [torch.empty(64, 256, dtype=asked.dtype) for _ in range(2)]
        of_tiles = [torch.empty(64, 8, dtype=torch.uint8), torch.empty(2, 256, dtype=torch.uint8)]
        made = dict(zip(("rowwise", "columnwise"), data, strict=True))
        made |= (
            {"rowwise_scale_inv": torch.empty(64, 1)}
            if scales
            else dict(zip(("rowwise_scale_inv", "columnwise_scale_inv"), of_tiles, strict=True))
        )
        quantizes_rows(asked, [], [*made])(rows, *scales, *made.values())
        ranks.append([as_bytes(x) if x.itemsize == 1 else x for x in made.values()])
    rowwise, columnwise, *scale_invs = map(torch.cat, zip(*ranks, strict=True))
    copies, given = GatheredCopies(weight, [128], CPU), scales[0] if scales else None
    copies.receive(0, [rowwise, scale_invs[0]], None, backward=False)
    for layout in ("rowwise", "columnwise"):
        if layout == "columnwise":
            copies.receive_columns(0, [columnwise, scale_invs[-1]], given)
        other = "columnwise" if layout == "rowwise" else "rowwise"
        codes, scale_inv, _ = oracle.quantize_tiles(whole, quantizer, columnwise=layout == "columnwise")
        oracle.assert_codes(copies.tensors[layout].clone(), codes)
        np.testing.assert_array_equal(copies.tensors[f"{layout}_scale_inv"].clone().numpy(), scale_inv)
        assert [size(x) for x in copies.kept([layout])] == [128 * 256]
        assert size(copies.tensors[other]) == 0
