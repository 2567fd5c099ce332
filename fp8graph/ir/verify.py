"""The definition of a valid graph. It is checked after every pass, which costs a few microseconds per node.

CPU kernels accept mistakes that CUDA refuses (any strides, E5M2 x E5M2, unpadded k), so layouts, dtype pairs
and alignment are checked here, from the fake tensors, on every machine.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import fx

from fp8graph.compat.ops import named_arguments
from fp8graph.errors import Fp8GraphError, UnsupportedRecipeError
from fp8graph.hardware import Hardware
from fp8graph.ir import ops
from fp8graph.ir.nodes import (
    CONVERT,
    GEMM_KEY,
    PASS_KEY,
    SITES,
    TAKEN_KEY,
    USES_KEY,
    aten,
    is_backward,
    known_contiguous,
    known_equal,
    matmul_arguments,
    static_size,
    swaps_last_dims,
    value,
)
from fp8graph.ir.quantize_node import Arguments, QuantizeNode
from fp8graph.ir.sites import Gemm, Site
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import FNUZ, FP8_MAX, Quantizer


def verify(
    graph: fx.Graph,
    *,
    after: str,
    lowered: bool = False,
    partitioned: bool = False,
    hardware_of: Callable[[fx.Node], Hardware] | None = None,
    sites: Sequence[Site] = (),
) -> None:
    """Raise :class:`Fp8GraphError` if ``graph`` is not valid; ``after`` names the pass to blame.

    ``lowered``: it may have no dialect nodes. ``partitioned``: it is forward or backward alone, and what its nodes say
    of their direction means nothing any more. ``hardware_of``: the hardware that a GEMM is decided for. None: its
    support for the GEMM was checked before. ``sites``: of the program, which say how each operand lies. Shapes do not:
    a square one fits transposed, too.
    """
    of_program = {gemm.node: gemm for site in sites for gemm in site.gemms}

    def fail(node: fx.Node, problem: str) -> None:
        raise Fp8GraphError(
            f"internal error: after pass '{after}', node {node.format_node()}: {problem}. "
            "Please report this with the model; the graph was not compiled."
        )

    graph.lint()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if lowered and node.target in ops.REFERENCE and not ops.stays(node):
            fail(node, "a dialect node that was not lowered")
        if sites and node.target in _MULTIPLY and (gemm := _gemm_of(node, sites) or of_program.get(node)) is not None:
            if (problem := _orientation(node, gemm)) is not None:
                fail(node, problem)
        if PASS_KEY not in node.meta:
            continue
        if "val" not in node.meta:
            fail(node, "an inserted node without a fake value")
        if not partitioned and "partitioner_tag" in node.meta and not is_backward(node):
            if any(is_backward(s) for s in node.all_input_nodes):
                fail(node, "a forward node that reads from backward")
        if (check := _CHECKS.get(node.target) or ops.CHECKS.get(node.target)) is not None:
            problem = check(node)
            if problem is None and hardware_of is not None and node.target in _CHECKS_OF_DEVICES:
                problem = _CHECKS_OF_DEVICES[node.target](node, hardware_of(node))
            if problem is not None:
                fail(node, problem)


def check_connected(graph: fx.Graph) -> None:
    """Raise if a scale outlives a call and no pass has taken the tensor that keeps it: it would be 1 in each call.

    Raises:
        UnsupportedRecipeError: names the recipe.
    """
    for node in graph.find_nodes(op="call_function", target=ops.quantize):
        quantized = QuantizeNode(node)
        if quantized.kind.has_state and quantized.arguments.scales is None:
            name = next((use.recipe.name for use in node.meta.get(USES_KEY, ())), quantized.arguments.scaling)
            raise UnsupportedRecipeError(
                f"the recipe {name} keeps its scales between calls, and fp8graph.passes has no pass that connects them "
                "to a graph. Add that pass again, or choose a recipe without a state, such as tensorwise."
            )


def _gemm_of(node: fx.Node, sites: Sequence[Site]) -> Gemm | None:
    """Return the GEMM of the program that a node made by a pass multiplies."""
    position, name = node.meta.get(GEMM_KEY, (0, ""))
    return next((gemm for gemm in sites[position].gemms if gemm.gemm == name), None) if name else None


def _orientation(node: fx.Node, gemm: Gemm) -> str | None:
    """Check that a multiplication reads each operand as the program does, and not its transpose."""
    decodes = node.target in SITES
    given = {} if decodes else named_arguments(node)
    operands = matmul_arguments(node) if decodes else (given["a"], given["b"])
    for side, operand, view in zip("ab", operands, (gemm.a, gemm.b), strict=True):
        source, turned = _followed(operand, (view.tensor, view.data))
        if source is not view.tensor and source is not view.data:
            continue
        if turned != (view.turned ^ (side == "b" and decodes)):
            return f"operand {side} is the {view.operand} of {gemm.gemm} transposed"
        if source is view.data and not given.get(f"order_{side}"):
            scale_inv = _scales_behind(operand) if decodes else given[f"scale_inv_{side}"]
            if scale_inv is not None and _lies(scale_inv) not in (None, view.turned):
                return f"operand {side} is the {view.operand} of {gemm.gemm}, whose scales are transposed alone"
    return None


def _followed(node: fx.Node, sources: Sequence[fx.Node | None] = ()) -> tuple[fx.Node, bool]:
    """Return the tensor of which ``node`` is a form, at the latest one of ``sources``, and whether it is transposed."""
    turned = False
    while node not in sources:
        if node.target is operator.getitem:
            quantized, position = cast("tuple[fx.Node, int]", node.args)
            if quantized.target is not ops.quantize or QuantizeNode(quantized).arguments.more is not None:
                break
            turned ^= QuantizeNode(quantized).names[position].startswith("columnwise")
            node = quantized
        elif swaps_last_dims(node) or node.target is ops.columnwise:
            turned = not turned
        elif node.target not in _AS_THEY_LIE and not _of_one_matrix(node):
            break
        node = cast(fx.Node, node.args[0])
    return node, turned


def _scales_behind(operand: fx.Node) -> fx.Node | None:
    """Return the scales with which ``operand`` of an emulated GEMM is decoded."""
    while operand.target is not ops.dequantize:
        if not operand.all_input_nodes:
            return None
        operand = operand.all_input_nodes[0]
    return cast(fx.Node, operand.args[1])


def _lies(scale_inv: fx.Node) -> bool | None:
    """Give whether stored scales are read transposed; None if they have one row, or are not those of the checkpoint."""
    source, turned = _followed(scale_inv)
    if value(scale_inv).ndim < 2 or 1 in value(scale_inv).shape or TAKEN_KEY in source.meta:
        return None
    return turned if source.all_input_nodes or source.op == "placeholder" else None


def _of_one_matrix(node: fx.Node) -> bool:
    """Return whether ``node`` is a matrix as a batch of one, or the other way round."""
    if node.target not in (aten.squeeze.dim, aten.unsqueeze.default) or value(node).ndim < 2:
        return False
    return cast(int, node.args[1]) == 0


def _quantize(node: fx.Node) -> str | None:
    quantized = QuantizeNode(node)
    arguments, x = quantized.arguments, value(quantized.arguments.x)
    if not x.is_floating_point():
        return f"quantizes {x.dtype}"
    if arguments.dtype not in FP8_MAX:
        return f"{arguments.dtype} is not an FP8 type"
    if arguments.amax_epsilon < 0:
        return "a negative epsilon"
    if not arguments.layouts and not arguments.keep_scales:
        return "no layout asked for"
    outputs = cast(list[torch.Tensor], node.meta["val"])
    if arguments.more is not None and (problem := _joined(arguments)) is not None:
        return problem
    if len(outputs) != len(quantized.names):
        return f"{len(outputs)} outputs"
    if quantized.kind.tiled != bool(arguments.block):
        return f"scaling {arguments.scaling} with tiles {arguments.block or None}"
    return None


def _joined(arguments: Arguments) -> str | None:
    """Check ``more``: tensors that are joined along ``dim``, each with the shape of the first except in ``dim``."""
    first, *more = map(value, arguments.parts)
    dim = arguments.dim
    if dim not in (-2, -1):
        return f"joins along dim {dim}"
    kept = -3 - dim
    for part in more:
        fits = part.ndim == first.ndim and known_equal(part.shape[kept], first.shape[kept])
        if not fits or part.dtype != first.dtype:
            return f"joins {part.dtype} {tuple(part.shape)} to {first.dtype} {tuple(first.shape)} along dim {dim}"
    return None


def _scaled_mm(node: fx.Node) -> str | None:
    given = named_arguments(node)
    bias, scaling = given["bias"], given["scaling"]
    a, b = value(given["a"]), value(given["b"])
    if (problem := _gemm(a, b, value(bias) if bias is not None else None, given["out_dtype"])) is not None:
        return problem
    kind = SCALINGS[scaling]
    for side, operand in (("a", a), ("b", b)):
        scale, block = value(given[f"scale_inv_{side}"]), given[f"block_{side}"]
        if kind.tiled != bool(block):
            return f"operand {side} has scaling {scaling} with tiles {block or None}"
        rows, columns = operand.shape
        wanted = kind.scale_shape(rows, columns * kind.packed, block)
        wanted = wanted and kind.ordered_shape(wanted, given[f"order_{side}"], block)
        fits = [known_equal(*pair) for pair in zip(wanted or (), scale.shape, strict=False)]
        shaped = tuple(scale.shape) in ((), (1,)) if wanted is None else len(wanted) == scale.ndim and all(fits)
        if not shaped or scale.dtype != kind.scale_dtype:
            return f"operand {side} has scales {scale.dtype} {tuple(scale.shape)} for {scaling} tiles {tuple(block)}"
        if (problem := _mixed(given[f"scale_inv_{side}"], given[f"global_scale_inv_{side}"])) is not None:
            return f"operand {side} has {problem}"
    return None


def _mixed(scale_inv: fx.Node, global_scale_inv: fx.Node | None) -> str | None:
    """Two quantizations that the scales come from: the numbers were encoded with one pair of them."""
    made_by, scaled_by = _quantization_of(scale_inv), _quantization_of(global_scale_inv)
    if made_by is None or scaled_by is None or made_by is scaled_by:
        return None
    return f"scales of {made_by} and the global scale of {scaled_by}"


def _quantization_of(output: fx.Node | None) -> fx.Node | None:
    """Return the quantization that an output, or a part or view of it, comes from; None if it is not in the graph."""
    while output is not None and output.target is not ops.quantize:
        sources = output.all_input_nodes
        output = sources[0] if len(sources) == 1 else None
    return output


def _sizes(node: fx.Node, device: Hardware) -> str | None:
    """Check that ``device`` supports the GEMM of a scaled_mm node."""
    given = named_arguments(node)
    a, b = value(given["a"]), value(given["b"])
    quantizers = quantizers_of(given)
    _, *multiples = device.alignment(*quantizers)
    sizes = b.shape[0], a.shape[1] * SCALINGS[quantizers[0].scaling].packed
    for name, size, multiple in zip("nk", sizes, multiples, strict=True):
        if (fixed := static_size(size)) is not None and fixed % multiple:
            return f"{name} = {fixed} is not a multiple of {multiple}"
    return device.obstacle(*quantizers, given["out_dtype"])


def quantizers_of(given: Mapping[str, Any]) -> tuple[Quantizer, Quantizer]:
    """Return the quantizers of a scaled matmul's operands, as far as the node tells."""
    a, b = (
        Quantizer(
            dtype=value(given[side]).dtype,
            scaling=given["scaling"],
            block=tuple(given[f"block_{side}"]) or Quantizer.block,
        )
        for side in "ab"
    )
    return a, b


