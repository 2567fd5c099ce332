"""Shards are read one tensor at a time, and what does not fit together is said when a folder is opened."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8graph.checkpoints.shards import INDEX, REPLACED, Shards, read_json
from fp8graph.checkpoints.writing import write_shards
from fp8graph.errors import CheckpointError, ConfigError
from fp8graph.files import PARTIAL


def tensors(count: int = 5) -> dict[str, Tensor]:
    return {f"layer.{i}.weight": torch.full((4, 8), float(i)) for i in range(count)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five tensors of 128 bytes in three shards."""
    write_shards(tmp_path, tensors().items(), max_shard_bytes=256)
    return tmp_path


SHARD = "model-00002-of-00003.safetensors"


def test_all_is_read(folder: Path) -> None:
    shards = Shards(folder)
    assert list(shards) == list(tensors())
    assert len(shards.files) == 3
    assert "layer.1.weight" in shards
    for name in shards:
        assert torch.equal(shards.tensor(name), tensors()[name])
    assert shards.info("layer.3.weight").shape == (4, 8)
    shards.close()
    assert torch.equal(shards.tensor("layer.0.weight"), torch.zeros(4, 8))


def test_one_file(tmp_path: Path) -> None:
    write_shards(tmp_path, tensors().items())
    assert {file.name for file in tmp_path.iterdir()} == {"model.safetensors"}
    for path in (tmp_path, tmp_path / "model.safetensors"):
        assert list(Shards(path)) == list(tensors())


def test_an_index_by_name(folder: Path) -> None:
    shutil.copy(folder / INDEX, folder / "other.safetensors.index.json")
    assert len(Shards(folder / "other.safetensors.index.json")) == 5
    assert len(Shards(folder)) == 5  # the usual one
    (folder / INDEX).rename(folder / "third.safetensors.index.json")
    with pytest.raises(CheckpointError, match="2 indices .other.*, third.*. Give one of them"):
        Shards(folder)


def test_one_file_is_mapped_at_a_time(folder: Path) -> None:
    shards = Shards(folder)
    for name in shards:
        shards.tensor(name)
        assert shards._open is not None
        assert shards._open[0] == shards.info(name).file
    maps = Path("/proc/self/maps")
    if maps.exists():
        open_now = {line.split()[-1] for line in maps.read_text().splitlines() if str(folder) in line}
        assert len(open_now) <= 1


def test_a_name_that_is_not_there(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no tensor 'layer.1.wieght'. Did you mean 'layer.1.weight'?"):
        Shards(folder).tensor("layer.1.wieght")


def test_a_missing_shard(folder: Path) -> None:
    (folder / SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"1 of 3 shards are missing, with 2 tensors: {SHARD}"):
        Shards(folder)


def test_a_truncated_shard(folder: Path) -> None:
    content = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match=f"{SHARD}: damaged. It is truncated: tensor 'layer.3.weight' ends after"):
        Shards(folder)


def test_a_tensor_that_only_the_index_has(folder: Path) -> None:
    save_file({"layer.2.weight": torch.ones(4, 8)}, folder / SHARD)
    with pytest.raises(CheckpointError, match=f"{SHARD}: there is no tensor 'layer.3.weight', which {INDEX} lists"):
        Shards(folder)


def test_a_tensor_in_two_shards(folder: Path) -> None:
    held = load_file(folder / SHARD)
    save_file({**held, "layer.1.weight": torch.ones(4, 8)}, folder / SHARD)
    message = f"{SHARD}: tensor 'layer.1.weight' is in model-00001-of-00003.safetensors, too"
    with pytest.raises(CheckpointError, match=message):
        Shards(folder)


def test_a_tensor_in_another_shard(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["layer.1.weight"] = SHARD
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"00001.*: {INDEX} says that tensor 'layer.1.weight' is in {SHARD}"):
        Shards(folder)


