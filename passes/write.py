"""Compute tensors that are copied into a graph input directly in that input, without a temporary.

    t = cat([a, b]);  copy_(w, t)               ->      write_(slice(w, 0, 0, m), a);  write_(slice(w, 0, m, n), b)
    t = view(x, [m, n]);  copy_(w, t)           ->      write_(view(w, x.shape), x)
    t = arrange([a, b]);  copy_(w, t)           ->      as with cat
    t = materialize(x);  copy_(w, t)            ->      write_(w, x)

The FP8 copies of weights are such inputs. Inductor fuses a cast with the copy of its result, but it does not fuse a
concatenation with its copy, nor, up to torch 2.11, a view with its copy: both were written to a temporary and copied.
A materialized source would be stored twice. ``write_`` is a ``copy_`` whose source Inductor does not store first: it
stored the columnwise copy of tiles along rows, and then transposed it.
Runs after ``lower``. Refuses (keeps) a copy into a tensor that is not contiguous, and one whose source has other
readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import fx

from fp8graph.compat.inductor import erase_unused
from fp8graph.ir.edit import insert
from fp8graph.ir.nodes import SAME_VALUES, aten, known_contiguous, known_equal, nodes, static_size, value
from fp8graph.numerics.hints import ARRANGE, MATERIALIZE, WRITE


def write(graph: fx.Graph) -> None:
    for node in list(nodes(graph, (aten.copy_.default,))):
        buffer, source = cast("tuple[fx.Node, fx.Node]", node.args[:2])
        only_written = buffer.op == "placeholder" and [*buffer.users] == [node]
        if only_written and not node.users and known_contiguous(value(buffer)) and _same_kind(buffer, source):
            if _write(graph, buffer, source, node):
                graph.erase_node(node)
    erase_unused(graph)


def _same_kind(a: fx.Node, b: fx.Node) -> bool:
    return value(a).dtype == value(b).dtype and all(map(known_equal, value(a).shape, value(b).shape))


def _write(graph: fx.Graph, target: fx.Node, source: fx.Node, like: fx.Node) -> bool:
    """Copy ``source`` into ``target``, a view of the input, in parts. Returns False if ``source`` has no parts."""
    if source.op != "call_function" or len(source.users) != 1:
        return False
    if source.target in SAME_VALUES and known_contiguous(value(target)):
        inner = cast(fx.Node, source.args[0])
        _copy(graph, _view(graph, target, aten.view.default, list(value(inner).shape), like=like), inner, like)
        return True
    if source.target is MATERIALIZE:  # so is what is copied
        _copy(graph, target, cast(fx.Node, source.args[0]), like)
        return True
    if source.target in (aten.cat.default, ARRANGE):
        parts = cast(Sequence[fx.Node], source.args[0])
        dim = cast(int, source.args[1] if len(source.args) > 1 else 0)
        if any(static_size(value(part).shape[dim]) is None for part in parts):
            return False
        start = 0
        for part in parts:
            end = start + value(part).shape[dim]
            _copy(graph, _view(graph, target, aten.slice.Tensor, dim, start, end, like=like), part, like)
            start = end
        return True
    return False


def _view(graph: fx.Graph, target: fx.Node, operation: Any, *args: Any, like: fx.Node) -> fx.Node:
    last = target if target.op == "call_function" else graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        return insert(graph, operation, (target, *args), like=like)


def _copy(graph: fx.Graph, target: fx.Node, part: fx.Node, like: fx.Node) -> None:
    """Insert the copy right behind its part, so that Inductor puts both into one loop."""
    if not _write(graph, target, part, like):
        with graph.inserting_after(part):
            insert(graph, WRITE, (target, part), like=like)
