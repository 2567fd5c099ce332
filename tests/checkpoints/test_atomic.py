"""A folder is there whole or not at all, also after a process was killed."""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8graph.checkpoints import writing
from fp8graph.checkpoints.shards import Shards
from fp8graph.checkpoints.writing import clear_leftovers, new_folder, write_json
from fp8graph.errors import CheckpointError
from fp8graph.files import PARTIAL

ROOT = Path(__file__).parent.parent.parent


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_new_folder(tmp_path: Path) -> None:
    target = tmp_path / "parent" / "model"
    with new_folder(target) as partial:
        assert PARTIAL in partial.name
        assert partial.parent == target.parent
        (partial / "config.json").touch()
        assert not target.exists()
    assert names(target.parent) == ["model"]
    assert names(target) == ["config.json"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def fails() -> None:
        with new_folder(tmp_path / "model") as partial:
            (partial / "config.json").touch()
            raise error

    pytest.raises(error, fails)
    assert names(tmp_path) == []


def test_a_folder_that_exists(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    with new_folder(target) as partial:  # empty
        (partial / "config.json").write_text("1")
    with pytest.raises(CheckpointError, match="model: exists. Choose another folder, or pass overwrite=True"):
        new_folder(target).__enter__()
    with new_folder(target, overwrite=True) as partial:
        (partial / "config.json").write_text("2")
        assert (target / "config.json").read_text() == "1"
    assert (target / "config.json").read_text() == "2"
    assert names(tmp_path) == ["model"]


def test_only_checkpoints_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters.txt").touch()
    with pytest.raises(CheckpointError, match="home: exists, and is not a checkpoint: it has no config.json"):
        new_folder(tmp_path / "home", overwrite=True).__enter__()
    (tmp_path / "link").symlink_to(tmp_path / "home")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(CheckpointError, match=f"{name}: exists, and is not a folder"):
            new_folder(tmp_path / name, overwrite=True).__enter__()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="model: cannot be written .(Not a directory|File exists)"):
        new_folder(tmp_path / "file" / "model").__enter__()


def written(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(text)


def export(target: Path, text: str, meanwhile: Callable[[], object], *, overwrite: bool = True) -> None:
    with new_folder(target, overwrite=overwrite) as partial:
        written(partial, text)
        meanwhile()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["mine.txt", "config.json"])
def test_a_folder_that_appears_meanwhile_stays(tmp_path: Path, name: str, overwrite: bool) -> None:
    target = tmp_path / "model"

    def appears() -> None:
        target.mkdir()
        (target / name).write_text("the only copy")

    if overwrite and name == "config.json":
        export(target, "new", appears)
        assert (target / name).read_text() == "new"
        assert names(tmp_path) == ["model"]
        return
    with pytest.raises(CheckpointError, match="model: exists.* what it wrote is whole, and kept as .*written-"):
        export(target, "new", appears, overwrite=overwrite)
    assert (target / name).read_text() == "the only copy"
    (kept,) = set(tmp_path.iterdir()) - {target}
    assert names(kept) == ["config.json"]
    clear_leftovers(target)  # another export
    assert kept.exists()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_that_appears_meanwhile_stays(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "model"

    def appears() -> None:
        target.touch() if kind == "file" else target.symlink_to("nosuch")

    with pytest.raises(CheckpointError, match="model: exists, and is not a folder.* kept as "):
        export(target, "new", appears)
    assert target.is_symlink() == (kind == "link")
    assert target.is_file() == (kind == "file")


def test_two_exports_to_one_place_both_stay(tmp_path: Path) -> None:
    target = tmp_path / "model"
    second = functools.partial(export, target, "second", lambda: None, overwrite=False)
    with pytest.raises(CheckpointError, match="model: exists.* kept as "):
        export(target, "first", second, overwrite=False)
    assert (tmp_path / "model" / "config.json").read_text() == "second"
    (kept,) = tmp_path.glob("model.fp8graph-written-*")
    assert (kept / "config.json").read_text() == "first"


@pytest.mark.parametrize("error", [OSError(5, "I/O error"), KeyboardInterrupt()])
@pytest.mark.parametrize("fails_at", [0, 1])
def test_the_old_folder_is_back_after_an_error_between_two_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int, error: BaseException
) -> None:
    target = tmp_path / "model"
    written(target, "old")
    rename, calls = os.rename, itertools.count()

    def fails(one: Path, other: Path) -> None:
        if next(calls) == fails_at:
            raise error
        rename(one, other)

    monkeypatch.setattr(writing, "_exchange", lambda *_: False)
    wanted = CheckpointError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(wanted, match="whole, and kept as .*written-" if isinstance(error, OSError) else None):
        export(target, "new", lambda: monkeypatch.setattr(os, "rename", fails))
    assert (target / "config.json").read_text() == "old"
    kept = [(folder / "config.json").read_text() for folder in tmp_path.iterdir() if folder != target]
    assert kept == (["new"] if isinstance(error, OSError) else [])


def test_two_folders_exchange_their_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        written(tmp_path / name, name)
    done = writing._exchange(tmp_path / "a", tmp_path / "b")
    assert done == (sys.platform == "linux")
    assert [(tmp_path / name / "config.json").read_text() for name in "ab"] == (["b", "a"] if done else ["a", "b"])
    assert not writing._exchange(tmp_path / "a", tmp_path / "nosuch")


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_that_changes_between_check_and_rename_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    target = tmp_path / "model"
    exchange, check = writing._exchange, writing.check_target

    def changes(folder: Path, overwrite: bool) -> None:
        check(folder, overwrite)
        (target / "config.json").rename(target / "mine.txt")

    monkeypatch.setattr(writing, "_exchange", exchange if exchanges else lambda *_: False)
    written(target, "the only copy")
    with pytest.raises(CheckpointError, match="model: exists, and is not a checkpoint.* kept as "):
        export(target, "new", lambda: monkeypatch.setattr(writing, "check_target", changes))
    assert (target / "mine.txt").read_text() == "the only copy"


@pytest.mark.parametrize("held", [False, True])
def test_a_mounted_volume_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    target = tmp_path / "model"
    written(target, "old") if held else target.mkdir()

    def busy(one: Path, other: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")  # as Linux, before it looks into the folder

    monkeypatch.setattr(os, "rename", busy)
    with pytest.raises(CheckpointError, match=r"a volume is mounted there. Give a folder in it, .*model.model.$"):
        new_folder(target, overwrite=True).__enter__()
    assert names(tmp_path) == ["model"]
    assert names(target) == (["config.json"] if held else [])


@pytest.mark.parametrize("held", [False, True])
def test_a_folder_is_as_it_was_after_the_trial(tmp_path: Path, held: bool) -> None:
    target = tmp_path / "model"
    written(target, "old") if held else target.mkdir()
    target.chmod(0o700)
    with pytest.raises(ValueError), new_folder(target, overwrite=True):
        raise ValueError
    assert target.stat().st_mode & 0o777 == 0o700
    assert names(target) == (["config.json"] if held else [])


def test_an_error_at_the_end_keeps_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with pytest.raises(CheckpointError, match=r"model: cannot be written \(Disk quota exceeded\).* kept as .*partial-"):
        export(tmp_path / "model", "new", lambda: monkeypatch.setattr(os, "rename", full))
    (kept,) = tmp_path.iterdir()
    assert (kept / "config.json").read_text() == "new"


def test_an_index_on_a_full_disk_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="config.json: cannot be written .No space left on device"):
        write_json(tmp_path / "config.json", {})


KILLED = """
import sys, time, torch
from pathlib import Path
from fp8graph.checkpoints.writing import new_folder, write_shards

def tensors():
    for i in range(1000):
        yield f"{i}", torch.ones(64)
        if i == 20:
            print("writing", flush=True)
            time.sleep(60)

with new_folder(Path(sys.argv[1])) as folder:
    (folder / "config.json").write_text("{}")
    write_shards(folder, tensors(), max_shard_bytes=1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="leftovers are only told where files cannot be locked")
def test_a_killed_export(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tmp_path / "model"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED, str(target)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        with caplog.at_level(logging.WARNING, "fp8graph"):
            clear_leftovers(target)  # another export to the same place
        assert "another export is writing here" in caplog.text
        process.send_signal(signal.SIGKILL)
        process.wait()
    (left,) = tmp_path.iterdir()
    assert PARTIAL in left.name
    assert not list(left.glob("*.safetensors"))  # nothing that a loader would take
    with pytest.raises(CheckpointError, match="an export to it did not finish"):
        Shards(left)
    deadline = time.monotonic() + 10
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:  # the system unlocks a moment later
        with caplog.at_level(logging.WARNING, "fp8graph"):
            clear_leftovers(target)
    assert "deleted. It is what is left of an export that did not finish" in caplog.text
    assert names(tmp_path) == []


def test_killed_while_it_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = tmp_path / "model.fp8graph-replaced-0123"
    old.mkdir()
    (old / "config.json").write_text("old")
    with caplog.at_level(logging.WARNING, "fp8graph"):
        clear_leftovers(tmp_path / "model")
    assert "it is put back" in caplog.text
    assert (tmp_path / "model" / "config.json").read_text() == "old"
    old.mkdir()
    (old / "config.json").write_text("older")
    clear_leftovers(tmp_path / "model")  # the new one is there: the old one goes
    assert names(tmp_path) == ["model"]


def test_an_old_folder_goes_only_if_a_checkpoint_is_in_its_place(tmp_path: Path) -> None:
    old, target = tmp_path / "model.fp8graph-replaced-0123", tmp_path / "model"
    written(old, "old")
    target.mkdir()
    (target / "mine.txt").touch()
    clear_leftovers(target)
    assert (old / "config.json").exists()
    (target / "mine.txt").unlink()
    clear_leftovers(target)
    assert names(tmp_path) == ["model"]
    assert (target / "config.json").read_text() == "old"


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    for name in (f"model2{PARTIAL}01", "model.old", "[m]"):
        (tmp_path / name).mkdir()
    clear_leftovers(tmp_path / "model")
    clear_leftovers(tmp_path / "[m]")
    assert len(names(tmp_path)) == 3
