"""FSDP2: which parameters it gathers."""

from __future__ import annotations

import re
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8graph.compat import fsdp
from fp8graph.errors import Fp8GraphError

needs_distributed = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


@needs_distributed
def test_what_fsdp2_gathers_is_found() -> None:
    """One of two ranks; the other is made up."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model: Any = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        for layer in model:
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        before = fsdp.gathered()
        model[0].unshard()  # the other was never gathered
        assert fsdp.gathered().keys() - before.keys() == {id(model[0].weight)}
    finally:
        dist.destroy_process_group()


class _State(types.SimpleNamespace):
    """What FSDP2 keeps of a module, of a group of parameters, of a parameter."""


def _sharded(state: _State, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    from torch.distributed import _composable_state
    from torch.distributed.fsdp import FSDPModule

    module = nn.Linear(2, 2)
    module.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    monkeypatch.setattr(_composable_state, "_module_state_mapping", {module: lambda: state})
    return module


@needs_distributed
@pytest.mark.parametrize(
    ("missing", "state"),
    [
        ("_fsdp_param_group", _State()),
        ("fsdp_params", _State(_fsdp_param_group=_State())),
        ("fsdp_params", _State(_fsdp_param_groups=[_State()])),
        ("_unsharded_param", _State(_fsdp_param_group=_State(fsdp_params=[_State()]))),
    ],
)
def test_fsdp2_with_other_attributes_is_refused(missing: str, state: _State, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing said, whole copies of gathered weights would be kept on every rank."""
    module = _sharded(state, monkeypatch)
    with pytest.raises(Fp8GraphError, match=rf"torch {re.escape(torch.__version__)} has no \w+\.{missing}: .* Install"):
        fsdp.gathered()
    module.__class__ = nn.Linear  # another composable API's
    assert fsdp.gathered() == {}


@needs_distributed
def test_fsdp2_without_its_table_of_modules_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import _composable_state

    _sharded(_State(), monkeypatch)
    monkeypatch.delattr(_composable_state, "_module_state_mapping")
    with pytest.raises(Fp8GraphError, match="_module_state_mapping"):
        fsdp.gathered()


@needs_distributed
def test_modules_of_fsdp2_without_parameters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    _sharded(_State(_fsdp_param_group=None), monkeypatch)
    assert fsdp.gathered() == {}
