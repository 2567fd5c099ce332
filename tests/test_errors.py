"""Errors reach the user as themselves, from anywhere inside torch.compile."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import fp8graph
from fp8graph import errors
from helpers import ALL, MLP, eager_backend, in_one_test

ERRORS = [getattr(errors, name) for name in errors.__all__]


@in_one_test("error", ERRORS)
def test_the_tree(error: type[fp8graph.Fp8GraphError]) -> None:
    assert issubclass(error, fp8graph.Fp8GraphError)
    assert issubclass(error, ValueError) == issubclass(error, fp8graph.ConfigError)
    first = error("what\nand why")
    for again in (pickle.loads(pickle.dumps(first)), copy.copy(first)):
        assert (type(again), str(again), again.args) == (error, "what\nand why", ("what\nand why",))


@in_one_test("error", ERRORS)
@in_one_test("fullgraph", [True, False])
def test_not_wrapped_by_dynamo(error: type[fp8graph.Fp8GraphError], fullgraph: bool) -> None:
    def backend(_module: Any, _inputs: Any) -> Any:
        raise error("the message")

    with pytest.raises(error, match="^the message") as caught:
        torch.compile(MLP(), backend=backend, fullgraph=fullgraph)(torch.randn(2, 32))
    assert type(caught.value) is error


@pytest.mark.parametrize("fullgraph", [True, False])
def test_other_errors_are_wrapped(fullgraph: bool) -> None:
    """The fact that the tests above are about. Should torch change, ShortenTraceback can go."""

    def backend(_module: Any, _inputs: Any) -> Any:
        raise ValueError("the message")

    with pytest.raises(BackendCompilerFailed, match="the message"):
        torch.compile(MLP(), backend=backend, fullgraph=fullgraph)(torch.randn(2, 32))


@in_one_test("name", errors.__all__)
def test_every_error_is_public_and_documented(name: str) -> None:
    assert getattr(fp8graph, name) is getattr(errors, name)
    assert getattr(errors, name).__doc__


def test_an_error_loses_nothing() -> None:
    """After the error the model is as it was, and compiles with a better policy."""
    model, x = MLP(), torch.randn(2, 32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bad = eager_backend(fp8graph.Policy([fp8graph.Rule("*", "tensorwise")]), strict=True)
    with pytest.raises(fp8graph.Fp8CoverageError):
        torch.compile(model.double(), backend=bad)(x.double())
    model.float()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    torch.compile(model, backend=eager_backend(ALL))(x)


@in_one_test("error", ERRORS)
def test_a_message_controls_no_terminal(error: type[fp8graph.Fp8GraphError]) -> None:
    first = error("a\x1b]0;title\x07\x7f\u202e\ud800 \u00e4\nb\tc")
    assert str(first) == "a\\x1b]0;title\\x07\\x7f\\u202e\\ud800 \u00e4\nb\\tc"
    assert str(pickle.loads(pickle.dumps(first))) == str(first)


def test_a_message_about_a_file_is_cut() -> None:
    assert len(str(fp8graph.CheckpointError("x" * 50_000_000))) < 11_000
