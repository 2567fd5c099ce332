"""What a safetensors file says that it holds, and whether the file can be that long. Reads no tensor."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from fp8graph.errors import CheckpointError

# safetensors' name -> bits per element, torch's name. Those without one are told and cannot be read.
_TYPES: Final[dict[str, tuple[int, str]]] = {
    "BOOL": (8, "bool"),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "U16": (16, "uint16"),
    "I16": (16, "int16"),
    "U32": (32, "uint32"),
    "I32": (32, "int32"),
    "U64": (64, "uint64"),
    "I64": (64, "int64"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "F32": (32, "float32"),
    "F64": (64, "float64"),
    "C64": (64, "complex64"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "F4": (4, ""),
    "F6_E2M3": (6, ""),
    "F6_E3M2": (6, ""),
}
_LARGEST: Final = 100_000_000  # bytes of a header: safetensors' own limit
_MOST: Final = 100_000  # tensors of one file; a shard of the largest models has 5,000
_LONGEST: Final = 1_000  # characters of a name


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
            if size < 8 or length > min(size - 8, _LARGEST):
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
    if long := next((name for name in header if len(name) > _LONGEST), None):
        raise CheckpointError(f"{file}: damaged. A tensor has a name of {len(long)} characters: {long!r:.100}.")
    return [(name, entry) for name, entry in header.items() if name != "__metadata__"]


def _tensor(file: Path, name: str, entry: Any) -> TensorInfo:
    def damaged(what: str) -> CheckpointError:
        return CheckpointError(f"{file}: damaged. {what} of tensor {name!r} is {entry!r:.200}.")

    try:
        stored_as, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise damaged("The entry") from None
    if not isinstance(stored_as, str) or stored_as not in _TYPES:
        raise CheckpointError(f"{file}: tensor {name!r} has dtype {stored_as!r:.200}. Known: {', '.join(_TYPES)}.")
    if not all(type(size) is int and size >= 0 for size in (*shape, start, end)):
        raise damaged("The entry")
    bits, known_as = _TYPES[stored_as]
    if (end - start) * 8 != math.prod(shape) * bits:
        raise damaged("The number of bytes")
    return TensorInfo(
        name=name,
        file=file,
        dtype=getattr(torch, known_as) if known_as else None,
        stored_as=stored_as,
        shape=shape,
        start=start,
        bytes=end - start,
    )
