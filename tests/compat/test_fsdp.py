"""FSDP2: which parameters it gathers."""

from __future__ import annotations

import ast
import inspect
import re
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8graph.compat import fsdp
from fp8graph.errors import Fp8GraphError
from helpers import in_one_test

needs_distributed = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


@needs_distributed
@pytest.mark.usefixtures("group_of_two")
def test_gathered_lists_the_parameters_of_fsdp2() -> None:
    """One of two ranks; the other is made up."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    before = fsdp.gathered()
    model[0].unshard()  # the other was never gathered
    assert fsdp.gathered().keys() - before.keys() == {id(model[0].weight)}


class _State(types.SimpleNamespace):
    """The objects that FSDP2 keeps for a module, for a group of parameters, for a parameter."""


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


class _Sharded(_State):
    def reset_sharded_param(self) -> None:
        """Take over the shard that the module has now."""


def _sharded_parameter(**changed: Any) -> _State:
    """The object that FSDP2 keeps for one parameter [48, 32] on the first of two ranks."""
    mesh = _State(size=lambda: 2, get_group=lambda: _State(group_name="7"))
    values: dict[str, Any] = {
        "sharded_param": _State(_local_tensor=torch.ones(24, 32), requires_grad=True),
        "_unsharded_param": torch.ones(48, 32),
        "_orig_size": torch.Size((48, 32)), "mesh_info": mesh, "post_forward_mesh_info": mesh, "shard_mesh": mesh,
        "fsdp_placement": _State(dim=0), "offload_to_cpu": False, "is_dtensor": False, "orig_dtype": torch.float32,
        "param_dtype": None, "all_gather_outputs": [], "_init_extensions": lambda: None,
        "init_all_gather_outputs": lambda *_: None, "free_unsharded_param": lambda: None,
        "sharded_state": _State(name="SHARDED"), "_module_info": _State(shared_modules=[]),
        "_sharded_param_data": torch.ones(24 * 32), "padded_sharded_param_size": torch.Size((24, 32)),
        "_unsharded_inner_tensors": [],
    }  # fmt: skip
    return _Sharded(**values | changed)


@in_one_test(
    ("changed", "reason"),
    [
        ({}, None),
        ({"sharded_param": _State(_local_tensor=torch.ones(4, 2), requires_grad=False)}, "it is frozen, and gathers"),
        ({"is_dtensor": True}, "it is sharded by tensor parallelism, too"),
        ({"fsdp_placement": _State(dim=1)}, "it is sharded along dim 1"),
        ({"_orig_size": torch.Size((47, 32))}, "its 47 rows do not fall into 2 equal shards"),
        ({"shard_mesh": _State(size=lambda: 1)}, "one rank has all of it"),
        ({"offload_to_cpu": True}, r"its shards are on the CPU \(CPUOffloadPolicy\)"),
        ({"post_forward_mesh_info": None}, None),
        (
            {"post_forward_mesh_info": _State()},
            r"it is resharded to fewer ranks after forward \(reshard_after_forward=<",
        ),
        ({"_module_info": _State(shared_modules=[1])}, "another module has the same parameter"),
    ],
)
def test_reasons_against_gathering_in_fp8(changed: dict[str, Any], reason: str | None) -> None:
    found = fsdp.why_not_in_fp8(_sharded_parameter(**changed))
    assert found is None if reason is None else re.match(reason, found or "")


def test_functions_of_others_and_other_torches() -> None:
    sharded = _sharded_parameter()
    shard = fsdp.shard_of(sharded)
    shard.fsdp_pre_all_gather = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    assert fsdp.why_not_in_fp8(sharded) == "a Tensor is gathered by functions of its own"
    del sharded.shard_mesh
    assert fsdp.why_not_in_fp8(sharded) == f"torch {torch.__version__} has no FSDPParam.shard_mesh"


def test_needed_names_are_those_that_are_read_and_written() -> None:
    nodes = list(ast.walk(ast.parse(inspect.getsource(fsdp))))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    assert {each.attr for each in attributes if ast.unparse(each.value) == "sharded"} == {*fsdp._NEEDED}
    # under another name, no list would know what is read
    private = {ast.unparse(each.value) for each in attributes if each.attr in fsdp._NEEDED and each.attr[0] == "_"}
    assert private == {"sharded"}


@needs_distributed
@pytest.mark.usefixtures("group_of_two")
def test_parameters_of_this_torch_have_what_is_needed() -> None:
    """Before the first gather, too."""
    from torch.distributed.fsdp import fully_shard

    module = fully_shard(nn.Linear(8, 8, bias=False))
    found = [fsdp._missing(x) for x in fsdp._sharded_parameters() if x._module_info.module is module]
    assert found == [""]


@needs_distributed
def test_stored_weights_need_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = _sharded_parameter()
    module = _sharded(_State(_fsdp_param_group=_State(fsdp_params=[sharded])), monkeypatch)
    del sharded.padded_sharded_param_size
    with pytest.raises(Fp8GraphError, match=r"has no FSDPParam\.padded_sharded_param_size: .* Install"):
        fsdp.gather_as_stored({module})
    fsdp.gather_as_stored(set())  # no weight is stored in FP8


def test_functions_come_and_go() -> None:
    sharded, owner = _sharded_parameter(all_gather_outputs=[1], _orig_size=torch.Size((48, 32))), object()
    sharded.init_all_gather_outputs = lambda sizes, dtypes, ranks, _: setattr(
        sharded, "all_gather_outputs", [torch.ones(sizes[0] * ranks, dtype=dtypes[0])]
    )
    whole = fsdp.whole_of(sharded)
    assert fsdp.owner_of(sharded) is None
    fsdp.attach(sharded, lambda: None, lambda: None, owner)
    assert fsdp.owner_of(sharded) is owner
    assert sharded.all_gather_outputs == []
    assert fsdp.facts(sharded) == (24, None, "7", True)  # no set of parameters that FSDP2 reshards has it
    fsdp.stand_in(sharded, torch.full((48, 32), torch.nan))
    fsdp.detach(sharded)
    assert fsdp.owner_of(sharded) is None
    assert fsdp.whole_of(sharded) is whole  # in the memory that FSDP2 gathers into
    assert whole.data_ptr() == sharded.all_gather_outputs[0].data_ptr()
    assert (whole.shape, whole.sum()) == ((48, 32), 48 * 32)


@needs_distributed
@pytest.mark.usefixtures("group_of_two")
@pytest.mark.parametrize("how", ["moved", "loaded"])
def test_another_shard_has_the_functions_too(how: str) -> None:
    from torch.distributed.fsdp import fully_shard

    module, owner = nn.Linear(8, 8, bias=False), object()
    fully_shard(module)
    (sharded,) = (x for x in fsdp._sharded_parameters() if x._module_info.module is module)
    fsdp.attach(sharded, lambda: None, lambda: None, owner)
    before = fsdp.shard_of(sharded)
    if how == "moved":
        module.to("cpu")
    else:
        module.load_state_dict({name: x * 2 for name, x in module.state_dict().items()}, assign=True)
    assert fsdp.shard_of(sharded) is not before
    assert fsdp.owner_of(sharded) is owner
    fsdp.detach(sharded)
    module.to("cpu")
    assert fsdp.owner_of(sharded) is None


def test_memory_that_several_tensors_share() -> None:
    memory = torch.full((64,), torch.nan)
    a, b = fsdp.view_of(memory, torch.Size((4, 8))), fsdp.view_of(memory, torch.Size((2, 3)))
    assert a.data_ptr() == b.data_ptr() == memory.data_ptr()
    assert (a.shape, a.stride()) == ((4, 8), (8, 1))
    a.untyped_storage().resize_(0)
    fsdp.allocate(a)
    assert a.untyped_storage().nbytes() >= a.nbytes
