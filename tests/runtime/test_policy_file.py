"""The tables [observe] and [guard] beside a policy, in files, dicts and options."""

from __future__ import annotations

import json
import logging
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8graph
from fp8graph import Backend, Policy, Rule
from fp8graph.errors import ConfigError, PolicyError
from fp8graph.runtime.policies import PolicyFile
from helpers import MLP, first_fast

TEXT = """
default = "tensorwise"
min_speedup = 0
[[rules]]
pattern = "down"
recipe = "high_precision"
[observe]
every = 2
stats = ["max", "sqnr"]
layers = ["gate"]
what_if = ["mxfp8"]
[guard]
every = 3
underflows = 5
recipe = ["rowwise", "high_precision"]
"""
KNOWN = {"observe": ["every", "stats", "layers", "what_if"], "guard": ["every", "underflows", "recipe"]}
POLICY = Policy([Rule("down", None)], default="tensorwise", min_speedup=0)


def written(tmp_path: Path, text: str = TEXT, name: str = "policy.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def train(compiled: Any, model: torch.nn.Module, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        compiled(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_file_is_a_policy_and_what_to_watch(tmp_path: Path) -> None:
    file = PolicyFile.of(written(tmp_path), KNOWN)
    assert Policy.coerce(file.policy) == POLICY  # pyright: ignore[reportArgumentType]
    assert file.watch.keys() == {"observe", "guard"}
    assert PolicyFile.of(POLICY, KNOWN) == PolicyFile(policy=POLICY, watch={}, settings={}, path=None)
    assert PolicyFile.of(None, KNOWN).policy is None


@first_fast("how", ["path", "json", "dict", "options", "compile"])
def test_watching_begins_without_code(tmp_path: Path, how: str) -> None:
    torch._dynamo.reset()
    path, model = written(tmp_path), MLP()
    if how == "json":
        path = written(tmp_path, json.dumps(tomllib.loads(TEXT)), "policy.json")
    if how == "options":
        compiled = torch.compile(
            model, backend="fp8graph", options={"policy": str(path), "compiler": "eager"}  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        backend = None
    elif how == "compile":
        compiled = fp8graph.compile(model, path, compiler="eager")
        backend = fp8graph.backend_of(model)
    else:
        backend = Backend(tomllib.loads(TEXT) if how == "dict" else path, compiler="eager")
        compiled = torch.compile(model, backend=backend)
    train(compiled, model)
    backend = backend or fp8graph.backend_of(compiled)
    assert backend.policy == POLICY
    assert backend.statistics is not None
    assert {(r.step, r.site, r.stat) for r in backend.statistics} == {
        (step, "gate", stat) for step in (0, 2) for stat in ("max", "sqnr")
    }
    assert {r.recipe for r in backend.statistics if r.what_if} == {"mxfp8"}
    (guard,) = backend.guards
    assert guard.settings.bounds.underflows == 5
    assert guard.settings.fallbacks == ("rowwise", "high_precision")
    assert guard.settings.steps.are_due(103)


def test_options_by_name() -> None:
    torch._dynamo.reset()
    model = MLP()
    options: Any = {"compiler": "eager", "observe": {"every": 2, "stats": "max"}, "guard": {}}
    compiled = torch.compile(model, backend="fp8graph", options=options)
    train(compiled, model)
    backend = fp8graph.backend_of(compiled)
    assert {r.step for r in backend.statistics or ()} == {0, 2}
    assert [guard.settings.steps.every for guard in backend.guards] == [100]


def test_an_argument_replaces_the_table_of_the_file(tmp_path: Path) -> None:
    backend = Backend(written(tmp_path), compiler="eager", guard={"every": 7})
    assert [guard.settings.steps.every for guard in backend.guards] == [7]
    assert backend.guards[0].settings.bounds.underflows == 10  # nothing of the table is left
    assert backend.statistics is not None


def test_unobserved_graphs_do_not_depend_on_it(tmp_path: Path) -> None:
    identities: list[Any] = []
    for policy in (POLICY, written(tmp_path)):
        backend = Backend(policy, compiler="eager")
        identities.append((backend.services.policies.identities(), backend.decides(training=True)))
    assert identities[0] == identities[1]


def test_copies_do_not_watch(tmp_path: Path) -> None:
    """A copied or pickled model shall not write into the file of the original."""
    assert Backend(**Backend(written(tmp_path), compiler="eager").arguments()).statistics is None


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[observe]\nevry = 1", r"\[observe\] has no key 'evry'. Did you mean 'every'\? Keys: every, stats, layers"),
        ("[guard]\nunderflow = 1", r"\[guard\] has no key 'underflow'. Did you mean 'underflows'\?"),
        ("[observe]\nevery = 0", r"observe\(every=0\): expected a whole number of steps >= 1"),
        ("[observe]\nstats = 3", r"observe\(stats=3\): expected a string or a list of strings"),
        ("[observe]\nwhat_if = 'mxfp8'", r"observe\(what_if='mxfp8'\): expected a list of recipes"),
        ("[observe]\nto_jsonl = 3", r"observe\(to_jsonl=3\): expected a path"),
        ("[guard]\nsaturated = 'much'", r"guard\(saturated='much'\): expected a number of percent from 0 to 100"),
        ("observe = 3", r"\[observe\] must be a table of arguments of Backend.observe, not 3"),
        ("[watch]\nevery = 1", r"policy: unknown key 'watch'"),
    ],
)
def test_wrong_tables_name_the_file(tmp_path: Path, table: str, message: str) -> None:
    path = written(tmp_path, table)
    with pytest.raises(ConfigError, match=f"^policy file {path}: {message}"):
        Backend(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"observe": True}, r"^observe must be a table of arguments of Backend.observe, not True"),
        ({"guard": {"evry": 1}}, r"^guard has no key 'evry'. Did you mean 'every'\?"),
        ({"observe": {"every": 0}}, r"^observe\(every=0\)"),
    ],
)
def test_wrong_arguments_do_not(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Backend(written(tmp_path), **arguments)


def test_a_table_needs_its_pass(tmp_path: Path) -> None:
    path, known = written(tmp_path, "[guard]"), {"observe": ["every"]}
    with pytest.raises(ConfigError, match=rf"^policy file {path}: \[guard\]: this build of fp8graph has no pass for"):
        PolicyFile.of(path, known)


def test_a_file_says_for_two_programs_that_they_are_batch_invariant(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer and its server share it. An argument is stronger."""
    path = written(tmp_path, 'batch_invariant = true\ndefault = "rowwise"')
    assert Backend(path, compiler="eager").settings.batch_invariant
    assert Backend({"batch_invariant": True}, compiler="eager").settings.batch_invariant
    assert not Backend(path, compiler="eager", batch_invariant=False).settings.batch_invariant
    assert not Backend(POLICY, compiler="eager").settings.batch_invariant
    assert caplog.text == ""
    Policy.load(path)
    assert "batch_invariant of a policy file is for Backend(path)" in caplog.text
    with pytest.raises(ConfigError, match="batch_invariant must be True or False, not 'yes'"):
        Backend(written(tmp_path, 'batch_invariant = "yes"'))


def test_a_missing_file() -> None:
    with pytest.raises(PolicyError, match="policy file nowhere.toml: cannot be read"):
        Backend("nowhere.toml")


def test_a_policy_alone_says_that_it_does_not_watch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fp8graph"):
        assert Policy.load(written(tmp_path)) == POLICY
    assert "[observe] and [guard] of a policy file" in caplog.text
    caplog.clear()
    Backend(written(tmp_path), compiler="eager")
    assert caplog.text == ""
