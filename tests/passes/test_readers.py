"""The GEMMs that read a quantized tensor."""

from __future__ import annotations

import pytest
import torch

from fp8graph import Policy
from fp8graph.ir import ops
from fp8graph.ir.nodes import OPERAND_KEY, gemms_behind, nodes
from fp8graph.passes.observe import sites_of_gemm
from helpers import ALL, MLP, passed


def names(policy: Policy, last: str) -> dict[str, set[str]]:
    graph, compilation = passed(MLP(), torch.zeros(16, 32, requires_grad=True), last=last, policy=policy)
    found: dict[str, set[str]] = {}
    for node in nodes(graph, (ops.quantize,)):
        for position, gemm in gemms_behind(node):
            sites = sites_of_gemm(position, gemm, compilation)
            found.setdefault(node.meta[OPERAND_KEY], set()).update(f"{compilation.sites[i].fqn} {gemm}" for i in sites)
    return found


@pytest.mark.slow
def test_native_and_emulated() -> None:
    """Both operands of each GEMM are found, whether it reads the numbers or decodes them."""
    layers, gemms = ("gate", "up", "down"), {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad")}
    wanted = {operand: {f"{layer} {gemm}" for layer in layers for gemm in of} for operand, of in gemms.items()}
    wanted["grad_output"] = {f"{layer} {gemm}" for layer in layers for gemm in ("dgrad", "wgrad")}
    for recipe in ("tensorwise", "mxfp8"):
        for last in ("share", "fuse_linears"):
            assert names(Policy(default=recipe, min_speedup=0), last) == wanted


def test_linears_that_became_one() -> None:
    graph, compilation = passed(MLP(), torch.zeros(16, 32), last="fuse_linears", policy=ALL)
    joined = [node for node in nodes(graph, (ops.quantize,)) if node.kwargs.get("more")]
    found = {tuple(sites_of_gemm(*gemm, compilation)) for node in joined for gemm in gemms_behind(node)}
    assert {tuple(sorted(compilation.sites[i].fqn for i in sites)) for sites in found} == {("gate", "up")}
