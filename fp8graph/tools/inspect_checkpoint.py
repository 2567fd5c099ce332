"""``fp8graph inspect``: the contents of an FP8 checkpoint, read one layer at a time, and as text.

They are formats, bytes, and the layers that stand out. The names are compared with those of the model that config.json
describes, which transformers builds on the meta device, without weights; where it cannot, the text says why.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fp8graph.checkpoints import WHOLE, Activation, Checkpoint, LayerFormat
from fp8graph.checkpoints.layer_format import is_packed
from fp8graph.errors import ConfigError, printable
from fp8graph.libraries.readers import as_saved
from fp8graph.recipes import FP8_MAX
from fp8graph.recipes.policy import text_of_file
from fp8graph.report.tables import aligned, any_layer, size_text
from fp8graph.report.terminal import progress_bar

# of layers and scales that a format adds to the model: ``quantization_config`` says what they are
_ADDED: Final = re.compile(r"(_scale|_scale_inv|_scale_2|_zero_point|_g_idx|\.scale|_shape)$")
# A config may claim anything, and much of it is built: its whole numbers are bounded before transformers reads them.
_ANY_NUMBER: Final = 300_000  # of any field, such as the index of a token: a table of as many labels takes seconds
_LARGEST: Final = 1 << 25  # of a dimension that a tensor has, and of the fields that follow: sizes, and lengths
_SIZES: Final = re.compile(r"vocab|position|seq|length|window|context|chunk|sampl|base|(_|^)id$")
_ANGLES: Final = re.compile(r"theta|freq")  # of the positions' rotations: nothing has this size
_MOST_VALUES: Final = 300_000  # in all lists and tables


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
    ``high_precision``: the matrices that are not. ``problems``: tensors that do not fit together, and scales that
    no weight has; a layer whose tensors do not fit is not in ``layers``.
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
    architecture: str = ""  #: a sentence: with which model the names were compared, or why not; "": not compared

    def outliers(self, count: int = 5) -> list[LayerSummary]:
        """Give the layers with the largest ratios of scales, and those with the largest shares of saturated numbers."""
        broken = [one for one in self.layers if one.nan]
        by_ratio = sorted(self.layers, key=lambda one: -one.scale_ratio)[:count]
        by_share = sorted(self.layers, key=lambda one: -one.saturated)[:count]
        return list({one.layer: one for one in (*broken, *by_ratio, *by_share)}.values())

    def to_dict(self) -> dict[str, Any]:
        """For JSON: a ratio that is not finite is None."""
        values = dataclasses.asdict(self)
        for layer in values["layers"]:
            layer |= {name: None for name, v in layer.items() if isinstance(v, float) and not math.isfinite(v)}
        return values


def inspect(checkpoint: Checkpoint, *, progress: Callable[[int, int], None] | None = None) -> Inspection:
    """Read a checkpoint, layer by layer.

    ``progress``: is called with the bytes of layers that were read, and of all.
    """
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
        folder=str(checkpoint.folder),
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
    tensors, counts = checkpoint.shards.tensors, Counter[tuple[LayerFormat, str]]()
    for layer, stored in checkpoint.layers.items():
        scale = tensors.get(stored.names(layer)["scale"])
        counts[dataclasses.replace(stored, part=None), "missing" if scale is None else scale.stored_as] += 1
    return [
        Scheme(
            name=stored.scheme,
            layers=count,
            tile=_tile_text(stored.block),
            scales=scales,
            input="high precision" if stored.activation is None else _input_text(stored.activation),
        )
        for (stored, scales), count in counts.most_common()
    ]


def _input_text(activation: Activation) -> str:
    words = {"dynamic": "dynamic", "static": "static", "local": "static and dynamic"}
    return f"{words[activation.scale]}, {_tile_text(activation.block)}"


def _tile_text(block: tuple[int, int]) -> str:
    """Who shares a scale: "tensor", "row", "128x128"."""
    return {(WHOLE, WHOLE): "tensor", (1, WHOLE): "row"}.get(block, f"{block[0]}x{block[1]}")


class Counts(NamedTuple):
    """The count of the numbers of a weight, and of those that are at the largest value of their type, zero, or NaN."""

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
    """Return the largest scale over the smallest that is not zero; inf if one is inf, NaN if one is NaN."""
    if scales.isnan().any():
        return math.nan
    positive = scales.abs()
    positive = positive[positive > 0]
    return float(positive.max() / positive.min()) if positive.numel() else 1.0


def inspected(folder: Path) -> Inspection:
    """:func:`inspect`, with a bar on a terminal, and a comparison of the names with those of the config's model.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or one of a format that is not known.
    """
    checkpoint = Checkpoint(folder)
    with progress_bar(f"reading {folder}") as progress:
        inspection = inspect(checkpoint, progress=progress)
    names, problems = compared(checkpoint)
    return dataclasses.replace(inspection, architecture=names, problems=[*inspection.problems, *problems])


def text(inspection: Inspection) -> str:
    """Return the contents of a checkpoint, for people."""
    share = f"{100 * inspection.quantized_share:.1f} % of the numbers"
    files = f"{inspection.files} file{'s' * (inspection.files != 1)}"
    origin = f"{inspection.folder}: {inspection.format}, {files}, {size_text(inspection.bytes)}"
    parts = [
        [f"{origin}. {_layers(inspection)} quantized: {share}."],
        aligned(
            [
                ("scheme", "layers", "one scale per", "scales", "inputs"),
                *((one.name, str(one.layers), one.tile, one.scales, one.input) for one in inspection.schemes),
            ],
            ruled=True,
        ),
        aligned(
            [
                ("dtype", "tensors", "size"),
                *((name, str(count), size_text(size)) for name, (count, size) in inspection.dtypes.items()),
            ],
            ruled=True,
        ),
        [f"in high precision: {_some(inspection.high_precision)}", f"ignore list: {_some(inspection.ignore)}"],
        *([[printable(f"key-value cache: {inspection.kv_cache}")]] if inspection.kv_cache is not None else []),
    ]
    if inspection.layers:
        rows = [_outlier(one) for one in inspection.outliers()]
        header = ("layers that stand out", "shape", "scales max/min", "max scale", "saturated", "zero", "not finite")
        parts.append(aligned([header, *rows], ruled=True))
    parts.append([inspection.architecture])
    some = [f"  {printable(problem)}" for problem in inspection.problems[:50]]
    more = [f"  and {len(inspection.problems) - 50} more"] if len(inspection.problems) > 50 else []
    wrong = [f"{len(inspection.problems)} things do not fit together:", *some, *more]
    parts.append(wrong if inspection.problems else ["Nothing is missing, left over or of a wrong shape."])
    return "\n\n".join("\n".join(lines) for lines in parts)


def _layers(inspection: Inspection) -> str:
    count = sum(one.layers for one in inspection.schemes)
    return f"{count} layer{'s' * (count != 1)}"


def _outlier(one: LayerSummary) -> tuple[str, ...]:
    shape = " x ".join(map(str, one.shape))
    shares = (f"{100 * share:.2f} %" for share in (one.saturated, one.zero))
    return printable(one.layer), shape, f"{one.scale_ratio:.3g}", f"{one.largest_scale:.3g}", *shares, str(one.nan)


def _some(names: list[str]) -> str:
    """Names, with one entry for layers that differ only in their numbers."""
    kinds = list(dict.fromkeys(printable(any_layer(f"{name}.").removesuffix(".")) for name in names))
    return ", ".join(kinds[:12]) + (f" and {len(kinds) - 12} more" if len(kinds) > 12 else "") or "none"


def compared(checkpoint: Checkpoint) -> tuple[str, list[str]]:
    """Return the class that the names were compared with, or why they were not; and what is missing or left over.

    Returns:
        A sentence, and problems in sentences without their full stop.
    """
    try:
        model = model_of_checkpoint(checkpoint)
    except ConfigError as error:
        return f"The names were not compared with those of a model: {error}", []
    title = type(model).__name__
    return f"The names were compared with those of {title} in transformers.", named_problems(checkpoint, model)


def named_problems(checkpoint: Checkpoint, model: Any) -> list[str]:
    """Compare the names of a checkpoint with those of ``model``: sentences without their full stop."""
    saved, tied = _names(model)
    tensors = set(_tensors(checkpoint, saved, getattr(model, "base_model_prefix", "")))
    missing = [name for name in saved if name not in tensors and not tied[name] & tensors]
    of_model = set(saved)
    unknown = [name for name in tensors if name not in of_model and not _ADDED.search(name)]
    missing = _without(missing, getattr(model, "_keys_to_ignore_on_load_missing", None))
    unknown = _without(unknown, getattr(model, "_keys_to_ignore_on_load_unexpected", None))
    unknown = _without(unknown, [r"rotary_emb\.inv_freq$"])  # transformers leaves those of older models out, too
    file, title = checkpoint.folder / "config.json", type(model).__name__
    texts = ((missing, "is not in the checkpoint"), (unknown, "is in the checkpoint, and not in that model"))
    return [f"{file}: of {title}, {name!r} {text}" for names, text in texts for name in sorted(names)]


def shapes_of(checkpoint: Checkpoint, model: Any) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the shape of each weight that both have: in the checkpoint, decoded, and in ``model``."""
    saved = _saved(model)
    names = _tensors(checkpoint, [*saved], getattr(model, "base_model_prefix", ""))
    stored = (*(checkpoint.layers), *checkpoint.others)
    return {
        own: (_shape(checkpoint, own), tuple(saved[name].shape))
        for own, name in zip(stored, names, strict=True)
        if name in saved
    }


