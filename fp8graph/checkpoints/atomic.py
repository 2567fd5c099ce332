"""Write a folder whole or not at all: into a sibling that is renamed at the end.

A process that is killed leaves the sibling, whose name says what it is (``PARTIAL``), and which has a locked file as
long as its process lives. The next export to that place deletes those that nobody holds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Final

from fp8graph.checkpoints.shards import PARTIAL
from fp8graph.errors import CheckpointError

try:
    import fcntl
except ModuleNotFoundError:  # Windows: leftovers are told, not deleted
    fcntl = None

_REPLACED: Final = ".fp8graph-replaced-"  # in the name of a folder that a new one is about to replace
_LOCK: Final = ".fp8graph-lock"
_log = logging.getLogger("fp8graph")


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
    for old in target.parent.glob(f"{_escaped(target.name)}{_REPLACED}*"):
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            _log.warning("%s: an export was interrupted as it replaced this folder: it is put back.", target)
            old.rename(target)
    for partial in target.parent.glob(f"{_escaped(target.name)}{PARTIAL}*"):
        if _is_held(partial):
            _log.warning("%s: another export is writing here, or did on another system. Delete it if not.", partial)
        else:
            _log.warning("%s: deleted. It is what is left of an export that did not finish.", partial)
            shutil.rmtree(partial, ignore_errors=True)


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.exists() and not target.is_symlink():
        return
    if target.is_symlink() or not target.is_dir():
        raise CheckpointError(f"{target}: exists, and is no folder.")
    held = [file.name for file in target.iterdir()]
    if held and not overwrite:
        raise CheckpointError(f"{target}: exists. Choose another folder, or pass overwrite=True to replace it.")
    if held and "config.json" not in held and not any(name.endswith(".safetensors") for name in held):
        raise CheckpointError(f"{target}: exists, and is no checkpoint: it has no config.json. It is not replaced.")


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
