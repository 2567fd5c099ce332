"""Find every node of a graph that multiplies matrices, whoever wrote it: its kind, FLOPs, operands and dtypes.

A product is

- an op that torch counts FLOPs of, or that multiplies by its name (``compat/products.py``);
- an op of another library that reads a weight, a tensor of two or more dims that is computed from parameters alone, or
  FP8 or int8 numbers of two or more dims, and beside them numbers of two or more dims: nobody can count its FLOPs,
  unless they are registered. So it is with a Triton kernel, and with the op's backward, whose result has the sizes of
  a weight;
- the sum of products that a decomposition makes of a matrix and a vector.

An op that reads a weight and its scales alone decodes it, and multiplies nothing. So does an op that rotates by a table
of cosines, of the sizes of what it rotates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import fx

from fp8graph.compat.ops import OpOverload, named_arguments, schema
from fp8graph.compat.products import is_of_torch, operation_of, was_product
from fp8graph.ir.naming import Parameter, names_of, place_of, sources_of
from fp8graph.ir.nodes import CONVERT, backward_nodes, size_hint, value
from fp8graph.ir.sites import Site
from fp8graph.ir.text import short
from fp8graph.libraries.products import LIBRARIES
from fp8graph.records import OPAQUE, ProductRecord

CUSTOM: Final = "custom op"  # the kind of those that nobody can count
_LOW: Final = (torch.int8, torch.uint8)
_CODES: Final = (torch.int32, torch.int64, torch.int16)  # several numbers of 4 bits in one, in weights alone


@dataclass(frozen=True, kw_only=True, eq=False)
class Product:
    """One node that multiplies matrices."""

    node: fx.Node
    kind: str  #: in words: "matmul", "scaled matmul", "convolution", "attention", "custom op", ...
    op: str  #: as the graph's text has it: "aten._scaled_mm"
    flops: int | None  #: multiplications and additions, of the traced sizes; None: nobody can count them
    operands: tuple[fx.Node, ...]  #: the tensors that are multiplied; of an op of another library: all that may be
    backward: bool

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of its operands."""
        return tuple(cast(torch.Tensor, operand.meta["val"]).dtype for operand in self.operands)

    @property
    def low(self) -> torch.dtype | None:
        """The dtype of an operand in eight bits or fewer; None: all have more."""
        return next(filter(is_low, self.dtypes), None)

    @property
    def taken_apart(self) -> bool:
        """Whether a decomposition wrote it as products of elements and their sum."""
        return was_product(self.node)


@dataclass(frozen=True, kw_only=True, eq=False)
class Whole:
    """An op that decodes and multiplies, and stays as it is: the reason, and the site of the matmul that it was."""

    node: fx.Node
    reason: str
    site: Site


def is_low(dtype: torch.dtype) -> bool:
    """Return whether numbers of ``dtype`` have eight bits or fewer: FP8, FP4, int8, or packed into bytes."""
    return dtype in _LOW or (dtype.is_floating_point and dtype.itemsize == 1)


def sites_of(
    products: Sequence[Product], weights: Collection[fx.Node], parameters: Mapping[fx.Node, Parameter]
) -> dict[fx.Node, Site]:
    """Return the named site of each product of a graph; a backward product has that of the forward one with its
    ``seq_nr``.

    Args:
        weights: the nodes that hold weights (:func:`weights_of`).
    """
    forward = {p.node.meta.get("seq_nr"): p for p in products if not p.backward}
    sites: dict[fx.Node, Site] = {}
    for product in products:
        first = forward.get(product.node.meta.get("seq_nr"), product) if product.backward else product
        if first.node not in sites:
            held = (x for x in first.operands if x in weights and sources_of(x, parameters))
            place = place_of(first.node, next(held, None), parameters)
            sites[first.node] = Site(place=place, op="product", region=None)
        sites[product.node] = sites[first.node]
    owners = list(dict.fromkeys(sites.values()))
    names = names_of([site.place for site in owners], parameters.values())
    for site, (fqn, index) in zip(owners, names, strict=True):
        site.fqn, site.index = fqn, index
    return sites


def record_of(product: Product, site: Site, reason: str) -> ProductRecord:
    """Return the row of a product, and why it is left as it is."""
    low = product.low
    return ProductRecord(
        fqn=site.fqn,
        index=site.index,
        kind=product.kind,
        op=product.op,
        direction="backward" if product.backward else "forward",
        shapes=tuple(f"[{', '.join(map(str, value(x).shape))}]" for x in product.operands),
        dtypes=tuple(map(short, product.dtypes)),
        low="" if low is None else short(low),
        flops=product.flops or 0,
        reason=reason,
        execution=OPAQUE if product.flops is None else "high precision" if low is None else "low precision",
    )