def _shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    """Return the shape of a tensor, or of the weight of a quantized layer."""
    if name not in checkpoint.layers:
        return checkpoint.shards.info(name).shape
    stored = checkpoint.layers[name]
    *leading, columns = checkpoint.shards.info(stored.names(name)["weight"]).shape
    return (*leading, columns * (1 + stored.packed))


def model_of_checkpoint(checkpoint: Checkpoint) -> Any:
    """Return the model that config.json describes, without weights.

    Raises:
        ConfigError: transformers has no such model, or cannot build it.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("transformers is not installed.")
    from fp8graph.tools.hugging_face import config_of, model_of

    tensors = len(checkpoint.shards)
    if problem := _claimed(checkpoint):
        raise ConfigError(f"config.json {problem}.")
    config, _ = config_of(str(checkpoint.folder))
    name = next(iter(getattr(config, "architectures", None) or ()), None)
    if not isinstance(name, str):
        raise ConfigError("config.json names no architecture.")
    if not hasattr(importlib.import_module("transformers"), name):
        raise ConfigError(f"transformers has no architecture {name!r}, which config.json names.")
    try:
        return model_of(config, most=2_000 + 10 * tensors)
    except ConfigError:
        raise
    except Exception as error:  # of sizes that no model has: each class fails in its own way
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"transformers cannot build {name}: {reason}") from None


def _claimed(checkpoint: Checkpoint) -> str | None:
    """Return a reason why the model of config.json is not built; None where there is none, also of a file without a
    table.
    """
    try:
        values = json.loads(text_of_file(checkpoint.folder / "config.json"))
    except (OSError, ValueError, RecursionError):
        return None  # transformers says what is wrong with it
    shapes = [info.shape for info in checkpoint.shards.tensors.values() if info.bytes]
    largest = max((size for shape in shapes for size in shape), default=0)
    most = max(_ANY_NUMBER, min(largest, _LARGEST))
    count, where = 0, [("", values)]
    while where:
        name, value = where.pop()
        if isinstance(value, (dict, list)):
            count += len(value)
            if count > _MOST_VALUES:
                return f"has more than {_MOST_VALUES} values"
            inner: Any = value.items() if isinstance(value, dict) else ((name, one) for one in value)
            where += [(key, one) for key, one in inner if key != "quantization_config"]
        elif (
            isinstance(value, int) and value > (_LARGEST if _SIZES.search(name) else most) and not _ANGLES.search(name)
        ):
            said = f"says {name:.100} = {value!r:.40}, and of its {len(checkpoint.shards)} tensors"
            return f"{said} the largest dimension is {largest}"
    return None


def _saved(model: Any) -> dict[str, Tensor]:
    """Return the tensors of ``model`` under the names that it is saved with."""
    model.tie_weights()
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    return dict(as_saved(model, {name: tensor.detach() for name, tensor in state.items()}))


def _names(model: Any) -> tuple[list[str], dict[str, set[str]]]:
    """Return the names under which ``model`` is saved; and for each, those of the same tensor, of which one is in a
    file.
    """
    saved = list(_saved(model))
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    owners: dict[int, set[str]] = {}
    for name, tensor in state.items():
        owners.setdefault(id(tensor), set()).add(name)
    return saved, {name: owners[id(state[name])] if name in state else set[str]() for name in saved}


def _tensors(checkpoint: Checkpoint, saved: Sequence[str], prefix: str) -> Iterator[str]:
    """Yield the tensors of the model in the checkpoint. transformers takes the names of the model without its head,
    too.
    """
    names = set(saved)
    layers = checkpoint.layers.items()
    weights = (layer if stored.names(layer)["weight"] == layer else f"{layer}.weight" for layer, stored in layers)
    for name in (*weights, *checkpoint.others):
        longer = f"{prefix}.{name}"
        yield longer if name not in names and longer in names else name


def _without(names: Sequence[str], patterns: Sequence[str] | None) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]
