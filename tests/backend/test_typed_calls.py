"""Keyword arguments as editors and pyright see them: names are completed, and a wrong one is reported.

An ignored error that pyright does not report is an error of ``make lint``, by the next line.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

import inspect
import typing
from typing import Any

import pytest
import torch

import fp8graph
from fp8graph import Backend
from fp8graph.backend.backend import BackendArguments
from fp8graph.backend.entry import CompileArguments
from fp8graph.ir.settings import Settings, SettingsArguments
from fp8graph.passes import METHODS
from helpers import MLP, first_fast

# of torch.compile in some version that fp8graph takes, and not in all of them
OF_SOME_TORCH = {"name", "recompile_limit", "isolate_recompiles", "shapes_spec", "dynamic_shapes"}


def test_settings_have_the_same_names_and_types_as_arguments() -> None:
    assert typing.get_type_hints(SettingsArguments) == typing.get_type_hints(Settings)
    assert tuple(SettingsArguments.__annotations__) == Settings.names()


def test_arguments_of_a_backend_are_those_of_its_signature() -> None:
    names = {"policy", "recipe", *typing.get_type_hints(BackendArguments)}
    assert names == inspect.signature(Backend).parameters.keys()
    assert {*METHODS} == names - {"policy", "recipe", *Settings.names()}


def test_arguments_of_compile_are_those_of_the_settings_and_of_torch() -> None:
    torchs = inspect.signature(torch.compile).parameters.keys() - {"model", "backend"}
    names = {*typing.get_type_hints(CompileArguments)}
    assert names >= {*Settings.names(), *torchs}
    assert names - {*Settings.names(), *torchs} <= OF_SOME_TORCH


def test_arguments_of_compile_are_shown_by_name() -> None:
    shown = inspect.signature(fp8graph.compile).parameters
    torchs = inspect.signature(torch.compile).parameters
    assert [*shown][:7] == ["model", "policy", "recipe", "observe", "guard", "regions", "backend"]
    assert {*shown} >= {*Settings.names()} | torchs.keys() - {"model", "backend"}
    assert {*shown} - OF_SOME_TORCH <= {*typing.get_type_hints(CompileArguments), *[*shown][:7]}
    for name in ("fullgraph", "dynamic", "mode", "options"):
        assert shown[name].default == torchs[name].default
    assert all(p.kind is p.KEYWORD_ONLY for p in [*shown.values()][2:])
    assert shown["save"].default == Settings().save
    assert fp8graph.compile.__name__ == "compile"


def test_arguments_of_explain_are_shown_before_those_of_the_model() -> None:
    shown = inspect.signature(fp8graph.explain).parameters
    assert [*shown] == ["model", "args", "policy", "recipe", "training", "backend", *Settings.names(), "kwargs"]


@first_fast("call", ["Backend(", "compile(model, ", "explain(model, "])
def test_an_editor_completes_settings(call: str) -> None:
    jedi = pytest.importorskip("jedi", reason="jedi is not installed: pip install jedi")
    names = [each.name for each in jedi.Interpreter(f"fp8graph.{call}cach", [{"fp8graph": fp8graph}]).complete()]
    assert names == ["cache_weights="]


def test_right_calls_have_the_types_that_are_stated() -> None:
    backend = Backend(recipe="rowwise", compiler="eager", cache_weights="update", observe={"every": 10})
    assert backend.settings.cache_weights == "update"
    model = fp8graph.compile(MLP(), recipe="rowwise", compiler="eager", save="memory", fullgraph=True, dynamic=False)
    assert fp8graph.backend_of(model).settings.save == "memory"
    settings: dict[str, Any] = {"compiler": "eager", "strict": True}
    assert Backend(**settings).settings.strict


def test_wrong_calls_are_reported_and_raise() -> None:
    with pytest.raises(TypeError, match="Did you mean 'strict'"):
        Backend(stric=True)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="Did you mean 'recipe'"):
        fp8graph.compile(MLP(), recpe="rowwise")  # pyright: ignore[reportCallIssue]
    with pytest.raises(fp8graph.ConfigError, match="^save must be one of speed, memory, not 'disk'"):
        Backend(save="disk")  # pyright: ignore[reportArgumentType]
    with pytest.raises(fp8graph.ConfigError, match="strict must be True or False"):
        fp8graph.compile(MLP(), strict=1)  # pyright: ignore[reportArgumentType]
