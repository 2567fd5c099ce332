"""Names of parameters: by identity, without keeping them alive."""

from __future__ import annotations

import gc
from typing import cast

import pytest
import torch
from torch import nn

import fp8graph
from fp8graph.runtime.names import Names
from fp8graph.runtime.staleness import Epoch
from helpers import MLP


def test_a_bound_parameter_has_its_name_and_others_have_none() -> None:
    names, model = Names(Epoch()), nn.ModuleDict({"mlp": MLP()})
    assert not names
    names.bind(model)
    assert names
    assert [names.get(p) for p in model.parameters()] == ["mlp.gate.weight", "mlp.up.weight", "mlp.down.weight"]
    assert names.get(nn.Parameter(torch.zeros(1))) == ""


def test_an_equal_tensor_is_another_parameter() -> None:
    names, model = Names(Epoch()), MLP()
    names.bind(model)
    assert names.get(model.up.weight.detach()) == ""


def test_a_parameter_that_a_bound_model_got_later() -> None:
    names, model = Names(Epoch()), MLP()
    names.bind(model)
    model.up.weight = nn.Parameter(torch.zeros(64, 32))
    assert names.get(model.up.weight) == "up.weight"


def test_the_compiled_module_is_named_as_the_original() -> None:
    names, model = Names(Epoch()), MLP()
    names.bind(cast(nn.Module, torch.compile(model, backend="eager")))
    assert names.get(model.up.weight) == "up.weight"


def test_nothing_is_kept_alive() -> None:
    names, model = Names(Epoch()), MLP()
    names.bind(model)
    assert len(names._names) == 3
    del model
    gc.collect()
    assert not names


def test_binding_ends_prepared_calls() -> None:
    epoch = Epoch()
    Names(epoch).bind(MLP())
    assert epoch.now == 1


def test_torch_refuses_to_swap_a_bound_parameter() -> None:
    """Names are known by weak references; docs/troubleshooting.md says so. Conversions in place are no swaps."""
    model = MLP()
    fp8graph.compile(model, compiler="eager")
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(model.up.weight, nn.Parameter(torch.zeros_like(model.up.weight)))
    model.to(torch.float64)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
@pytest.mark.usefixtures("group_of_two")
def test_torch_converts_sharded_parameters_by_a_swap() -> None:
    from torch.distributed.fsdp import fully_shard

    names, model = Names(Epoch()), MLP()
    fully_shard(model)
    names.bind(model)
    before = list(map(names.get, model.parameters()))
    model.to(torch.bfloat16)
    learned = len(names._names)
    assert model.up.weight.dtype == torch.bfloat16
    assert list(map(names.get, model.parameters())) == before == ["gate.weight", "up.weight", "down.weight"]
    assert len(names._names) == learned
    del model
    gc.collect()
    assert not names


def test_the_modules_of_bound_models_and_their_own_matrices() -> None:
    names, model = Names(Epoch()), nn.Sequential(nn.Linear(2, 2))
    model.scale, model.mixing = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 2))
    assert names.modules() == set()
    compiled = cast(nn.Module, torch.compile(model))
    names.bind(compiled, "teacher")
    assert names.modules() == {"teacher", "teacher.0", "teacher.mixing"}


def test_a_name_that_the_user_gave_stays() -> None:
    names, model = Names(Epoch()), MLP()
    assert model not in names
    names.bind(model, "teacher")
    names.bind_later(model)
    assert model in names
    model.up.weight = nn.Parameter(torch.zeros(64, 32))
    assert names.get(model.up.weight) == "teacher.up.weight"
