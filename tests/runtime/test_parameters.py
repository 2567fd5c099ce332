"""Values that are kept for parameters: they go with them, and are never those of another one."""

from __future__ import annotations

import torch
from torch import nn

from fp8graph.runtime.parameters import ParameterTable


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1))


def test_a_parameter_keeps_its_value() -> None:
    table, (a, b) = ParameterTable[str](), [parameter() for _ in range(2)]
    assert table.of(a) is None
    table.set(a, "a")
    table.set(b, "b")
    assert (table.of(a), table.of(b), table.values()) == ("a", "b", ["a", "b"])
    assert [(x is y, value) for (x, value), y in zip(table.parameters(), [a, b], strict=True)] == [
        (True, "a"),
        (True, "b"),
    ]
    table.set(a, "c")
    assert (table.of(a), len(table)) == ("c", 2)


def test_a_parameter_with_the_id_of_a_freed_one_has_no_value() -> None:
    """An id comes again as soon as the memory of a parameter is another's."""
    gone: list[int] = []
    table = ParameterTable[int](gone.append)
    for number in range(20):
        one = parameter()
        assert table.of(one) is None
        table.set(one, number)
        del one  # nothing else refers to it
    assert gone == [*range(20)]
    assert (len(table), table.parameters()) == (0, [])


def test_an_entry_of_several_goes_with_the_first_of_them() -> None:
    table, several = ParameterTable[str](), [parameter() for _ in range(3)]
    key = "joined", *map(id, several)
    table.keep(key, "value", several)
    del several[1]
    assert (table.get(key), table.items()) == (None, [])


def test_an_entry_that_was_replaced_does_not_go_with_earlier_parameters() -> None:
    table, earlier, later = ParameterTable[str](), parameter(), parameter()
    table.keep("key", "earlier", [earlier])
    table.keep("key", "later", [later])
    del earlier
    assert table.get("key") == "later"
    assert table.drop("key") == "later"
    assert table.drop("key") is None


def test_a_table_that_is_gone_hears_of_no_parameter() -> None:
    gone, one = list[str](), parameter()
    table = ParameterTable[str](gone.append)
    table.set(one, "value")
    del table, one
    assert gone == []
