"""A file is there whole, or as it was."""

from __future__ import annotations

import array
import errno
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8graph import ConfigError
from fp8graph.errors import expect_path
from fp8graph.files import PARTIAL, NewFile, new_file, obstacle, write_file

POSIX = pytest.mark.skipif(os.name != "posix", reason="links and permissions of files as POSIX has them")


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def raises(code: int) -> Callable[..., Any]:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    return full


def by_text(path: Path) -> None:
    write_file(path, "new", "here")


def by_parts(path: Path) -> None:
    with new_file(path, "here") as file:
        for part in (b"n", b"ew"):
            file.write(part)


WAYS = pytest.mark.parametrize("write", [by_text, by_parts])


@WAYS
@pytest.mark.parametrize("name", ["a.json", "é" * 120 + ".json"])
def test_a_file_is_made_and_replaced(tmp_path: Path, write: Callable[[Path], None], name: str) -> None:
    for _ in range(2):
        write(tmp_path / name)
        assert (tmp_path / name).read_text() == "new"
        assert names(tmp_path) == [name]
        (tmp_path / name).write_text("an old text, which is longer")


@WAYS
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_stays_as_it_was_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None], call: str
) -> None:
    (tmp_path / "a").write_text("old")
    monkeypatch.setattr(os, call, raises(errno.ENOSPC))
    with pytest.raises(ConfigError, match=r"here: cannot be (written|replaced) \(No space left on device\)"):
        write(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "old"
    kept = [file.read_text() for file in tmp_path.iterdir() if PARTIAL in file.name]
    assert kept == (["new"] if (write, call) == (by_parts, "replace") else [])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_file_stays_as_it_was_after_an_error(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(error), new_file(tmp_path / "a", "here") as file:
        raise error(file.write(b"new"))
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_a_text_without_bytes_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(ConfigError, match="here: cannot be written .*surrogates not allowed"):
        write_file(tmp_path / "a", "\ud800", "here")
    assert (tmp_path / "a").read_text() == "old"


@WAYS
@pytest.mark.parametrize("name", ["nosuch/a", "folder", "file/a", "a\0b", "a\ud800"])
def test_a_place_without_files_is_refused(tmp_path: Path, write: Callable[[Path], None], name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="here: cannot be written "):
        write(tmp_path / name)
    assert names(tmp_path) == ["file", "folder"]


@POSIX
@WAYS
def test_links_and_permissions_stay(tmp_path: Path, write: Callable[[Path], None]) -> None:
    (tmp_path / "a").touch(0o640)
    (tmp_path / "a").chmod(0o640)
    (tmp_path / "link").symlink_to("a")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


@POSIX
def test_a_pipe_is_written_in_place() -> None:
    ours, theirs = os.pipe()
    write_file(f"/dev/fd/{theirs}", "new", "here")
    assert os.read(ours, 10) == b"new"
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EBUSY])
def test_a_file_that_cannot_be_replaced_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (tmp_path / "a").write_text("an old text, which is longer")
    monkeypatch.setattr(os, "replace", raises(code))  # EBUSY: mounted by itself, as containers do
    write_file(tmp_path / "a", "new", "here")
    assert (tmp_path / "a").read_text() == "new"
    assert names(tmp_path) == ["a"]
    with pytest.raises(ConfigError):
        write_file(tmp_path / "b", "new", "here")


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_torch_writes_on_a_full_disk_without_an_abort() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        file = NewFile(full)
        torch.save(torch.ones(100), file)  # pyright: ignore[reportArgumentType]
    assert isinstance(file.error, OSError)
    assert file.error.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("error", "raised"), [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(errno.ENOSPC, "full"), ConfigError)]
)
def test_an_error_while_torch_writes_comes_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
) -> None:
    class Interrupted:
        def write(self, _: object) -> int:
            raise error

    def writes() -> None:
        with new_file(tmp_path / "a", "here") as file:
            monkeypatch.setattr(file, "_file", Interrupted())
            sizes.extend(map(file.write, (b"new", b"more")))

    sizes: list[int] = []
    pytest.raises(raised, writes)
    assert sizes == [3, 4]
    assert names(tmp_path) == []


def test_parts_of_a_write_are_written_to_the_end(tmp_path: Path) -> None:
    with new_file(tmp_path / "a", "here") as file:
        write, whole = file._file.write, array.array("i", range(40))
        file._file = type("Short", (), {"write": lambda _, data: write(data[:7])})()
        assert file.write(whole) == 160
        file._file = type("Rest", (), {"fileno": None})()
    assert (tmp_path / "a").read_bytes() == whole.tobytes()


@pytest.mark.parametrize(
    ("name", "why"),
    [("folder", "is a folder"), ("file/new/a", "file is a file, not a folder"), ("new/a", ""), ("file", "")],
)
def test_obstacles_are_named(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert obstacle(tmp_path / name).endswith(why)
    assert bool(obstacle(tmp_path / name)) == bool(why)


@pytest.mark.parametrize(
    ("path", "why"),
    [("a\0b", r"'a\\x00b'\): file must be a path; this has a NUL"), (Path("a\ud800"), "this has half of a pair")],
)
def test_names_that_no_file_has_are_refused(path: str | Path, why: str) -> None:
    with pytest.raises(ConfigError, match=r"call\(file=.*" + why):
        expect_path("call", "file", path)


def test_paths_of_bytes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"call\(file=b'a'\): file must be a path"):
        expect_path("call", "file", type("OfBytes", (os.PathLike,), {"__fspath__": lambda _: b"a"})())
