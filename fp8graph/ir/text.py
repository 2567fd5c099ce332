"""A graph as text: one line per node."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import fx

from fp8graph.compat.ops import schema
from fp8graph.ir.naming import split_source
from fp8graph.ir.nodes import is_backward, module_path

_SHORT: Final = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2fnuz: "e5m2fnuz",
}


def _short(dtype: torch.dtype) -> str:
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def _type_text(val: Any) -> str:
    if isinstance(val, torch.Tensor):
        return f"{_short(val.dtype)}[{', '.join(str(size) for size in val.shape)}]"
    if isinstance(val, (list, tuple)):
        return f"({', '.join(_type_text(v) for v in cast(Sequence[Any], val))})"
    return type(val).__name__


def _argument_text(argument: Any) -> str:
    if isinstance(argument, (list, tuple)):
        items = ", ".join(_argument_text(a) for a in cast(Sequence[Any], argument))
        return f"[{items}]" if isinstance(argument, list) else f"({items})"
    return _short(argument) if isinstance(argument, torch.dtype) else str(argument)


@functools.cache
def _argument_names(op: Any) -> list[str]:
    """``name=`` for the settings of a dialect op; its tensors need no name."""
    return ["" if str(a.type) == "Tensor" else f"{a.name}=" for a in schema(op).arguments]


class GraphText:
    """Writes the text of one graph again and again while passes change it; only changed lines are made anew."""

    def __init__(self) -> None:
        self._lines: dict[
            fx.Node, tuple[Any, Any, Any, str]
        ] = {}  # node -> the values that its line was made from, the line

    def __call__(self, graph: fx.Graph) -> str:
        """Return one line per node: ``name: dtype[shape] = op(args)``. Joint graphs mark where backward begins."""
        lines: list[str] = []
        in_backward = False
        for node in graph.nodes:
            if node.op == "output":
                results = node.args[0]  # a single node in some subgraphs, such as flex_attention's score_mod
                listed = cast(Sequence[Any], results if isinstance(results, (list, tuple)) else [results])
                lines.append(f"return {', '.join(map(_argument_text, listed))}")
                continue
            if not in_backward and node.op != "placeholder" and is_backward(node):
                in_backward = True
                lines.append("# backward")
            lines.append(self._line(node))
        return "\n".join(lines)

    def _line(self, node: fx.Node) -> str:
        args, kwargs, val = node.args, node.kwargs, node.meta.get("val")
        entry = self._lines.get(node)
        if entry is None or entry[0] is not args or entry[1] is not kwargs or entry[2] is not val:
            self._lines[node] = entry = args, kwargs, val, _line(node)
        return entry[3]


def _line(node: fx.Node) -> str:
    left = f"{node.name}: {_type_text(node.meta.get('val'))}"
    if node.op == "placeholder":
        return left
    target = str(node.target) if node.op == "call_function" else f"{node.op} {node.target}"
    if node.target is operator.getitem:
        return f"{left} = {node.args[0]}[{node.args[1]}]"
    target = target.removeprefix("torch.ops.").removesuffix(".default")
    names = _argument_names(node.target) if target.startswith("fp8graph.") else [""] * len(node.args)
    arguments = [name + _argument_text(a) for name, a in zip(names, node.args, strict=False)]  # the rest are kwargs
    arguments += [f"{key}={_argument_text(v)}" for key, v in node.kwargs.items()]
    path = split_source(module_path(node))[1] if target.endswith("mm") else ""
    path = path if path.isprintable() else repr(path)[1:-1]  # a line stays one
    return f"{left} = {target}({', '.join(arguments)})" + (f"  # {path}" if path else "")


def short(dtype: torch.dtype) -> str:
    """Return a dtype as reports write it: e4m3, bf16, fp32."""
    name = str(dtype).removeprefix("torch.").removeprefix("float8_")
    return {"e4m3fn": "e4m3", "bfloat16": "bf16"}.get(name, name.replace("float", "fp"))
