"""A field of a config that is not known is named, with its value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fp8graph.checkpoints.config import Fields, is_count, is_names, is_pair
from fp8graph.errors import CheckpointError
from helpers import in_one_test


def test_fields() -> None:
    fields = Fields({"a": 1, "b": None, "c": ["x"], "d": {}}, "here")
    assert fields.one_of("a", [1, 2]) == 1
    assert fields.take("b", "default") == "default"
    assert fields.names("c") == ("x",)
    assert fields.names("not there") == ()
    fields.empty("d", "not there")
    fields.end()


@in_one_test(
    ("ask", "message"),
    [
        (lambda fields: fields.one_of("a", [2, "b"]), "here: a is 1. Known: 2, 'b'."),
        (lambda fields: fields.one_of("a", [True]), "here: a is 1. Known: True."),
        (lambda fields: fields.one_of("not there", [2]), "here: not there is None. Known: 2."),
        (lambda fields: fields.names("a"), "here: a is 1. It must be a list of names."),
        (lambda fields: fields.checked("a", is_pair, "a pair"), "here: a is 1. It must be a pair."),
        (lambda fields: fields.empty("a"), "here: a is 1. It must be empty."),
        (lambda fields: fields.end(), "here: a is 1. fp8graph does not know this field."),
        (lambda _: Fields([1], "there"), r"there: \[1\] is not a table of fields."),
    ],
)
def test_fields_refuse_unknown_values(ask: Callable[[Fields], Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ask(Fields({"a": 1}, "here"))


def test_kinds_of_values() -> None:
    assert [is_count(value) for value in (1, 0, True, 1.0, "1")] == [True, False, False, False, False]
    assert [is_pair(value) for value in ([1, 2], (1, 2), [1], [0, 1], "ab")] == [True, True, False, False, False]
    assert [is_names(value) for value in ([], ["a"], ("a",), "a", [1])] == [True, True, True, False, False]
