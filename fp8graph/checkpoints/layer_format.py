"""The model of a checkpoint that all formats share: a quantized weight, how its layer is stored, and the config.

A format is a subclass of ``Quantization``, which says for each layer by which ``LayerFormat`` its tensors are named,
typed and shaped. Reading one gives a ``QuantizedWeight``, the same for all formats.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Literal, Self

import torch
from torch import Tensor

from fp8graph.checkpoints.shards import TensorInfo
from fp8graph.errors import CheckpointError
from fp8graph.numerics.formats import exp2_biased
from fp8graph.numerics.quantization import dequantize_data

WHOLE: Final = 0  # in a block: the whole dim
EVERY: Final = ".*"  # of expressions: the one that matches all names
Kind = tuple[str, tuple[int, int]]  # of scaling, and (rows, columns) of a tile; (0, 0): scales are not of tiles
EMBEDDING: Final[Kind] = ("embedding", (0, 0))  # a table with one scale, whose rows are looked up
STATIC: Final[Kind] = ("static", (0, 0))  # one scale, and one of the input, both from a checkpoint
FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
E8M0: Final = (torch.uint8, torch.float8_e8m0fnu)


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """The bytes and scales of one weight [..., n, k], as they are in a file.

    ``data``: FP8 [..., n, k], or two E2M1 codes per byte [..., n, k / 2], the first in the low half (uint8 or int8).
    ``scale_inv``: multiplies; one per tile, [..., ceil(n / rows), ceil(k / columns)]; FP32, BF16, FP16, E4M3, or E8M0
    (float8_e8m0fnu or its bytes in uint8). ``block``: (rows, columns) of a tile.

    What the whole tensor shares, and what quantizes the layer's input, is stored by one library as a factor and by
    another as a divisor. One of both is given: the one that is in the file.
    """

    data: Tensor
    scale_inv: Tensor
    block: tuple[int, int]
    global_scale_inv: Tensor | None = None  # FP32 []: multiplies
    global_scale: Tensor | None = None  # FP32 []: divides
    input_scale_inv: Tensor | None = None  # [] (or one per expert): x = q * input_scale_inv
    input_scale: Tensor | None = None  # []: x = q / input_scale

    @property
    def packed(self) -> bool:
        return is_packed(self.data.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        *leading, columns = self.data.shape
        return (*leading, columns * (1 + self.packed))

    def scales(self) -> Tensor:
        """FP32: what each tile is multiplied by. A factor or divisor of the whole tensor is applied to the scales.

        In this order, as in compressed-tensors (``_dequantize``), ModelOpt (``NVFP4QTensor.dequantize``) and the GEMMs
        of engines; the other order would round other numbers.
        """
        scales = decoded_scales(self.scale_inv)
        if self.global_scale_inv is not None:
            scales = scales * self.global_scale_inv.to(torch.float32)
        if self.global_scale is not None:
            scales = scales / self.global_scale.to(torch.float32)
        return scales


def dequantize(weight: QuantizedWeight) -> Tensor:
    """FP32 [..., n, k]: each number times the scale of its tile, rounded once to FP32."""
    data, scaling = weight.data, "block"
    if weight.packed:
        data, scaling = data.view(torch.uint8), "nvfp4"
    return dequantize_data(data, weight.scales(), torch.float32, scaling=scaling, block=weight.block)


def is_packed(dtype: torch.dtype | None) -> bool:
    """Return whether a weight of this dtype holds two E2M1 codes per byte."""
    return dtype in (torch.uint8, torch.int8)


def decoded_scales(scales: Tensor) -> Tensor:
    """Stored scales in FP32. E8M0: 2 ** (byte - 127), and byte 255 is NaN."""
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    return exp2_biased(scales.to(torch.int32)) if scales.dtype == torch.uint8 else scales.to(torch.float32)


@dataclass(frozen=True, kw_only=True)
class Suffixes:
    """Suffixes of the names of a layer's tensors. None: the format has no such tensor."""

    weight: str = ".weight"
    scale: str = ".weight_scale"
    global_scale: str | None = None
    input_scale: str | None = None