def _scaled_grouped_mm(node: fx.Node) -> str | None:
    given = named_arguments(node)
    a, b, offs = (value(given[name]) for name in ("a", "b", "offs"))
    if (problem := _low_precision(a, b)) is not None:
        return problem
    if (a.ndim, b.ndim) not in ((2, 3), (2, 2)) or not known_equal(a.shape[-1], b.shape[-1]):
        return f"shapes {tuple(a.shape)} and {tuple(b.shape)} do not contract"
    if offs.ndim != 1 or (b.ndim == 3 and not known_equal(b.shape[0], offs.shape[0])):
        return f"{offs.shape} groups for {tuple(b.shape)}"
    for side in "ab":
        if (problem := _mixed(given[f"scale_inv_{side}"], given[f"global_scale_inv_{side}"])) is not None:
            return f"operand {side} has {problem}"
    return None


def _sizes_of_groups(node: fx.Node, device: Hardware) -> str | None:
    """Check that ``device`` supports the GEMMs of a native scaled_grouped_mm node."""
    given = named_arguments(node)
    if not given["native"]:
        return None
    a, b = value(given["a"]), value(given["b"])
    quantizers = quantizers_of(given)
    if (problem := device.obstacle(*quantizers, given["out_dtype"], grouped=True)) is not None:
        return f"no grouped GEMM {a.dtype} x {b.dtype} -> {given['out_dtype']}: {problem}"
    packed = SCALINGS[quantizers[0].scaling].packed
    multiple = given["multiple"] if b.ndim == 2 else (static_size(a.shape[1]) or 0) * packed
    _, n, k = device.alignment(*quantizers)
    if (multiple or k) % k or (static_size(b.shape[-2]) or n) % n:
        return f"sizes {tuple(a.shape)} and {tuple(b.shape)} are not multiples of {k} and {n}"
    return None


