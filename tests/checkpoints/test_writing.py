"""Shards as they are written: by name, in order, and never more than one held with the tensor that comes next."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from fp8graph.checkpoints import writing
from fp8graph.checkpoints.shards import INDEX, Shards
from fp8graph.checkpoints.writing import write_shards
from fp8graph.errors import CheckpointError


def test_shards_and_index(tmp_path: Path) -> None:
    told: list[int] = []
    tensors = {"a": torch.ones(8), "b": torch.ones(16), "c": torch.ones(2, dtype=torch.bfloat16), "d": torch.ones(1)}
    sizes = write_shards(tmp_path, tensors.items(), max_shard_bytes=40, progress=told.append)
    assert sizes == {"a": 32, "b": 64, "c": 4, "d": 4}  # b alone is larger than a shard
    assert told == [32, 64, 8]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 104}
    one, two, three = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
    assert index["weight_map"] == {"a": one, "b": two, "c": three, "d": three}
    assert {file.name for file in tmp_path.iterdir()} == {one, two, three, INDEX}
    with safe_open(tmp_path / one, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}  # transformers wants it


def test_tensors_of_any_kind(tmp_path: Path) -> None:
    w = torch.randn(4, 6)
    given = {
        "transposed": w.t(),
        "parameter": nn.Parameter(w),
        "same memory": w,
        "part": w[1:3, 2:4],
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "empty too": torch.empty(0),
        "fp8": w.to(torch.float8_e4m3fn),
        "e8m0": torch.full((2, 2), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    }
    write_shards(tmp_path, given.items())
    shards = Shards(tmp_path)
    for name, tensor in ((name, shards.tensor(name)) for name in shards):
        assert tensor.dtype == given[name].dtype
        assert tensor.shape == given[name].shape
        assert torch.equal(tensor.float(), given[name].float()), name


def test_nothing(tmp_path: Path) -> None:
    assert write_shards(tmp_path, []) == {}
    assert len(Shards(tmp_path)) == 0


def test_writing_holds_one_shard_and_one_tensor(tmp_path: Path) -> None:
    """200 shards of 4 KiB; never more than one and the next tensor is alive. Read again, one tensor is."""
    alive = largest = 0

    def gone(size: int) -> None:
        nonlocal alive
        alive -= size

    def counted(tensor: Tensor) -> Tensor:
        nonlocal alive, largest
        alive += tensor.nbytes
        largest = max(largest, alive)
        weakref.finalize(tensor.untyped_storage(), gone, tensor.nbytes)
        return tensor

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for i in range(800):
            yield f"{i}", counted(torch.full((256,), float(i)))

    write_shards(tmp_path, tensors(), max_shard_bytes=4096)
    assert largest <= 4096 + 1024
    assert alive <= 1024
    alive = largest = 0
    shards = Shards(tmp_path)
    for tensor in map(shards.tensor, shards):
        counted(tensor)
        del tensor
    assert largest <= 2048  # the loop's, as the next one is read


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "tensor 'a' is to be written twice"),
        ([("a", torch.ones(1, device="meta"))], "tensor 'a' has no data: it is on the meta device"),
    ],
)
def test_repeated_or_meta_tensors_are_refused(tmp_path: Path, tensors: list[tuple[str, Tensor]], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        write_shards(tmp_path, tensors)


def test_shards_of_no_size(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="max_shard_bytes must be at least 1, not 0"):
        write_shards(tmp_path, [], max_shard_bytes=0)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.os, "fsync", full)
    with pytest.raises(CheckpointError, match="shard-00001.partial: cannot be written .*No space left on device"):
        write_shards(tmp_path, [("a", torch.ones(1))])


def test_no_shard_has_its_name_before_the_end(tmp_path: Path) -> None:
    def tensors() -> Iterator[tuple[str, Tensor]]:
        for i in range(8):
            yield f"{i}", torch.ones(4)
            assert not list(tmp_path.glob("*.safetensors*"))

    write_shards(tmp_path, tensors(), max_shard_bytes=16)
    assert len(list(tmp_path.glob("*.safetensors"))) == 8
