"""What a node is: its value, its direction, its readers; which ops are matmuls and views."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, cast

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8graph.compat.ops import OpOverload, schema
from fp8graph.ir import ops
from fp8graph.ir.keys import NO_GRAD_KEY

aten = torch.ops.aten

# Matmuls that quantize rewrites, and those that are only reported.
MATMULS: Final = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
GROUPED: Final = (aten._grouped_mm.default, ops.grouped_mm)
SITES: Final = (*MATMULS, *GROUPED)
FORWARD: Final = "is_forward"
BACKWARD: Final = "is_backward"
SAME_VALUES: Final = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_OF_ANY_STRIDES: Final = ("aten", "prims", "fp8graph")


def value(node: fx.Node) -> torch.Tensor:
    """The fake tensor that stands for ``node``: shape, strides, dtype, device."""
    return cast(torch.Tensor, node.meta["val"])


def is_backward(node: fx.Node) -> bool:
    """Whether the joint graph's node belongs to backward."""
    return "backward" in str(node.meta.get("partitioner_tag", ""))


def runs_without_gradients(node: fx.Node) -> bool:
    """Whether the node comes from a ``torch.no_grad`` region of a graph that runs with gradients."""
    return bool((node.meta.get("custom") or {}).get(NO_GRAD_KEY))


def backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of backward: tagged so, or computed from the gradients of the outputs.

    The backward of a custom autograd function carries no backward tag.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_gradient = node.op == "placeholder" and str(node.target).startswith("tangents")
        if is_gradient or is_backward(node) or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def static_size(size: int | torch.SymInt) -> int | None:
    """The size if it is static, else None. Never adds a guard."""
    return size if isinstance(size, int) else None


def size_hint(size: int | torch.SymInt) -> int:
    """The size, or the one that a dynamic size had when it was traced. Never adds a guard."""
    return size if isinstance(size, int) else int(size.node.hint or 1)


def known_equal(a: Any, b: Any) -> bool:
    """Whether two sizes are equal in every run. Never adds a guard."""
    return isinstance(a == b, bool) and a == b or statically_known_true(a == b)


def fake_mode_of(node: fx.Node) -> Any:
    """The FakeTensorMode that ``node``'s value lives in (several outputs share one)."""
    val = node.meta["val"]
    return cast(Any, val[0] if isinstance(val, (list, tuple)) else val).fake_mode


def is_view(node: fx.Node) -> bool:
    """Whether the value of ``node`` is a view of its first argument (or may be: reshape)."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    returns = schema(node.target).returns
    aliases = [a.alias_info for a in returns if a.alias_info is not None and not a.alias_info.is_write]
    return bool(aliases) or node.target in SAME_VALUES


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads ``node``, through views."""
    for user in node.users:
        yield from readers(user) if is_view(user) else (user,)


def strides_matter(node: fx.Node) -> bool:
    """Whether ``node`` leaves the graph, or an op that is not torch's own reads it: both expect the strides it had."""
    return any(getattr(reader.target, "namespace", "") not in _OF_ANY_STRIDES for reader in readers(node))


def module_path(node: fx.Node) -> str:
    """The FQN of the module that ``node`` was traced in, relative to the frame; "" at the root."""
    stack = cast(
        "Mapping[str, tuple[str, Any]] | None",
        node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack"),
    )
    return list(stack.values())[-1][0] if stack else ""


def matmul_arguments(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """``(a, b)`` of a matmul node: addmm and baddbmm have the bias before them, grouped matmuls the offsets after."""
    a, b = cast(tuple[fx.Node, ...], node.args[:2] if node.target in GROUPED else node.args[-2:])
    return a, b


def nodes(graph: fx.Graph, targets: Iterable[Any]) -> Iterator[fx.Node]:
    """The call_function nodes with one of ``targets``, in order."""
    wanted = set(targets)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in wanted:
            yield node
