"""The bytes that collectives send in a ring."""

from __future__ import annotations

import pytest

from fp8graph.ir.collectives import bytes_sent, ranks_of
from helpers import in_one_test


@in_one_test(
    ("kind", "ranks", "expected"),
    [
        ("all_gather", 4, 768),
        ("reduce_scatter", 4, 768),
        ("all_to_all", 4, 768),
        ("all_reduce", 4, 1536),  # a reduce_scatter and an all_gather
        ("all_gather", 1, 0),
        ("all_reduce", 1, 0),
        ("all_reduce", 2, 1024),
    ],
)
def test_bytes_of_1024(kind: str, ranks: int, expected: int) -> None:
    assert bytes_sent(kind, 1024, ranks) == expected


def test_an_unknown_kind() -> None:
    with pytest.raises(ValueError, match="kind must be one of .*all_reduce.*, not 'broadcast'"):
        bytes_sent("broadcast", 1024, 2)


def test_a_group_that_is_unknown_here_has_no_ranks() -> None:
    assert ranks_of(None) == frozenset()
    assert ranks_of("no such group") == frozenset()
