"""How a weight that fprop multiplies is stored: for each format, the form that its library has for the recipe."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from fp8graph.backend.multiplied import Multiplied
from fp8graph.checkpoints import LayerFormat, QuantizedWeight, compressed_tensors
from fp8graph.checkpoints.compressed_tensors import CompressedTensors
from fp8graph.checkpoints.hugging_face_fp8 import HuggingFaceFP8
from fp8graph.checkpoints.layer_format import Quantization
from fp8graph.checkpoints.modelopt import ALGORITHMS, ModelOpt
from fp8graph.errors import CheckpointError, ConfigError
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import FP8_MAX

AUTO: Final = "auto"
Kind = tuple[str, tuple[int, int]]  # of scaling, and (rows, columns) of a tile


def _hugging_face(**settings: Any) -> LayerFormat:
    return HuggingFaceFP8(**settings).linear()


# By format, then by kind of scaling and tile: how the library that owns the format stores such a weight. Its GEMMs
# quantize the input as the recipe does, or (static) with a scale from the checkpoint.
_FORMATS: Final[Mapping[str, tuple[type[Quantization], Mapping[Kind, LayerFormat]]]] = {
    "fp8": (
        HuggingFaceFP8,
        {
            ("block", (128, 128)): _hugging_face(block=(128, 128)),
            ("block_e8m0", (128, 128)): _hugging_face(block=(128, 128), scale_format="ue8m0"),
            ("tensor", (0, 0)): _hugging_face(block=None),
        },
    ),
    "compressed-tensors": (
        CompressedTensors,
        {
            ("row", (0, 0)): compressed_tensors.layer_format("FP8_DYNAMIC"),
            ("block", (128, 128)): compressed_tensors.layer_format("FP8_BLOCK"),
            ("tensor", (0, 0)): compressed_tensors.layer_format("FP8"),
            ("delayed", (0, 0)): compressed_tensors.layer_format("FP8"),
            ("mxfp8", (1, 32)): compressed_tensors.layer_format("MXFP8"),
            ("nvfp4", (1, 16)): compressed_tensors.layer_format("NVFP4"),
        },
    ),
    "modelopt": (
        ModelOpt,
        {
            ("row", (0, 0)): ALGORITHMS["FP8_PER_CHANNEL_PER_TOKEN"],
            ("tensor", (0, 0)): ALGORITHMS["FP8"],
            ("delayed", (0, 0)): ALGORITHMS["FP8"],
            ("mxfp8", (1, 32)): ALGORITHMS["MXFP8"],
            ("nvfp4", (1, 16)): ALGORITHMS["NVFP4"],
        },
    ),
}
FORMAT_NAMES: Final = tuple(_FORMATS)


def as_stored(weight: Multiplied, stored: LayerFormat, amax: Tensor | None) -> QuantizedWeight:
    """``weight`` in the words of checkpoints.

    Args:
        amax: FP32 []: of the layer's input, for a static scale that the recipe has not.
    """
    rows, columns = weight.data.shape[0], weight.data.shape[1] * SCALINGS[weight.quantizer.scaling].packed
    tile, scales = stored.tile((rows, columns)), weight.scale_inv
    if scales.ndim == 2 and (repeats := weight.quantizer.block[0] // tile[0]) > 1:  # 16x16 tiles as 1x16
        scales = scales.repeat_interleave(repeats, 0)[:rows]
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
    """What :func:`chosen` looks for."""
    rows, columns = weight.quantizer.block
    return weight.quantizer.scaling, (1 if SCALINGS[weight.quantizer.scaling].packed > 1 else rows, columns)


def chosen(
    name: str, kinds: Mapping[str, Kind], inputs: Collection[str]
) -> tuple[type[Quantization], dict[Kind, LayerFormat]]:
    """The format, and how it stores each kind of weight.

    ``inputs``: the layers of whose input a static scale is known.
    """
    if name not in (*FORMAT_NAMES, AUTO):
        raise ConfigError(f"format must be one of {', '.join((AUTO, *FORMAT_NAMES))}, not {name!r}.")
    problems: list[str] = []
    for title in FORMAT_NAMES if name == AUTO else (name,):
        quantization, forms = _FORMATS[title]
        problem = next((p for layer, kind in kinds.items() if (p := _why_not(layer, kind, forms, inputs))), None)
        if problem is None and quantization is HuggingFaceFP8 and len(set(kinds.values())) > 1:
            problem = "it has one form for all layers, and these have several"
        if problem is None:
            return quantization, {kind: forms[kind] for kind in kinds.values()}
        problems.append(f"{title}: {problem}")
    raise CheckpointError("the model cannot be written: " + "; ".join(problems) + ".")


def _why_not(layer: str, kind: Kind, forms: Mapping[Any, LayerFormat], inputs: Collection[str]) -> str | None:
    scaling, (rows, columns) = kind
    if kind not in forms:
        tiles = f" with {rows}x{columns} tiles" if columns else ""
        return f"{layer} is quantized as {scaling!r}{tiles}, for which it has no form"
    activation = forms[kind].activation
    if activation is not None and activation.scale != "dynamic" and layer not in inputs:
        return f"it stores a static scale of the input of {layer}: give calibration=[batch, ...]"
    return None
