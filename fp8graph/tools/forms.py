"""The linears of a checkpoint as which a model's weight is written, and the form that a format has for its recipe.

transformers keeps the experts of a layer in one tensor [experts, N, K], where its checkpoints have a linear per expert
and projection, and its modules may have other names than its checkpoints. Engines read checkpoints.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8graph.backend.multiplied import Multiplied
from fp8graph.checkpoints import FORMATS, LayerFormat, QuantizedWeight
from fp8graph.checkpoints.layer_format import EMBEDDING, STATIC, WHOLE, Kind, Quantization
from fp8graph.compat.wrappers import name_in_original
from fp8graph.errors import CheckpointError, ConfigError
from fp8graph.libraries.readers import as_saved
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import FP8_MAX

AUTO: Final = "auto"
_SHIFT: Final = 40  # bits for the number of a row
_MOST_ROWS: Final = 1 << 27  # of a model: a GiB of their numbers. The largest public models have a fifth of it


@dataclass(frozen=True, kw_only=True)
class MatrixRows:
    """Rows of one matrix of a parameter, which a checkpoint stores as the weight of ``layer``."""

    layer: str
    rows: Tensor  # int64, of the matrix
    expert: int | None  # of a parameter [experts, N, K]


def saved_parts(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[MatrixRows]]:
    """Return the linears as which the parameters of these names and shapes ([N, K] or [experts, N, K]) are stored.

    A parameter that is not stored as linears, or not alone, is left out.
    """
    numbered: dict[str, Tensor] = {}  # transformers rearranges rows by their numbers: nothing large is copied
    for source, (name, shape) in enumerate(shapes.items()):
        rows = torch.arange(torch.Size(shape[:-1]).numel()).reshape(*shape[:-1], 1)
        numbered[name] = rows + (source << _SHIFT)
    names = list(shapes)
    by_name: dict[str, list[MatrixRows]] = {name: [] for name in names}
    unknown: set[str] = set()
    for name, tensor in as_saved(model, numbered).items():
        sources, rows = (tensor.flatten() >> _SHIFT).unique().tolist(), tensor.flatten() % (1 << _SHIFT)
        source = names[sources[0]]
        matrices = rows // shapes[source][-2]
        if len(sources) > 1 or tensor.ndim > 2 or matrices.unique().numel() > 1 or not name.endswith(".weight"):
            unknown.update(names[other] for other in sources)
            continue
        expert = int(matrices[0]) if len(shapes[source]) == 3 else None
        part = MatrixRows(layer=name.removesuffix(".weight"), rows=rows % shapes[source][-2], expert=expert)
        by_name[source].append(part)
    return {name: parts for name, parts in by_name.items() if name not in unknown and parts}


def saved_layers(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the linears as which each matrix of ``model`` is stored, by the name of its parameter.

    Raises:
        ConfigError: the matrices of ``model``, which may be on the meta device, have too many rows to number them.
    """
    named = ((name_in_original(name), parameter.shape) for name, parameter in model.named_parameters())
    # of experts [experts, n, k] two rows each tell where they are
    shapes = {name: (shape[0], 2, 1) if len(shape) == 3 else shape for name, shape in named if len(shape) in (2, 3)}
    if (rows := sum(math.prod(shape[:-1]) for shape in shapes.values())) > _MOST_ROWS:
        raise ConfigError(f"the matrices of {type(model).__name__} have {rows} rows, more than {_MOST_ROWS}.")
    return {name: [part.layer for part in parts] for name, parts in saved_parts(model, shapes).items()}


def saved_alone(model: nn.Module, name: str, shape: Sequence[int]) -> str | list[MatrixRows] | None:
    """Give the name under which a tensor is saved as it is, or the rows that are saved apart; None: in other pieces."""
    tensor = torch.empty(shape, device="meta")
    made = as_saved(model, {name: tensor})
    if [*map(id, made.values())] == [id(tensor)]:
        return next(iter(made))
    return saved_parts(model, {name: shape}).get(name) if len(shape) in (2, 3) else None


