"""siblings: which linears may be one, before they are quantized."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fp8graph
from fp8graph.analysis.siblings import can_be_slices, fits_in_group, sibling_key, size_in_group
from fp8graph.ir.nodes import MATMULS, aten, nodes
from fp8graph.ir.sites import Site
from helpers import Two, Weight, in_one_test, passed, traced


def sites(module: nn.Module, *args: Tensor) -> list[Site]:
    args = args or (torch.randn(16, 32, requires_grad=True),)
    return passed(module, *args, last="match")[1].sites


class Apart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Two(), Two()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


class Region(Two):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        with fp8graph.autocast(recipe="tensorwise"):
            return torch.cat([gate, self.up(x)], dim=-1)


class NoGrad(Two):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        with torch.no_grad():
            return torch.cat([gate, self.up(x)], dim=-1)


def test_linears_of_one_module_are_kin() -> None:
    gate, up = sites(Two())
    assert sibling_key(gate) == sibling_key(up)


@pytest.mark.parametrize("module", [Region(), NoGrad()], ids=["region", "no_grad"])
def test_linears_that_run_otherwise_are_not(module: nn.Module) -> None:
    gate, up = sites(module)
    assert sibling_key(gate) != sibling_key(up)


def test_linears_of_two_modules_are_not() -> None:
    found = [sibling_key(site) for site in sites(Apart())]
    assert found[0] == found[1] != found[2] == found[3]


def test_recomputed_linears_are_siblings_in_their_region() -> None:
    gate, up = sites(Two())
    gate.gemms[0].node.meta["ac_graph_id"] = 1
    assert sibling_key(gate) != sibling_key(up)


SIZES: list[Any] = [
    pytest.param(Two(48), [], 48, id="of the output"),
    pytest.param(Weight(lambda w, x: x @ w, 32, 48), [], 48, id="of a flipped weight"),
    pytest.param(Two(40), [], "its output size 40 is not a multiple of 16: pad it", id="uneven"),
    pytest.param(Two(64), [(1, 32)], 64, id="whole tiles"),
    pytest.param(Two(64), [(1, 32), (128, 128)], "its output size 64 is not a multiple of 128: pad it", id="tiles cut"),
    pytest.param(
        Weight(lambda w, x: w @ x.t(), 48, 32),
        [],
        "its weight is on the left: write x @ w.T in place of w @ x",
        id="left",
    ),
    pytest.param(
        Weight(lambda w, x: w.sum() * (x @ x.t()), 48, 32), [], "it does not multiply by a weight", id="no weight"
    ),
]


@pytest.mark.parametrize(("module", "blocks", "size"), SIZES)
def test_the_size_in_a_group(module: nn.Module, blocks: Any, size: int | str) -> None:
    assert size_in_group(sites(module)[-1], blocks) == size


def test_a_dynamic_size() -> None:
    """Weights of parameters have static sizes, unless the user asks Dynamo for others."""
    graph = make_fx(lambda x, w: x @ w.t(), tracing_mode="symbolic")(torch.randn(16, 32), torch.randn(48, 32)).graph
    (site,) = sites(Two())[:1]
    (fprop, *_) = site.gemms
    (weight,) = [node for node in graph.find_nodes(op="placeholder") if node.name.startswith("w")]
    dynamic = dataclasses.replace(fprop, b=dataclasses.replace(fprop.b, tensor=weight))
    assert size_in_group(dataclasses.replace(site, gemms=[dynamic]), []) == "its output size is dynamic"


@in_one_test(
    ("size", "blocks", "fits"),
    [(32, [], True), (24, [], False), (32, [(1, 32), ()], True), (32, [(1, 128)], False), (256, [(128, 128)], True)],
)
def test_rows_between_others(size: int, blocks: Any, fits: bool) -> None:
    assert fits_in_group(size, blocks) == fits


SLICES = [
    pytest.param(lambda a, b: [a.sin(), b.cos()], True, id="torch's ops take any strides"),
    pytest.param(lambda a, b: [a.view(-1).sin(), b.cos()], True, id="and views of them"),
    pytest.param(lambda a, b: [a, b.cos()], False, id="one leaves the graph"),
    pytest.param(lambda a, b: [a.view(2, -1), b.cos()], False, id="a view leaves it"),
    pytest.param(lambda a, b: [torch.ops.fp8graph_tests.odd(a), b.cos()], False, id="an op of somebody else"),
]


@torch.library.custom_op("fp8graph_tests::odd", mutates_args=())
def odd(x: Tensor) -> Tensor:
    return x.clone()


@odd.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@in_one_test(("body", "slices"), SLICES)
def test_results_that_can_be_slices(body: Any, slices: bool) -> None:
    graph = traced(lambda x, w, v: body(x @ w, x @ v), (4, 8), (8, 16), (8, 16))
    assert can_be_slices(list(nodes(graph, (aten.mm.default,)))) == slices


@pytest.mark.parametrize(
    ("mix", "slices"),
    [(lambda a, b: a.square() + b.square(), True), (lambda a, b: a * 2 + b.square(), False)],
    ids=["backward keeps both", "backward keeps one"],
)
def test_slices_need_all_results_saved_for_backward(mix: Any, slices: bool) -> None:
    class Mixed(Two):
        def forward(self, x: Tensor) -> Tensor:
            return mix(self.gate(x), self.up(x))

    found = [site.gemms[0].node for site in sites(Mixed())]
    assert all(node.target in MATMULS for node in found)
    assert can_be_slices(found) == slices
