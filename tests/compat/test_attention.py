"""torch's attention ops: the arguments that are relied on."""

from __future__ import annotations

import inspect

import pytest

from fp8graph.compat.attention import FLEX, FLEX_BACKWARD


@pytest.mark.parametrize(
    ("op", "first"), [(FLEX, "query key value"), (FLEX_BACKWARD, "query key value out logsumexp grad_out")]
)
def test_the_first_arguments_of_flex_attention(op: object, first: str) -> None:
    names = list(inspect.signature(type(op).__call__).parameters)[1:]
    assert names[: len(first.split())] == first.split()
