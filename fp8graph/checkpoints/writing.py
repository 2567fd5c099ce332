"""Write tensors as safetensors shards, one after the other, and a folder whole or not at all.

A folder is written as a sibling that is renamed at the end. A process that is killed leaves the sibling, whose name
says that it is one (``PARTIAL``), and which has a locked file as long as its process lives. The next export to that
place deletes those that nobody holds.

Hours may lie between the beginning and the end: the rename is tried at the beginning, and whatever is then at the place
is looked at again. If a whole folder cannot take its place, it is kept under another name (``_WRITTEN``).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from fp8graph.checkpoints.shards import INDEX, REPLACED, imported_safetensors
from fp8graph.errors import CheckpointError
from fp8graph.files import PARTIAL, sync

try:
    import fcntl
except ModuleNotFoundError:  # Windows: leftovers are reported, not deleted
    fcntl = None

SHARD_BYTES: Final = 5_000_000_000  # transformers' default is 5 GB, too
_WRITTEN: Final = ".fp8graph-written-"  # in the name of a whole folder that could not take its place
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
    """Write a JSON file as transformers does: indented, with a line end.

    Raises:
        CheckpointError: the disk is full.
    """
    try:
        with file.open("w", encoding="utf-8") as opened:
            opened.write(json.dumps(values, indent=2) + "\n")
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be written ({error.strerror or error}).") from None


@contextlib.contextmanager
def new_folder(target: Path, *, overwrite: bool = False) -> Generator[Path]:
    """A folder to write into, which becomes ``target`` at the end, and is deleted after an error.

    Args:
        target: must not exist, or be an empty folder; at the end, too.
        overwrite: it may also be a checkpoint, which is then replaced at the end.

    Raises:
        CheckpointError: there is such a folder already, or nothing can be written there. If that is so only at the end,
            nothing is replaced, and what was written is kept beside ``target``, under the name in the message.
    """
    target = target.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(target)
        check_target(target, overwrite)
        _try_rename(target)
        partial = _sibling(target, PARTIAL)
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(f"{target}: {_why_not(target, error)}.") from None
    try:
        with _locked(partial):
            yield partial
    except BaseException:  # Ctrl-C too
        shutil.rmtree(partial, ignore_errors=True)
        raise
    written = partial.stat()
    try:
        _rename(partial, target, overwrite)
    except (OSError, CheckpointError) as error:
        reason = f"{target}: {_why_not(target, error)}." if isinstance(error, OSError) else str(error)
        with contextlib.suppress(OSError):
            partial = partial.rename(_sibling(target, _WRITTEN))
        raise CheckpointError(
            f"{reason} That was not so when the export began: what it wrote is whole, and kept as {partial}. Rename it."
        ) from None
    except BaseException:
        with contextlib.suppress(OSError):
            if os.path.samestat(partial.stat(), written):  # not an old folder that is about to go
                shutil.rmtree(partial, ignore_errors=True)
        raise


def _sibling(target: Path, mark: str) -> Path:
    return target.with_name(f"{target.name}{mark}{secrets.token_hex(4)}")


def _why_not(target: Path, error: OSError) -> str:
    if error.errno == errno.EBUSY:
        return f"cannot be replaced, as a volume is mounted there. Give a folder in it, {target / 'model'}"
    return f"cannot be written ({error.strerror or error})"


def _try_rename(target: Path) -> None:
    """Raise OSError if no folder can take the place of ``target``: where a volume is mounted, for one.

    An empty folder is replaced by one like it. A rename to any other fails, and says first if the place is the reason.
    """
    if os.name != "posix" or not target.exists():
        return
    trial = _sibling(target, PARTIAL)
    trial.mkdir()
    try:
        shutil.copymode(target, trial)
        with contextlib.suppress(OSError):  # only the superuser may
            os.chown(trial, target.stat().st_uid, target.stat().st_gid)
        os.rename(trial, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    finally:
        with contextlib.suppress(OSError):
            trial.rmdir()


def clear_leftovers(target: Path) -> None:
    """Delete what exports to ``target`` left that did not finish, and put back what one was about to replace."""
    for old in target.parent.glob(f"{glob.escape(target.name)}{REPLACED}*"):
        if _is_checkpoint(target):
            shutil.rmtree(old, ignore_errors=True)
        elif not target.exists() or (target.is_dir() and not any(target.iterdir())):
            _log.warning("%s: an export was interrupted as it replaced this folder: it is put back.", target)
            old.rename(target)
    for partial in target.parent.glob(f"{glob.escape(target.name)}{PARTIAL}*"):
        if _is_held(partial):
            _log.warning("%s: another export is writing here, or did on another system. Delete it if not.", partial)
        else:
            _log.warning("%s: deleted. It is what is left of an export that did not finish.", partial)
            shutil.rmtree(partial, ignore_errors=True)


def check_target(target: Path, overwrite: bool) -> None:
    """Raise CheckpointError if there is something that no export may replace."""
    if not target.exists() and not target.is_symlink():
        return
    if target.is_symlink() or not target.is_dir():
        raise CheckpointError(f"{target}: exists, and is not a folder.")
    is_empty = not any(target.iterdir())
    if not is_empty and not overwrite:
        raise CheckpointError(f"{target}: exists. Choose another folder, or pass overwrite=True to replace it.")
    if not is_empty and not _is_checkpoint(target):
        raise _no_checkpoint(target)


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is one that an export may replace."""
    return folder.is_dir() and any(f.name == "config.json" or f.suffix == ".safetensors" for f in folder.iterdir())


def _no_checkpoint(target: Path) -> CheckpointError:
    return CheckpointError(f"{target}: exists, and is not a checkpoint: it has no config.json. It is not replaced.")


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
    """Return whether a process is writing into it, or might."""
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


def _rename(partial: Path, target: Path, overwrite: bool) -> None:
    """Give a written folder its name. A checkpoint that has it is deleted if ``overwrite``.

    Raises:
        CheckpointError, OSError: nothing was replaced.
    """
    check_target(target, overwrite)  # again: it is deleted now
    if not target.exists() or not any(target.iterdir()):
        os.rename(partial, target)  # fails if there is more than an empty folder by now
    elif _exchange(partial, target):
        if not _is_checkpoint(partial):  # it changed since it was looked at
            _exchange(partial, target)
            raise _no_checkpoint(target)
        shutil.rmtree(partial, ignore_errors=True)
    else:
        old = _sibling(target, REPLACED)
        try:
            target.rename(old)
            if not _is_checkpoint(old):
                raise _no_checkpoint(target)
            os.rename(partial, target)
        except BaseException:  # Ctrl-C too
            if old.exists() and not os.path.lexists(target):
                old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    sync(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders exchange their names in one step, and return whether this system can."""
    try:
        rename: Any = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux, or an old one
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
