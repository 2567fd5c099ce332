"""compressed-tensors, the format of llm-compressor and vLLM: ``quant_method: "compressed-tensors"``. Read from 0.20.

Groups of layers have a scheme each. A linear layer ``X`` has ``X.weight`` [n, k] in E4M3 and ``X.weight_scale``, which
multiplies: [1], [n, 1], tiles [n / rows, k / columns], or bytes of E8M0 [n, k / 32]; static activations have
``X.input_scale`` [1]. NVFP4 has ``X.weight_packed`` [n, k / 2], ``X.weight_scale`` [n, k / 16] in E4M3, and
``X.weight_global_scale`` and ``X.input_global_scale`` [1], which divide: 448 * 6 / amax.

``dequantize`` is the arithmetic of its ``decompress``, in FP32; that rounds to the dtype of the scales then.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self

import torch

from fp8graph.checkpoints.config import Expressions, Fields, is_count, is_names, is_pair, is_version_0
from fp8graph.checkpoints.layer_format import (
    EVERY,
    FLOATS,
    WHOLE,
    Activation,
    Kind,
    LayerFormat,
    Quantization,
    Suffixes,
)
from fp8graph.errors import CheckpointError

_FP8: Final = Suffixes()
_STATIC: Final = Suffixes(input_scale=".input_scale")
_FP4: Final = Suffixes(weight=".weight_packed", global_scale=".weight_global_scale")
_FP4_LOCAL: Final = Suffixes(
    weight=".weight_packed", global_scale=".weight_global_scale", input_scale=".input_global_scale"
)
_PER_TENSOR: Final = (WHOLE, WHOLE)
_PER_TOKEN: Final = (1, WHOLE)

Table = dict[str, Any]


def _arguments(strategy: str, bits: int = 8, **more: Any) -> Table:
    """Return a table of ``QuantizationArgs``."""
    return {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}


_MX: Final[Table] = {"group_size": 32, "scale_dtype": "torch.uint8"}
_NV: Final[Table] = {"group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
# The presets of compressed-tensors that fp8graph writes: weights, input_activations.
PRESETS: Final[dict[str, tuple[Table, Table | None]]] = {
    "FP8": (_arguments("tensor"), _arguments("tensor")),
    "FP8_DYNAMIC": (_arguments("channel"), _arguments("token", dynamic=True)),
    "FP8_BLOCK": (
        _arguments("block", block_structure=[128, 128]),
        _arguments("group", group_size=128, dynamic=True),
    ),
    "MXFP8": (_arguments("group", **_MX), _arguments("group", **_MX, dynamic=True)),
    "MXFP8A16": (_arguments("group", **_MX), None),
    "NVFP4": (_arguments("tensor_group", 4, **_NV), _arguments("tensor_group", 4, **_NV, dynamic="local")),
    "NVFP4A16": (_arguments("tensor_group", 4, **_NV), None),
}
_FORMS: Final[dict[Kind, str]] = {
    ("row", (0, 0)): "FP8_DYNAMIC",
    ("block", (128, 128)): "FP8_BLOCK",
    ("tensor", (0, 0)): "FP8",
    ("delayed", (0, 0)): "FP8",
    ("mxfp8", (1, 32)): "MXFP8",
    ("nvfp4", (1, 16)): "NVFP4",
}
_CLASSES: Final = ("Linear", "LinearBase")  # as targets: every linear
_FORMATS: Final = ("float-quantized", "naive-quantized", "mxfp8-quantized", "nvfp4-pack-quantized")


@dataclass(frozen=True, kw_only=True)
class ConfigGroup:
    """The layers that one scheme quantizes. ``targets``: full names, "re:" and a pattern, or classes like "Linear"."""

    stored: LayerFormat
    targets: tuple[str, ...]
    weights: Table = field(compare=False)
    inputs: Table | None = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class CompressedTensors(Quantization):
    """A parsed config."""

    title: ClassVar[str] = "compressed-tensors"
    method: ClassVar[str] = "compressed-tensors"
    spellings: ClassVar[tuple[Suffixes, ...]] = (_STATIC, _FP4_LOCAL)

    groups: tuple[ConfigGroup, ...] = ()

    @classmethod
    def parse(cls, config: Mapping[str, Any], where: str) -> Self:
        fields = Fields(config, where)
        fields.one_of("quant_method", [cls.method])
        # files of 2024 are "frozen" and hold FP8; weights in high precision are refused by their dtype
        fields.one_of("quantization_status", ["compressed", "frozen"], "compressed")
        fields.checked("version", is_version_0, 'a version of 0.x, like "0.20.0"', "0.20.0")
        fields.one_of("format", [*_FORMATS, "mixed-precision"])
        fields.empty("transform_config", "sparsity_config", "moe_sparsity_config")
        fields.unused("global_compression_ratio", "use_optimized_inference", "run_compressed", "dequantize")
        groups = fields.checked("config_groups", lambda groups: isinstance(groups, Mapping), "a table of groups")
        parsed = cls(
            groups=tuple(_group(name, group, f"{where}: config_groups") for name, group in groups.items()),
            ignore=fields.names("ignore"),
            kv_cache=fields.take("kv_cache_scheme"),
            where=where,
        )
        fields.end()
        _ = parsed.matched  # raises for an expression that cannot be read
        return parsed

    @classmethod
    def of(cls, layers: Mapping[str, LayerFormat], ignore: Sequence[str]) -> Self:
        by_format: dict[LayerFormat, list[str]] = {}
        for layer, stored in layers.items():
            by_format.setdefault(stored, []).append(layer)
        groups: list[ConfigGroup] = []
        for stored, names in by_format.items():
            preset = next((name for name in PRESETS if layer_format(name) == stored), None)
            if preset is None:
                raise CheckpointError(f"{cls.title} has no form for {stored.scheme}: it has {', '.join(PRESETS)}.")
            targets = ("Linear",) if len(by_format) == 1 else tuple(names)
            weights, inputs = PRESETS[preset]
            groups.append(ConfigGroup(stored=stored, targets=targets, weights=weights, inputs=inputs))
        return cls(groups=tuple(groups), ignore=tuple(ignore))

    @classmethod
    def forms(cls) -> Mapping[Kind, LayerFormat]:
        return {kind: layer_format(preset) for kind, preset in _FORMS.items()}

    def layer_formats(self, layer: str) -> tuple[LayerFormat, ...]:
        ignored, targets = self.matched
        group = targets.first(layer) if ignored.first(layer) is None else None
        return () if group is None else (self.groups[group].stored,)

    def selections(self) -> Iterator[tuple[str, LayerFormat | None]]:
        ignored, targets = self.matched
        for expression, _ in ignored.expressions():
            yield expression, None
        for expression, group in targets.expressions():
            yield expression, self.groups[group].stored

    @functools.cached_property
    def matched(self) -> tuple[Targets, Targets]:
        """The layers that are ignored, and those that belong to each group."""
        owners = [(target, index) for index, group in enumerate(self.groups) for target in group.targets]
        return (
            Targets([(target, 0) for target in self.ignore], f"{self.where}: ignore"),
            Targets(owners, f"{self.where}: config_groups"),
        )

    def config(self) -> dict[str, Any]:
        formats = [_format_name(group.stored) for group in self.groups]
        return {
            "config_groups": {
                f"group_{i}": {
                    "format": name,
                    "input_activations": group.inputs,
                    "output_activations": None,
                    "targets": list(group.targets),
                    "weights": group.weights,
                }
                for i, (group, name) in enumerate(zip(self.groups, formats, strict=True))
            },
            "format": formats[0] if len(set(formats)) == 1 else "mixed-precision",
            "global_compression_ratio": None,
            "ignore": list(self.ignore),
            "kv_cache_scheme": self.kv_cache,
            "quant_method": self.method,
            "quantization_status": "compressed",
        }


def layer_format(preset: str) -> LayerFormat:
    """Return the format of a preset's layers.

    Raises:
        CheckpointError: the preset is not known.
    """
    if preset.upper() not in PRESETS:
        raise CheckpointError(f"compressed-tensors: {preset!r} is not a known preset: {', '.join(PRESETS)}.")
    weights, inputs = PRESETS[preset.upper()]
    return _stored(weights, inputs, preset)


def _group(name: str, group: object, where: str) -> ConfigGroup:
    if is_names(group):  # the name of a preset, and its targets
        weights, inputs = PRESETS.get(name.upper(), (None, None))
        if weights is None:
            raise CheckpointError(f"{where}: {name!r} is not a known preset: {', '.join(PRESETS)}.")
        return ConfigGroup(stored=layer_format(name), targets=tuple(group), weights=weights, inputs=inputs)  # pyright: ignore
    fields = Fields(group, f"{where}.{name}")
    fields.empty("output_activations")
    fields.one_of("format", [None, *_FORMATS])
    weights, inputs = fields.take("weights"), fields.take("input_activations")
    targets = fields.names("targets")
    fields.end()
    return ConfigGroup(stored=_stored(weights, inputs, fields.where), targets=targets, weights=weights, inputs=inputs)


def _stored(weights: object, inputs: object, where: str) -> LayerFormat:
    """Return the format of a scheme, from its arguments for weights and inputs."""
    fields = Fields(weights, f"{where}.weights")
    fields.one_of("dynamic", [False], False)
    bits, strategy, tile, group, scales = _read(fields, ("tensor", "channel", "block", "group", "tensor_group"))
    activation = None if inputs is None else _activation(inputs, f"{where}.input_activations", bits)
    static = activation is not None and activation.scale == "static"
    if bits == 4:
        if strategy != "tensor_group" or group != 16 or static:
            raise fields.unknown("strategy", strategy, "With num_bits 4, only tensor_group of 16 is known (NVFP4).")
        suffixes, scale_dtypes, scheme = _FP4_LOCAL if activation else _FP4, (torch.float8_e4m3fn,), "NVFP4"
    else:
        suffixes = _STATIC if static else _FP8
        mx = scales in ("torch.uint8", "uint8")
        if strategy == "tensor_group" or (mx and (strategy, group) != ("group", 32)):
            raise fields.unknown("strategy", strategy, f"With num_bits 8 and scale_dtype {scales}, it is not known.")
        scale_dtypes: tuple[torch.dtype, ...] = (torch.uint8,) if mx else FLOATS
        per_token = activation == Activation(scale="dynamic", block=_PER_TOKEN)
        channel = "FP8_DYNAMIC" if per_token else "FP8_CHANNEL"
        schemes = {"tensor": "FP8", "channel": channel, "block": "FP8_BLOCK", "group": f"FP8_GROUP_{group}"}
        scheme = "MXFP8" if mx else schemes[strategy]
    return LayerFormat(
        scheme=scheme + ("" if activation else "A16" if scheme in ("MXFP8", "NVFP4") else "_A16"),
        suffixes=suffixes,
        block=tile,
        scale_dtypes=scale_dtypes,
        scale_dims=1 if strategy == "tensor" else 2,
        packed=bits == 4,
        divides=bits == 4,
        activation=activation,
    )


def _read(fields: Fields, strategies: Sequence[str]) -> tuple[int, str, tuple[int, int], int | None, str | None]:
    """Read the fields that ``QuantizationArgs`` of weights and of inputs share."""
    bits = fields.one_of("num_bits", [8, 4], 8)
    fields.one_of("type", ["float"], "int")
    fields.one_of("symmetric", [True], True)
    fields.empty("actorder")
    fields.unused("observer", "observer_kwargs", "zp_dtype")
    dtypes = (None, "torch.uint8", "uint8", "torch.float8_e4m3fn", "float8_e4m3fn")
    scales = fields.one_of("scale_dtype", [*dtypes, "torch.float32", "torch.bfloat16", "torch.float16"])
    group = fields.checked("group_size", lambda g: g is None or g == -1 or is_count(g), "a number of elements")
    block = fields.checked("block_structure", lambda b: b is None or is_pair(b), "null or [rows, columns]")
    default = "tensor" if group is None else "channel" if group == -1 else "group"
    strategy = fields.one_of("strategy", strategies, default)
    if (strategy == "block") != (block is not None):
        raise fields.unknown("block_structure", block, f"That does not go with strategy {strategy!r}.")
    if strategy in ("group", "tensor_group") and (group is None or group < 1):
        raise fields.unknown("group_size", group, f"That does not go with strategy {strategy!r}.")
    tiles = {"tensor": _PER_TENSOR, "channel": _PER_TOKEN, "token": _PER_TOKEN}
    fields.end()
    tile = (block[0], block[1]) if block is not None else tiles.get(strategy, (1, group or 0))
    return bits, strategy, tile, group, scales


def _activation(inputs: object, where: str, bits_of_weight: int) -> Activation:
    fields = Fields(inputs, where)
    dynamic = fields.one_of("dynamic", [False, True, "local"], False)
    bits, strategy, tile, *_ = _read(fields, ("tensor", "token", "group", "tensor_group"))
    if bits != bits_of_weight:
        raise fields.unknown("num_bits", bits, f"The weights have {bits_of_weight}.")
    if (dynamic == "local") != (strategy == "tensor_group") or (dynamic is False and strategy != "tensor"):
        raise fields.unknown("dynamic", dynamic, f"That does not go with strategy {strategy!r}.")
    return Activation(scale="local" if dynamic == "local" else "dynamic" if dynamic else "static", block=tile)


def _format_name(stored: LayerFormat) -> str:
    return "nvfp4-pack-quantized" if stored.packed else "mxfp8-quantized" if stored.scheme[:2] == "MX" else _FORMATS[0]


class Targets:
    """The targets of several owners, by which a linear layer finds its owner (compressed-tensors' ``match_targets``).

    Names come before expressions before classes, and the first owner before others.
    """

    def __init__(self, targets: Sequence[tuple[str, int]], where: str) -> None:
        self._names = dict(reversed(targets))
        written = [(target.removeprefix("re:"), owner) for target, owner in targets if target.startswith("re:")]
        self._written = [text for text, _ in written]
        self._expressions = Expressions(self._written, where)
        self._owners = [owner for _, owner in written]
        self._of_all = next((owner for target, owner in targets if target in _CLASSES), None)

    def expressions(self) -> Iterator[tuple[str, int]]:
        """Expressions on whole names, and their owners; the first that matches decides, as :meth:`first` does."""
        names = {name: owner for name, owner in self._names.items() if name not in _CLASSES and name[:3] != "re:"}
        yield from ((re.escape(name), owner) for name, owner in names.items())
        yield from ((f"(?:{text}).*", owner) for text, owner in zip(self._written, self._owners, strict=True))
        if self._of_all is not None:
            yield EVERY, self._of_all

    def first(self, layer: str) -> int | None:
        """Return the owner; None: the layer has none."""
        if layer in self._names:
            return self._names[layer]
        index = self._expressions.first(layer)
        return self._of_all if index is None else self._owners[index]
