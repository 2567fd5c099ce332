"""The tensors of a checkpoint, by name, read one at a time: one safetensors file, or shards with an index.

Opening a folder reads the headers of all shards, and no tensor. Each header is compared with its file and with the
index, and safetensors opens each file, so that a folder that opens can be read to its end. safetensors reads the
tensors. Headers are parsed here first, as most of its errors name neither the file nor the tensor, and a stranger's
header may take very long.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fp8graph.errors import CheckpointError, did_you_mean, printable

INDEX: Final = "model.safetensors.index.json"
PARTIAL: Final = ".fp8graph-partial-"  # in the name of a folder that is being written
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
_ONLY_LISTED: Final = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # bits; torch has no such type
_LARGEST_HEADER: Final = 100_000_000  # bytes of a header: safetensors' own limit
_MOST: Final = 100_000  # tensors of one file; a shard of the largest models has 5,000
_LONGEST_NAME: Final = 1_000  # characters of a tensor's name


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a file. ``dtype``: None if torch has none. ``start``: its first byte, behind the header."""

    name: str
    file: Path
    dtype: torch.dtype | None
    stored_as: str
    shape: tuple[int, ...]
    start: int
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
        path = Path(path)
        self.folder = path if path.is_dir() else path.parent
        if PARTIAL in self.folder.resolve().name:
            raise CheckpointError(f"{self.folder}: what is left of an export that did not finish. Delete it.")
        index, files = _found(path)
        self._where = _of_files(files) if index is None else _of_index(index)
        self._open: tuple[Path, Any] | None = None
        for file in self.files:  # it finds overlaps, holes and sizes that no tensor has
            self._opened(file)
        self.close()

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
        """A tensor's entry in its header.

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
        opened = self._opened(info.file)
        try:
            return opened.get_tensor(name)
        except (imported_safetensors().SafetensorError, OSError) as error:
            raise CheckpointError(f"{info.file}: tensor {name!r} cannot be read ({error}).") from None

    def _opened(self, file: Path) -> Any:
        """The file, mapped by safetensors; the one before is unmapped."""
        if self._open is None or self._open[0] != file:
            self._open = None
            safetensors = imported_safetensors()
            try:
                self._open = file, safetensors.safe_open(file, framework="pt")
            except (safetensors.SafetensorError, OSError) as error:
                raise CheckpointError(f"{file}: damaged ({error}). Download it again.") from None
        return self._open[1]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, file by file."""
        for name in self:
            yield name, self.tensor(name)

    def close(self) -> None:
        """Unmap the file that was read last. Tensors that were read stay."""
        self._open = None


def tensors_of(file: Path) -> list[TensorInfo]:
    """The tensors of a safetensors file in the order of their bytes.

    Raises:
        CheckpointError: the file cannot be read, its header is damaged, or it is shorter or longer than it says.
    """
    try:
        size = file.stat().st_size
        if not file.is_file():  # a pipe would wait for its writer
            raise CheckpointError(f"{file}: cannot be read (it is not a regular file).")
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise CheckpointError(
                    f"{file}: damaged. Its header should have {length} bytes, and the file has {size}. "
                    "Download it again."
                )
            text = opened.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror or error}).") from None
    found = sorted((_tensor(file, name, entry) for name, entry in _entries(file, text)), key=lambda one: one.start)
    end = max((one.start + one.bytes for one in found), default=0)
    held = size - 8 - length
    if end > held:
        first = next(one.name for one in found if one.start + one.bytes > held)
        raise CheckpointError(
            f"{file}: truncated. Its tensors need {end} bytes, and {held} are there; {first!r} is the first that is "
            "not whole. Download it again."
        )
    if end < held:
        raise CheckpointError(f"{file}: damaged. Its tensors end after {end} bytes, and {held} are there.")
    return found


def _entries(file: Path, text: bytes) -> list[tuple[str, Any]]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise CheckpointError(f"{file}: damaged. Its header names {twice!r:.200} twice.")
        return table

    if (count := text.count(b'"data_offsets"')) > _MOST:
        raise CheckpointError(f"{file}: its header has {count} tensors. At most {_MOST} are read from one file.")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:  # of the encoding, too
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: damaged. Its header is not JSON ({error}). Download it again.") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: damaged. Its header is not a table of tensors.")
    if long := next((name for name in header if len(name) > _LONGEST_NAME), None):
        raise CheckpointError(f"{file}: damaged. A tensor has a name of {len(long)} characters: {long!r:.100}.")
    return [(name, entry) for name, entry in header.items() if name != "__metadata__"]


