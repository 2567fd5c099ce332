"""Find weights that arrive quantized, behind the operations with which the program decodes them.

    w = mul(to(data, bf16), scale [N, 1])                          ->   w = stored_weight(data, scale, bf16, "row")
    w = view(mul(view(to(data), [n, 128, k, 128]), unsqueeze(scale)))   ->   w = stored_weight(data, scale, "block")

A chain is one product of an FP8 input and an input of scales, each behind casts, views, transposes and expansions: one
scale, one per row, or one per tile. Which elements share a scale is followed through the views, so it
does not matter how a library writes them. Roundings of the program on the way (HF rounds scales to bf16) are left out:
the GEMM multiplies bytes and scales as they are stored, as an engine does.

Refuses (leaves unchanged) chains of other operations, such as exponents that are computed (MX) and numbers of 4 bits,
scales of anything else, and data or scales that are no inputs of the graph; an FP8 input that reaches a matmul so is
reported. So is a table whose rows are looked up: they are activations of the program.

What a chain of views makes of a stored tensor: every dim is a list of factors ``(size, stride)``. Its index is split
into digits, the last one fastest, and each digit moves ``stride`` elements in the stored tensor. An expanded dim has
stride 0. Views split and regroup factors, transposes permute dims; a chain that cannot be written so is not understood
(None).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import fx

from fp8graph.compat.inductor import erase_unused
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import inserted
from fp8graph.ir.naming import names_of, parameters_of, place_of
from fp8graph.ir.nodes import CASTS, CONVERT, MATMULS, aten, matmul_arguments, nodes, static_size, value
from fp8graph.recipes import E2M1X2, FP8_MAX, Float8BlockScaling, Float8RowwiseScaling, MXFP8BlockScaling

_HIGH: Final = (torch.bfloat16, torch.float16, torch.float32)
_PER_ROW: Final = Float8RowwiseScaling().quantizer("weight").scaling
_TILES: Final = {  # by whether scales are bytes of E8M0, and whether tiles are 1x32
    (False, False): Float8BlockScaling().quantizer("weight").scaling,
    (False, True): Float8BlockScaling().quantizer("weight").scaling,
    (True, False): Float8BlockScaling(scale_format="ue8m0").quantizer("weight").scaling,
    (True, True): MXFP8BlockScaling().quantizer("weight").scaling,
}
_SCALES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_Factor = tuple[int, int]  # size, stride
Dims = list[list[_Factor]]
_VIEWS: Final = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims),
)
_LOOKUPS: Final = (aten.embedding.default, aten.index.Tensor, aten.index_select.default)
_SAME: Final = (aten.alias.default, aten.detach.default, aten.clone.default)


def has_fp8_inputs(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether the graph takes FP8 tensors: the weights of a checkpoint."""
    return any(map(_is_fp8, graph.find_nodes(op="placeholder")))


def recognize(graph: fx.Graph, compilation: Compilation) -> None:
    weights: dict[Any, fx.Node] = {}  # one weight for forward and backward
    for matmul in list(nodes(graph, MATMULS)):
        for argument in matmul_arguments(matmul):
            if not _reads_fp8(argument):
                continue
            product = _product(argument)
            if isinstance(product, str):
                _refuse(compilation, matmul, argument, product)
                continue
            matmul.replace_input_with(argument, _weight(product, argument, weights))
    erase_unused(graph)
    _report_others(graph, compilation)


def _report_others(graph: fx.Graph, compilation: Compilation) -> None:
    """Report FP8 weights that a library's own kernels multiply, and tables whose rows are looked up."""
    for node in graph.find_nodes(op="placeholder"):
        for user in node.users if _is_fp8(node) and value(node).ndim > 1 else ():
            if user.target in _LOOKUPS and user.args[0] is node:
                _refuse(
                    compilation, user, node, "its rows are decoded as they are looked up, and no GEMM multiplies them"
                )
            elif getattr(user.target, "namespace", "aten") not in ("aten", "prims", "fp8graph"):
                _refuse(compilation, user, node, f"{user.target} reads it: an op that is not looked into")


def _refuse(compilation: Compilation, node: fx.Node, weight: fx.Node, reason: str) -> None:
    """Say by the name of its layer why ``weight``, which ``node`` reads, is not multiplied as it is stored."""
    parameters = parameters_of(node.graph, compilation.facts.parameters)
    ((fqn, index),) = names_of([place_of(node, weight, parameters)], parameters.values())
    compilation.refuse_at("stored weight", fqn, index, reason)


@dataclass(frozen=True)
class _Product:
    data: fx.Node
    scale: fx.Node
    block: tuple[int, int]
    grid: tuple[int, int]
    transposed: bool  # the operand is [K, N]


