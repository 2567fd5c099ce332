"""``fp8graph inspect`` on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fp8_checkpoints
from fp8graph.cli import main
from fp8graph.tools import inspect_checkpoint

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspected") / "my-model-FP8"
    fp8_checkpoints.FORMATS["hf-float"].write(folder)
    return folder


def test_the_sample_of_the_page(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.parent)
    assert main(["inspect", folder.name]) == 0
    printed = capsys.readouterr().out.splitlines()
    text = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    sample = text.split("$ fp8graph inspect my-model-FP8\n")[1].split("```")[0].splitlines()
    assert [line for line in sample if line not in (*printed, "...")] == []
    assert len(sample) > 10


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["layers"]) == 14
    assert found["layers"][0].keys() >= {"layer", "scheme", "scale_ratio", "saturated", "zero"}
    assert found["schemes"][0]["name"] == "dynamic 128x128"
    assert found["problems"] == []


def test_problems_are_counted_and_the_first_listed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = load_file(folder / "model.safetensors")
    for i in range(60):
        held[f"lost.{i}.weight_scale_inv"] = torch.ones(1)
    save_file(held, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert main(["inspect", str(tmp_path)]) == 1
    *_, first, last = capsys.readouterr().out.rstrip().partition("60 things do not fit together:")
    assert first
    assert "tensor 'lost.0.weight_scale_inv' is a scale without a quantized layer" in last
    assert last.endswith("and 10 more")


def test_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "nosuch")]) == 2
    assert capsys.readouterr().err == f"fp8graph: {tmp_path / 'nosuch'}: no such file or folder.\n"
    assert main(["inspect", str(tmp_path)]) == 2
    assert "no safetensors file" in capsys.readouterr().err


def test_without_safetensors(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert main(["inspect", str(folder)]) == 2
    assert 'safetensors is missing. Run: pip install "fp8graph[checkpoints]"' in capsys.readouterr().err


def test_many_identical_layers() -> None:
    assert inspect_checkpoint._some([]) == "none"
    assert inspect_checkpoint._some(["a.0.gate", "a.1.gate", "lm_head"]) == "a.*.gate, lm_head"
    assert inspect_checkpoint._some([f"{chr(97 + i)}.x" for i in range(15)]).endswith("l.x and 3 more")


def test_names_control_no_terminal(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = load_file(folder / "model.safetensors")
    name = "a\x1b[2J\nNothing is missing"
    held |= {f"{name}.weight": torch.ones(4, 4), f"{name}.weight_scale_inv": torch.ones(1)}
    held |= {f"{name}.q.weight": torch.zeros(128, 128).to(torch.float8_e4m3fn)}
    held |= {f"{name}.q.weight_scale_inv": torch.full((1, 1), float("inf"))}
    save_file(held, tmp_path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["\x1bc"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["inspect", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert [c for c in out if not c.isprintable() and c != "\n"] == []
    assert not any(line.startswith("Nothing is missing") for line in out.splitlines())
    assert out.count(r"a\x1b[2J\nNothing is missing") == 6
