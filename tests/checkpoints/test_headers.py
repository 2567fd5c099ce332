"""What is told of a damaged file, before any tensor is read."""

from __future__ import annotations

import json
import os
import time
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
    assert {a.start, b.start} in ({0, 24}, {0, 32})


def test_types_that_torch_lacks_are_told(file: Path) -> None:
    change = with_header(lambda header: header["b"].update(dtype="F4", shape=[4, 16]))
    file.write_bytes(change(file.read_bytes()))
    (b,) = (one for one in tensors_of(file) if one.name == "b")
    assert (b.dtype, b.stored_as, b.bytes) == (None, "F4", 32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1], r"truncated. Its tensors need 56 bytes, and 55 are there; '[ab]' is the first"),
        (lambda content: content[:30], "damaged. Its header should have"),
        (lambda content: content[:4], "damaged. Its header should have"),
        (lambda content: b"", "damaged. Its header should have 0 bytes, and the file has 0"),
        (lambda content: content + b"more", "damaged. Its tensors end after 56 bytes, and 60 are there"),
        (lambda content: b"\xff" * 8 + content[8:], "damaged. Its header should have 18446744073709551615 bytes"),
        (with_header(lambda _: b"{not json"), "damaged. Its header is not JSON"),
        (with_header(lambda _: b"\xff\xfe"), "damaged. Its header is not JSON"),
        (with_header(lambda _: b"[]"), "damaged. Its header is not a table of tensors"),
        (with_header(lambda _: b'{"a": 1, "a": 2}'), "damaged. Its header names 'a' twice"),
        (with_header(lambda h: h["a"].update(dtype="F12")), "tensor 'a' has dtype 'F12'. Known: BOOL, "),
        (with_header(lambda h: h["a"].update(dtype=["F32"])), "tensor 'a' has dtype .'F32'.. Known: BOOL, "),
        (with_header(lambda _: b'{"a":' + b"[" * 100_000), "damaged. Its header is not JSON .*recursion"),
        (
            with_header(lambda h: h.update({"x" * 5000: h["a"]})),
            "damaged. A tensor has a name of 5000 characters: 'xxx",
        ),
        (with_header(lambda h: h["a"].update(shape=[True, 6])), "damaged. The entry of tensor 'a' is"),
        (with_header(lambda h: h["a"].pop("shape") and None), "damaged. The entry of tensor 'a' is {'dtype'"),
        (with_header(lambda h: h["a"].update(shape=[2, -3])), "damaged. The entry of tensor 'a' is"),
        (with_header(lambda h: h["a"].update(shape=[7])), "damaged. The number of bytes of tensor 'a' is"),
    ],
)
def test_damage_is_named(file: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=f"model.safetensors: {message}"):
        tensors_of(file)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read .No such file"):
        tensors_of(tmp_path / "model.safetensors")


def header(entries: Iterable[tuple[str, str]]) -> bytes:
    text = ("{" + ",".join(f'"{name}":{entry}' for name, entry in entries) + "}").encode()
    return len(text).to_bytes(8, "little") + text


EMPTY = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'


def test_a_name_twice_is_found_without_comparing_all_pairs(file: Path) -> None:
    """2.3 MB took more than 20 s."""
    file.write_bytes(header((f"t{min(i, 39_998)}", EMPTY) for i in range(40_000)))
    started = time.process_time()
    with pytest.raises(CheckpointError, match="Its header names 't39998' twice"):
        tensors_of(file)
    assert time.process_time() - started < 5  # 0.3 s; all pairs: half a minute


def test_a_header_that_is_only_long(file: Path) -> None:
    file.write_bytes(header((f"t{i}", EMPTY) for i in range(100_001)))
    with pytest.raises(CheckpointError, match="its header has 100001 tensors. At most 100000 are read"):
        tensors_of(file)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes in folders")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read .it is not a regular file"):
        tensors_of(tmp_path / "model.safetensors")
