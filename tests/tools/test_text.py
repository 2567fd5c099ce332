"""Batches of text: see ``tests/cli/test_tune.py`` for a whole folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fp8graph.errors import ConfigError
from fp8graph.tools.hugging_face import batches_of


def letters(text: str, **_: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([[ord(letter) for letter in text]])}


def test_several_files_are_one_text(tmp_path: Path) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file, text in zip(files, ("aaa", "bbb"), strict=True):
        file.write_text(text)
    (batch,) = batches_of(letters, files, 1, 2, 7)
    assert batch.tolist() == [[97, 97, 97, 10, 98, 98, 98]] * 2
    with pytest.raises(ConfigError, match="7 tokens, fewer than one sequence of 8"):
        batches_of(letters, files, 1, 2, 8)


def test_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        batches_of(letters, [tmp_path / "picture.png"], 1, 1, 1)
