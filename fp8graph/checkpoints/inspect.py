"""Summarize an FP8 checkpoint: formats, bytes, and which layers stand out. Reads one layer at a time."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8graph.checkpoints.checkpoint import Checkpoint
from fp8graph.checkpoints.layer_format import WHOLE, Activation, LayerFormat, is_packed
from fp8graph.recipes import FP8_MAX


@dataclass(frozen=True, kw_only=True)
class LayerSummary:
    """One quantized layer.

    ``scale_ratio``: its largest scale over its smallest; ``largest_scale`` includes the scale of the whole tensor.
    ``saturated``, ``zero``: the shares of its numbers that are the largest of their type, or zero. ``nan``: how many
    numbers and scales are not finite.
    """

    layer: str
    scheme: str
    shape: tuple[int, ...]
    bytes: int
    scale_ratio: float
    largest_scale: float
    saturated: float
    zero: float
    nan: int


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A way in which layers are stored, and how many are. ``input``: how their inputs are to be quantized."""

    name: str
    layers: int
    tile: str
    scales: str
    input: str


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The result of :func:`inspect`.

    ``dtypes``: (tensors, bytes) by safetensors' names. ``quantized_share``: of all numbers, how many are in FP8 or FP4.
    ``high_precision``: the matrices that are not. ``problems``: what does not fit together, and scales that no weight
    has; ``layers`` lacks layers whose tensors do not fit.
    """

    folder: str
    format: str
    files: int
    bytes: int
    dtypes: dict[str, tuple[int, int]]
    schemes: list[Scheme]
    quantized_share: float
    layers: list[LayerSummary]
    high_precision: list[str]
    ignore: list[str]
    kv_cache: object | None
    problems: list[str]
    architecture: str = ""  #: a sentence: with which model the names were compared, or why not; "": nobody has tried

    def outliers(self, count: int = 5) -> list[LayerSummary]:
        """The layers with the largest ratios of scales, and those with the largest shares of saturated numbers."""
        broken = [one for one in self.layers if one.nan]
        by_ratio = sorted(self.layers, key=lambda one: -one.scale_ratio)[:count]
        by_share = sorted(self.layers, key=lambda one: -one.saturated)[:count]
        return list({one.layer: one for one in (*broken, *by_ratio, *by_share)}.values())

    def to_dict(self) -> dict[str, Any]:
        """For JSON: a ratio that is not finite is None."""
        found = dataclasses.asdict(self)
        for layer in found["layers"]:
            layer |= {name: None for name, v in layer.items() if isinstance(v, float) and not math.isfinite(v)}
        return found


def inspect(folder: Path | str, *, progress: Callable[[int, int], None] | None = None) -> Inspection:
    """Read a checkpoint, layer by layer.

    Args:
        folder: a folder with config.json and safetensors files.
        progress: is called with the bytes of layers that were read, and of all.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or one of a format that is not known.
    """
    checkpoint = Checkpoint(folder)
    tensors = checkpoint.shards.tensors
    dtypes: dict[str, tuple[int, int]] = {}
    for info in tensors.values():
        count, size = dtypes.get(info.stored_as, (0, 0))
        dtypes[info.stored_as] = count + 1, size + info.bytes
    sizes = {layer: _bytes(checkpoint, layer) for layer in checkpoint.layers}
    layers, problems = list[LayerSummary](), [*checkpoint.problems]
    done, quantized = 0, 0
    for layer, stored in checkpoint.layers.items():
        quantized += _numbers(checkpoint, layer)
        if not any(stored.problems(layer, tensors)):
            layers.append(_summary(checkpoint, layer, sizes[layer]))
            problems += stored.wrong_scales(layer, tensors, checkpoint.shards.tensor)
        done += sizes[layer]
        if progress is not None:
            progress(done, sum(sizes.values()))
    others = sum(math.prod(tensors[name].shape) for name in checkpoint.others)
    return Inspection(
        folder=str(folder),
        format=checkpoint.quantization.title,
        files=len(checkpoint.shards.files),
        bytes=sum(size for _, size in dtypes.values()),
        dtypes=dict(sorted(dtypes.items(), key=lambda one: -one[1][1])),
        schemes=_schemes(checkpoint),
        quantized_share=quantized / (quantized + others) if quantized else 0.0,
        layers=layers,
        high_precision=[
            name.removesuffix(".weight")
            for name in checkpoint.others
            if len(tensors[name].shape) > 1 and not tensors[name].stored_as.startswith("F8")
        ],
        ignore=list(checkpoint.quantization.ignore),
        kv_cache=checkpoint.quantization.kv_cache,
        problems=problems,
    )


def _bytes(checkpoint: Checkpoint, layer: str) -> int:
    stored = checkpoint.layers[layer]
    names = {what: name for what, name in stored.names(layer).items() if what != "scale" or stored.part is None}
    return sum(checkpoint.shards.tensors[name].bytes for name in names.values() if name in checkpoint.shards)


def _numbers(checkpoint: Checkpoint, layer: str) -> int:
    stored = checkpoint.layers[layer]
    return math.prod(checkpoint.shards.info(stored.names(layer)["weight"]).shape) * (1 + stored.packed)


def _summary(checkpoint: Checkpoint, layer: str, size: int) -> LayerSummary:
    weight = checkpoint.weight(layer)
    counts, scales = counts_of(weight.data), weight.scales()
    return LayerSummary(
        layer=layer,
        scheme=checkpoint.layers[layer].scheme,
        shape=weight.shape,
        bytes=size,
        scale_ratio=scale_ratio(scales),
        largest_scale=float(scales.abs().max()) if scales.numel() else 0.0,
        saturated=counts.saturated / max(1, counts.numbers),
        zero=counts.zero / max(1, counts.numbers),
        nan=counts.nan + int((~scales.isfinite()).sum()),
    )


def _schemes(checkpoint: Checkpoint) -> list[Scheme]:
    tensors, found = checkpoint.shards.tensors, Counter[tuple[LayerFormat, str]]()
    for layer, stored in checkpoint.layers.items():
        scale = tensors.get(stored.names(layer)["scale"])
        found[replace(stored, part=None), "missing" if scale is None else scale.stored_as] += 1
    return [
        Scheme(
            name=stored.scheme,
            layers=count,
            tile=_tile_text(stored.block),
            scales=scales,
            input="high precision" if stored.activation is None else _input_text(stored.activation),
        )
        for (stored, scales), count in found.most_common()
    ]


def _input_text(activation: Activation) -> str:
    words = {"dynamic": "dynamic", "static": "static", "local": "static and dynamic"}
    return f"{words[activation.scale]}, {_tile_text(activation.block)}"


def _tile_text(block: tuple[int, int]) -> str:
    """Who shares a scale: "tensor", "row", "128x128"."""
    return {(WHOLE, WHOLE): "tensor", (1, WHOLE): "row"}.get(block, f"{block[0]}x{block[1]}")


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The distribution of the numbers of a weight. ``saturated``: at the largest value of their type."""

    numbers: int
    saturated: int
    zero: int
    nan: int