def _is_fp8(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.dtype in FP8_MAX and val.dtype != E2M1X2


def _reads_fp8(argument: fx.Node) -> bool:
    """Return whether ``argument`` is computed from an FP8 input, and not by a matmul or from a weight that is known."""
    pending, seen, reads = [argument], set[fx.Node](), False
    while pending:
        node = pending.pop()
        if node.target is ops.stored_weight or node.target in MATMULS:
            return False
        if node not in seen and node.target not in _LOOKUPS:  # rows of a table are activations
            seen.add(node)
            reads |= node.op == "placeholder" and _is_fp8(node)
            pending.extend(node.all_input_nodes)
    return reads


def _weight(product: _Product, argument: fx.Node, weights: dict[Any, fx.Node]) -> fx.Node:
    """Return the node that takes the place of ``argument``."""
    key = product.data, product.scale, value(argument).dtype
    emit = functools.partial(inserted, like=argument)
    if key not in weights:
        (rows, columns), (down, across), scale = product.block, product.grid, product.scale
        bytes_of_e8m0 = value(scale).dtype == torch.float8_e8m0fnu
        if bytes_of_e8m0:
            scale = emit(aten.view.dtype, scale, torch.uint8)
        elif value(scale).dtype != torch.float32:
            scale = emit(CONVERT, scale, torch.float32)
        settings: dict[str, Any] = {}
        if across == 1 and not bytes_of_e8m0:  # a scale of the tensor, or one per row
            shape = [1] if down == 1 else [down, 1]
            settings = {} if down == 1 else {"scaling": _PER_ROW}
        else:
            shape = [down, across]
            settings = {"scaling": _TILES[bytes_of_e8m0, (rows, columns) == (1, 32)], "block": [rows, columns]}
        scale = emit(aten.view.default, scale, shape)
        weights[key] = emit(ops.stored_weight, product.data, scale, value(argument).dtype, **settings)
    return emit(aten.permute.default, weights[key], [1, 0]) if product.transposed else weights[key]


def _product(argument: fx.Node) -> _Product | str:
    """Return the two factors of the weight ``argument``, or the reason why it is not understood."""
    if any(static_size(size) is None for size in value(argument).shape):
        return "its size is dynamic"
    parts = _followed(argument)
    if isinstance(parts, str):
        return parts
    of_data = [(node, dims) for node, dims in parts if value(node).dtype in FP8_MAX]
    of_scale = [(node, dims) for node, dims in parts if value(node).dtype in _SCALES]
    if len(of_data) != 1 or len(of_scale) != 1 or value(argument).ndim != 2:
        return "it is not the product of FP8 numbers and scales"
    (data, numbers), (scale, scales) = of_data[0], of_scale[0]
    if value(data).ndim != 2 or not value(data).is_contiguous():
        return "its numbers are not stored row by row"
    shape = [*value(data).shape]
    transposed = not is_row_major(numbers) or (1 in shape and sizes(numbers) != shape)  # [1, K] is [K, 1] row by row
    if transposed:
        numbers, scales = numbers[::-1], scales[::-1]
    if not is_row_major(numbers):
        return "its numbers are not stored row by row"
    if sizes(numbers) != shape:
        return f"its numbers are stored as {tuple(shape)}, and multiplied as {tuple(sizes(numbers))}"
    tile = tile_of(scales)
    if tile is None or not value(scale).is_contiguous() or value(scale).numel() != tile.grid[0] * tile.grid[1]:
        return "its scales are not those of rows or tiles"
    if tile.block == (1, 1):
        return "each of its numbers has a scale of its own"
    if tile.block[1] == 1:
        return "its scales are not those of rows or tiles"
    if tile.grid[1] == 1 < tile.block[0] and tile.grid[0] > 1:
        return f"{tile.block[0]} of its rows share a scale"
    return _Product(data, scale, tile.block, tile.grid, transposed)


def _followed(node: fx.Node) -> list[tuple[fx.Node, Dims]] | str:
    """Give the inputs that ``node`` is the product of, each with the place of its elements, or why it is no product."""
    if node.op == "placeholder":
        return [(node, stored([int(size) for size in value(node).shape]))]
    if node.op != "call_function" or not node.args:
        return f"{node.op} {node.name} is not understood"
    target, shape = node.target, [int(size) for size in value(node).shape]
    if target is aten.mul.Tensor:
        if not all(isinstance(part, fx.Node) for part in node.args):
            return "it is multiplied by a number"
        both = [_followed(cast(fx.Node, part)) for part in node.args]
        if wrong := next((part for part in both if isinstance(part, str)), None):
            return wrong
        return [(source, expanded(dims, shape)) for part in both for source, dims in cast(Any, part)]
    first = cast(fx.Node, node.args[0])
    if target in CASTS and value(node).dtype not in _HIGH:
        return f"it is cast to {value(node).dtype}"
    inner = _followed(first) if isinstance(first, fx.Node) else "it is computed from several tensors"
    if isinstance(inner, str):
        return inner
    result: list[tuple[fx.Node, Dims]] = []
    for source, dims in inner:
        after = moved(target, dims, shape, node.args[1:])
        if after is None:
            return f"{getattr(target, '__name__', target)} of {tuple(sizes(dims))} is not understood"
        result.append((source, after))
    return result


def stored(shape: Sequence[int]) -> Dims:
    """Return a contiguous tensor as it is stored."""
    dims: Dims = []
    stride = 1
    for size in reversed(shape):
        dims.append([(size, stride)])
        stride *= size
    return dims[::-1]


def sizes(dims: Dims) -> list[int]:
    return [_size(factors) for factors in dims]


def viewed(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """``dims`` as a view of ``shape``; None if a digit would have to be split unevenly."""
    digits_of_all = _merged([factor for factors in dims for factor in factors])
    left = [factor for factor in digits_of_all if factor[0] != 1]
    result: Dims = []
    for size in shape:
        dim: list[_Factor] = []
        wanted = size
        while wanted > 1:
            if not left:
                return None
            digits, stride = left.pop(0)
            if wanted % digits == 0:
                dim.append((digits, stride))
                wanted //= digits
            elif digits % wanted == 0:  # its slow part belongs here
                dim.append((wanted, stride * (digits // wanted)))
                left.insert(0, (digits // wanted, stride))
                wanted = 1
            else:
                return None
        result.append(dim or [(1, 0)])
    return result if not left else None


def permuted(dims: Dims, order: Sequence[int]) -> Dims:
    return [dims[position] for position in order]


def expanded(dims: Dims, shape: Sequence[int]) -> Dims:
    """``dims`` broadcast to ``shape``, with new dims before the old ones."""
    padded: Dims = [[(1, 0)]] * (len(shape) - len(dims)) + dims
    pairs = zip(padded, shape, strict=True)
    return [[(size, 0)] if _size(own) == 1 and size != 1 else own for own, size in pairs]


def moved(target: Any, dims: Dims, shape: Sequence[int], args: tuple[Any, ...]) -> Dims | None:
    """``dims`` after one operation with a result of ``shape`` and more ``args``; None if it is not understood."""
    rank = len(dims)
    if target in (*CASTS, *_SAME):
        return dims
    if target in _VIEWS:
        return viewed(dims, shape)
    if target is aten.expand.default:
        return expanded(dims, shape)
    if target is aten.t.default:
        return dims[::-1]
    if target is aten.permute.default:
        return permuted(dims, [d % rank for d in args[0]])
    if target is aten.transpose.int:
        order = list(range(rank))
        a, b = args[0] % rank, args[1] % rank
        order[a], order[b] = b, a
        return permuted(dims, order)
    return None


@dataclass(frozen=True)
class Tile:
    """The elements that share a scale: (rows, columns), and the number of tiles along both."""

    block: tuple[int, int]
    grid: tuple[int, int]


def tile_of(scale: Dims) -> Tile | None:
    """Return the tiles of a weight [N, K] whose element (i, j) has the scale at ``scale`` in a contiguous tensor of
    scales.

    None if they are no grid of equal tiles, stored row by row.
    """
    runs = [along for factors in scale if (along := _constant_below(factors)) is not None]
    if len(runs) != 2 or len(scale) != 2:
        return None
    (rows, down), (columns, across) = runs
    grid = (_size(scale[0]) // rows, _size(scale[1]) // columns)
    wanted = (grid[1], 1)
    for tiles, own, stride in zip(grid, (down, across), wanted, strict=True):
        if tiles > 1 and own != stride:
            return None
    return Tile((rows, columns), grid)


def is_row_major(data: Dims) -> bool:
    """Return whether a tensor is the stored one, element by element."""
    merged = [_merged(factors) for factors in data]
    stride = 1
    for factors in reversed(merged):
        if len(factors) != 1 or (factors[0][0] > 1 and factors[0][1] != stride):
            return False
        stride *= factors[0][0]
    return True


def _constant_below(factors: Sequence[_Factor]) -> tuple[int, int] | None:
    """(elements that share a scale, stride from one tile to the next), along one dim; None for anything else."""
    merged = _merged(factors)
    block = 1
    if merged and merged[-1][1] == 0:
        block = merged.pop()[0]
    if len(merged) > 1 or (merged and merged[0][1] == 0):
        return None
    return block, merged[0][1] if merged else 0


def _merged(factors: Sequence[_Factor]) -> list[_Factor]:
    """Neighbouring digits that count on as one."""
    result: list[_Factor] = []
    for size, stride in factors:
        if size == 1:
            continue
        if result and (result[-1][1] == size * stride):
            result[-1] = (result[-1][0] * size, stride)
        else:
            result.append((size, stride))
    return result or [(1, 0)]


def _size(factors: Sequence[_Factor]) -> int:
    total = 1
    for size, _ in factors:
        total *= size
    return total