def _tensor(file: Path, name: str, entry: Any) -> TensorInfo:
    def damaged(what: str) -> CheckpointError:
        return CheckpointError(f"{file}: damaged. {what} of tensor {name!r} is {entry!r:.200}.")

    try:
        stored_as, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise damaged("The entry") from None
    if not isinstance(stored_as, str) or stored_as not in (*_TYPES, *_ONLY_LISTED):
        known = ", ".join((*_TYPES, *_ONLY_LISTED))
        raise CheckpointError(f"{file}: tensor {name!r} has dtype {stored_as!r:.200}. Known: {known}.")
    if not all(type(size) is int and size >= 0 for size in (*shape, start, end)):
        raise damaged("The entry")
    dtype = _TYPES.get(stored_as)
    bits = _ONLY_LISTED[stored_as] if dtype is None else 8 * dtype.itemsize
    if (end - start) * 8 != math.prod(shape) * bits:
        raise damaged("The number of bytes")
    return TensorInfo(
        name=name,
        file=file,
        dtype=dtype,
        stored_as=stored_as,
        shape=shape,
        start=start,
        bytes=end - start,
    )


def _found(path: Path) -> tuple[Path | None, list[Path]]:
    """The index, or the files of a checkpoint that has none."""
    if path.is_file():
        return (path, []) if path.name.endswith(".json") else (None, [path])
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or folder.")
    indices = sorted(path.glob("*.safetensors.index.json"))
    if Path(path, INDEX) in indices or len(indices) == 1:
        return Path(path, INDEX) if Path(path, INDEX) in indices else indices[0], []
    files = sorted(path.glob("*.safetensors"))
    if Path(path, "model.safetensors") in files and not indices:
        return None, [path / "model.safetensors"]
    if len(files) == 1 and not indices:
        return None, files
    if indices:
        raise CheckpointError(
            f"{path}: {len(indices)} indices ({', '.join(i.name for i in indices)}). Give one of them."
        )
    if files:
        raise CheckpointError(f"{path}: {len(files)} safetensors files and no {INDEX}. Is a download incomplete?")
    others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in path.glob(pattern))
    text = f" {others[0]} is of a kind that is not read." if others else ""
    raise CheckpointError(f"{path}: no safetensors file.{text}")


def _of_files(files: list[Path]) -> dict[str, TensorInfo]:
    return {one.name: one for file in files for one in tensors_of(file)}


def _of_index(index: Path) -> dict[str, TensorInfo]:
    """The tensors that an index lists, in the order of its files, compared with what the files hold."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise CheckpointError(f"{index}: damaged. weight_map is not a table of files. Download it again.")
    names = sorted(set(listed.values()))
    if outside := [name for name in names if Path(name).name != name or not name.strip(".") or "\0" in name]:
        raise CheckpointError(f"{index}: names a file outside of its folder: {outside[0]!r:.200}.")
    if long := [name for name in names if len(os.fsencode(name)) > _LONGEST_FILE]:
        raise CheckpointError(f"{index}: damaged. It names a file of {len(long[0])} characters: {long[0]!r:.100}.")
    if missing := [name for name in names if not Path(index.parent, name).exists()]:
        lost = sum(file in missing for file in listed.values())
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
    """The library, which is not among those that fp8graph needs.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        importlib.import_module("safetensors.torch")
        return importlib.import_module("safetensors")
    except ModuleNotFoundError as error:
        message = 'reading and writing checkpoints needs safetensors. Run: pip install "fp8graph[checkpoints]"'
        raise ModuleNotFoundError(message, name=error.name) from None


def read_json(file: Path) -> dict[str, Any]:
    """The table in a JSON file.

    Raises:
        CheckpointError: there is no such file, or no table in it.
    """
    try:
        if file.exists() and not file.is_file():  # a pipe would wait for its writer
            raise CheckpointError(f"{file}: cannot be read (it is not a regular file).")
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: there is no such file, and it says which format the checkpoint has.") from None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: cannot be read ({error}). Download it again.") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: there is no table of fields in it.")
    return values
