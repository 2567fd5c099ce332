"""Hugging Face's FineGrained FP8, which is DeepSeek-V3's: ``quant_method: "fp8"``. Read from transformers 5.24.

A linear layer ``X`` has ``X.weight`` [n, k] in E4M3 and ``X.weight_scale_inv``, which multiplies: one number for each
tile of ``weight_block_size``, or one for the tensor. ``scale_fmt: "ue8m0"``: powers of two, as E8M0 (or its bytes in
uint8), or in FP32 (DeepSeek-V3.1). Static activations have one scale, ``X.activation_scale``: x = q * scale.
Fused experts [experts, n, k] have no ``.weight``: ``gate_up_proj``, ``gate_up_proj_scale_inv``. transformers saves
their weights one by one, ``experts.0.gate_proj.weight``, and their scales as they are. Engines (vLLM, AutoFP8) call
scales of a linear ``X.weight_scale`` and ``X.input_scale``.

``quant_method: "mxfp8"`` (MiniMax-M3, Inkling 2) is the same with tiles of 1x32 and the bytes of E8M0.

An embedding table has one scale, ``X.weight_scale`` [1], and ``modules_to_convert`` has the ends of such names
(``FP8Embedding`` of transformers).

``dequantize`` is the arithmetic of transformers' ``Fp8Dequantize``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self

import torch

from fp8graph.checkpoints.config import Expressions, Fields, is_pair
from fp8graph.checkpoints.layer_format import (
    E8M0,
    EMBEDDING,
    EVERY,
    FLOATS,
    STATIC,
    WHOLE,
    Activation,
    Kind,
    LayerFormat,
    Quantization,
    ScalesOfExpert,
    Suffixes,
)
from fp8graph.errors import CheckpointError

_LINEAR: Final = Suffixes(scale=".weight_scale_inv", input_scale=".activation_scale")
_OTHERS: Final = (
    # DeepSeek-V4 and Mistral Large 4, which transformers renames as it loads them
    Suffixes(scale=".scale", input_scale=".activation_scale"),
    Suffixes(scale=".qscale_weight", input_scale=".activation_scale"),
    Suffixes(scale=".weight_scale", input_scale=".input_scale"),  # vLLM and AutoFP8
)
_MX: Final = (1, 32)
_TABLE: Final = LayerFormat(
    scheme=EMBEDDING[0], suffixes=Suffixes(scale=".weight_scale"), block=(WHOLE, WHOLE), scale_dims=1
)
_EXPERTS: Final = Suffixes(weight="", scale="_scale_inv", input_scale="_activation_scale")
_BOUNDARY: Final = r"(?:(?<=\.)|(?=\.|$))"  # behind a name in the list of layers that are skipped
FUSED: Final = ("gate_up_proj", "down_proj", "up_proj")  # the parameters of fused experts


@dataclass(frozen=True, kw_only=True)
class HuggingFaceFP8(Quantization):
    """A parsed config. ``block``: None for one scale per tensor."""

    title: ClassVar[str] = "Hugging Face FP8"
    method: ClassVar[str] = "fp8"
    spellings: ClassVar[tuple[Suffixes, ...]] = (_LINEAR, *_OTHERS, _EXPERTS)
    mixes: ClassVar[bool] = False

    block: tuple[int, int] | None = (128, 128)
    scale_format: str = "float"
    static: bool = False
    packed_experts: bool = False
    modules_to_convert: tuple[str, ...] = ()  # embeddings

    @property
    def powers_of_two(self) -> bool:
        return self.scale_format == "ue8m0"

    @classmethod
    def parse(cls, config: Mapping[str, Any], where: str) -> Self:
        fields = Fields(config, where)
        fields.one_of("quant_method", [cls.method])
        fields.one_of("fmt", ["e4m3", "float8_e4m3fn"], "e4m3")  # DeepSeek's own, and MiniMax's
        fields.one_of("dequantize", [False, True], False)  # how it was loaded, not how it is stored
        block = fields.checked("weight_block_size", lambda b: b is None or is_pair(b), "null or [rows, columns]")
        ignored = fields.names("ignored_layers")  # MiniMax's and vLLM's name
        parsed = cls(
            block=None if block is None else (block[0], block[1]),
            scale_format=fields.one_of("scale_fmt", ["float", "ue8m0"], "float"),
            static=fields.one_of("activation_scheme", ["dynamic", "static"], "dynamic") == "static",
            packed_experts=fields.one_of("expert_dtype", ["fp8", "fp4"], "fp8") == "fp4",
            ignore=fields.names("modules_to_not_convert", ignored),
            modules_to_convert=fields.names("modules_to_convert"),
            kv_cache=fields.take("kv_cache_scheme"),  # AutoFP8, Hunyuan: "static", and there are k_scale, ...
            where=where,
        )
        fields.end()
        _ = parsed.skipped  # raises for an expression that cannot be read
        return parsed

    @classmethod
    def of(cls, layers: Mapping[str, LayerFormat], ignore: Sequence[str]) -> Self:
        tables = tuple(layer for layer, stored in layers.items() if stored == _TABLE)
        linears = {
            replace(stored, suffixes=_LINEAR, least_rows=1, scale_dims=2, part=None)
            for layer, stored in layers.items()
            if layer not in tables
        }
        if not linears:
            return cls(ignore=tuple(ignore), modules_to_convert=tables)
        first, *more = sorted(linears, key=lambda stored: stored.scheme)
        if more:
            schemes = ", ".join(stored.scheme for stored in (first, *more))
            raise CheckpointError(f"{cls.title} has one format for all layers, and these have {schemes}.")
        quantization = cls(
            block=None if first.block == (WHOLE, WHOLE) else first.block,
            scale_format="float" if torch.float8_e8m0fnu not in first.scale_dtypes else "ue8m0",
            static=first.activation is not None and first.activation.scale == "static",
            ignore=tuple(ignore),
            modules_to_convert=tables,
        )
        if replace(quantization.linear(), suffixes=_LINEAR, scale_dims=2) != first:
            raise CheckpointError(f"{cls.title} has no form for {first.scheme}.")
        return quantization

    @classmethod
    def forms(cls) -> Mapping[Kind, LayerFormat]:
        return {
            ("block", (128, 128)): cls().linear(),
            ("block_e8m0", (128, 128)): cls(scale_format="ue8m0").linear(),
            ("tensor", (0, 0)): cls(block=None).linear(),
            STATIC: cls(block=None, static=True).linear(),
            EMBEDDING: _TABLE,
        }

    @functools.cached_property
    def skipped(self) -> Skipped:
        """The layers that stay in high precision."""
        return Skipped(self.ignore, f"{self.where}: modules_to_not_convert")

    def linear(self) -> LayerFormat:
        """Return the format of a linear layer."""
        block = (WHOLE, WHOLE) if self.block is None else self.block
        ending = "" if self.scale_format == "float" else " ue8m0"
        tiles = "tensor" if self.block is None else f"{block[0]}x{block[1]}"
        scheme = f"{'static' if self.static else 'dynamic'} {tiles}{ending}"
        return LayerFormat(
            scheme=scheme,
            suffixes=_LINEAR if self.static else replace(_LINEAR, input_scale=None),
            block=block,
            scale_dtypes=FLOATS if self.scale_format == "float" else E8M0 if block == _MX else (*E8M0, torch.float32),
            scale_dims=0 if self.block is None else 2,
            # tokens are quantized alone even where the weight has one scale (transformers' kernels)
            activation=Activation(scale="static", block=(WHOLE, WHOLE))
            if self.static
            else Activation(scale="dynamic", block=(1, block[1])),
        )

    def experts(self) -> LayerFormat:
        """Return the format of a parameter of fused experts, [experts, n, k]."""
        fused = replace(self.linear(), suffixes=_EXPERTS if self.static else replace(_EXPERTS, input_scale=None))
        return replace(fused, scale_dims=2)

    def layer_formats(self, layer: str) -> tuple[LayerFormat, ...]:
        if layer in self.skipped:
            return ()
        if layer.rpartition(".")[2] in FUSED and layer.split(".")[-2:-1] == ["experts"]:
            # the two halves of gate_up_proj never share a scale
            experts = replace(self.experts(), least_rows=2 if layer.endswith("gate_up_proj") else 1)
            linears = (experts, self.experts(), self.linear())
        else:
            others = [replace(o, input_scale=o.input_scale if self.static else None) for o in _OTHERS]
            if layer.endswith(self.modules_to_convert):
                return (_TABLE,)
            linears = (self.linear(), *(replace(self.linear(), suffixes=other) for other in others), _TABLE)
            if (part := _among_experts(layer)) is not None:
                linears = (*linears, replace(self.linear(), part=part))
        if self.packed_experts and ".experts." in layer:  # DeepSeek-V4: MXFP4
            packed = {"scheme": "fp4 1x32", "packed": True, "block": (1, 32), "scale_dtypes": E8M0, "scale_dims": 2}
            return tuple(replace(linear, **packed) for linear in linears)
        return linears

    def selections(self) -> Iterator[tuple[str, LayerFormat | None]]:
        for name in self.ignore:
            yield rf"(?:{name}){_BOUNDARY}.*|.*{re.escape(name)}", None
        for table in self.modules_to_convert:
            yield rf".*{re.escape(table)}", _TABLE
        if self.packed_experts:
            yield r".*\.experts\..*", self.layer_formats(".experts.")[0]
        yield EVERY, self.linear()

    def config(self) -> dict[str, Any]:
        given = {"modules_to_convert": list(self.modules_to_convert), "kv_cache_scheme": self.kv_cache}
        return {name: value for name, value in given.items() if value} | {
            "activation_scheme": "static" if self.static else "dynamic",
            "modules_to_not_convert": list(self.ignore) or None,
            "quant_method": self.method,
            "scale_fmt": self.scale_format,
            "weight_block_size": None if self.block is None else list(self.block),
        }


@dataclass(frozen=True, kw_only=True)
class HuggingFaceMXFP8(HuggingFaceFP8):
    """A parsed config of tiles of 1x32, whose scales are E8M0."""

    title: ClassVar[str] = "Hugging Face MXFP8"
    method: ClassVar[str] = "mxfp8"

    block: tuple[int, int] | None = _MX
    scale_format: str = "ue8m0"

    @classmethod
    def parse(cls, config: Mapping[str, Any], where: str) -> Self:
        fields = Fields(config, where)
        fields.checked("weight_block_size", lambda b: tuple(b) == _MX, "[1, 32]", [*_MX])
        fields.one_of("scale_fmt", ["ue8m0"], "ue8m0")
        fields.one_of("activation_scheme", ["dynamic"], "dynamic")
        return super().parse({**config, "weight_block_size": _MX, "scale_fmt": "ue8m0"}, where)

    @classmethod
    def forms(cls) -> Mapping[Kind, LayerFormat]:
        return {("mxfp8", _MX): cls().linear(), EMBEDDING: _TABLE}


def _among_experts(layer: str) -> ScalesOfExpert | None:
    """Return the place of one expert's scales among those of all; None for another layer."""
    match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj", layer)
    if match is None:
        return None
    experts, expert, which = match.groups()
    fused = "down_proj" if which == "down" else "gate_up_proj"
    half = {"gate": 0, "up": 1, "down": None}[which]
    return ScalesOfExpert(tensor=f"{experts}.{fused}{_EXPERTS.scale}", expert=int(expert), half=half)


class Skipped:
    """The layers that transformers leaves in high precision (``should_convert_module``).

    A name is skipped if it begins with one of ``names``, up to a dot; if it does as a regular expression; or if it ends
    with it.
    """

    def __init__(self, names: Sequence[str], where: str) -> None:
        self._endings = frozenset(names)
        self._expressions = Expressions(dict.fromkeys(names), where, then=_BOUNDARY)

    def __contains__(self, layer: str) -> bool:
        ends = any(layer[start:] in self._endings for start in range(len(layer) + 1))
        return ends or self._expressions.first(layer) is not None
