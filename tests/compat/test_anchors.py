"""The anchor of a parameter whose contents torch swaps: its weak references, its end, copies of it."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from fp8graph.compat import anchors
from fp8graph.compat.anchors import Anchor, anchor, remember_modules

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")


@pytest.fixture
def model(group_of_two: None) -> nn.Linear:
    """A layer with a weight and a bias that are DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    return cast(nn.Linear, distribute_module(nn.Linear(4, 4), init_device_mesh("cpu", (2,))))


def test_plain_tensors_are_referred_to_themselves() -> None:
    parameter, fake = nn.Parameter(torch.ones(2)), torch.ones(2, device="meta")
    assert anchor(parameter) is parameter
    assert anchor(fake) is fake


def test_torch_may_swap_a_parameter_that_has_a_life(model: nn.Linear) -> None:
    remember_modules(model)
    alive = anchor(model.weight)
    assert isinstance(alive, Anchor)
    assert anchor(model.weight) is anchor(alive) is alive
    assert anchor(model.bias) is not alive
    assert weakref.getweakrefs(model.weight) == []
    model.to(torch.float64)
    assert model.weight.dtype == torch.float64
    assert anchor(model.weight) is alive


def test_a_life_outlasts_swaps_that_nobody_asked_about(model: nn.Linear) -> None:
    ended: list[str] = []
    remember_modules(model)
    weakref.finalize(anchor(model.weight), ended.append, "weight")
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        model.to(dtype)
    gc.collect()
    assert ended == []
    model.weight = nn.Parameter(torch.ones(4, 4))
    gc.collect()
    assert ended == ["weight"]


def test_two_parameters_of_a_model_that_are_swapped(model: nn.Linear) -> None:
    square = nn.Linear(4, 4, bias=False)
    square.weight = cast(Any, nn.Parameter(model.weight.detach().clone()))
    remember_modules(model, square)
    before = anchor(model.weight), anchor(square.weight)
    torch.utils.swap_tensors(model.weight, square.weight)
    assert (anchor(model.weight), anchor(square.weight)) == before


def test_a_life_ends_with_its_parameter_and_keeps_nothing_alive(model: nn.Linear) -> None:
    known, ended = len(anchors._anchors), list[str]()
    held = nn.ModuleList([copy.deepcopy(model)])
    remember_modules(held)
    assert len(anchors._anchors) == known + 2
    shard = weakref.ref(cast(Any, held[0]).weight.to_local())
    weakref.finalize(anchor(cast(Any, held[0]).weight), ended.append, "weight")
    held.to(torch.float64)
    del held
    gc.collect()
    assert (ended, shard(), len(anchors._anchors)) == (["weight"], None, known)


def test_a_swapped_parameter_whose_module_is_not_known_begins_a_new_life(model: nn.Linear) -> None:
    alive = weakref.ref(anchor(model.weight))
    assert anchors.has_no_module(model.weight)
    model.to(torch.float64)
    assert alive() is None
    remember_modules(model)
    assert not anchors.has_no_module(model.weight)


def test_a_tensor_with_the_id_of_a_dead_one_has_its_own_life(model: nn.Linear) -> None:
    remember_modules(model)
    first, other = anchor(model.weight), anchor(model.bias)
    anchors._anchors[id(model.bias)] = cast(Anchor, first)  # as if the weight had been freed, and its id used again
    assert anchor(model.bias) is not first
    assert anchor(model.bias) is not other


def test_copies_and_files_have_no_life(model: nn.Linear) -> None:
    alive = anchor(model.weight)
    copied = copy.deepcopy(model)
    assert anchor(copied.weight) is not alive
    file = io.BytesIO()
    torch.save(model.state_dict(keep_vars=True), file)
    file.seek(0)
    loaded: dict[str, Tensor] = torch.load(file, weights_only=False)
    assert loaded["weight"].shape == (4, 4)
    assert anchor(loaded["weight"]) is not alive
    assert anchor(model.weight) is alive
