"""An FP8 checkpoint: shards, their config, and which tensors make which layer. And such a folder, written."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from fp8graph.checkpoints.compressed_tensors import CompressedTensors
from fp8graph.checkpoints.hugging_face_fp8 import FUSED, HuggingFaceFP8, HuggingFaceMXFP8
from fp8graph.checkpoints.layer_format import LayerFormat, Quantization, QuantizedWeight, is_packed
from fp8graph.checkpoints.modelopt import FILE, ModelOpt
from fp8graph.checkpoints.shards import Shards, read_json
from fp8graph.checkpoints.writing import SHARD_BYTES, new_folder, write_json, write_shards
from fp8graph.errors import CheckpointError, expect_path

FORMATS: Final[Mapping[str, type[Quantization]]] = {
    kind.method: kind for kind in (HuggingFaceFP8, CompressedTensors, ModelOpt, HuggingFaceMXFP8)
}
# Files of its source that a new checkpoint does not take: weights, whatever their format, and those that are rewritten.
_NOT_COPIED: Final = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.index.json"),
    *("config.json", FILE),
)


class Checkpoint:
    """A checkpoint with quantized layers, opened from a folder. Reads configs and headers; tensors on demand.

    ``layers``: how each quantized layer is stored. ``others``: the tensors that belong to none. ``unlisted``: FP8
    weights of layers that the config leaves in high precision, by layer. ``problems``: what does not fit together, in
    sentences without their full stop; :meth:`weight` raises those of a layer.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or one of a format that is not known.
    """

    def __init__(self, folder: Path | str) -> None:
        self.shards = Shards(folder)
        self.folder = self.shards.folder
        self.quantization = quantization_of(self.folder)
        self.layers, self.unlisted, self.problems = dict[str, LayerFormat](), dict[str, str](), list[str]()
        self._find_layers()
        claimed = {name for layer, stored in self.layers.items() for name in stored.names(layer).values()}
        self.others = [name for name in self.shards if name not in claimed]
        self.problems += self._left_over()

    def weight(self, layer: str) -> QuantizedWeight:
        """Return the bytes and scales of one layer.

        Raises:
            CheckpointError: there is no such layer, or its tensors do not fit together.
        """
        if layer not in self.layers:
            raise CheckpointError(f"{self.folder}: there is no quantized layer {layer!r}.")
        return self.layers[layer].read(layer, self.shards.tensors, self.shards.tensor)

    def check(self) -> None:
        """
        Raises:
            CheckpointError: something does not fit together.
        """
        if self.problems:
            more = f" And {len(self.problems) - 1} more: fp8graph inspect shows all." if self.problems[1:] else ""
            raise CheckpointError(f"{self.folder}: {self.problems[0]}.{more}")

    def check_scales(self) -> None:
        """Read all scales.

        Raises:
            CheckpointError: a scale is NaN, infinite or negative, or zero and not of zeros.
        """
        read = functools.lru_cache(maxsize=4)(self.shards.tensor)  # experts share a tensor of scales
        for layer, stored in self.layers.items():
            for problem in stored.wrong_scales(layer, self.shards.tensors, read):
                raise CheckpointError(f"{problem}.")

    def _find_layers(self) -> None:
        tensors = self.shards.tensors
        for name, info in tensors.items():
            dtype = str(info.dtype).removeprefix("torch.")
            if not (is_packed(info.dtype) or dtype.startswith("float8_e4m3") or dtype.startswith("float8_e5m2")):
                continue
            for layer in self._layers_with(name):
                formats = [one for one in self.quantization.layer_formats(layer) if one.names(layer)["weight"] == name]
                if is_packed(info.dtype) and not any(one.packed for one in formats):
                    continue
                if not formats:
                    self.unlisted[layer] = name
                    self.problems.append(
                        f"{info.file}: tensor {name!r} is {info.stored_as}, and the config leaves layer {layer!r} in "
                        "high precision"
                    )
                    continue
                candidates = [(list(one.problems(layer, tensors)), one) for one in formats]
                wrong, self.layers[layer] = min(candidates, key=lambda one: len(one[0]))  # the first of equals
                self.problems += wrong

    def _layers_with(self, name: str) -> Iterator[str]:
        """Yield the layer whose weight a tensor of this name is."""
        for suffix in dict.fromkeys(spelling.weight for spelling in self.quantization.spellings):
            if suffix and name.endswith(suffix):
                yield name.removesuffix(suffix)
            elif not suffix and name.rpartition(".")[2] in FUSED:
                yield name

    def _left_over(self) -> Iterator[str]:
        """Scales without a quantized weight, and FP8 tensors that are not the weight of a layer."""
        spelled = {s for one in self.quantization.spellings for s in (one.scale, one.global_scale, one.input_scale)}
        suffixes = tuple(suffix for suffix in spelled if suffix is not None and suffix != ".scale")  # some norms' name
        for name in self.others:
            info = self.shards.tensors[name]
            if name.endswith(suffixes):
                ending = max((one for one in suffixes if name.endswith(one)), key=len)
                stored = self.layers.get(layer := name.removesuffix(ending))
                if stored is None:
                    yield f"{info.file}: tensor {name!r} is a scale without a quantized layer"
                else:
                    text = f"layer {layer!r} ({stored.scheme}) has no use for it"
                    yield f"{info.file}: tensor {name!r} is a scale, and by the config {text}"
            elif info.stored_as.startswith("F8") and not name.endswith(".weight"):
                yield f"{info.file}: tensor {name!r} is {info.stored_as}, and not the weight of a layer"


def quantization_of(folder: Path) -> Quantization:
    """Return the quantization config of a folder, parsed.

    Raises:
        CheckpointError: there is none, or it is of a format that is not known.
    """
    file = folder / "config.json"
    if (quantization := _of_config(read_json(file), str(file))) is not None:
        return quantization
    if (folder / FILE).exists():
        return parsed(read_json(folder / FILE), str(folder / FILE))
    raise CheckpointError(f"{file}: there is no quantization_config, and no {FILE}: this checkpoint is not in FP8.")


def parsed(config: Mapping[str, Any], where: str) -> Quantization:
    """Return a config.json with its quantization config, or such a config alone, parsed. ``where``: names it in errors.

    Raises:
        CheckpointError: it is of a format that is not known.
    """
    if (quantization := _of_config(config, where)) is not None:
        return quantization
    if config.keys().isdisjoint(("quant_method", "producer")):
        raise CheckpointError(f"{where}: there is neither a quantization_config nor a quant_method: it is not in FP8.")
    producer = config.get("producer")
    of_producer = producer.get("name") if isinstance(producer, Mapping) else None
    method = config.get("quant_method", of_producer)
    if not isinstance(method, str) or method not in FORMATS:
        raise CheckpointError(f"{where}: quant_method is {method!r:.200}. Known: {', '.join(FORMATS)}.")
    return FORMATS[method].parse(config, where)


def _of_config(config: Mapping[str, Any], where: str) -> Quantization | None:
    """Return the quantization config in a config.json, parsed; None: there is none."""
    said = config.get("quantization_config") or config.get("compression_config")
    where = f"{where}: quantization_config"
    if said is None:
        return None
    if not isinstance(said, Mapping):
        raise CheckpointError(f"{where}: {said!r:.200} is not a table of fields.")
    return parsed(said, where)


def write_checkpoint(
    folder: Path | str,
    *,
    layers: Iterable[tuple[str, LayerFormat, QuantizedWeight]],
    others: Iterable[tuple[str, Tensor]],
    quantization: type[Quantization],
    ignore: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    copy_from: Path | str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Write a checkpoint into a new folder: whole, or not at all. Streams; see :func:`write_shards`.

    Args:
        folder: must not exist, or be empty, when this begins and when it ends.
        layers: the quantized layers by their full names, how to store each, and its bytes and scales.
        others: all other tensors.
        quantization: the format, one of ``FORMATS``.
        ignore: the full names of the linear layers that stay in high precision.
        config: the model's config.json. None: that of ``copy_from``.
        copy_from: a folder whose other files (tokenizer, generation config, code, license) are copied as they are.
        max_shard_bytes: a larger tensor gets a shard of its own.
        overwrite: replace a checkpoint in ``folder``.
        progress: is called with the bytes of each shard that was written.

    Raises:
        CheckpointError: the folder exists; the format cannot hold a layer; a tensor comes twice.
    """
    expect_path("write_checkpoint", "folder", folder)
    if copy_from is not None:
        expect_path("write_checkpoint", "copy_from", copy_from)
    source = None if copy_from is None else Path(copy_from)
    if source is not None and not source.is_dir():
        raise CheckpointError(f"{source}: there is no such folder to copy files from.")
    if config is None:
        config = {} if source is None else read_json(source / "config.json")
    written: dict[str, LayerFormat] = {}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for layer, stored, weight in layers:
            written[layer] = stored
            yield from stored.write(layer, weight)

    with new_folder(Path(folder), overwrite=overwrite) as partial:
        if source is not None:
            _copy_files(source, partial)
        write_shards(partial, itertools.chain(tensors(), others), max_shard_bytes=max_shard_bytes, progress=progress)
        said = quantization.of(written, ignore)
        for name, values in said.files().items():
            write_json(partial / name, values)
        write_json(partial / "config.json", {**config, "quantization_config": said.config()})
    return Path(folder)


def _copy_files(source: Path, target: Path) -> None:
    """Copy the files of a checkpoint beside its weights; of folders, only those with chat templates."""
    for file in sorted(source.iterdir()):
        if file.name.startswith(".") or any(file.match(pattern) for pattern in _NOT_COPIED):
            continue
        try:
            if file.is_file():
                shutil.copy2(file, target)
            elif file.name == "additional_chat_templates":
                shutil.copytree(file, target / file.name)
        except OSError as error:  # shutil's errors, too
            raise CheckpointError(f"{file}: cannot be copied to {target} ({error.strerror or error}).") from None
