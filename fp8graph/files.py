"""Write a file whole, or leave it as it was: it is written as a sibling, which takes its name at the end.

A process that is killed leaves the sibling, whose name says so (``PARTIAL``). Folders of checkpoints are written the
same way (``fp8graph/checkpoints/writing.py``).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

from fp8graph.errors import ConfigError

PARTIAL: Final = ".fp8graph-partial-"  # in the name of a file or folder that is being written


def write_file(path: str | Path, text: str, where: str) -> None:
    """Write ``text``. A link stays a link, and a file keeps its permissions.

    Devices and pipes are written in place. So is a file that no other can replace: its folder takes no new files, or it
    is mounted by itself, as containers do.

    Args:
        where: begins the message, ``Report.to_html(path='report.html')``.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        data = text.encode("utf-8")
        if Path(path).exists() and not Path(path).is_file():
            Path(path).write_bytes(data)
            return
        target = Path(os.path.realpath(path))
        try:
            _replace(target, data)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EBUSY) or not target.is_file():
                raise
            target.write_bytes(data)
    except (OSError, ValueError) as error:  # ValueError: characters that have no bytes
        raise _refusal(where, error) from None


def _sibling(target: Path) -> Path:
    return target.with_name(f"{target.name[:40]}{PARTIAL}{secrets.token_hex(4)}")  # of 255 bytes at most


def _replace(target: Path, data: bytes) -> None:
    beside = _sibling(target)
    try:
        with beside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _rename(beside, target)
    except BaseException:  # Ctrl-C too
        beside.unlink(missing_ok=True)
        raise


class NewFile(io.BufferedIOBase):
    """A file that others write into. ``write`` raises nothing: C++ code that calls it may not pass an error on.

    The first error is kept in ``error`` (Ctrl-C too), and nothing is written after it.
    """

    def __init__(self, file: Any) -> None:
        self._file = file  # without a buffer, which would be written when it is closed
        self.error: BaseException | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while left and self.error is None:
                left = left[self._file.write(left) :]  # 2 GiB at most
        except BaseException as error:
            self.error = error
        return size

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


@contextlib.contextmanager
def new_file(path: str | Path, where: str) -> Generator[NewFile]:
    """A file to write into, which becomes ``path`` at the end; after an error ``path`` is as it was.

    It is opened at once, so that a place where no file can be is refused before any work is done.

    Args:
        where: begins the message.

    Raises:
        ConfigError: it cannot be written; or not replaced at the end, and then what was written is kept beside it.
    """
    try:
        target = Path(os.path.realpath(path))
        if Path(path).exists() and not target.is_file():
            raise ConfigError(f"{where}: cannot be written (it is not a file).")
        beside = _sibling(target)
        opened = beside.open("xb", buffering=0)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _refusal(where, error) from None
    try:
        with opened:
            file = NewFile(opened)
            yield file
            try:
                if file.error is not None:
                    raise file.error
                os.fsync(opened.fileno())
            except OSError as error:
                raise _refusal(where, error) from None
    except BaseException:  # Ctrl-C too
        beside.unlink(missing_ok=True)
        raise
    try:
        _rename(beside, target)
    except OSError as error:
        text = f"cannot be replaced ({error.strerror or error}). What was written is whole: it is {beside}"
        raise ConfigError(f"{where}: {text}.") from None


def _rename(beside: Path, target: Path) -> None:
    if target.exists():
        shutil.copymode(target, beside)
    os.replace(beside, target)
    sync(target.parent)


def _refusal(where: str, error: Exception) -> ConfigError:
    return ConfigError(f"{where}: cannot be written ({getattr(error, 'strerror', None) or error}).")


def sync(folder: Path) -> None:
    """Make a new name in a folder survive a loss of power, where the system can."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def obstacle(path: Path) -> str:
    """Return why no file can be written at ``path``, whose folders may be missing; "" if one can."""
    if path.is_dir():
        return f"{path} is a folder"
    there = next(place for place in (path, *path.parents) if place.exists())
    if there != path and not there.is_dir():
        return f"{there} is a file, not a folder"
    return "" if os.access(there, os.W_OK) else f"{there} cannot be written"
