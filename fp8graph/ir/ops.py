"""The dialect: the ops that fp8graph's graphs are written in, between match and lower.

    quantize(x, dtype, power_2_scale, amax_epsilon, rowwise, columnwise, *, scaling, block, ...) -> [data..., scales...]
    scaled_mm(a [m, k], b [n, k], scale_inv_a, scale_inv_b, bias, out_dtype, use_fast_accum, *, scaling, ...) -> [m, n]
    scaled_grouped_mm(a, b, scale_inv_a, scale_inv_b, offs, out_dtype, native, *, ...) -> one GEMM per group
    grouped_mm(a, b, offs) -> the same in high precision, for what aten._grouped_mm does not take
    dequantize(data, scale_inv, dtype, *, scaling, block, ...) -> the numbers
    stored_weight(data, scale_inv, dtype, *, scaling, block, activations, ...) -> the numbers, in the program's words
    random_seed(device) -> [1]
    amax(x) -> [1];  scales(amax, dtype, power_2_scale, amax_epsilon) -> [1, 2]
    columnwise(data [rows, columns], multiples, *, offs) -> [columns, rows], padded
    join(parts [rows, ...]) -> their rows below each other
    repeat_scales(scale_inv [rows / 128, tiles], rows) -> [tiles, rows]: those of 128x128 tiles as those of 1x128

Each op runs its reference function from ``numerics``, which ``lower`` traces as well (``REFERENCE``); scaled matmuls
run the device's own kernel (``hardware``). The fakes compute only shapes, since running a reference on fakes costs a
millisecond per node; tests/ir/test_ops.py compares them with the references.

``define`` adds an op, with what ``lower`` and ``verify`` must know of it: ``ir/transforms.py`` and features in
``passes/`` have ops of their own.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx

from fp8graph import hardware
from fp8graph.compat import fakes
from fp8graph.compat.ops import define_op, named_arguments
from fp8graph.numerics import experts, quantization, random_bits, tiles
from fp8graph.numerics.scalings import SCALINGS, QuantizeArguments

Check = Callable[[fx.Node], str | None]  # the reason why a node is not valid

_library = torch.library.Library("fp8graph", "DEF")


REFERENCE: Final[dict[Any, Callable[..., Any]]] = {}  # the function that ``lower`` traces
SHAPES: Final[dict[Any, Callable[..., Any]]] = {}  # fakes whose results are contiguous
CHECKS: Final[dict[Any, Check]] = {}  # of nodes, by ``verify``; those of the ops here stand there
MEASURES: Final[set[Any]] = set()  # ops whose results no GEMM reads


# Fakes. They read only ``shape``, ``dtype``, ``ndim`` and ``new_empty`` of their arguments (``fake_results``).


def _shape_of_quantize(*args: Any, **kwargs: Any) -> list[Tensor]:
    arguments: QuantizeArguments[Any] = QuantizeArguments(*args, **kwargs)
    return [arguments.x.new_empty(shape, dtype=dtype) for shape, dtype in quantization.output_shapes(arguments)]


def _shape_of_scaled_mm(
    a: Tensor,
    b: Tensor,
    _scale_inv_a: Tensor,
    _scale_inv_b: Tensor,
    _bias: Tensor | None,
    out_dtype: torch.dtype,
    _use_fast_accum: bool,
    **_kwargs: Any,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _shape_of_scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    _scale_inv_a: Tensor,
    _scale_inv_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    _use_fast_accum: bool,
    _native: bool,
    **_kwargs: Any,
) -> Tensor:
    shape = (a.shape[0], b.shape[1]) if b.ndim == 3 else (offs.shape[0], a.shape[0], b.shape[0])
    return a.new_empty(shape, dtype=out_dtype)


def _shape_of_grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[2]) if b.ndim == 3 else (offs.shape[0], a.shape[0], b.shape[1]))


def _shape_of_dequantize(
    data: Tensor, _scale_inv: Tensor, dtype: torch.dtype, *, scaling: str = "tensor", **_kwargs: Any
) -> Tensor:
    if (packed := SCALINGS[scaling].packed) > 1:
        return data.new_empty([*data.shape[:-1], data.shape[-1] * packed], dtype=dtype)
    return torch.empty_like(data, dtype=dtype)


def _shape_of_random_seed(device: torch.device) -> Tensor:
    return torch.empty((1,), dtype=torch.int64, device=device)


def _shape_of_amax(x: Tensor) -> Tensor:
    return x.new_empty((1,), dtype=torch.float32)


def _shape_of_scales(amax: Tensor, *_settings: Any) -> Tensor:
    return amax.new_empty((1, 2))


def _shape_of_columnwise(data: Tensor, multiples: Sequence[int], *, offs: Tensor | None = None) -> Tensor:
    rows, columns = data.shape
    rows = rows if offs is None else experts.padded_rows(rows, offs.shape[0], multiples[1])
    return data.new_empty([size + -size % m for size, m in zip((columns, rows), multiples, strict=True)])


def _shape_of_join(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    return first.new_empty([sum(part.shape[0] for part in parts), *first.shape[1:]])


def _shape_of_repeat_scales(scale_inv: Tensor, rows: int) -> Tensor:
    return scale_inv.new_empty([scale_inv.shape[1], rows])


def define(
    name: str,
    schema: str = "",
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    run: Callable[..., Any] | None = None,
    check: Check | None = None,
    measures: bool = False,
    lowered: bool = True,
    contiguous: bool = True,
    tags: tuple[torch.Tag, ...] = (),
) -> Any:
    """Define one op, ``fp8graph::name``, and return it.

    Args:
        schema: its arguments and results, as torch writes them; "": those of ``reference``.
        reference: computes it; ``lower`` puts the aten nodes of this function in the place of a node.
        fake: the same in shapes alone.
        run: the function that it runs, if not ``reference``.
        check: says why a node that a pass inserted is not valid; None: it is.
        measures: whether its results are statistics, which no GEMM reads.
        lowered: whether ``lower`` replaces it.
        contiguous: whether its results are.
        tags: of torch's, more than ``pt2_compliant_tag``.
    """
    op = define_op(_library, name + (schema or _schema_of(reference)), run or reference, fake, tags=tags)
    if lowered:
        REFERENCE[op] = reference
    if contiguous:
        SHAPES[op] = fake
    if check is not None:
        CHECKS[op] = check
    if measures:
        MEASURES.add(op)
    return op


# The types of arguments and results, as Python has them, in a schema.
_TYPES: Final = {
    "Tensor | None": "Tensor?",
    "Sequence[Tensor]": "Tensor[]",
    "Sequence[Tensor] | None": "Tensor[]?",
    "list[Tensor]": "Tensor[]",
    "Sequence[int]": "int[]",
    "int | None": "int?",
    "float | None": "float?",
    "torch.dtype": "ScalarType",
    "torch.dtype | None": "ScalarType?",
    "tuple[Tensor, Tensor]": "(Tensor, Tensor)",
    "torch.device": "Device",
}


def _type_of(annotation: str) -> str:
    written = re.sub(r"\bT\b", "Tensor", annotation)  # of QuantizeArguments
    return _TYPES.get(written, written)


def _schema_of(arguments: Callable[..., Any], returns: str = "") -> str:
    """Return the schema of an op with the arguments and results of a function, or the fields of a dataclass."""
    signature = inspect.signature(arguments)
    written: list[str] = []
    for name, argument in signature.parameters.items():
        if argument.kind is argument.KEYWORD_ONLY and "*" not in written:
            written.append("*")
        text = f"{_type_of(argument.annotation)} {name}"
        if (default := argument.default) is not argument.empty:
            text += f"={json.dumps(default)}" if isinstance(default, str) else f"={[] if default == () else default}"
        written.append(text)
    return f"({', '.join(written)}) -> {returns or _type_of(signature.return_annotation)}"


quantize = define(
    "quantize",
    _schema_of(QuantizeArguments, returns="Tensor[]"),
    reference=quantization.quantize_layouts,
    fake=_shape_of_quantize,
)
scaled_mm = define(
    "scaled_mm",
    "(Tensor a, Tensor b, Tensor scale_inv_a, Tensor scale_inv_b, Tensor? bias, ScalarType out_dtype,"
    ' bool use_fast_accum, *, str scaling="tensor", int[] block_a=[], int[] block_b=[],'
    " Tensor? global_scale_inv_a=None, Tensor? global_scale_inv_b=None, Tensor? addend=None,"
    ' str order_a="", str order_b="") -> Tensor',
    reference=hardware.scaled_mm,
    fake=_shape_of_scaled_mm,
)
scaled_grouped_mm = define(
    "scaled_grouped_mm",
    "(Tensor a, Tensor b, Tensor scale_inv_a, Tensor scale_inv_b, Tensor offs, ScalarType out_dtype,"
    ' bool use_fast_accum, bool native, *, str scaling="tensor", int[] block_a=[], int[] block_b=[],'
    " Tensor? global_scale_inv_a=None, Tensor? global_scale_inv_b=None, int multiple=1,"
    ' str order_a="", str order_b="") -> Tensor',
    reference=hardware.scaled_grouped_mm,
    fake=_shape_of_scaled_grouped_mm,
)
grouped_mm = define("grouped_mm", reference=experts.grouped_mm, fake=_shape_of_grouped_mm, lowered=False)
dequantize = define("dequantize", reference=quantization.dequantize_data, fake=_shape_of_dequantize, contiguous=False)
stored_weight = define(
    "stored_weight",
    reference=quantization.stored_weight,
    fake=_shape_of_dequantize,
    contiguous=False,
)
random_seed = define(
    "random_seed",
    reference=random_bits.random_seed,
    fake=_shape_of_random_seed,
    lowered=False,
    contiguous=False,
    tags=(torch.Tag.nondeterministic_seeded,),
)
amax = define("amax", reference=quantization.reducible_amax, fake=_shape_of_amax)
scales = define("scales", reference=quantization.scales_of_amax, fake=_shape_of_scales)
columnwise = define("columnwise", reference=tiles.columnwise_copy, fake=_shape_of_columnwise)
join = define("join", reference=tiles.joined_rows, fake=_shape_of_join)
repeat_scales = define("repeat_scales", reference=tiles.repeated_scales, fake=_shape_of_repeat_scales)


class _Described:
    """The properties of a tensor that a fake reads; ``new_empty`` describes another tensor."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape, self.dtype, self.ndim = tuple(shape), dtype, len(shape)

    def new_empty(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> _Described:
        return _Described(shape, dtype or self.dtype)


def fake_results(target: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a dialect op's fake for fake tensors of fixed sizes; None if some size is dynamic.

    Calling the op on them gives the same, but takes torch a millisecond, and a graph of a hundred layers has thousands
    of ops.
    """
    first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
    described: list[_Described] = []

    def describe(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            described.append(_Described(argument.shape, argument.dtype))
            return described[-1]
        return list(map(describe, argument)) if isinstance(argument, (list, tuple)) else argument

    args, kwargs = describe(args), {name: describe(argument) for name, argument in kwargs.items()}
    if any(not isinstance(size, int) for x in described for size in x.shape):
        return None
    results = SHAPES[target](*args, **kwargs)
    make = functools.partial(fakes.contiguous_fake, first.fake_mode, first.device)
    return (
        [make(x.shape, x.dtype) for x in results] if isinstance(results, list) else make(results.shape, results.dtype)
    )


def stays(node: fx.Node) -> bool:
    """Return whether a dialect node is not lowered: a loop over groups, whose sizes are not known in the graph."""
    if node.target is not scaled_grouped_mm:
        return False
    given = named_arguments(node)
    return not given["native"] or not hardware.vendor_of(given["a"].meta["val"].device).multiplies_groups