def saved_together(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of ``tensors``, those together that ``model`` saves in common pieces."""
    alone = {name: torch.tensor(source).expand(x.shape) for source, (name, x) in enumerate(tensors.items())}
    names, groups = list(tensors), {name: {name} for name in tensors}
    places = {x.data_ptr(): name for name, x in alone.items()}
    for made in as_saved(model, alone).values():
        if made.data_ptr() not in places:  # copied from several
            group = set[str]().union(*(groups[names[source]] for source in made.unique().tolist()))
            groups.update(dict.fromkeys(group, group))
    return [sorted(group, key=names.index) for name, group in groups.items() if name == min(group, key=names.index)]


def why_not(weight: Multiplied, parts: Sequence[MatrixRows]) -> str | None:
    """Return the reason why the tiles of ``weight`` cannot be cut into ``parts``; None if they can."""
    rows, height = weight.data.shape[-2], _tile_rows(weight)
    for part in parts:
        start, stop = int(part.rows[0]), int(part.rows[-1]) + 1
        whole = start % height == 0 and (stop % height == 0 or stop == rows)
        if height > 1 and not (whole and torch.equal(part.rows, torch.arange(start, stop))):
            return f"{part.layer} begins or ends inside a tile of {height} rows"
    return None


def cut(weight: Multiplied, parts: Sequence[MatrixRows]) -> Iterator[tuple[str, Multiplied]]:
    """``weight`` as the linears that a checkpoint stores, each with the name of its layer."""
    for part in parts:
        data, scales, whole = weight.data, weight.scale_inv, weight.global_scale_inv
        if part.expert is not None:
            data = data[part.expert]
            scales = scales[part.expert] if len(scales) == len(weight.data) else scales
            whole = None if whole is None else whole[part.expert]
        if _has_rows(weight):
            scales = scales[scale_rows_of(weight, part)]
        data = selected(data, part.rows)
        scales = scales.contiguous()
        yield part.layer, dataclasses.replace(weight, data=data, scale_inv=scales, global_scale_inv=whole)


def scale_rows_of(weight: Multiplied, part: MatrixRows) -> Tensor:
    """Return the rows of tiles of a matrix of ``weight`` that are those of ``part``."""
    height = _tile_rows(weight)
    return part.rows[::height] // height


def selected(x: Tensor, rows: Tensor) -> Tensor:
    """Some rows of a matrix."""
    if x.dtype.itemsize > 1:
        return x[rows]
    in_bytes: Any = x.view(torch.uint8)  # not every FP8 dtype can be indexed
    return in_bytes[rows].view(x.dtype)


def _has_rows(weight: Multiplied) -> bool:
    """Return whether each row of tiles of ``weight`` has scales."""
    return SCALINGS[weight.quantizer.scaling].scale_shape(1, 1, [1, 1]) is not None


def _tile_rows(weight: Multiplied) -> int:
    return max(weight.quantizer.block[0], 1) if _has_rows(weight) else 1


def as_stored(weight: Multiplied, stored: LayerFormat, amax: Tensor | None) -> QuantizedWeight:
    """``weight`` in the words of checkpoints.

    Args:
        amax: FP32 []: of the layer's input, for a static scale that the recipe has not.
    """
    rows, columns = weight.data.shape[0], weight.data.shape[1] * SCALINGS[weight.quantizer.scaling].packed
    tile, scales = stored.tile((rows, columns)), weight.scale_inv
    if scales.ndim == 2 and (repeats := weight.quantizer.block[0] // tile[0]) > 1:  # 16x16 tiles as 1x16
        scales = scales.repeat_interleave(repeats, 0)[:rows]
    if stored.block == (WHOLE, WHOLE):
        scales = scales.flatten()[:1]  # of a scale per row, one is repeated: see with_one_scale
    input_scale = None
    if stored.activation is not None and stored.activation.scale != "dynamic":
        input_scale = weight.input_scale_inv
        if input_scale is None and amax is not None:
            input_scale = amax / (weight.quantizer.fp8_max * (FP8_MAX[torch.float8_e4m3fn] if stored.packed else 1.0))
    return QuantizedWeight(
        data=weight.data,
        scale_inv=scales.reshape(stored.grid((rows, columns))),
        block=tile,
        global_scale_inv=weight.global_scale_inv,
        input_scale_inv=input_scale,
    )


def kind_of(weight: Multiplied) -> Kind:
    """Return the kind of scaling and the tile of ``weight``, for :func:`chosen`."""
    rows, columns = weight.quantizer.block
    return weight.quantizer.scaling, (1 if SCALINGS[weight.quantizer.scaling].packed > 1 else rows, columns)


def with_one_scale(weight: Multiplied) -> Kind | None:
    """Return the kind of a weight that arrived with one scale, where its layer multiplies another; None if it did not.

    Inputs with a scale per token are multiplied by a weight whose scale is repeated for each row.
    """
    if weight.quantizer.scaling == "row" and bool((weight.scale_inv == weight.scale_inv[0]).all()):
        return ("tensor", (0, 0))
    return STATIC if weight.quantizer.scaling == "delayed" else None


def chosen(
    name: str, kinds: Mapping[str, Kind], inputs: Collection[str]
) -> tuple[type[Quantization], dict[Kind, LayerFormat]]:
    """Return the format, and how it stores each kind of weight.

    ``inputs``: the layers of whose input a static scale is known.
    """
    if name not in (AUTO, *FORMATS):
        raise ConfigError(f"format must be one of {', '.join((AUTO, *FORMATS))}, not {name!r}.")
    problems: list[str] = []
    for title in FORMATS if name == AUTO else (name,):
        quantization = FORMATS[title]
        forms = quantization.forms()
        problem = next((p for layer, kind in kinds.items() if (p := _why_not(layer, kind, forms, inputs))), None)
        if problem is None and not quantization.mixes and len({*kinds.values()} - {EMBEDDING}) > 1:
            problem = "it has one form for all layers, and these have several"
        if problem is None:
            return quantization, {kind: forms[kind] for kind in kinds.values()}
        problems.append(f"{title}: {problem}")
    raise CheckpointError("the model cannot be written: " + "; ".join(problems) + ".")


def _why_not(layer: str, kind: Kind, forms: Mapping[Any, LayerFormat], inputs: Collection[str]) -> str | None:
    scaling, (rows, columns) = kind
    if kind == EMBEDDING and kind not in forms:
        return f"{layer} is an embedding in FP8, for which it has no form"
    if kind not in forms:
        tiles = f" with {rows}x{columns} tiles" if columns else ""
        return f"{layer} is quantized as {scaling!r}{tiles}, for which it has no form"
    activation = forms[kind].activation
    if activation is not None and activation.scale != "dynamic" and layer not in inputs:
        return f"it stores a static scale of the input of {layer}: give calibration=[batch, ...]"
    return None
