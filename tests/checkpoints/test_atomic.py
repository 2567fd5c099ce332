"""A folder is there whole or not at all, also after a process was killed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fp8graph.checkpoints.shards import PARTIAL, Shards
from fp8graph.checkpoints.writing import clear_leftovers, new_folder
from fp8graph.errors import CheckpointError

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
    clear_leftovers(tmp_path / "model")  # the new one is there: the old one goes
    assert names(tmp_path) == ["model"]


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    for name in (f"model2{PARTIAL}01", "model.old", "[m]"):
        (tmp_path / name).mkdir()
    clear_leftovers(tmp_path / "model")
    clear_leftovers(tmp_path / "[m]")
    assert len(names(tmp_path)) == 3