def counts_of(data: Tensor) -> Counts:
    """Count the numbers of FP8 or packed E2M1 data without decoding them, from how often each byte is there."""
    per_byte = torch.zeros(256, dtype=torch.int64)
    for part in data.contiguous().view(torch.uint8).flatten().split(1 << 24):
        per_byte += torch.bincount(part, minlength=256)
    every_byte = torch.arange(256, dtype=torch.uint8)
    if is_packed(data.dtype):
        halves = torch.stack([every_byte & 7, (every_byte >> 4) & 7])  # without their signs
        saturated, zero = (int((per_byte * (halves == code).sum(0)).sum()) for code in (7, 0))
        return Counts(numbers=2 * data.numel(), saturated=saturated, zero=zero, nan=0)
    numbers = every_byte.view(data.dtype).to(torch.float32).abs()
    saturated = int(per_byte[numbers >= FP8_MAX[data.dtype]].sum())  # E5M2's inf too
    zero, nan = int(per_byte[numbers == 0].sum()), int(per_byte[numbers.isnan()].sum())
    return Counts(numbers=data.numel(), saturated=saturated, zero=zero, nan=nan)


def scale_ratio(scales: Tensor) -> float:
    """The largest scale over the smallest that is not zero; inf if one is inf, NaN if one is NaN."""
    if scales.isnan().any():
        return math.nan
    positive = scales.abs()
    positive = positive[positive > 0]
    return float(positive.max() / positive.min()) if positive.numel() else 1.0
