"""passes/order_scales: scales of tiles are written in the order in which the GEMM reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import MXFP8BlockScaling, Policy
from fp8graph.hardware.nvidia import NVIDIA
from fp8graph.numerics import tiles
from helpers import around, compiled_step, eager_backend, first_fast, in_one_test, same_bits


class Block(nn.Module):
    """Two linears that are fused, and one."""

    def __init__(self, gate: int = 128, up: int = 256) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(128, n, bias=False, dtype=torch.bfloat16) for n in (gate, up))
        self.down = nn.Linear(gate, 128, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        return self.down(gate * up[:, : gate.shape[1]].sigmoid())


X = torch.linspace(-3, 3, 256 * 128).reshape(256, 128).bfloat16()


def policy(recipe: Any) -> Policy:
    return Policy(default=recipe, min_speedup=0)


def text(recipe: Any, target: str, module: nn.Module | None = None, **settings: Any) -> list[str]:
    """The lines that the pass added or changed, of a training graph."""
    backend = eager_backend(policy(recipe), target=target, **settings)
    compiled_step(module or Block(), X.clone().requires_grad_(), backend)
    before, after = around(backend.report.graphs[0], "order_scales")
    return [line.strip() for line in after.splitlines() if line not in before.splitlines()]


def orders(lines: list[str]) -> list[tuple[bool, bool]]:
    """Of each GEMM: whether it reads the scales of a, and those of b, as they were written."""
    return [("order_a=" in line, "order_b=" in line) for line in lines if "fp8graph.scaled_mm" in line]


def test_each_gemm_reads_what_quantize_wrote() -> None:
    lines = text("mxfp8", "sm_100", nn.Linear(128, 256, bias=False, dtype=torch.bfloat16))
    quantized = [line for line in lines if "fp8graph.quantize" in line]
    assert len(quantized) == 3  # x, w, dy
    assert all(line.endswith("rowwise_order=128x4, columnwise_order=128x4)") for line in quantized)
    assert orders(lines) == [(True, True)] * 3
    assert "weight_rowwise_scale_inv: uint8[2, 512] = quantize_weight[2]" in lines  # 256 rows, 4 tiles


def test_square_tiles_stay_in_rows_on_hopper() -> None:
    lines = text("blockwise", "sm_90", nn.Linear(128, 512, bias=False, dtype=torch.bfloat16))
    assert sorted(orders(lines)) == [(True, False), (True, False), (True, True)]
    assert "quantize_weight" not in "".join(line.partition(" = ")[0] for line in lines)


@pytest.mark.parametrize(
    ("recipe", "target"), [("tensorwise", "sm_90"), ("rowwise", "sm_90"), ("mxfp8", "cpu"), ("blockwise", "sm_100")]
)
def test_other_graphs_are_left_alone(recipe: str, target: str) -> None:
    """No tiles, or no GEMM of the device that reads their scales."""
    assert text(recipe, target) == []


RECIPES = [
    ("mxfp8", "sm_100", {}),
    ("blockwise", "sm_90", {}),
    (MXFP8BlockScaling(enable_2d_quantization=True), "sm_100", {}),
    ("nvfp4", "sm_100", {}),
    ("mxfp8", "sm_100", {"save": "memory"}),
    ("mxfp8", "sm_100", {"cache_weights": "update"}),
    ("blockwise", "sm_90", {"accumulate_wgrad": True}),
    (MXFP8BlockScaling(backward_override="dequantized"), "sm_100", {}),
]


@first_fast(("recipe", "target", "settings"), RECIPES)
@first_fast(("gate", "up"), [(128, 256), (64, 64)])
def test_no_number_changes(
    recipe: Any, target: str, settings: dict[str, Any], gate: int, up: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes of whole blocks and others; outputs and all gradients, with and without an order."""
    module = Block(gate, up)
    found: list[list[Tensor]] = []
    for order in (True, False):
        if not order:
            monkeypatch.setattr(NVIDIA, "scale_order", classmethod(lambda *_: ""))
        torch._dynamo.reset()
        torch.manual_seed(0)
        module.zero_grad(set_to_none=True)
        backend = eager_backend(policy(recipe), target=target, **settings)
        x = X.clone().requires_grad_()
        out = torch.compile(module, backend=backend)(x)
        out.square().sum().backward()
        before, after = around(backend.report.graphs[0], "order_scales")
        assert (before != after) == order
        grads = [getattr(p, "main_grad", None) if p.grad is None else p.grad for p in module.parameters()]
        found.append([g for g in (out.detach(), x.grad, *grads) if g is not None])
    assert same_bits(*found)


def test_whoever_decodes_reads_the_scales_in_rows() -> None:
    lines = text(MXFP8BlockScaling(backward_override="dequantized"), "sm_100")
    put_back = [line for line in lines if "fp8graph.scales_in_rows" in line]
    assert put_back
    assert all("order=128x4" in line for line in put_back)


def test_slices_of_a_joined_weight_are_slices_of_blocks() -> None:
    """Forward multiplies slices of the joined weight: 128 and 256 rows are one block of rows and two."""
    lines = text("mxfp8", "sm_100")
    assert "fprop_part_1: uint8[1, 512] = aten.slice.Tensor(weight_rowwise_scale_inv, 0, 0, 1)" in lines
    assert "fprop_1_part_1: uint8[2, 512] = aten.slice.Tensor(weight_rowwise_scale_inv, 0, 1, 3)" in lines


def test_slices_within_a_block_have_no_order() -> None:
    lines = text("mxfp8", "sm_100", Block(64, 64))
    assert sorted(orders(lines)) == [(True, False)] * 2 + [(True, True)] * 5


def test_exported_bytes_are_those_without_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept copies hold ordered scales; what is exported of them does not."""
    model = Block()
    found: list[dict[str, Tensor]] = []
    for order in (True, False):
        if not order:
            monkeypatch.setattr(NVIDIA, "scale_order", classmethod(lambda *_: ""))
        torch._dynamo.reset()
        backend = eager_backend(policy("mxfp8"), target="sm_100")
        compiled: Any = torch.compile(model, backend=backend)
        with torch.no_grad():
            compiled(X)
        assert ("order_b=128x4" in backend.report.graphs[0].after) == order
        found.append(dict(fp8graph.quantized_state(compiled)))
    assert found[0].keys() == found[1].keys()
    assert same_bits(list(found[0].values()), list(found[1].values()))


@in_one_test("rows", [1, 32])
@in_one_test("shape", [(128, 4), (3, 5), (256, 12)])
@in_one_test("order", [tiles.TRANSPOSED, tiles.BLOCKS])
def test_an_order_is_undone(order: str, shape: tuple[int, int], rows: int) -> None:
    scales = torch.arange(shape[0] * shape[1]).reshape(shape).to(torch.uint8)
    rows = rows if order == tiles.BLOCKS else 1
    made = tiles.ordered([scales], order, rows=rows)
    assert [*made.shape] == tiles.ordered_shape(shape, order, rows)
    assert made.is_contiguous()
    assert same_bits(tiles.in_rows(made, order, shape, rows), scales)


@in_one_test("axis", [-2, -1])
@in_one_test("sizes", [(128, 8), (96, 6)])
@in_one_test("order", [tiles.TRANSPOSED, tiles.BLOCKS])
def test_parts_are_ordered_as_the_whole(order: str, sizes: tuple[int, int], axis: int) -> None:
    parts = [torch.randint(0, 250, sizes, dtype=torch.uint8) for _ in range(2)]
    assert same_bits(tiles.ordered(parts, order, axis), tiles.ordered([torch.cat(parts, axis)], order))
