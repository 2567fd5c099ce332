"""The linears of a checkpoint that a weight of a model is written as.

transformers keeps the experts of a layer in one tensor [experts, N, K], where its checkpoints have a linear per expert
and projection, and its modules may have other names than its checkpoints. Engines read checkpoints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8graph.backend.multiplied import Multiplied
from fp8graph.libraries import transformers
from fp8graph.numerics.scalings import SCALINGS

_SHIFT: Final = 40  # bits for the number of a row


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows of one matrix of a parameter, which a checkpoint stores as the weight of ``layer``."""

    layer: str
    rows: Tensor  # int64, of the matrix
    expert: int | None  # of a parameter [experts, N, K]


def saved_parts(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[Part]]:
    """How the parameters of these names and shapes ([N, K] or [experts, N, K]) are stored, as linears.

    A parameter that is not stored as linears, or not alone, is left out.
    """
    numbered: dict[str, Tensor] = {}  # transformers rearranges rows by their numbers: nothing large is copied
    for source, (name, shape) in enumerate(shapes.items()):
        rows = torch.arange(torch.Size(shape[:-1]).numel()).reshape(*shape[:-1], 1)
        numbered[name] = rows + (source << _SHIFT)
    names = list(shapes)
    found: dict[str, list[Part]] = {name: [] for name in names}
    unknown: set[str] = set()
    for name, tensor in transformers.as_saved(model, numbered).items():
        sources, rows = (tensor.flatten() >> _SHIFT).unique().tolist(), tensor.flatten() % (1 << _SHIFT)
        source = names[sources[0]]
        matrices = rows // shapes[source][-2]
        if len(sources) > 1 or tensor.ndim > 2 or matrices.unique().numel() > 1 or not name.endswith(".weight"):
            unknown.update(names[other] for other in sources)
            continue
        expert = int(matrices[0]) if len(shapes[source]) == 3 else None
        part = Part(layer=name.removesuffix(".weight"), rows=rows % shapes[source][-2], expert=expert)
        found[source].append(part)
    return {name: parts for name, parts in found.items() if name not in unknown and parts}


def why_not(weight: Multiplied, parts: Sequence[Part]) -> str | None:
    """Why the tiles of ``weight`` cannot be cut into ``parts``; None if they can."""
    rows, height = weight.data.shape[-2], _tile_rows(weight)
    for part in parts:
        start, stop = int(part.rows[0]), int(part.rows[-1]) + 1
        whole = start % height == 0 and (stop % height == 0 or stop == rows)
        if height > 1 and not (whole and torch.equal(part.rows, torch.arange(start, stop))):
            return f"{part.layer} begins or ends inside a tile of {height} rows"
    return None


def cut(weight: Multiplied, parts: Sequence[Part]) -> Iterator[tuple[str, Multiplied]]:
    """``weight`` as the linears that a checkpoint stores, each with the name of its layer."""
    for part in parts:
        data, scales, height = weight.data, weight.scale_inv, _tile_rows(weight)
        if part.expert is not None:
            data = data[part.expert]
            scales = scales[part.expert] if len(scales) == len(weight.data) else scales
        if _has_rows(weight):
            scales = scales[part.rows[::height] // height]
        yield part.layer, dataclasses.replace(weight, data=_rows(data, part), scale_inv=scales.contiguous())


def _rows(data: Tensor, part: Part) -> Tensor:
    in_bytes: Any = data.view(torch.uint8)  # not every FP8 dtype can be indexed
    return in_bytes[part.rows].view(data.dtype)


def _has_rows(weight: Multiplied) -> bool:
    """Whether ``weight`` has scales of its own for each row of tiles."""
    return SCALINGS[weight.quantizer.scaling].scale_shape(1, 1, [1, 1]) is not None


def _tile_rows(weight: Multiplied) -> int:
    return max(weight.quantizer.block[0], 1) if _has_rows(weight) else 1
