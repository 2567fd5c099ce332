"""``fp8graph tune``: from a folder and a text to a policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import fp8graph
from fp8graph.cli import main
from fp8graph.tools.hugging_face import batches_of
from tiny_models import TINY

WORDS = "the cat sat on a mat and then it ran".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, with a tokenizer of ten words, and a text."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    TINY["llama"].build(1).bfloat16().save_pretrained(path)
    words = Tokenizer(WordLevel({word: index for index, word in enumerate([*WORDS, "?"])}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(path)
    (path / "text.txt").write_text(" ".join(WORDS[i * i % 10] for i in range(400)))
    return path


def arguments(folder: Path, *more: str) -> list[str]:
    sizes = ["--seq", "16", "--batch", "2", "--batches", "2"]
    return ["tune", str(folder), "--text", str(folder / "text.txt"), "--target", "sm_90", *sizes, *more]


@pytest.mark.slow
def test_a_policy_is_written(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy, picture = tmp_path / "policy.toml", tmp_path / "curve.png"
    kept = tmp_path / "measured.json"
    more = ["--recipe", "tensorwise", "rowwise", "--out", str(policy), "--plot", str(picture), "--resume", str(kept)]
    assert main(arguments(folder, *more)) == 0
    out, err = capsys.readouterr()
    assert out.startswith("On sm_90, predicted: GEMMs ")
    assert f"wrote {policy}" in err
    assert f"wrote {picture}" in err
    loaded = fp8graph.Policy.load(policy)
    assert kept.exists()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(arguments(folder, *more)) == 0
    assert fp8graph.Policy.load(policy) == loaded


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seq", "500"], "the text has 400 tokens, fewer than one sequence of 500"),
        (["--budget", "2"], "budget"),
        (["--text", "nosuch.txt"], "nosuch.txt: cannot be read as text"),
    ],
)
def test_errors_are_one_line(folder: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(folder, *more)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("fp8graph: ")
    assert message in line


def test_a_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(tmp_path), "--text", "text.txt"]) == 2
    assert "no config.json in it" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert main(["tune", str(tmp_path), "--text", "text.txt"]) == 2
    assert "transformers cannot load a causal language model from it" in capsys.readouterr().err


def test_batches_are_those_of_the_seed(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    first, again, other = (batches_of(tokenizer, [folder / "text.txt"], 3, 2, 16, seed) for seed in (0, 0, 1))
    assert [batch.shape for batch in first] == [torch.Size([2, 16])] * 3
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))
    assert first[0].max() < len(WORDS)
