"""The tensors of a checkpoint, by name, read one at a time: one safetensors file, or shards with an index.

Opening a folder reads the headers of all shards, and no tensor. safetensors compares each header with its file, and
here it is compared with the index, so that a folder that opens can be read to its end. Its errors name neither the file
nor the tensor: both are added.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fp8graph.errors import CheckpointError, did_you_mean, expect_path, printable, why_no_path
from fp8graph.files import PARTIAL
from fp8graph.words.extras import install

INDEX: Final = "model.safetensors.index.json"
REPLACED: Final = ".fp8graph-replaced-"  # in the name of a folder that a new one is about to replace
_LONGEST_FILE: Final = 255  # bytes of a file's name, on every system
_TYPES: Final[Mapping[str, torch.dtype]] = {  # by safetensors' names
    "BOOL": torch.bool,
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_LARGEST_HEADER: Final = 100_000_000  # bytes: safetensors' limit
_MOST: Final = 100_000  # tensors of one file; a shard of the largest models has 5,000
_MOST_FILES: Final = 10_000  # of an index: the largest models have hundreds
_LONGEST_NAME: Final = 1_000  # characters of a tensor's name


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a file. ``dtype``: None if torch has none."""

    name: str
    file: Path
    dtype: torch.dtype | None
    stored_as: str
    shape: tuple[int, ...]
    bytes: int


class Shards:
    """The tensors of a safetensors file, or of a folder of them. Iterates over names, in the order of the files.

    At most one file is mapped at a time.

    Args:
        path: a folder, a .safetensors file, or an index.

    Raises:
        CheckpointError: there is no checkpoint; a file is missing, damaged or truncated; the index and the files
            disagree; two files hold one tensor.
    """

    def __init__(self, path: Path | str) -> None:
        expect_path("Shards", "path", path)
        path = Path(path)
        self.folder = path if path.is_dir() else path.parent
        if PARTIAL in self.folder.resolve().name:
            raise CheckpointError(f"{self.folder}: an export to it did not finish. Delete it.")
        index, files = _index_or_files(path)
        listed = {} if index is None else _of_index(index)
        self._where = listed | {one.name: one for file in files for one in tensors_of(file)}
        self._open: tuple[Path, Any] | None = None

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Each tensor's entry in its header."""
        return self._where

    @property
    def files(self) -> list[Path]:
        return list(dict.fromkeys(one.file for one in self._where.values()))

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __len__(self) -> int:
        return len(self._where)

    def info(self, name: str) -> TensorInfo:
        """Return a tensor's entry in its header.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if name not in self._where:
            raise CheckpointError(f"{self.folder}: there is no tensor {name!r}.{did_you_mean(name, self._where)}")
        return self._where[name]

    def tensor(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            CheckpointError: there is no such tensor, or its file changed since it was opened.
        """
        info = self.info(name)
        if info.dtype is None:
            raise CheckpointError(
                f"{info.file}: tensor {name!r} has dtype {info.stored_as!r}, which torch cannot hold."
            )
        if self._open is None or self._open[0] != info.file:
            self._open = None  # unmapped before the next one is mapped
            self._open = info.file, _opened(info.file)
        try:
            return self._open[1].get_tensor(name)
        except (imported_safetensors().SafetensorError, OSError) as error:
            raise CheckpointError(f"{info.file}: tensor {name!r} cannot be read ({error}).") from None

    def close(self) -> None:
        """Unmap the file that was read last. Tensors that were read stay."""
        self._open = None


def tensors_of(file: Path) -> list[TensorInfo]:
    """Return the tensors of a safetensors file in the order of their bytes.

    Raises:
        CheckpointError: the file cannot be read, its header is damaged, or it is shorter or longer than it says.
    """
    infos: list[TensorInfo] = []
    with _opened(file) as opened:
        names: list[str] = opened.offset_keys()
        if len(names) > _MOST:
            raise CheckpointError(
                f"{file}: its header has {len(names)} tensors. At most {_MOST} are read from one file."
            )
        if (name := _named_twice(file)) is not None:
            raise CheckpointError(f"{file}: damaged. Its header names {name!r:.100} twice. Download it again.")
        for name in names:
            if len(name) > _LONGEST_NAME:
                raise CheckpointError(f"{file}: damaged. A tensor has a name of {len(name)} characters: {name!r:.100}.")
            entry = opened.get_slice(name)
            kind, shape = entry.get_dtype(), tuple(entry.get_shape())
            size = math.prod(shape) * _bits(kind) // 8
            info = TensorInfo(name=name, file=file, dtype=_TYPES.get(kind), stored_as=kind, shape=shape, bytes=size)
            infos.append(info)
    return infos


def _named_twice(file: Path) -> str | None:
    """Return a name that several entries of a header have, of which safetensors silently takes the last."""
    with file.open("rb") as opened:
        header = opened.read(int.from_bytes(opened.read(8), "little"))
    names: list[str] = [name for name, _ in json.loads(header, object_pairs_hook=list)]
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _bits(stored_as: str) -> int:
    """Return the size of a number, which the name of its type says: 16 for "BF16"."""
    return 8 if stored_as == "BOOL" else int(re.findall(r"\d+", stored_as)[0])


def _opened(file: Path) -> Any:
    """Return the file, mapped by safetensors."""
    safetensors = imported_safetensors()
    try:
        if file.exists() and not file.is_file():  # a pipe would wait for its writer
            raise CheckpointError(f"{file}: cannot be read (it is not a regular file).")
        return safetensors.safe_open(file, framework="pt")
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror or error}).") from None
    except safetensors.SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise CheckpointError(f"{file}: damaged{_damage(file)} ({reason:.300}). Download it again.") from None


