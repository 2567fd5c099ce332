"""Let what a GPU adds up for a token add up in one order whatever the batch.

    y = sum(x, dims) | mean(x, dims)            ->      y = ordered_sum(x, dims, ...)
    v, m = var_mean(x, dims)                    ->      v, m = ordered_var_mean(x, dims, ...)
    y = index_put(x, i, v, accumulate=True)     ->      y = ordered_index_put(x, i, v, True)

With ``batch_invariant=True``, on GPUs. There the size of a loop's blocks, and whether several programs share a sum,
depend on the number of rows, in code that Inductor generates and in aten's kernels (torch 2.15's option
``batch_invariant`` fixes those loops alone whose whole sum is one block). The ops are a Triton kernel of one
configuration, and aten's kernel for indices, which sorts them and adds in their order; Inductor's adds by atomics.
Amaxes have no order and stay with Inductor, as do sums over the first dim in backward, which are those of weights.

Refuses (raises) what may add up in any other way: every op that is not known to compute each number by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any, Final

import torch
from torch import Tensor, fx

from fp8graph.compat.ops import OpOverload, named_arguments, schema
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import insert, take_place, update_value, update_views
from fp8graph.ir.naming import split_source
from fp8graph.ir.nodes import aten, is_backward, is_view, known_equal, module_path, value
from fp8graph.ir.ops import define
from fp8graph.numerics import invariant
from fp8graph.passes.batch_invariance.fix_order import refuse, weight_gradients


def sums_on_gpu(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether the user wants one order, and the graph is for a GPU."""
    if not compilation.facts.settings.batch_invariant:
        return False
    tensors = (node for node in graph.nodes if isinstance(node.meta.get("val"), Tensor))
    return any(compilation.hardware_of(node).is_gpu for node in tensors)


def fix_sums(graph: fx.Graph, compilation: Compilation) -> None:
    doubtful: list[str] = []
    left = weight_gradients(graph, compilation)
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        if (make := _ORDERED.get(node.target)) is not None and _is_of_a_token(node):
            with graph.inserting_before(node):
                target, args = make(named_arguments(node))
                _take_place(graph, insert(graph, target, args, like=node), node)
        elif node not in left and not _is_by_itself(node):
            layer = split_source(module_path(node))[1] or "the model"
            doubtful.append(f"{layer}: {node.target} may add up in another order in another batch")
    refuse(doubtful)


def _is_of_a_token(node: fx.Node) -> bool:
    """Return whether the result may be that of a token: all but integers, sums of everything, and those of weights."""
    x = node.args[0]
    if not isinstance(x, fx.Node) or not value(x).is_floating_point():
        return False
    given = named_arguments(node)
    if "accumulate" in given or "indices" in given:
        return bool(given.get("accumulate", True))
    dims = [dim % max(value(x).ndim, 1) for dim in given["dim"] or ()]
    if not dims or len(dims) == value(x).ndim:
        return False
    return not (is_backward(node) and 0 in dims and not known_equal(value(x).shape[0], 1))


def _is_by_itself(node: fx.Node) -> bool:
    """Return whether each number of the result is computed by itself, moved, or the same in any order."""
    target, out = node.target, node.meta.get("val")
    results = out if isinstance(out, tuple | list) else [out]
    if not any(isinstance(x, Tensor) and x.is_floating_point() and x.ndim for x in results):
        return True  # integers, sizes, checks, and what is not a token's
    if not isinstance(target, OpOverload):
        return target is getitem  # others run graphs, or kernels of other libraries
    if target.namespace in ("fp8graph", "fp8graph_hints", "_c10d_functional") or target in _ORDERED:
        return True
    if torch.Tag.pointwise in target.tags or is_view(node) or target in _MOVES or target in _ANY_ORDER:
        return True
    return known_equal(_depth(node), 1)


