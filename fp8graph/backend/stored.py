"""Store the findings of the passes beside torch's compiled code.

With a warm compile cache no pass runs, yet the report must be right, and the inputs of the code must be known.

There is one file per graph, in Inductor's cache folder, named by a hash of all that decides about the graph. The files
travel with torch's code in ``torch.compiler.save_cache_artifacts``. They are pickles (like everything that torch keeps
there): whoever can write to the folder can run code.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from fp8graph.compat import cache_artifacts, inductor
from fp8graph.compat.fakes import FakeTensorMode
from fp8graph.compat.ops import OpOverload
from fp8graph.ir.compilation import Findings
from fp8graph.ir.keys import PASS_KEY
from fp8graph.report import GraphView

# raised by reading a damaged file or the pickle of another version
_DAMAGED: Final = (LookupError, ValueError, TypeError, AttributeError, EOFError, pickle.PickleError, ImportError)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One graph: its report, and what the passes found in it."""

    view: GraphView
    findings: Findings

    def write(self, key: str) -> None:
        """Write it for other processes. If it cannot be written, they trace the graph again and find the same."""
        with contextlib.suppress(OSError, pickle.PicklingError, TypeError, AttributeError):
            findings = base64.b64encode(_dumped(self.findings)).decode()
            content = json.dumps(self.view.to_dict() | {"findings": findings}).encode()
            cache_artifacts.record(key, content)
            _write(key, content)


def read(key: str) -> Stored | None:
    """The findings stored under ``key``; None if there are none, or the file is damaged."""
    with contextlib.suppress(OSError, *_DAMAGED):
        content = _path(key).read_bytes()
        values = json.loads(content)
        findings = pickle.loads(base64.b64decode(values.pop("findings")))
        stored = Stored(view=GraphView.from_dict(values), findings=findings)
        cache_artifacts.record(key, content)
        return stored
    return None


def _path(key: str) -> Path:
    return inductor.inductor_cache_folder() / "fp8graph" / f"{key}.json"


def _write(key: str, content: bytes) -> None:
    """Write atomically: another process may read or write the same file."""
    path = _path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def _write_loaded(key: str, content: bytes) -> None:
    """Write what came with torch's cache artifacts. If it cannot be written, the graph is traced again."""
    with contextlib.suppress(OSError):
        _write(key, content)


cache_artifacts.register(_write_loaded)


class _Pickler(pickle.Pickler):
    """Pickles dialect graphs, which hold fake tensors and ops, as plain values."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, fx.Graph):
            return _graph_of, (_lines(obj),)
        if isinstance(obj, OpOverload):
            return _op_of, tuple(str(obj).split("."))
        return NotImplemented


def _dumped(findings: Findings) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(findings)
    return stream.getvalue()


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
