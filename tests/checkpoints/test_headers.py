"""A damaged file is refused before any tensor is read, and the error names file and tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fp8graph.checkpoints.shards import tensors_of
from fp8graph.errors import CheckpointError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4, 8).to(torch.float8_e4m3fn)}, path)
    return path


def with_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """Change the header of a file, and leave the rest."""

    def changed(content: bytes) -> bytes:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        text = change(header)
        text = text if isinstance(text, bytes) else json.dumps(header if text is None else text).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + length :]

    return changed


def test_a_sound_file(file: Path) -> None:
    a, b = sorted(tensors_of(file), key=lambda one: one.name)
    assert (a.name, a.dtype, a.shape, a.bytes) == ("a", torch.float32, (2, 3), 24)
    assert (b.name, b.dtype, b.stored_as, b.shape, b.bytes) == ("b", torch.float8_e4m3fn, "F8_E4M3", (4, 8), 32)


def test_types_that_torch_lacks_are_listed(file: Path) -> None:
    change = with_header(lambda header: header["b"].update(dtype="F4", shape=[4, 16]))
    file.write_bytes(change(file.read_bytes()))
    (b,) = (one for one in tensors_of(file) if one.name == "b")
    assert (b.dtype, b.stored_as, b.bytes) == (None, "F4", 32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1], r"It is truncated: tensor '[ab]' ends after 56 bytes, and 55 are there \("),
        (lambda content: content[:30], r" \(invalid header length\)"),
        (lambda content: content[:4], r" \(header too small\)"),
        (lambda content: b"", r" \(header too small\)"),
        (lambda content: content + b"more", r" \(incomplete metadata, file not fully covered\)"),
        (lambda content: b"\xff" * 8 + content[8:], r" \(header too large\)"),
        (with_header(lambda _: b"{not json"), r" \(invalid JSON in header: key must be a string"),
        (with_header(lambda _: b"\xff\xfe"), r" \(invalid UTF-8 in header"),
        (with_header(lambda _: b"[]"), r" \(invalid JSON in header: invalid type: sequence"),
        (
            with_header(lambda h: b'{"a":%s,' % json.dumps(h["b"]).encode() + json.dumps(h).encode()[1:]),
            "Its header names 'a' twice",
        ),
        (with_header(lambda _: b'{"a": 1, "a": 2}'), r"The entry of tensor 'a' is 2 \(invalid JSON"),
        (with_header(lambda h: h["a"].update(dtype="F12")), "The entry of tensor 'a' is .*unknown variant `F12`"),
        (with_header(lambda h: h["a"].update(dtype=["F32"])), "The entry of tensor 'a' is "),
        (with_header(lambda _: b'{"a":' + b"[" * 100_000), r" \(invalid JSON in header: recursion limit"),
        (
            with_header(lambda h: h.update({"x" * 5000: h["a"] | {"data_offsets": [56, 56], "shape": [0]}})),
            " A tensor has a name of 5000 characters: 'xxx",
        ),
        (with_header(lambda h: h["a"].update(shape=[True, 6])), "The entry of tensor 'a' is"),
        (with_header(lambda h: h["a"].pop("shape") and None), "The entry of tensor 'a' is {'dtype'"),
        (with_header(lambda h: h["a"].update(shape=[2, -3])), "The entry of tensor 'a' is"),
        (with_header(lambda h: h["a"].update(shape=[7])), "The entry of tensor 'a' is"),
    ],
)
def test_damage_is_named(file: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=rf"model.safetensors: damaged\.? ?{message.lstrip()}") as caught:
        tensors_of(file)
    assert len(str(caught.value)) < 1000


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read .No such file"):
        tensors_of(tmp_path / "model.safetensors")


def header(entries: Iterable[tuple[str, str]]) -> bytes:
    text = ("{" + ",".join(f'"{name}":{entry}' for name, entry in entries) + "}").encode()
    return len(text).to_bytes(8, "little") + text


EMPTY = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'


def test_a_header_that_is_only_long(file: Path) -> None:
    file.write_bytes(header((f"t{i}", EMPTY) for i in range(100_001)))
    with pytest.raises(CheckpointError, match="its header has 100001 tensors. At most 100000 are read"):
        tensors_of(file)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes in folders")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read .it is not a regular file"):
        tensors_of(tmp_path / "model.safetensors")
