"""Decide from the program which linears may be fused into one GEMM: q, k and v; gate and up.

The pass ``fuse_linears`` fuses them once they are quantized. ``assign`` asks earlier, since fused GEMMs pay, or do not
pay, as one. Both use the questions here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from fp8graph.ir.nodes import is_backward, readers, runs_without_gradients, static_size, strides_matter, value
from fp8graph.ir.sites import Site


def kin(site: Site) -> tuple[Any, ...]:
    """A key equal for linears that may be fused if they read one tensor: their module, region, and when they run."""
    node = site.gemms[0].node
    same_run = runs_without_gradients(node), str(node.meta.get("recompute")), node.meta.get("ac_graph_id")
    return site.fqn.rpartition(".")[0], site.region, *same_run


def size_in_group(site: Site, blocks: Iterable[Sequence[int]]) -> int | str:
    """N of a linear that may be fused, or the reason why it may not.

    Reasons are a product of activations, a weight on the left (``w @ x``), and an N that is dynamic or not a multiple
    of 16 and of the ``blocks`` (scale tiles of its weight and gradient).
    """
    fprop = site.gemms[0]
    if site.op != "linear" or fprop.gemm != "fprop":
        return "it does not multiply by a weight"
    if fprop.a.operand != "input":
        return "its weight is on the left: write x @ w.T in place of w @ x"
    weight = value(fprop.b.tensor)
    size = static_size(weight.shape[-1 if fprop.b.flipped else -2])
    if size is None:
        return "its output size is dynamic"
    multiple = _multiple(blocks)
    return size if size % multiple == 0 else f"its output size {size} is not a multiple of {multiple}: pad it"


def fits_in_group(size: int, blocks: Iterable[Sequence[int]]) -> bool:
    """Whether a weight of ``size`` rows can lie between others: it fills whole scale tiles and is 16-byte aligned."""
    return size % _multiple(blocks) == 0


def _multiple(blocks: Iterable[Sequence[int]]) -> int:
    return max([16, *(max(block or (1,)) for block in blocks)])


def can_be_slices(fprops: Sequence[fx.Node]) -> bool:
    """Whether no copy is needed when the results are slices of one tensor.

    A copy is needed for results that leave the graph or that an op of another library reads, as both expect the strides
    that they had; and if backward keeps one result and not the others, since a slice keeps all of them alive.
    """
    found = [list(readers(node)) for node in fprops]
    kept = {
        any(map(is_backward, own)) and "recompute" not in node.meta for node, own in zip(fprops, found, strict=True)
    }
    return len(kept) == 1 and not any(map(strides_matter, fprops))
