"""The origin of each node of a graph: its module, its line in the model's code, its direction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Final

import torch
from torch import fx

from fp8graph.ir.nodes import backward_nodes, module_path
from fp8graph.ir.sources import split_source
from fp8graph.records import Origin

_FRAME: Final = re.compile(r'File "([^"]*)", line (\d+), in [^\n]*\n[ ]*([^\n]*)')
_LENGTH: Final = 160  # of a line of code


def add_origins(found: dict[str, Origin], graph: fx.Graph) -> None:
    """Add the nodes of ``graph`` whose names are not in ``found``.

    A sum of gradients belongs to no module by itself: it gets the module of the last gradient that has one.
    """
    new = [node for node in graph.nodes if node.name not in found]
    if not new:
        return
    in_backward = backward_nodes(graph)
    lines: dict[str, str] = {}  # by stack trace: many nodes have the same
    for node in new:
        module, backward = split_source(module_path(node))[1], node in in_backward
        if not module and backward and node.target is torch.ops.aten.add.Tensor:
            given = (
                found[source.name].module for source in reversed(node.all_input_nodes) if source.op != "placeholder"
            )
            module = next(filter(None, given), "")
        trace = str(node.meta.get("stack_trace") or "")
        if trace not in lines:
            lines[trace] = source_line(trace)
        found[node.name] = Origin(module=module, source=lines[trace], backward=backward)


def input_origins(names: Mapping[fx.Node, str | None]) -> dict[str, Origin]:
    """The inputs of a graph, by their names in the report; None: nobody took this spare input."""
    found: dict[str, Origin] = {}
    for node, text in names.items():
        root, path = split_source(text or "")
        found[node.name] = Origin(module=path or root, source="", backward=str(node.target).startswith("tangents"))
    return found


def source_line(trace: str) -> str:
    """The innermost line of a stack trace outside of torch, as "models/llama.py:65 x = x * torch.rsqrt(variance)"."""
    frames = _FRAME.findall(trace)
    outside = [frame for frame in frames if "torch" not in PurePath(frame[0]).parts] or frames
    if not outside:
        return ""
    file, line, code = outside[-1]
    path = PurePath(file).parts
    start = path.index("site-packages") + 1 if "site-packages" in path else max(0, len(path) - 2)
    return f"{'/'.join(path[start:])}:{line} {code[:_LENGTH]}"
