"""Write tensors as safetensors shards, one after the other, and a folder whole or not at all.

A folder is written as a sibling that is renamed at the end. A process that is killed leaves the sibling, whose name
says that it is one (``PARTIAL``), and which has a locked file as long as its process lives. The next export to that
place deletes those that nobody holds.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Final

from torch import Tensor

from fp8graph.checkpoints.shards import INDEX, PARTIAL, imported_safetensors
from fp8graph.errors import CheckpointError

try:
    import fcntl
except ModuleNotFoundError:  # Windows: leftovers are reported, not deleted
    fcntl = None

SHARD_BYTES: Final = 5_000_000_000  # transformers' default is 5 GB, too
_REPLACED: Final = ".fp8graph-replaced-"  # in the name of a folder that a new one is about to replace
_LOCK: Final = ".fp8graph-lock"
_log = logging.getLogger("fp8graph")


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


@contextlib.contextmanager
def new_folder(target: Path, *, overwrite: bool = False) -> Generator[Path]:
    """A folder to write into, which becomes ``target`` at the end, and is deleted after an error.

    Args:
        target: must not exist, or be an empty folder.
        overwrite: it may also be a checkpoint, which is then replaced at the end.

    Raises:
        CheckpointError: there is such a folder already, or nothing can be written there.
    """
    target = target.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(target)
        _check_target(target, overwrite)
        partial = target.with_name(f"{target.name}{PARTIAL}{secrets.token_hex(4)}")
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written ({error.strerror or error}).") from None
    try:
        with _locked(partial):
            yield partial
        _rename(partial, target)
    except BaseException:  # Ctrl-C too
        shutil.rmtree(partial, ignore_errors=True)
        raise


def clear_leftovers(target: Path) -> None:
    """Delete what exports to ``target`` left that did not finish, and put back what one was about to replace."""
    for old in target.parent.glob(f"{glob.escape(target.name)}{_REPLACED}*"):
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            _log.warning("%s: an export was interrupted as it replaced this folder: it is put back.", target)
            old.rename(target)
    for partial in target.parent.glob(f"{glob.escape(target.name)}{PARTIAL}*"):
        if _is_held(partial):
            _log.warning("%s: another export is writing here, or did on another system. Delete it if not.", partial)
        else:
            _log.warning("%s: deleted. It is what is left of an export that did not finish.", partial)
            shutil.rmtree(partial, ignore_errors=True)


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.exists() and not target.is_symlink():
        return
    if target.is_symlink() or not target.is_dir():
        raise CheckpointError(f"{target}: exists, and is not a folder.")
    held = [file.name for file in target.iterdir()]
    if held and not overwrite:
        raise CheckpointError(f"{target}: exists. Choose another folder, or pass overwrite=True to replace it.")
    if held and "config.json" not in held and not any(name.endswith(".safetensors") for name in held):
        raise CheckpointError(f"{target}: exists, and is not a checkpoint: it has no config.json. It is not replaced.")


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Hold the lock of a folder; the file is gone afterwards."""
    file = folder / _LOCK
    with file.open("wb") as opened:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
        file.unlink()


def _is_held(folder: Path) -> bool:
    """Whether a process is writing into it, or might."""
    if fcntl is None:
        return True
    try:
        with Path(folder, _LOCK).open("rb") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False  # killed just before the lock was made, or between unlocking and renaming
    except OSError:
        return True
    return False


def _rename(partial: Path, target: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        os.replace(partial, target)
    else:
        old = target.with_name(f"{target.name}{_REPLACED}{secrets.token_hex(4)}")
        target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    _sync(target.parent)


def _sync(folder: Path) -> None:
    """Make the new name survive a loss of power, where the system can."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