def may_be_product(node: fx.Node) -> bool:
    """Return whether :func:`products_of` may list ``node``: cheaper, and without false negatives."""
    if node.op != "call_function":
        return False
    op = op_of(node)
    return operation_of(op) is not None or not is_of_torch(op) or was_product(node)


def products_of(graph: fx.Graph, stored: Collection[fx.Node]) -> list[Product]:
    """Return every product of ``graph``, in order. ``stored``: inputs that are parameters and buffers of the model."""
    weights, backward = weights_of(graph, stored), backward_nodes(graph)
    products: list[Product] = []
    for node in graph.nodes:
        if (product := product_of(node, weights, backward)) is not None:
            products.append(product)
        elif node in backward and (gradient := _gradient_of_weight(node, products, weights)) is not None:
            products.append(gradient)
    return products


def weights_of(graph: fx.Graph, stored: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes that are computed from ``stored`` tensors and constants alone."""
    weights, constants = set(stored), set[fx.Node]()
    for node in graph.nodes:
        if node.op == "get_attr":
            weights.add(node)
        elif node.op == "call_function":
            sources = node.all_input_nodes
            if all(source in constants for source in sources):
                constants.add(node)
            elif all(source in weights or source in constants for source in sources):
                weights.add(node)
    return weights


def product_of(
    node: fx.Node, weights: Collection[fx.Node] = frozenset(), backward: Collection[fx.Node] = frozenset()
) -> Product | None:
    """Return the product that ``node`` computes, or None.

    Args:
        weights: the nodes that hold weights (:func:`weights_of`).
        backward: the nodes of backward.
    """
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    in_backward = node in backward
    operation = operation_of(op_of(node)) or LIBRARIES.get(_name_of(node))
    if operation is not None:
        args = _arguments(node)
        places = [args[place] for place in operation.operands if place < len(args)]
        operands = [arg for arg in places if isinstance(arg, fx.Node)] or list(_numbers(node))
        flops = None if operation.formula is None else _counted(operation.formula, args, node)
        if flops is not None and operands and value(operands[0]).dtype == torch.float4_e2m1fn_x2:
            flops *= 2
        return _product(node, operation.kind, flops, operands, in_backward)
    if was_product(node):
        summed = cast(fx.Node, node.args[0])
        flops, original = 2 * size_hint(value(summed).numel()), node.meta["original_aten"]
        return _product(node, "matmul", flops, _factors(summed), in_backward, original)
    if not is_of_torch(op_of(node)) and (operands := _operands_of_custom(node, weights)):
        return _product(node, CUSTOM, None, operands, in_backward)
    return None


def _product(
    node: fx.Node, kind: str, flops: int | None, operands: Sequence[fx.Node], backward: bool, op: Any = None
) -> Product:
    name = _name(op or op_of(node))
    return Product(node=node, kind=kind, op=name, flops=flops, operands=tuple(operands), backward=backward)


def op_of(node: fx.Node) -> Any:
    """Give the op that ``node`` runs; of one that writes to its arguments, the op inside of ``auto_functionalized``."""
    first = node.args[0] if node.args else None
    return first if isinstance(first, OpOverload) else node.target


def _name(op: Any) -> str:
    return str(op.overloadpacket) if isinstance(op, OpOverload) else str(getattr(op, "__name__", op))


def _name_of(node: fx.Node) -> str:
    return _name(op_of(node))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _arguments(node: fx.Node) -> list[Any]:
    if isinstance(node.target, OpOverload):
        return list(named_arguments(node).values())
    return list(node.args)


def _sizes(x: Any) -> Any:
    """Return a value with a list of sizes in place of each tensor."""
    if isinstance(x, fx.Node):
        x = x.meta.get("val")
    if isinstance(x, torch.Tensor):
        return [size_hint(size) for size in x.shape]
    if isinstance(x, (list, tuple)):
        return [_sizes(one) for one in cast("Sequence[Any]", x)]
    return size_hint(x) if isinstance(x, torch.SymInt) else x


def _counted(count: Any, args: Sequence[Any], node: fx.Node) -> int | None:
    try:
        return int(count([_sizes(arg) for arg in args], _sizes(node)))
    except Exception:  # a formula of somebody else: whatever it raises, nobody has counted
        return None


def _numbers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the tensors of two or more dims that ``node`` reads, and does not write, whose elements may be numbers."""
    written = _written(node)
    for source in node.all_input_nodes:
        is_new = source.op == "call_function" and not source.all_input_nodes  # a buffer for results
        if not is_new and _is_tensor(source) and source not in written and (val := value(source)).ndim >= 2:
            if val.dtype.is_floating_point or val.dtype in (*_LOW, *_CODES):
                yield source


def _written(node: fx.Node) -> set[fx.Node]:
    if not isinstance(node.target, OpOverload):
        bases = cast("Sequence[Any]", node.kwargs.get("_all_bases") or ())  # of auto_functionalized
        return {base for base in bases if isinstance(base, fx.Node)}
    arguments = named_arguments(node)
    names = [each.name for each in schema(node.target).arguments if each.alias_info and each.alias_info.is_write]
    return {arguments[name] for name in names if isinstance(arguments[name], fx.Node)}


def _operands_of_custom(node: fx.Node, weights: Collection[fx.Node]) -> list[fx.Node]:
    """Return the tensors that an op of another library multiplies, or [] if it shows no sign of that."""
    numbers = list(_numbers(node))
    weighed = [x for x in numbers if x in weights]
    others = [x for x in numbers if x not in weights and value(x).dtype not in _CODES]
    if weighed and others and not all(_scales_elements(w, others[0], node) for w in weighed):
        return [others[0], weighed[0], *others[1:], *weighed[1:]]
    low = [x for x in others if is_low(value(x).dtype) and value(x).dtype != torch.uint8]
    decodes = any(_same_sizes(result, value(x)) for x in low for result in _results(node))
    return others if low and len(others) > 1 and not decodes else []


def _scales_elements(weight: fx.Node, x: fx.Node, node: fx.Node) -> bool:
    """Return whether ``weight`` is a table for the elements of ``x``, such as cosines [tokens, size] or [tokens, size /
    2].

    An op that multiplies ``x`` [..., k] by a matrix sums over k, which is one of its two sizes.
    """
    table, sizes = _sizes(weight), _sizes(x)
    table = [size for size in table if size != 1]
    if len(table) != 2 or table[0] == table[1] or value(weight).dtype.itemsize < 2:
        return False
    returns = any(_sizes(result.shape) == sizes for result in _results(node))
    return returns and table[0] in sizes[:-1] and table[0] != sizes[-1] and table[1] in (sizes[-1], sizes[-1] // 2)


def reads_codes(node: fx.Node) -> bool:
    """Return whether ``node`` reads numbers of eight bits or fewer."""
    return any(is_low(value(source).dtype) for source in node.all_input_nodes if _is_tensor(source))


def _results(node: fx.Node) -> list[torch.Tensor]:
    val = node.meta.get("val")
    values = cast("Sequence[Any]", val) if isinstance(val, (list, tuple)) else [val]
    return [one for one in values if isinstance(one, torch.Tensor)]


def _same_sizes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.ndim == b.ndim and sorted(_sizes(a.shape)) == sorted(_sizes(b.shape))


def _gradient_of_weight(node: fx.Node, products: Sequence[Product], weights: Collection[fx.Node]) -> Product | None:
    """Return the gradient of a weight, by an op of a library one of whose ops multiplied that weight."""
    op = op_of(node)
    if node.op != "call_function" or not isinstance(op, OpOverload) or is_of_torch(op):
        return None
    operands = [x for x in _numbers(node) if x not in weights]
    same_library = (
        product
        for product in products
        if product.kind == CUSTOM and getattr(op_of(product.node), "namespace", "") == op.namespace
    )
    multiplied = [value(x) for product in same_library for x in product.operands if x in weights]
    of_weight = any(_same_sizes(result, weight) for result in _results(node) for weight in multiplied)
    return _product(node, CUSTOM, None, operands, True) if len(operands) > 1 and of_weight else None


def _factors(summed: fx.Node) -> list[fx.Node]:
    """Return the tensors whose elements' products ``summed`` has, before they were cast to add up in FP32."""
    factors: list[fx.Node] = []
    for source in summed.all_input_nodes:
        while source.target in (CONVERT, torch.ops.aten.unsqueeze.default):
            source = cast(fx.Node, source.args[0])
        factors.append(source)
    return factors