def _damage(file: Path) -> str:
    """Return a sentence, after a full stop, on the first tensor that is not whole; or nothing, if the header is not
    one.
    """
    with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError), file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(min(length, _LARGEST_HEADER)))
        held = file.stat().st_size - 8 - length
        for name, entry in header.items():
            try:
                (start, stop), shape = entry["data_offsets"], entry["shape"]
                sizes = all(type(size) is int and size >= 0 for size in (start, stop, *shape))
                sound = sizes and (stop - start) * 8 == math.prod(shape) * _bits(entry["dtype"])
            except (TypeError, KeyError, ValueError, IndexError):
                sound, stop = name == "__metadata__", 0
            if not sound:
                return f". The entry of tensor {name!r:.100} is {entry!r:.200}"
            if stop > held:
                return f". It is truncated: tensor {name!r:.100} ends after {stop} bytes, and {held} are there"
    return ""


def _index_or_files(path: Path) -> tuple[Path | None, list[Path]]:
    """Return the index, or the files of a checkpoint that has none."""
    if path.is_file():
        return (path, []) if path.name.endswith(".json") else (None, [path])
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or folder.{put_aside(path)}")
    indices = sorted(path.glob("*.safetensors.index.json"))
    indices = [index for index in indices if index.name == INDEX] or indices  # the usual name comes first
    if len(indices) == 1:
        return indices[0], []
    if indices:
        names = ", ".join(index.name for index in indices)
        raise CheckpointError(f"{path}: {len(indices)} indices ({names}). Give one of them.")
    files = sorted(path.glob("*.safetensors"))
    files = [file for file in files if file.name == "model.safetensors"] or files
    if len(files) == 1:
        return None, files
    if files:
        raise CheckpointError(f"{path}: {len(files)} safetensors files and no {INDEX}. Is a download incomplete?")
    others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in path.glob(pattern))
    text = f" {others[0]} is of a kind that is not read." if others else ""
    raise CheckpointError(f"{path}: no safetensors file.{text}")


def put_aside(folder: Path) -> str:
    """Give a sentence, with a space before it, on the folder that was here until an export was stopped; or nothing."""
    old = sorted(folder.absolute().parent.glob(f"{glob.escape(folder.name)}{REPLACED}*"))
    if not old:
        return ""
    return f" An export was stopped as it replaced this folder, which is now {old[0]}: rename it."


def _of_index(index: Path) -> dict[str, TensorInfo]:
    """Return the tensors that an index lists, in the order of its files, compared with what the files hold."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise CheckpointError(f"{index}: damaged. weight_map is not a table of files. Download it again.")
    names = sorted(set(listed.values()))
    if len(names) > _MOST_FILES:
        raise CheckpointError(f"{index}: it names {len(names)} files. At most {_MOST_FILES} are read.")
    if bad := next((name for name in names if why_no_path(name)), None):
        raise CheckpointError(f"{index}: damaged. It names the file {bad!r:.100}, which {why_no_path(bad)}.")
    if outside := [name for name in names if Path(name).name != name or not name.strip(".")]:
        raise CheckpointError(f"{index}: names a file outside of its folder: {outside[0]!r:.200}.")
    if long := [name for name in names if len(os.fsencode(name)) > _LONGEST_FILE]:
        raise CheckpointError(f"{index}: damaged. It names a file of {len(long[0])} characters: {long[0]!r:.100}.")
    if missing := [name for name in names if not Path(index.parent, name).exists()]:
        absent = set(missing)
        lost = sum(file in absent for file in listed.values())
        raise CheckpointError(
            f"{index.parent}: {len(missing)} of {len(names)} shards are missing, with {lost} tensors: "
            f"{', '.join(map(printable, missing[:3]))}{', ...' if len(missing) > 3 else ''}. Download them again."
        )
    where: dict[str, TensorInfo] = {}
    for one in (one for name in names for one in tensors_of(Path(index.parent, name))):
        if one.name in where:
            raise CheckpointError(f"{one.file}: tensor {one.name!r} is in {where[one.name].file.name}, too.")
        if one.name not in listed:
            raise CheckpointError(f"{one.file}: tensor {one.name!r} is not in {index.name}.")
        where[one.name] = one
        if listed[one.name] != one.file.name:
            raise CheckpointError(f"{one.file}: {index.name} says that tensor {one.name!r} is in {listed[one.name]}.")
    if lost := next((name for name in listed if name not in where), None):
        raise CheckpointError(f"{index.parent / listed[lost]}: there is no tensor {lost!r}, which {index.name} lists.")
    return where


def imported_safetensors() -> Any:
    """Return the library, which is not among those that fp8graph needs.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        importlib.import_module("safetensors.torch")
        return importlib.import_module("safetensors")
    except ModuleNotFoundError as error:
        message = f"reading and writing checkpoints needs safetensors. Run: {install('safetensors')}"
        raise ModuleNotFoundError(message, name=error.name) from None


def read_json(file: Path) -> dict[str, Any]:
    """Return the table in a JSON file.

    Raises:
        CheckpointError: there is no such file, or no table in it.
    """
    try:
        if file.exists() and not file.is_file():  # a pipe would wait for its writer
            raise CheckpointError(f"{file}: cannot be read (it is not a regular file).")
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        text = f"{file}: there is no such file, and it says which format the checkpoint has."
        raise CheckpointError(f"{text}{'' if file.parent.exists() else put_aside(file.parent)}") from None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: cannot be read ({error}). Download it again.") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: there is no table of fields in it.")
    return values
