"""Questions about nodes: value, direction, readers, whether one is a matmul or a view, whether two hold one tensor.

Passes leave each other notes in a node's metadata: all their keys are here, but the one of ``recipes/autocast.py`` for
the regions of the user's code.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.nn import functional

from fp8graph.compat.ops import OpOverload, schema
from fp8graph.ir import collectives, ops
from fp8graph.recipes import GemmName

aten = torch.ops.aten
CONVERT: Final = torch.ops.prims.convert_element_type.default
CASTS: Final = (CONVERT, aten._to_copy.default)

# Matmuls that the pass `quantize` rewrites, and those that are only reported.
MATMULS: Final = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
GROUPED: Final = (aten._grouped_mm.default, ops.grouped_mm)
SITES: Final = (*MATMULS, *GROUPED)
BACKWARD: Final = "is_backward"
SAME_VALUES: Final = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_OF_ANY_STRIDES: Final = ("aten", "prims", "fp8graph")
_TRANSPOSES: Final = (aten.permute.default, aten.transpose.int, aten.t.default)
# The ops with which DTensor gathers shards. If the dim is not the first, it moves the parts there afterwards.
_GATHERS: Final = (collectives.ALL_GATHER, collectives.WAIT, aten.split.Tensor, operator.getitem, aten.cat.default)
_PURE_VIEWS: Final = (  # the same elements in the same order
    *SAME_VALUES,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.alias.default,
    aten.detach.default,
)

# All keys of metadata.
NOT_KEPT_KEY: Final = "fp8graph_not_kept"  # node.meta of quantize: why a weight gathered for the graph is not kept
GATHERED_KEY: Final = "fp8graph_gathered"  # node.meta of an all-gather of a quantized tensor: Gathered
PURPOSE_KEY: Final = "fp8graph_purpose"  # node.meta of a collective that a pass added: its purpose
OPERAND_KEY: Final = "fp8graph_operand"  # node.meta of a quantize node: the operand's name
USES_KEY: Final = "fp8graph_uses"  # node.meta of a quantize node whose scales are kept between calls: its Uses
TAKEN_KEY: Final = "fp8graph_taken"  # node.meta of a spare input that a pass took
CACHED_KEY: Final = "fp8graph_cached"  # node.meta of a quantize node that runs outside the graph
NO_GRAD_KEY: Final = "fp8graph_no_grad"  # in node.meta["custom"]: the node runs without gradients
GEMM_KEY: Final = "fp8graph_gemm"  # node.meta: the GEMM that the node belongs to, (index of its site, its name)
PASS_KEY: Final = "fp8graph_pass"  # node.meta: the pass that made the node; "" while it runs
DECIDED_KEY: Final = "fp8graph_decided"  # node.meta: the joint pipeline has seen the node
NAMES_KEY: Final = "fp8graph_names"  # node.meta after lowering: names of the nodes before it that the node computes
REPORT_KEY: Final = "fp8graph_report"  # module.meta of a graph that another compiler traced: the report on it
TEXT_KEY: Final = "fp8graph_text"  # module.meta of a partitioned graph: the joint graph's text after all passes


def value(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor of ``node``: its shape, strides, dtype and device."""
    return cast(torch.Tensor, node.meta["val"])


def is_backward(node: fx.Node) -> bool:
    """Return whether the joint graph's node belongs to backward: the gradients of the outputs, and what is tagged so.

    The tag of another input says nothing: in the body of a higher-order op all of them have that of backward.
    """
    if node.op == "placeholder":
        return str(node.target).startswith("tangents")
    return "backward" in str(node.meta.get("partitioner_tag", ""))


def runs_without_gradients(node: fx.Node) -> bool:
    """Return whether the node comes from a ``torch.no_grad`` region of a graph that runs with gradients."""
    return bool((node.meta.get("custom") or {}).get(NO_GRAD_KEY))


def backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes of backward: tagged so, or computed from the gradients of the outputs.

    The backward of a custom autograd function carries no backward tag.
    """
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        if is_backward(node) or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    return backward


def static_size(size: int | torch.SymInt) -> int | None:
    """Return the size if it is static, else None. Never adds a guard."""
    return size if isinstance(size, int) else None


def size_hint(size: int | torch.SymInt) -> int:
    """Return the size, or for a dynamic size the one that was traced. Never adds a guard."""
    return size if isinstance(size, int) else int(size.node.hint or 1)


def known_at_run_time_only(size: int | torch.SymInt) -> bool:
    """Give whether the data decide the size (an unbacked one: rows that a mask selects): no run was traced with it."""
    return not isinstance(size, int) and bool(free_unbacked_symbols(size))


def known_equal(a: Any, b: Any) -> bool:
    """Return whether two sizes are equal in every run. Never adds a guard."""
    return isinstance(a == b, bool) and a == b or statically_known_true(a == b)


def known_at_most(size: int | torch.SymInt, most: int) -> bool:
    """Return whether a size is no larger in any run. Never adds a guard."""
    return size <= most if isinstance(size, int) else statically_known_true(size <= most)


def known_contiguous(x: torch.Tensor) -> bool:
    """Give whether ``x`` is contiguous in every run. Never adds a guard, where ``x.is_contiguous()`` does or raises."""
    if all(isinstance(size, int) for size in (*x.shape, *x.stride())):
        return x.is_contiguous()
    dense: list[Any] = [1, 1]  # with sizes as they are, and at least 1: strides of torch have one or the other
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if not known_equal(size, 1) and not any(known_equal(stride, right) for right in dense):
            return any(static_size(size) == 0 for size in x.shape)
        dense = [dense[0] * size, dense[1] * torch.sym_max(size, 1)]
    return True


def fake_mode_of(node: fx.Node) -> Any:
    """Return the FakeTensorMode that ``node``'s value lives in (several outputs share one)."""
    val = node.meta["val"]
    return cast(Any, val[0] if isinstance(val, (list, tuple)) else val).fake_mode


def is_view(node: fx.Node) -> bool:
    """Return whether the value of ``node`` is a view of its first argument (or may be: reshape)."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    returns = schema(node.target).returns
    aliases = [a.alias_info for a in returns if a.alias_info is not None and not a.alias_info.is_write]
    return bool(aliases) or node.target in SAME_VALUES


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read ``node``, directly or through views."""
    for user in node.users:
        yield from readers(user) if is_view(user) else (user,)


def strides_matter(node: fx.Node) -> bool:
    """Give whether ``node`` leaves the graph or is read by an op of another library: both expect the strides it had."""
    return any(getattr(reader.target, "namespace", "") not in _OF_ANY_STRIDES for reader in readers(node))


def module_path(node: fx.Node) -> str:
    """Return the FQN of the module that ``node`` was traced in, relative to the frame; "" at the root."""
    stack = cast(
        "Mapping[str, tuple[str, Any]] | None",
        node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack"),
    )
    return list(stack.values())[-1][0] if stack else ""


def _written_as(node: fx.Node) -> tuple[str, Any]:
    """Return the name and the function or module class of the call that became ``node``, as Dynamo knows it."""
    stack = cast("list[tuple[str, Any]]", node.meta.get("source_fn_stack") or [("", None)])
    return stack[-1]


def takes_gradient(node: fx.Node) -> str:
    """Return the library that computes a gradient by ``node`` inside the program; "" if none does.

    That is torch.func, for its grad, vjp and jacrev, or torch.autograd, for its grad and for ``backward``.
    """
    name, source = _written_as(node)
    of_func = name.startswith("_autograd_grad")
    return "torch.func" if of_func else "torch.autograd" if source is torch.autograd.grad else ""


def written_as_linear(node: fx.Node) -> bool:
    """Return whether the program wrote the matmul ``node`` as a linear: a Linear module, F.linear, addmm with
    ``w.t()``.

    Its right operand is a weight then, wherever that comes from: an argument, a parametrization that reads buffers, a
    parameter under torch.func, the body of a higher-order op, whose inputs do not say what they are.
    """
    _, source = _written_as(node)
    if source in (torch.addmm, torch.Tensor.addmm, "addmm"):
        return cast(fx.Node, node.args[-1]).target in (aten.t.default, aten.permute.default)
    return source is functional.linear or (isinstance(source, type) and issubclass(source, torch.nn.Linear))


