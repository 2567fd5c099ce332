"""Store the findings of the passes in torch's compile cache.

With a warm compile cache no pass runs, yet the report must be right, and the inputs of the code must be known.

They are bytes inside torch's own entry of the graph (``compat/aot.py``), behind their checksum. So whoever gets
the code gets the findings of the very passes that it was generated from, and no key is made here that could read less
than torch's does. They are pickled, like all that torch keeps there: whoever can write to its folder can run code.
"""

from __future__ import annotations

import hashlib
import io
import logging
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from fp8graph.compat.fakes import FakeTensorMode
from fp8graph.compat.ops import OpOverload
from fp8graph.ir.compilation import Findings
from fp8graph.ir.nodes import PASS_KEY
from fp8graph.report import GraphView

_log = logging.getLogger("fp8graph")


def dumped(view: GraphView, findings: Findings) -> bytes | None:
    """Return the entry of one graph as bytes, for other processes.

    None if it cannot be pickled, and they trace the graph again.
    """
    stream = io.BytesIO()
    try:
        _Pickler(stream).dump((view.to_dict(), findings))
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:  # the last is pybind11's
        _log.debug("The findings in %s are not cached: %s", view.name, error)
        return None
    packed = zlib.compress(stream.getvalue())
    return hashlib.sha256(packed).digest() + packed


def loaded(content: bytes) -> tuple[GraphView, Findings] | None:
    """Return the inverse of :func:`dumped`; None if the bytes are damaged or another version wrote them."""
    checksum, packed = content[:_CHECKSUM], content[_CHECKSUM:]
    if hashlib.sha256(packed).digest() != checksum:
        _log.debug("The findings in torch's compile cache are damaged: the graph is traced again.")
        return None
    try:
        view, findings = pickle.loads(zlib.decompress(packed))
        return GraphView.from_dict(view), findings
    except Exception as error:  # whatever unpickling raises: the bytes are whole, but say something else here
        _log.debug("The findings in torch's compile cache cannot be read, and the graph is traced again: %r", error)
        return None


_CHECKSUM: Final = hashlib.sha256().digest_size


class _Pickler(pickle.Pickler):
    """Pickles dialect graphs, which hold fake tensors and ops, as plain values."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, fx.Graph):
            return _graph_of, (_lines(obj),)
        if isinstance(obj, OpOverload):
            return _op_of, tuple(str(obj).split("."))
        return NotImplemented


def _op_of(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


@dataclass(frozen=True)
class _Reference:
    """A node, as an argument of another one."""

    name: str


def _reference(node: fx.Node) -> Any:
    return _Reference(node.name)


_Line = tuple[str, str, Any, Any, Any, Any, dict[str, Any]]  # op, name, target, args, kwargs, value, metadata
_KEPT: Final = (PASS_KEY,)  # metadata that ``ir/verify.py`` checks


def _lines(graph: fx.Graph) -> list[_Line]:
    return [
        (
            node.op,
            node.name,
            node.target,
            *(fx.map_arg(x, _reference) for x in (node.args, node.kwargs)),
            _shapes(node.meta.get("val")),
            {key: node.meta[key] for key in _KEPT if key in node.meta},
        )
        for node in graph.nodes
    ]


def _shapes(val: Any) -> Any:
    if isinstance(val, torch.Tensor):
        return val.dtype, tuple(val.shape), val.stride(), val.device
    return [_shapes(x) for x in val] if isinstance(val, (list, tuple)) else None


def _graph_of(lines: Sequence[_Line]) -> fx.Graph:
    graph, nodes = fx.Graph(), dict[str, fx.Node]()

    def resolved(argument: Any) -> Any:
        if isinstance(argument, _Reference):
            return nodes[argument.name]
        if isinstance(argument, (list, tuple)):
            return type(argument)(map(resolved, argument))
        return {k: resolved(v) for k, v in argument.items()} if isinstance(argument, dict) else argument

    with FakeTensorMode():
        for op, name, target, args, kwargs, shapes, metadata in lines:
            node = nodes[name] = graph.create_node(op, target, resolved(args), resolved(kwargs), name=name)
            node.meta.update(metadata)
            if shapes is not None:
                node.meta["val"] = _fake(shapes)
    return graph


def _fake(shapes: Any) -> Any:
    if isinstance(shapes, list):
        return [_fake(one) for one in shapes]
    dtype, size, stride, device = shapes
    return torch.empty_strided(size, stride, dtype=dtype, device=device)
