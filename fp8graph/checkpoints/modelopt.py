"""NVIDIA ModelOpt, the format of TensorRT-LLM: ``quant_method: "modelopt"``. Read from 0.47.

The config is in ``hf_quant_config.json``, and once more, in other words, in config.json. A linear layer ``X`` has
``X.weight``, ``X.weight_scale``, and with static activations ``X.input_scale`` []. All scales multiply. FP8:
``weight_scale`` []; per channel [n]; MXFP8: bytes of E8M0 [n, k / 32]. NVFP4: ``X.weight`` is [n, k / 2] in uint8,
``weight_scale`` [n, k / 16] in E4M3, ``weight_scale_2`` and ``input_scale`` [] are amax / (448 * 6).

``dequantize`` is the arithmetic of its quantized tensors (``NVFP4QTensor``, ``MXFP8QTensor``) and of the engines that
read them, in FP32.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Self

import torch

from fp8graph.checkpoints.config import Expressions, Fields, is_version_0
from fp8graph.checkpoints.layer_format import EVERY, WHOLE, Activation, Kind, LayerFormat, Quantization, Suffixes
from fp8graph.errors import CheckpointError

FILE: Final = "hf_quant_config.json"
_MIXED: Final = "MIXED_PRECISION"
_WEIGHTS: Final = Suffixes()
_STATIC: Final = Suffixes(input_scale=".input_scale")
_FP4: Final = Suffixes(global_scale=".weight_scale_2", input_scale=".input_scale")
_FP32: Final = (torch.float32,)
_PRODUCER: Final = {"name": "modelopt", "version": "0.47.0"}  # whose files these are like

ALGORITHMS: Final[dict[str, LayerFormat]] = {
    stored.scheme: stored
    for stored in (
        LayerFormat(
            scheme="FP8",
            suffixes=_STATIC,
            block=(WHOLE, WHOLE),
            scale_dtypes=_FP32,
            scale_dims=0,
            activation=Activation(scale="static", block=(WHOLE, WHOLE)),
        ),
        LayerFormat(
            scheme="FP8_PER_CHANNEL_PER_TOKEN",
            suffixes=_WEIGHTS,
            block=(1, WHOLE),
            scale_dtypes=_FP32,
            scale_dims=1,
            activation=Activation(scale="dynamic", block=(1, WHOLE)),
        ),
        LayerFormat(  # ModelOpt writes the name in lower case
            scheme="FP8_PB_WO", suffixes=_WEIGHTS, block=(128, 128), scale_dtypes=_FP32, scale_dims=4
        ),
        LayerFormat(
            scheme="MXFP8",
            suffixes=_WEIGHTS,
            block=(1, 32),
            scale_dtypes=(torch.uint8,),
            activation=Activation(scale="dynamic", block=(1, 32)),
        ),
        LayerFormat(
            scheme="NVFP4",
            suffixes=_FP4,
            block=(1, 16),
            scale_dtypes=(torch.float8_e4m3fn,),
            packed=True,
            activation=Activation(scale="local", block=(1, 16)),
        ),
        LayerFormat(
            scheme="W4A16_NVFP4",
            suffixes=replace(_FP4, input_scale=None),
            block=(1, 16),
            scale_dtypes=(torch.float8_e4m3fn,),
            packed=True,
        ),
    )
}
_FORMS: Final[dict[Kind, str]] = {
    ("row", (0, 0)): "FP8_PER_CHANNEL_PER_TOKEN",
    ("tensor", (0, 0)): "FP8",
    ("delayed", (0, 0)): "FP8",
    ("mxfp8", (1, 32)): "MXFP8",
    ("nvfp4", (1, 16)): "NVFP4",
}
_GROUP_SIZES: Final = {"NVFP4": 16, "W4A16_NVFP4": 16, "MXFP8": 32}
_LOWER_CASE: Final = ("FP8_PB_WO",)


@dataclass(frozen=True, kw_only=True)
class ModelOpt(Quantization):
    """A parsed config. ``algorithm``: of all layers; None: ``layers`` have one each."""

    title: ClassVar[str] = "ModelOpt"
    method: ClassVar[str] = "modelopt"
    spellings: ClassVar[tuple[Suffixes, ...]] = (_STATIC, _FP4)

    algorithm: str | None = None
    layers: Mapping[str, str] = field(default_factory=dict[str, str])
    producer: Mapping[str, str] = field(default_factory=lambda: dict(_PRODUCER), compare=False)

    @classmethod
    def parse(cls, config: Mapping[str, Any], where: str) -> Self:
        """Read ``hf_quant_config.json``, or the ``quantization_config`` of config.json."""
        outer = Fields(config, where)
        producer = outer.take("producer", _PRODUCER)
        source = Fields(producer, f"{where}: producer")
        source.one_of("name", [cls.method])
        source.checked("version", is_version_0, 'a version of 0.x, like "0.47.0"')
        outer.one_of("quant_method", [cls.method], cls.method)
        inner = outer.take("quantization")
        fields = outer if inner is None else Fields(inner, f"{where}: quantization")
        algorithm = fields.take("quant_algo")
        if algorithm != _MIXED:
            algorithm = _algorithm(algorithm, fields)
        layers = fields.checked("quantized_layers", lambda layers: isinstance(layers, Mapping), "a table of layers", {})
        excluded = fields.names("exclude_modules") or fields.names("ignore")
        kv_cache = fields.take("kv_cache_quant_algo") or fields.take("kv_cache_scheme")
        if algorithm != _MIXED:
            _check_group(fields, algorithm)
            layers = {}
        # the same said in compressed-tensors' words, and what older versions wrote beside it
        fields.unused("config_groups", "kv_cache_quant_algo", "kv_cache_scheme", "ignore", "quantized_layers")
        fields.empty("has_zero_point", "pre_quant_scale", "lora_rank")
        fields.end()
        outer.end()
        parsed = cls(
            algorithm=None if algorithm == _MIXED else algorithm,
            layers={name: _of_layer(name, layer, where) for name, layer in layers.items()},
            ignore=excluded,
            kv_cache=kv_cache,
            producer=dict(producer),
            where=where,
        )
        _ = parsed.expressions  # raises for a pattern that cannot be read
        return parsed

    @classmethod
    def of(cls, layers: Mapping[str, LayerFormat], ignore: Sequence[str]) -> Self:
        for stored in layers.values():
            if ALGORITHMS.get(stored.scheme) != stored:
                raise CheckpointError(f"{cls.title} has no form for {stored.scheme}: it has {', '.join(ALGORITHMS)}.")
        schemes = {name: stored.scheme for name, stored in layers.items()}
        if len(set(schemes.values())) == 1:
            return cls(algorithm=next(iter(schemes.values())), ignore=tuple(ignore))
        return cls(layers=schemes, ignore=tuple(ignore))

    @classmethod
    def forms(cls) -> Mapping[Kind, LayerFormat]:
        return {kind: ALGORITHMS[algorithm] for kind, algorithm in _FORMS.items()}

    def layer_formats(self, layer: str) -> tuple[LayerFormat, ...]:
        if self.algorithm is not None:
            names, patterns = self.expressions
            excluded = any(owner in names for owner in _owners(layer)) or patterns.first(layer) is not None
            return () if excluded else (ALGORITHMS[self.algorithm],)
        owner = next((name for name in _owners(layer) if name in self.layers), None)
        return () if owner is None else (ALGORITHMS[self.layers[owner]],)

    def selections(self) -> Iterator[tuple[str, LayerFormat | None]]:
        if self.algorithm is None:
            for name in sorted(self.layers, key=lambda one: -one.count(".")):  # the innermost owner decides
                yield _inside(name), ALGORITHMS[self.layers[name]]
            return
        for name in self.ignore:
            yield of_glob(name) if _is_glob(name) else _inside(name), None
        yield EVERY, ALGORITHMS[self.algorithm]

    @functools.cached_property
    def expressions(self) -> tuple[frozenset[str], Expressions]:
        """The modules that are left in high precision: their names, and patterns."""
        patterns = [of_glob(one) for one in self.ignore if _is_glob(one)]
        return frozenset(self.ignore), Expressions(patterns, f"{self.where}: exclude_modules", then="$")

    def config(self) -> dict[str, Any]:
        if self.algorithm is None:
            said: dict[str, Any] = {"quant_algo": _MIXED, "quantized_layers": self._quantized_layers()}
        else:
            said = {"quant_algo": _written(self.algorithm)}
        cache = {} if self.kv_cache is None else {"kv_cache_scheme": self.kv_cache}
        more = {"ignore": list(self.ignore), "producer": dict(self.producer), "quant_method": self.method}
        return {**said, **cache, **more}

    def files(self) -> dict[str, dict[str, Any]]:
        said: dict[str, Any] = {"quant_algo": _MIXED, "kv_cache_quant_algo": self.kv_cache}
        if self.algorithm is None:
            said |= {"quantized_layers": self._quantized_layers()}
        else:
            said |= {"quant_algo": _written(self.algorithm)} | _group_size(self.algorithm)
        said["exclude_modules"] = list(self.ignore)
        return {FILE: {"producer": dict(self.producer), "quantization": said}}

    def _quantized_layers(self) -> dict[str, Any]:
        return {name: {"quant_algo": _written(one), **_group_size(one)} for name, one in self.layers.items()}


def _algorithm(algorithm: object, fields: Fields) -> str:
    """Return an algorithm by its name in ``ALGORITHMS``."""
    name = algorithm.upper() if isinstance(algorithm, str) else ""
    if name not in ALGORITHMS:
        raise fields.unknown("quant_algo", algorithm, f"Known: {', '.join(ALGORITHMS)}, {_MIXED}.")
    return name


def _check_group(fields: Fields, algorithm: str) -> None:
    """Refuse tiles of another size than the algorithm has."""
    usual = _GROUP_SIZES.get(algorithm)
    fields.one_of("group_size", [None, 0] if usual is None else [usual], usual)


def _of_layer(name: str, layer: object, where: str) -> str:
    fields = Fields(layer, f"{where}: quantized_layers[{name!r}]")
    algorithm = _algorithm(fields.take("quant_algo"), fields)
    _check_group(fields, algorithm)
    fields.empty("has_zero_point", "pre_quant_scale", "lora_rank")
    fields.end()
    return algorithm


def _group_size(algorithm: str) -> dict[str, int]:
    return {"group_size": _GROUP_SIZES[algorithm]} if algorithm in _GROUP_SIZES else {}


def _written(algorithm: str) -> str:
    return algorithm.lower() if algorithm in _LOWER_CASE else algorithm


def _owners(layer: str) -> list[str]:
    """Return a layer and the modules that it is in: fused experts are listed by the module that holds them."""
    parts = layer.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _inside(module: str) -> str:
    """Return the expression that matches a module and those in it."""
    return rf"{re.escape(module)}(?:\..*)?"


def _is_glob(name: str) -> bool:
    return any(character in name for character in "*?[")


def of_glob(pattern: str) -> str:
    """Return the expression that matches what a pattern of ``fnmatch`` does."""

    def part(match: re.Match[str]) -> str:
        if match["among"] is None:
            return {"*": ".*", "?": "."}.get(match[0], re.escape(match[0]))
        among = match["among"].replace("\\", "\\\\").replace("^", "\\^")
        return f"[{'^' if match['none'] else ''}{among}]"

    return re.sub(r"\[(?P<none>!?)(?P<among>[^\]]+)\]|.", part, pattern, flags=re.DOTALL)