def matmul_arguments(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """``(a, b)`` of a matmul node: addmm and baddbmm have the bias before them, grouped matmuls the offsets after."""
    a, b = cast(tuple[fx.Node, ...], node.args[:2] if node.target in GROUPED else node.args[-2:])
    return a, b


def nodes(graph: fx.Graph, targets: Iterable[Any]) -> Iterator[fx.Node]:
    """Yield the call_function nodes with one of ``targets``, in order."""
    wanted = set(targets)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in wanted:
            yield node


def in_order(unordered: Iterable[fx.Node]) -> list[fx.Node]:
    """Nodes of one graph in its order, without reading the whole graph."""
    return sorted(cast("Iterable[Any]", unordered))


def swaps_last_dims(node: fx.Node) -> bool:
    """Return whether ``node`` is a transpose of the last two dims: t, transpose or permute."""
    if node.target not in _TRANSPOSES:
        return False
    ndim = value(cast(fx.Node, node.args[0])).ndim
    swapped = [*range(ndim - 2), ndim - 1, ndim - 2]
    if node.target is aten.permute.default:
        return [d % ndim for d in cast(Sequence[int], node.args[1])] == swapped
    if node.target is aten.transpose.int:
        return {cast(int, d) % ndim for d in node.args[1:3]} == {ndim - 1, ndim - 2}
    return node.target is aten.t.default and ndim == 2


def look_through_transposes(node: fx.Node) -> tuple[fx.Node, bool]:
    """Return the tensor under any number of transposes of the last two dims, and whether it arrives transposed.

    The weight of a linear is ``permute(w)`` in forward and ``permute(permute(w))`` in dgrad.
    """
    transposed = False
    while True:
        if node.op == "call_function" and node.target in (aten.alias.default, aten.detach.default):
            node = cast(fx.Node, node.args[0])
        elif swaps_last_dims(node):
            node, transposed = cast(fx.Node, node.args[0]), not transposed
        else:
            return node, transposed


def value_key(node: fx.Node) -> Any:
    """Return a key equal for nodes that certainly hold the same tensor, seen through views and repeated casts.

    ``view(h, [M, K])``, made once each for q, k and v, is one tensor; so is ``h.to(bf16)``, which torch.autocast makes
    for each of them.
    """
    shape = tuple(str(size) for size in value(node).shape)
    return shape, _origin(node)


def _key(node: fx.Node) -> Any:
    return value_key(node) if isinstance(node.meta["val"], torch.Tensor) else _origin(node)  # split: several outputs


def _origin(node: fx.Node) -> Any:
    while node.op == "call_function" and node.target in _PURE_VIEWS:
        node = cast(fx.Node, node.args[0])
    if node.op == "call_function" and node.target is CONVERT:
        return "cast", node.args[1], _origin(cast(fx.Node, node.args[0]))
    if node.op == "call_function" and node.target is aten.permute.default:
        source = cast(fx.Node, node.args[0])
        return "permute", str(node.args[1]), value_key(source)
    if node.op == "call_function" and node.target in _GATHERS:  # q, k and v each gather the same shards
        return str((node.target, fx.map_arg(node.args, lambda n: repr(_key(n)))))
    return node


def gemms_behind(quantized: fx.Node) -> list[tuple[int, GemmName]]:
    """``(position of the site, gemm)`` of each GEMM that reads a quantize node, through collectives and slices too.

    Of an emulated GEMM, the node that decodes for it is found.
    """
    gemms: dict[tuple[int, GemmName], None] = {}
    pending, seen = [user for output in quantized.users for user in output.users], set[fx.Node]()
    while pending:
        node = pending.pop(0)
        if node in seen:
            continue
        seen.add(node)
        if GEMM_KEY in node.meta:
            gemms[node.meta[GEMM_KEY]] = None
        else:
            pending.extend(node.users)
    return list(gemms)
