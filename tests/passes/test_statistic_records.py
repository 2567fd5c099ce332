"""Lines that are appended while a model trains."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fp8graph import Backend, ConfigError
from fp8graph.passes.observe import statistics
from fp8graph.passes.observe.observation import Observation
from helpers import ALL, MLP
from ranks import run_ranks


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(backend: Backend, path: Path, steps: int = 4) -> list[set[int]]:
    """The steps that the file holds after each step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MLP()
    optimizer, compiled = torch.optim.SGD(model.parameters(), 0.1), torch.compile(model, backend=backend)
    held: list[set[int]] = []
    for _ in range(steps):
        compiled(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
        held.append({line["step"] for line in lines(path)} if path.exists() else set())
    return held


def test_each_observed_step_is_appended_when_the_next_one_begins(tmp_path: Path) -> None:
    path = tmp_path / "new" / "statistics.jsonl"
    asked: dict[str, Any] = {"every": 2, "stats": ["max", "sqnr"], "to_jsonl": str(path)}
    backend = Backend(ALL, compiler="eager", observe=asked)
    statistics = backend.observe(every=2, stats=["max", "sqnr"])
    assert train(backend, path, 5) == [set(), {0}, {0}, {0, 2}, {0, 2}]
    statistics.to_jsonl(tmp_path / "whole.jsonl")
    whole = lines(tmp_path / "whole.jsonl")
    assert lines(path) == [line for line in whole if line["step"] < 4]
    assert {line["step"] for line in whole} == {0, 2, 4}


def test_steps_that_were_written_are_not_kept(tmp_path: Path) -> None:
    backend = Backend(ALL, compiler="eager", observe={"every": 1, "to_jsonl": tmp_path / "s.jsonl"})
    train(backend, tmp_path / "s.jsonl", 4)
    assert {*backend.store(Observation)._by_step} == set()
    assert {r.step for r in backend.statistics or ()} == {3}  # the last one is not written yet


@pytest.mark.slow
def test_the_last_step_is_written_at_exit(tmp_path: Path) -> None:
    code = f"""
import torch, fp8graph
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
compiled = torch.compile(model, backend="fp8graph", options={{
    "compiler": "eager", "observe": {{"every": 1, "stats": "max", "to_jsonl": {str(tmp_path / "s.jsonl")!r}}}
}})
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    compiled(torch.randn(16, 32)).sum().backward()
    optimizer.step()
"""
    for _ in range(2):  # a second run appends
        subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    assert [line["step"] for line in lines(tmp_path / "s.jsonl") if line["operand"] == "dgrad"].count(1) >= 2
    steps = [line["step"] for line in lines(tmp_path / "s.jsonl") if line["operand"] == "input"]
    assert steps == [0] * 2 + [1] * 2 + [0] * 2 + [1] * 2


@pytest.mark.parametrize("mode", [contextlib.nullcontext, FakeTensorMode])  # the collector may run at any moment
def test_freed_backend_has_written(tmp_path: Path, mode: Callable[[], AbstractContextManager[Any]]) -> None:
    backend = Backend(ALL, compiler="eager", observe={"every": 1, "to_jsonl": tmp_path / "s.jsonl"}, guard={})
    train(backend, tmp_path / "s.jsonl", 1)
    assert not (tmp_path / "s.jsonl").exists()
    torch._dynamo.reset()
    del backend
    with mode():
        gc.collect()
    assert {line["step"] for line in lines(tmp_path / "s.jsonl")} == {0}


def _rank(rank: int, path: str) -> None:
    train(Backend(ALL, compiler="eager", observe={"every": 1, "to_jsonl": path}), Path(path), 2)


@pytest.mark.slow
def test_each_rank_has_a_file(tmp_path: Path) -> None:
    run_ranks(_rank, 2, tmp_path, str(tmp_path / "s.jsonl"))
    assert sorted(file.name for file in tmp_path.glob("*.jsonl")) == ["s.rank0.jsonl", "s.rank1.jsonl"]


def test_a_full_disk_loses_statistics_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, append = tmp_path / "s.jsonl", statistics._append
    calls = itertools.count()

    def full(file: Path, lines: bytes) -> None:
        # A backend of an earlier test that is freed just now appends to its own file.
        if file == path and next(calls) in (1, 2):
            raise OSError(28, "No space left on device")
        append(file, lines)

    monkeypatch.setattr(statistics, "_append", full)
    backend = Backend(ALL, compiler="eager", observe={"every": 1, "stats": "max", "to_jsonl": path})
    assert train(backend, path, 5)[-1] == {0, 3}  # there is space again
    assert caplog.text.count("step 1 cannot be written (No space left on device): its statistics are lost") == 1
    assert "step 2" not in caplog.text


def test_half_a_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            if len(data) < 10:
                raise OSError(28, "No space left on device")
            return super().write(data[:5])

    path = tmp_path / "s.jsonl"
    path.write_bytes(b"a line\n")
    with monkeypatch.context() as patches:
        patches.setattr(Path, "open", lambda path, *_, **__: Full(path, "ab"))
        with pytest.raises(OSError, match="No space left"):
            statistics._append(path, b"another line\n")
    assert path.read_bytes() == b"a line\n"


def test_names_that_no_file_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"observe\(to_jsonl='a.+b'\): it has a NUL. Give the path of a file"):
        Backend(ALL, compiler="eager").observe(to_jsonl="a\0b")


@pytest.mark.parametrize(
    ("given", "why"),
    [("folder", "it is a folder"), (".", "it is a folder"), ("file/statistics.jsonl", "file is a file, not a folder")],
)
def test_a_path_that_no_file_can_have_is_an_error_at_once(
    given: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the first observed step, which may be hours away."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    with pytest.raises(ConfigError, match=re.escape(f"observe(to_jsonl={given!r}): {why}. Give the path of a file")):
        Backend(ALL, compiler="eager").observe(to_jsonl=given)
    Backend(ALL, compiler="eager").observe(to_jsonl="made/later/statistics.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