@dataclass(frozen=True, kw_only=True)
class Activation:
    """The quantization of a layer's input.

    ``scale``: "dynamic" from the input itself, "static" from the checkpoint, "local": dynamic tiles below a static
    scale of the whole tensor. ``block``: (tokens, elements) that share a scale.
    """

    scale: Literal["dynamic", "static", "local"]
    block: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class ScalesOfExpert:
    """The scales of one expert among those of all experts, [experts, tiles, tiles].

    ``half``: of gate_up_proj, whose tiles of gate_proj come first; None: all of them.
    """

    tensor: str
    expert: int
    half: int | None = None

    def shape(self, of_all: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part, from that of the scales of all experts; empty if there is no such part."""
        if len(of_all) != 3 or self.expert >= of_all[0] or (self.half is not None and of_all[1] % 2):
            return ()
        return (of_all[1] // (1 if self.half is None else 2), of_all[2])

    def of(self, scales: Tensor) -> Tensor:
        scale = scales[self.expert]
        return scale if self.half is None else scale.chunk(2)[self.half]


@dataclass(frozen=True, kw_only=True)
class LayerFormat:
    """One way to store a quantized linear layer.

    ``scheme``: its name in its library. ``block``: (rows, columns) of the weight that share a scale; ``WHOLE``: all.
    ``scale_dims``: how many dims a stored scale has for a weight of two. ``divides``: scales of the whole tensor are
    stored as divisors. ``activation``: None, if the input stays in high precision. ``part``: where the scales are, if
    they have no tensor of their own; written, they get one.
    """

    scheme: str
    suffixes: Suffixes
    block: tuple[int, int]
    scale_dtypes: tuple[torch.dtype, ...] = FLOATS
    scale_dims: int = 2
    packed: bool = False
    divides: bool = False
    activation: Activation | None = None
    least_rows: int = 1  # of scales, even for a weight of fewer rows than a tile
    part: ScalesOfExpert | None = None

    @property
    def data_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8, torch.int8) if self.packed else (torch.float8_e4m3fn,)

    def tile(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """(rows, columns) of a tile of a weight of this shape."""
        rows, columns = (size or whole or 1 for size, whole in zip(self.block, shape[-2:], strict=True))
        if -(-shape[-2] // rows) < self.least_rows:
            rows = max(1, shape[-2] // self.least_rows)
        return rows, columns

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tiles of a weight of this shape: what ``QuantizedWeight.scale_inv`` has."""
        rows, columns = self.tile(shape)
        return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))

    def names(self, layer: str) -> dict[str, str]:
        """Return the tensors of a layer, by what they are. Those of the input are there only if they are static."""
        s = self.suffixes
        suffixes = {"weight": s.weight, "scale": s.scale, "global scale": s.global_scale, "input scale": s.input_scale}
        names = {what: layer + suffix for what, suffix in suffixes.items() if suffix is not None}
        return names if self.part is None else names | {"scale": self.part.tensor}

    def problems(self, layer: str, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
        """Sentences on the tensors of a layer that do not fit, from their headers alone."""
        names = self.names(layer)
        for what, name in names.items():
            if name not in tensors:
                yield f"the {what} of layer {layer!r} is missing: there is no tensor {name!r} ({self.scheme})"
        if names["weight"] not in tensors:
            return
        weight = tensors[names["weight"]]
        where = f"{weight.file}: tensor {weight.name!r}"
        if weight.dtype not in self.data_dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in self.data_dtypes)
            yield f"{where} is {weight.stored_as}, not {wanted} ({self.scheme})"
            return
        if len(weight.shape) not in (2, 3):
            yield f"{where} has shape {list(weight.shape)}, and a weight has 2 dims, or 3 of experts"
            return
        shape = (*weight.shape[:-1], weight.shape[-1] * (1 + self.packed))
        *leading, rows, columns = self.grid(shape)
        forms = [(rows, columns), (rows, 1, columns, 1)]
        forms += [(rows,)] * (columns == 1) + [()] * (rows == columns == 1)
        of_scales = {(*leading, *form) for form in forms}
        one = {(), (1,), (*leading,), (*leading, 1), (*leading, 1, 1)}
        for what, name in names.items():
            if what == "weight" or name not in tensors:
                continue
            scale = tensors[name]
            held = self.part.shape(scale.shape) if self.part is not None and what == "scale" else scale.shape
            if held not in (of_scales if what == "scale" else one):
                yield (
                    f"{scale.file}: tensor {name!r} has shape {list(scale.shape)}, and {weight.name!r} of shape "
                    f"{list(weight.shape)} needs {list(self.stored_shape(shape)) if what == 'scale' else 'one number'} "
                    f"({self.scheme})"
                )
            if scale.dtype not in (self.scale_dtypes if what == "scale" else FLOATS):
                yield f"{scale.file}: tensor {name!r} is {scale.stored_as}, which no {what} of {self.scheme} is"

    def wrong_scales(
        self, layer: str, tensors: Mapping[str, TensorInfo], tensor: Callable[[str], Tensor]
    ) -> Iterator[str]:
        """Sentences on the tensors of a layer that hold scales which no weight has.

        A scale of zero is right for a tile of zeros, and where a small scale was rounded to E4M3. ``tensor(name)``
        reads the scales, and the weight only if a scale is zero.
        """
        names = self.names(layer)
        for what, name in names.items():
            if what == "weight":
                continue
            stored = tensor(name)
            scale = decoded_scales(stored if self.part is None or what != "scale" else self.part.of(stored))
            wrong = {"NaN": scale.isnan(), "infinite": scale.isinf(), "negative": scale < 0}
            if (scale == 0).any() and not (what == "scale" and self._are_zeros(tensor(names["weight"]), stored, scale)):
                wrong["zero"] = scale == 0
            for which, mask in wrong.items():
                if count := int(mask.sum()):
                    text = f"tensor {name!r} has {count} of {scale.numel()} scales that are {which}"
                    yield f"{tensors[name].file}: {text}"

    def _are_zeros(self, data: Tensor, stored: Tensor, scale: Tensor) -> bool:
        """Return whether scales of zero change nothing."""
        if stored.dtype == torch.float8_e4m3fn:
            return True
        shape = (*data.shape[:-1], data.shape[-1] * (1 + is_packed(data.dtype)))
        there = (scale == 0).to(torch.float32).reshape(self.grid(shape))
        return not dequantize(QuantizedWeight(data=data, scale_inv=there, block=self.tile(shape))).any()

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in which the scales of a weight of this shape are written."""
        *leading, rows, columns = self.grid(shape)
        forms = {0: (), 1: (rows * columns,), 2: (rows, columns), 4: (rows, 1, columns, 1)}
        return (*leading, *forms[self.scale_dims])

    def read(self, layer: str, tensors: Mapping[str, TensorInfo], tensor: Callable[[str], Tensor]) -> QuantizedWeight:
        """Return the bytes and scales of a layer, from ``tensor(name)``.

        Raises:
            CheckpointError: a tensor is missing, or has another dtype or shape.
        """
        for problem in self.problems(layer, tensors):
            raise CheckpointError(f"{problem}.")
        read = {what: tensor(name) for what, name in self.names(layer).items()}
        if self.part is not None:
            read["scale"] = self.part.of(read["scale"])
        data = read["weight"]
        shape = (*data.shape[:-1], data.shape[-1] * (1 + is_packed(data.dtype)))
        one = {what: _one_each(read[what]) for what in ("global scale", "input scale") if what in read}
        ending = "" if self.divides else "_inv"
        return QuantizedWeight(
            data=data,
            scale_inv=read["scale"].reshape(self.grid(shape)),
            block=self.tile(shape),
            **{f"{what.replace(' ', '_')}{ending}": value for what, value in one.items()},
        )

    def write(self, layer: str, weight: QuantizedWeight) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a layer under their names. Bytes and scales are those of ``weight``.

        Raises:
            CheckpointError: ``weight`` is of another kind.
        """
        if (reason := self._refuses(weight)) is not None:
            raise CheckpointError(f"layer {layer!r} cannot be written as {self.scheme}: {reason}.")
        names = replace(self, part=None).names(layer)
        yield names["weight"], weight.data
        yield names["scale"], weight.scale_inv.reshape(self.stored_shape(weight.shape))
        for what in ("global scale", "input scale"):
            if what in names:
                field = what.replace(" ", "_")
                factor, divisor = getattr(weight, f"{field}_inv"), getattr(weight, field)
                given, other = (divisor, factor) if self.divides else (factor, divisor)
                value = given if given is not None else other.to(torch.float32).reciprocal()
                yield names[what], value.reshape((1,) if self.divides or self.scale_dims == 1 else value.shape)

    def _refuses(self, weight: QuantizedWeight) -> str | None:
        if weight.data.dtype not in self.data_dtypes:
            return f"its numbers are {weight.data.dtype}"
        if weight.block != self.tile(weight.shape):
            return f"its tiles are {weight.block}, not {self.tile(weight.shape)}"
        if tuple(weight.scale_inv.shape) != self.grid(weight.shape):
            return f"its scales have shape {list(weight.scale_inv.shape)}, not {list(self.grid(weight.shape))}"
        if weight.scale_inv.dtype not in self.scale_dtypes:
            return f"its scales are {weight.scale_inv.dtype}"
        given = {
            "global scale": (weight.global_scale_inv, weight.global_scale),
            "input scale": (weight.input_scale_inv, weight.input_scale),
        }
        for what, values in given.items():
            there = any(value is not None for value in values)
            if there != (what in self.names("")):
                return f"there is no tensor for its {what}" if there else f"it has no {what}"
        return None


