"""Write tensors as safetensors shards, one shard after the other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from torch import Tensor

from fp8graph.checkpoints.shards import INDEX, imported_safetensors
from fp8graph.errors import CheckpointError

SHARD_BYTES: Final = 5_000_000_000  # transformers' default is 5 GB, too


def write_shards(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    max_shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], None] | None = None,
) -> dict[str, int]:
    """Write tensors into ``folder``, in their order, and an index if they need several shards.

    A shard is written as soon as the next tensor does not fit into it; no more than one shard and that tensor is held.
    Shards get their names at the end: no loader takes a folder before.

    Args:
        folder: exists, and holds no shards.
        tensors: on any device, any strides. None may come twice.
        max_shard_bytes: a larger tensor gets a shard of its own.
        progress: is called with the bytes of each shard that was written.

    Returns:
        The bytes of each tensor.

    Raises:
        CheckpointError: a name comes twice, a tensor has no data, or the disk is full.
    """
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes must be at least 1, not {max_shard_bytes}.")
    shards: list[list[str]] = []
    written: dict[str, int] = {}
    held: dict[str, Tensor] = {}
    memory: set[int] = set()  # the addresses of what is held
    size = 0

    def write() -> None:
        nonlocal size
        shards.append(list(held))
        _write_shard(folder / f"shard-{len(shards):05}.partial", held)
        held.clear()
        memory.clear()
        if progress is not None:
            progress(size)
        size = 0

    for name, tensor in tensors:
        if name in written:
            raise CheckpointError(f"{folder}: tensor {name!r} is to be written twice.")
        if tensor.is_meta:
            raise CheckpointError(f"{folder}: tensor {name!r} has no data: it is on the meta device.")
        written[name] = tensor.numel() * tensor.element_size()
        if held and size + written[name] > max_shard_bytes:
            write()
        plain = tensor.detach().to("cpu").contiguous()
        address = plain.untyped_storage().data_ptr()
        held[name] = plain.clone() if address in memory else plain  # safetensors writes no memory twice
        memory |= {address} if plain.numel() else set()
        size += written[name]
        del tensor, plain  # held once, until its shard is written
    if held or not shards:
        write()
    _name_shards(folder, shards, sum(written.values()))
    return written


def _write_shard(file: Path, tensors: dict[str, Tensor]) -> None:
    safetensors = imported_safetensors()
    try:
        safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: cannot be written ({error}).") from None


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    """Give the shards their names; the last one last, as an index without it is of no use."""
    last = len(shards)
    names = (
        [f"model-{i:05}-of-{last:05}.safetensors" for i in range(1, last + 1)] if last > 1 else ["model.safetensors"]
    )
    if last > 1:
        weight_map = {tensor: name for name, held in zip(names, shards, strict=True) for tensor in held}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for i, name in enumerate(names, 1):
        (folder / f"shard-{i:05}.partial").rename(folder / name)


def write_json(file: Path, values: object) -> None:
    """Write a JSON file as transformers does: indented, with a line end."""
    with file.open("w", encoding="utf-8") as opened:
        opened.write(json.dumps(values, indent=2) + "\n")
        opened.flush()
        os.fsync(opened.fileno())
