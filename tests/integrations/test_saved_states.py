"""Scaling states in the checkpoints of hosts: by the shared helpers alone, and never those of one rank for all."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8graph
from fp8graph import StateError
from fp8graph.compat import distributed
from fp8graph.integrations import loading
from helpers import in_one_test

FOLDER = Path(fp8graph.__file__).parent / "integrations"
FILES = sorted(file for file in FOLDER.glob("*.py") if file.name != "__init__.py")
_METHODS = {"state_dict", "load_state_dict"}


@in_one_test("file", FILES, ids=[file.stem for file in FILES])
def test_states_go_through_the_shared_helpers(file: Path) -> None:
    """They refuse a state of one rank, and say that one is missing."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    assert [node.lineno for node in nodes if isinstance(node, ast.Attribute) and node.attr in _METHODS] == []


class Engine:
    """Stands in for verl's: it has what the integration touches."""

    _is_lora = _is_offload_param = False
    fails = False

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module, self.loaded, self.saved = self._build_fsdp_module(nn.Linear(32, 32)), False, False

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        return module

    def save_checkpoint(self, path: str) -> None:
        self.saved = True

    def load_checkpoint(self, path: str) -> None:
        if self.fails:
            raise OSError("a shard is missing")
        self.loaded = True


class Registry:
    @staticmethod
    def register(**_: Any) -> Callable[[type], type]:
        return lambda kind: kind


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    names = ["verl", "verl.workers", "verl.workers.engine", "verl.workers.engine.base", "verl.workers.engine.fsdp"]
    for name in [*names, f"{names[-1]}.transformer_impl"]:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[f"{names[-1]}.transformer_impl"].FSDPEngineWithLMHead = Engine  # pyright: ignore
    sys.modules["verl.workers.engine.base"].EngineRegistry = Registry  # pyright: ignore
    from fp8graph.integrations.verl import register

    def made(*, steps: int = 0, **settings: Any) -> Any:
        recipe = fp8graph.DelayedScaling(amax_history_len=4, reduce_amax=settings.pop("reduce_amax", True))
        engine = register(recipe=recipe, compiler="eager", regions=None, **settings)()
        for _ in range(steps):
            engine.module(torch.randn(16, 32)).sum().backward()
        return engine

    return made


def state_of(engine: Any) -> dict[str, Any]:
    return dict(fp8graph.backend_of(engine.module).state_dict())


def test_verls_checkpoint_brings_the_scales_back(engine: Callable[..., Any], tmp_path: Path) -> None:
    first, second = engine(steps=1), engine()
    first.save_checkpoint(str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["fp8graph.pt"]
    second.load_checkpoint(str(tmp_path))
    assert second.loaded
    before, after = state_of(first), state_of(second)
    assert len(before) == 1 + 3 * 2  # three operands
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_verls_engine_refuses_to_save_the_scales_of_one_rank(
    engine: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine(steps=1, reduce_amax=False)
    monkeypatch.setattr(distributed, "number_of_ranks", lambda group: 2)
    with pytest.raises(StateError, match="verl's checkpoint holds the scaling state of one rank, but .*reduce_amax"):
        one.save_checkpoint(str(tmp_path))
    assert not one.saved
    assert [*tmp_path.iterdir()] == []


def test_verls_checkpoint_without_scales_is_named(
    engine: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strict, lenient = engine(strict=True), engine()
    with pytest.raises(StateError, match=r"strict mode: .* has no scaling state .* without the engine of fp8graph"):
        strict.load_checkpoint(str(tmp_path))
    assert not strict.loaded
    with caplog.at_level("WARNING", "fp8graph"):
        lenient.load_checkpoint(str(tmp_path))
    assert "has no scaling state of fp8graph: it was saved without the engine of fp8graph" in caplog.text
    assert lenient.loaded


def test_a_damaged_state_is_refused_before_verl_loads(engine: Callable[..., Any], tmp_path: Path) -> None:
    one = engine()
    (tmp_path / "fp8graph.pt").write_bytes(b"no archive")
    with pytest.raises(StateError, match=r"in .*fp8graph\.pt is damaged"):
        one.load_checkpoint(str(tmp_path))
    assert not one.loaded


def test_scales_are_put_back_if_the_host_fails_to_load(engine: Callable[..., Any], tmp_path: Path) -> None:
    first, second = engine(steps=1), engine(steps=3)
    first.save_checkpoint(str(tmp_path))
    before, second.fails = state_of(second), True
    with pytest.raises(OSError, match="a shard is missing"):
        second.load_checkpoint(str(tmp_path))
    after = state_of(second)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_missing_state_replaces_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "fp8graph"), loading(fp8graph.Backend(recipe="delayed"), None, "the checkpoint"):
        pass
    assert "the checkpoint has no scaling state of fp8graph" in caplog.text