def _one_each(scale: Tensor) -> Tensor:
    """Return one number, or one for each expert."""
    return scale.reshape(()) if scale.numel() == 1 else scale.flatten()


@dataclass(frozen=True, kw_only=True)
class Quantization(ABC):
    """The quantization config of a checkpoint, in the words of the library that owns the format.

    A subclass is the only statement of its format.

    Attributes:
        ignore: the layers that the config leaves in high precision, as it writes them.
        kv_cache: the config's entry for a quantized key-value cache.
        where: the place of the config, for errors.
    """

    title: ClassVar[str]  # for people
    method: ClassVar[str]  # ``quant_method`` of config.json
    spellings: ClassVar[tuple[Suffixes, ...]]  # all that its layers may use
    mixes: ClassVar[bool] = True  # whether layers may be stored in different ways

    ignore: tuple[str, ...] = ()
    kv_cache: object | None = field(default=None, compare=False)
    where: str = field(default="quantization_config", compare=False)

    @property
    def powers_of_two(self) -> bool:
        """Whether the config says that scales which are stored in FP32 are powers of two."""
        return False

    @classmethod
    @abstractmethod
    def parse(cls, config: Mapping[str, Any], where: str) -> Self:
        """Read a config.

        Raises:
            CheckpointError: a field, a value or a version is not known.
        """

    @classmethod
    @abstractmethod
    def of(cls, layers: Mapping[str, LayerFormat], ignore: Sequence[str]) -> Self:
        """Return the config for these layers and those that stay in high precision, by full names.

        Raises:
            CheckpointError: the format has no config that says this.
        """

    @classmethod
    @abstractmethod
    def forms(cls) -> Mapping[Kind, LayerFormat]:
        """Return the forms in which the library stores weights that fp8graph quantized, for the kinds that it has one
        for.

        Its GEMMs quantize the input as the recipe does, or (static) with a scale from the checkpoint.
        """

    @abstractmethod
    def layer_formats(self, layer: str) -> tuple[LayerFormat, ...]:
        """Return the possible formats of a linear layer of this name; empty if it is left in high precision."""

    @abstractmethod
    def selections(self) -> Iterator[tuple[str, LayerFormat | None]]:
        """:meth:`layer_formats` as data: expressions on whole names, of which the first that matches decides.

        None: the layer is left in high precision, as are layers that match none.
        """

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """``quantization_config`` of config.json."""

    def files(self) -> dict[str, dict[str, Any]]:
        """Other JSON files that belong to a checkpoint."""
        return {}