def _aten_scaled_mm(node: fx.Node) -> str | None:
    given = named_arguments(node)
    a, b, *scales = (value(given[name]) for name in ("self", "mat2", "scale_a", "scale_b"))
    bias, out_dtype = given["bias"], given["out_dtype"]
    for name, size in (("k", a.shape[1]), ("n", b.shape[1])):
        if (fixed := static_size(size)) is not None and fixed % 16:
            return f"{name} = {fixed} is not a multiple of 16"
    for side, operand, scale in zip("ab", (a, b.t()), scales, strict=True):
        fits = scale.ndim == 1 if scale.dtype != torch.float32 else scale.numel() == 1 or scale.ndim == 2
        if not fits or scale.dtype not in (torch.float32, torch.float8_e8m0fnu, torch.float8_e4m3fn):
            return f"operand {side} has scales {scale.dtype} {tuple(scale.shape)}"
        if scale.ndim == 2 and scale.numel() != 1:
            if (problem := _scale_strides(operand, scale if side == "a" else scale.t())) is not None:
                return f"operand {side} {problem}"
    return _gemm(a, b.t(), value(bias) if isinstance(bias, fx.Node) else None, cast(torch.dtype, out_dtype))


def _scale_strides(operand: torch.Tensor, scale: torch.Tensor) -> str | None:
    """Return the reason why no kernel reads ``scale`` [rows or row tiles, k tiles] as that of ``operand`` [rows, k].

    See ``NVIDIA.alignment``: scales of rows and of 1x128 tiles are outer-dim-major. With 128x128 tiles, rows of scales
    are as many elements apart as there are tiles along k, which is a multiple of four. The stride of a dim with one
    row or one tile does not matter.
    """
    rows, tiles = operand.shape[0], -(-operand.shape[1] // 128)
    outer, along = scale.shape
    of_rows = known_equal(outer, rows)
    layout = f"has scales {tuple(scale.shape)} with strides {scale.stride()}"
    if not (of_rows or known_equal(outer, -(-rows // 128))) or not any(known_equal(along, n) for n in (1, tiles)):
        return f"{layout} for {tuple(operand.shape)}"
    wanted = (1, rows) if of_rows else (tiles, 1)
    for size, stride, right in zip(scale.shape, scale.stride(), wanted, strict=True):
        if not known_equal(size, 1) and not known_equal(stride, right):
            return f"{layout}: torch reads them with {wanted}"
    if (static_size(scale.storage_offset()) or 0) % 4:
        return (
            f"{layout} from element {scale.storage_offset()} on: cuBLASLt reads from 16-byte addresses (pytorch#159957)"
        )
    if not of_rows and not known_equal(outer, 1) and (static_size(tiles) or 0) % 4:
        return f"{layout}: cuBLASLt reads rows that are a multiple of 4 apart"
    return None


def _gemm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> str | None:
    """Check the rules of low-precision GEMMs: a [m, k] and b [n, k], both contiguous along k."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        return f"shapes {tuple(a.shape)} and {tuple(b.shape)} do not contract"
    if bias is not None and (out_dtype == torch.float32 or bias.dtype != out_dtype or bias.ndim != 1):
        return f"cuBLAS cannot add a {bias.dtype} bias of {bias.ndim} dims to {out_dtype}"
    return _low_precision(a, b)


def _low_precision(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Check the rules of all operands: that their dtypes go together, and that they are contiguous along k."""
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dtype not in (*FP8_MAX, torch.float4_e2m1fn_x2):
            return f"operand {name} is {tensor.dtype}"
        if not known_contiguous(tensor):
            return f"operand {name} is not contiguous along k: strides {tensor.stride()}"
    if (a.dtype in FNUZ) != (b.dtype in FNUZ):
        return f"{a.dtype} x {b.dtype}: two families of FP8"
    if a.dtype == b.dtype and a.dtype in (torch.float8_e5m2, torch.float8_e5m2fnuz):
        return "E5M2 x E5M2, which no recipe asks for"
    return None


def _dequantize(node: fx.Node) -> str | None:
    given = named_arguments(node)
    if (dtype := value(given["data"]).dtype) not in FP8_MAX:
        return f"dequantizes {dtype}"
    return _mixed(given["scale_inv"], given["global_scale_inv"])


def _stored_weight(node: fx.Node) -> str | None:
    given = named_arguments(node)
    data, scale, kind = value(given["data"]), value(given["scale_inv"]), SCALINGS[given["scaling"]]
    if (data.dtype not in FP8_MAX and data.dtype != torch.uint8) or data.ndim not in (2, 3):
        return f"a stored weight of {data.dtype} {tuple(data.shape)}"
    *experts, rows, columns = data.shape
    wanted = kind.scale_shape(rows, columns * kind.packed, given["block"])
    shapes = [(), (1,)] if wanted is None else [(*experts, *wanted)]
    if tuple(scale.shape) not in shapes or scale.dtype != kind.scale_dtype:
        return f"a stored weight of {tuple(data.shape)} with scales {scale.dtype} {tuple(scale.shape)}"
    return None


_MULTIPLY: Final = (*SITES, ops.scaled_mm, ops.scaled_grouped_mm)
_AS_THEY_LIE: Final = (  # the first argument with the same last two dims, or parts of them
    *(ops.dequantize, ops.stored_weight, CONVERT, aten._to_copy.default),
    *(aten.alias.default, aten.detach.default, aten.clone.default, aten.slice.Tensor, aten.constant_pad_nd.default),
)

_CHECKS: dict[Any, Any] = {
    ops.quantize: _quantize,
    ops.scaled_mm: _scaled_mm,
    ops.scaled_grouped_mm: _scaled_grouped_mm,
    ops.dequantize: _dequantize,
    ops.stored_weight: _stored_weight,
    aten._scaled_mm.default: _aten_scaled_mm,
}
_CHECKS_OF_DEVICES: dict[Any, Any] = {ops.scaled_mm: _sizes, ops.scaled_grouped_mm: _sizes_of_groups}
