"""The GEMMs that read a quantized tensor, and the sites that these belong to."""

from __future__ import annotations

from typing import cast

from torch import fx

from fp8graph.ir.compilation import Compilation
from fp8graph.ir.nodes import GEMM_KEY, PASS_KEY, aten
from fp8graph.recipes import GemmName


def gemms_behind(quantized: fx.Node) -> list[tuple[int, GemmName]]:
    """``(position of the site, gemm)`` of each GEMM that reads a quantize node, through collectives and slices too.

    Of an emulated GEMM, the node that decodes for it is found.
    """
    found: dict[tuple[int, GemmName], None] = {}
    pending, seen = [user for output in quantized.users for user in output.users], set[fx.Node]()
    while pending:
        node = pending.pop(0)
        if node in seen:
            continue
        seen.add(node)
        if GEMM_KEY in node.meta:
            found[node.meta[GEMM_KEY]] = None
        else:
            pending.extend(node.users)
    return list(found)


def is_smoothed(node: fx.Node) -> bool:
    """Whether ``passes/smooth.py`` made this product of a tensor and powers of two."""
    return node.meta.get(PASS_KEY) == "smooth" and node.target is aten.mul.Tensor


def before_smoothing(node: fx.Node) -> fx.Node:
    """The tensor whose channels were scaled to make ``node``; ``node`` if they were not."""
    return cast(fx.Node, node.args[0]) if is_smoothed(node) else node


def sites_of_gemm(position: int, gemm: str, compilation: Compilation) -> list[int]:
    """The position of a site, and of the sites whose GEMM is one with its."""
    site = compilation.sites[position]
    parent, dot, _ = site.fqn.rpartition(".")
    others = {(parent + dot + name, site.index) for name in compilation.fused.get((site.fqn, site.index, gemm), ())}
    return [position, *(i for i, x in enumerate(compilation.sites) if (x.fqn, x.index) in others)]