def _depth(node: fx.Node) -> Any:
    """Return the number of products that are added for each number of a batched matmul."""
    return value(node.all_input_nodes[0]).shape[-1] if node.target is aten.bmm.default else 0


def _take_place(graph: fx.Graph, made: fx.Node, node: fx.Node) -> None:
    if isinstance(node.meta.get("val"), Tensor):
        take_place(made, node)
        return
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    for user in made.users:
        assert user.target is getitem, user.format_node()
        update_value(user)
        update_views(user)


def _of_sum(given: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    return ordered_sum, (given["self"], given["dim"], given.get("keepdim", False), given.get("dtype"), False)


def _of_mean(given: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    return ordered_sum, (given["self"], given["dim"], given.get("keepdim", False), given.get("dtype"), True)


def _of_var_mean(given: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    correction = given.get("correction")
    return ordered_var_mean, (given["self"], given["dim"], 1 if correction is None else correction, given["keepdim"])


def _shape_of_sum(x: Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype | None, _mean: bool) -> Tensor:
    return x.new_empty(_reduced(x, dims, keepdim), dtype=dtype or x.dtype)


def _shape_of_var_mean(x: Tensor, dims: list[int], _correction: float, keepdim: bool) -> tuple[Tensor, Tensor]:
    shape = _reduced(x, dims, keepdim)
    return x.new_empty(shape), x.new_empty(shape)


def _shape_of_first(x: Tensor, *_arguments: Any) -> Tensor:
    return torch.empty_like(x)


def _reduced(x: Tensor, dims: list[int], keepdim: bool) -> list[Any]:
    last = {dim % x.ndim for dim in dims}
    sizes = [1 if dim in last else size for dim, size in enumerate(x.shape)]
    return sizes if keepdim else [size for dim, size in enumerate(sizes) if dim not in last]


ordered_sum = define(
    "ordered_sum",
    reference=invariant.add_up,
    fake=_shape_of_sum,
    lowered=False,
)
ordered_var_mean = define(
    "ordered_var_mean",
    reference=invariant.spread,
    fake=_shape_of_var_mean,
    lowered=False,
    contiguous=False,
)


def _opaque(name: str, op: Any) -> Callable[[dict[str, Any]], tuple[Any, tuple[Any, ...]]]:
    """Return what makes a node of an op that runs aten's own kernel, which Inductor does not generate."""
    own = define(
        name,
        str(schema(op)).removeprefix(schema(op).name),
        reference=op,
        fake=_shape_of_first,
        lowered=False,
        contiguous=False,
    )
    return lambda given: (own, tuple(given.values()))


# The ops that have an ordered form, and the function that gives its op and arguments.
_ORDERED: Final = {
    aten.sum.dim_IntList: _of_sum,
    aten.mean.dim: _of_mean,
    aten.var_mean.correction: _of_var_mean,
    aten.index_put.default: _opaque("ordered_index_put", aten.index_put.default),
    aten._unsafe_masked_index_put_accumulate.default: _opaque(
        "ordered_masked_index_put", aten._unsafe_masked_index_put_accumulate.default
    ),
}
_ANY_ORDER: Final = frozenset(
    (aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim, aten.argmax.default, aten.any.dim, aten.all.dim)
)
_MOVES: Final = frozenset(
    (
        *(aten.cat.default, aten.clone.default, aten.constant_pad_nd.default, aten.embedding.default),
        *(aten.empty.memory_format, aten.full.default, aten.full_like.default, aten.gather.default, aten.index.Tensor),
        *(aten.index_select.default, aten.lift_fresh_copy.default, aten.repeat.default, aten.scalar_tensor.default),
        *(aten.scatter.src, aten.scatter.value, aten.select_scatter.default, aten.slice_scatter.default),
        *(aten.sort.default, aten.sort.stable, aten.topk.default, aten.copy.default, aten.flip.default),
        *(aten.histc.default, torch.ops.prims.iota.default),  # counts are exact
    )
)