def test_a_tensor_that_the_index_lacks(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["layer.3.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{SHARD}: tensor 'layer.3.weight' is not in {INDEX}"):
        Shards(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=f"{INDEX}: (damaged|cannot be read|there is no table)"):
        Shards(folder)


def test_an_index_stays_in_its_folder(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(CheckpointError, match="names a file outside of its folder: '../model.safetensors'"):
        Shards(folder)


def test_folders_without_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nosuch: no such file or folder"):
        Shards(tmp_path / "nosuch")
    (folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match=f"3 safetensors files and no {INDEX}. Is a download incomplete?"):
        Shards(folder)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="empty: no safetensors file.$"):
        Shards(empty)
    (empty / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="no safetensors file. pytorch_model.bin is of a kind that is not read"):
        Shards(empty)


def test_a_folder_that_was_not_finished(tmp_path: Path) -> None:
    unfinished = tmp_path / f"model{PARTIAL}0123"
    unfinished.mkdir()
    write_shards(unfinished, tensors().items())
    with pytest.raises(CheckpointError, match="an export to it did not finish. Delete it"):
        Shards(unfinished)


def test_a_file_that_changes_while_it_is_read(folder: Path) -> None:
    shards = Shards(folder)
    save_file({"other": torch.ones(2)}, folder / SHARD)
    with pytest.raises(CheckpointError, match=f"{SHARD}: tensor 'layer.2.weight' cannot be read"):
        shards.tensor("layer.2.weight")


def test_without_safetensors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ModuleNotFoundError, match=r'Run: pip install "fp8graph\[checkpoints\]"') as caught:
        Shards(folder).tensor("layer.0.weight")
    assert caught.value.name == "safetensors"


@pytest.mark.parametrize(
    ("entries", "length"),
    [
        ({"a": ([16], [0, 64]), "b": ([4], [0, 16])}, 64),  # one in the other
        ({"a": ([4], [0, 16]), "b": ([4], [32, 48])}, 48),  # a hole
        ({"a": ([0, 2**70], [0, 0]), "b": ([4], [0, 16])}, 16),  # no size
    ],
)
def test_files_that_safetensors_refuses_are_found_before_the_first_tensor(
    folder: Path, entries: dict[str, tuple[list[int], list[int]]], length: int
) -> None:
    text = json.dumps({n: {"dtype": "F32", "shape": s, "data_offsets": o} for n, (s, o) in entries.items()}).encode()
    last = folder / "model-00003-of-00003.safetensors"
    last.write_bytes(len(text).to_bytes(8, "little") + text + bytes(length))
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != last.name}
    index["weight_map"] |= dict.fromkeys(entries, last.name)
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{last.name}: damaged"):
        Shards(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("..", "names a file outside of its folder: '..'"),
        (".", "names a file outside of its folder: '.'"),
        ("", "names a file outside of its folder: ''"),
        ("a\0b", "names the file 'a.+b', which has a NUL"),
        ("m\ud800.safetensors", "names the file 'm.+ud800.safetensors', which has half of a pair of UTF-16"),
        ("x" * 100_000, "names a file of 100000 characters: 'xxx"),
    ],
)
def test_names_that_no_file_has(folder: Path, name: str, message: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=message) as caught:
        Shards(folder)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("files", [9_000, 20_000])
def test_an_index_of_many_absent_files_is_refused_at_once(tmp_path: Path, files: int) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {f"t{i}": f"m{i}.safetensors" for i in range(files)}}))
    message = f"{files} of {files} shards are missing, with {files} tensors" if files < 10_000 else "At most 10000 are"
    start = time.process_time()
    with pytest.raises(CheckpointError, match=message):
        Shards(tmp_path)
    assert time.process_time() - start < 2  # 3 s and 12 s where each tensor was looked up in a list


def test_names_that_no_folder_has_are_refused(tmp_path: Path) -> None:
    for name in ("a\0b", "a\ud800"):
        with pytest.raises(ConfigError, match=r"Shards\(path=.*\): path must be a path; this has "):
            Shards(tmp_path / name)


def test_a_folder_that_was_put_aside_is_named(tmp_path: Path) -> None:
    aside = tmp_path / f"model{REPLACED}0123"
    aside.mkdir()
    (tmp_path / f"model2{REPLACED}0123").mkdir()
    (aside / "config.json").write_text("{}")
    message = f"no such file or folder. An export was stopped as it replaced this folder, which is now {aside}: rename"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Shards(tmp_path / "model")
    with pytest.raises(CheckpointError, match=re.escape(f"which is now {aside}: rename")):
        read_json(tmp_path / "model" / "config.json")
    with pytest.raises(CheckpointError, match="no such file or folder.$"):
        Shards(tmp_path / "mode")


def test_deep_json(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map":' + "[" * 100_000)
    with pytest.raises(CheckpointError, match=f"{INDEX}: cannot be read .*recursion"):
        Shards(folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes in folders")
def test_a_pipe_as_a_config(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="config.json: cannot be read .it is not a regular file"):
        read_json(tmp_path / "config.json")
