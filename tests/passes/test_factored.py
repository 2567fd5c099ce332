"""factored: what views make of a stored tensor, compared with what torch makes of one that holds its own places."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8graph.passes.recognize import Dims, Tile, expanded, is_row_major, permuted, stored, tile_of, viewed
from helpers import in_one_test


def places(dims: Dims) -> Tensor:
    """The element of the stored tensor at each place."""
    shape = [math.prod(size for size, _ in factors) for factors in dims]
    result = torch.zeros(shape, dtype=torch.long)
    for axis, factors in enumerate(dims):
        index, offset = torch.arange(shape[axis]), torch.zeros(shape[axis], dtype=torch.long)
        for size, stride in reversed(factors):
            offset += index % size * stride
            index = index // size
        result += offset.view([-1 if i == axis else 1 for i in range(len(shape))])
    return result


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_chain_that_is_understood_is_right(data: Any) -> None:
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
    dims, x = stored(shape), torch.arange(math.prod(shape)).view(shape)
    for _ in range(data.draw(st.integers(1, 4))):
        what = data.draw(st.sampled_from(["view", "permute", "expand", "unsqueeze"]))
        if what == "permute":
            order = data.draw(st.permutations(range(x.ndim)))
            dims, x = permuted(dims, order), x.permute(order)
        elif what == "expand":
            new = [data.draw(st.integers(1, 3)) if size == 1 else size for size in x.shape]
            dims, x = expanded(dims, new), x.expand(new)
        else:
            target = [*x.shape, 1] if what == "unsqueeze" else [-1, data.draw(st.sampled_from([1, 2, 3, 4]))]
            if x.numel() % target[-1]:
                continue
            y = x.reshape(target)
            made = viewed(dims, list(y.shape))
            if made is None:
                continue
            dims, x = made, y
    assert torch.equal(places(dims), x)


@in_one_test(
    ("scale", "shape", "tile"),
    [
        ([[(1, 0)], [(1, 0)]], (6, 8), Tile((6, 8), (1, 1))),
        ([[(6, 1)], [(1, 0)]], (6, 8), Tile((1, 8), (6, 1))),
        ([[(3, 4), (2, 0)], [(4, 1), (2, 0)]], (6, 8), Tile((2, 2), (3, 4))),
        ([[(6, 4)], [(4, 1), (2, 0)]], (6, 8), Tile((1, 2), (6, 4))),
        ([[(1, 0)], [(8, 1)]], (6, 8), Tile((6, 1), (1, 8))),
        ([[(3, 1), (2, 0)], [(4, 3), (2, 0)]], (6, 8), None),  # stored column by column
        ([[(2, 0), (3, 4)], [(4, 1), (2, 0)]], (6, 8), None),  # rows take turns
    ],
)
def test_tiles(scale: Dims, shape: tuple[int, int], tile: Tile | None) -> None:
    assert tile_of(expanded(scale, shape)) == tile


def test_row_major() -> None:
    assert is_row_major(stored([4, 6]))
    assert is_row_major(viewed(stored([24]), [4, 6]) or [])
    assert not is_row_major(stored([4, 6])[::-1])
    assert is_row_major(viewed(stored([4, 6]), [6, 4]) or [])
    assert viewed(stored([4, 6])[::-1], [8, 3]) is None
