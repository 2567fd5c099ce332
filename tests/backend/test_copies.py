"""Copies of a model that fp8graph.compile compiled: deep copies, averages, pickles; each is compiled, by its own."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import pytest
import torch
from torch import nn

import fp8graph
from fp8graph import Policy
from helpers import ALL, MLP, first_fast, first_slow, through_torch_save

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "within another": lambda model: copy.deepcopy(nn.ModuleDict({"student": model}))["student"],
    "EMA": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_torch_save,
}


def trained(model: nn.Module, steps: int = 3) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        model(torch.randn(16, 32)).square().sum().backward()


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("delayed", marks=pytest.mark.release)])
@first_fast("how", COPIES)
def test_a_copy_is_compiled_and_computes_the_same(how: str, recipe: str) -> None:
    model = nn.Sequential(MLP(), MLP())
    fp8graph.compile(model, Policy(default=recipe, min_speedup=0), compiler="eager", save="memory", fullgraph=True)
    backend = fp8graph.backend_of(model)
    trained(model)
    copied = COPIES[how](model)
    found = fp8graph.backend_of(copied)
    assert found is not backend
    assert found.policy == backend.policy
    assert found.settings == backend.settings
    backend.refresh_weights()  # delayed: to the scales of now, as the copy does
    x = torch.randn(16, 32)
    with torch.no_grad():
        assert torch.equal(copied(x), model(x))
        copied[0].down.weight.mul_(2)
        assert not torch.equal(copied(x), model(x))
    assert {gemm.fqn for gemm in found.report.gemms} == {f"{i}.{name}" for i in "01" for name in ("gate", "up", "down")}
    assert found.state_dict().keys() == backend.state_dict().keys()
    trained(copied)
    trained(copied := COPIES[how](copied))  # a copy of a copy
    assert fp8graph.backend_of(copied).report.gemms


@pytest.mark.slow
def test_blocks_compiled_one_by_one_share_the_backend_of_the_copy() -> None:
    model = nn.Sequential(nn.Sequential(MLP(), MLP()), nn.Linear(32, 8))
    fp8graph.compile(model, ALL, regions=["MLP"], compiler="eager")
    trained(model, 1)
    copied: Any = copy.deepcopy(model)
    trained(copied, 1)
    backends = {fp8graph.backend_of(block) for block in (copied[0][0], copied[0][1], copied[1])}
    assert len(backends) == 1
    assert backends.isdisjoint({fp8graph.backend_of(model)})
    names = {gemm.name for gemm in backends.pop().report.gemms}
    assert names == {gemm.name for gemm in fp8graph.backend_of(model).report.gemms}


def test_a_model_that_is_compiled_no_more_has_plain_copies() -> None:
    for undo in (lambda m: setattr(m, "_compiled_call_impl", None), lambda m: m.compile(backend="eager")):
        model = MLP()
        fp8graph.compile(model, ALL, compiler="eager")
        undo(model)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with pytest.raises(fp8graph.ConfigError, match="was not compiled"):
                fp8graph.backend_of(copied)


def test_a_spawned_process_gets_the_state_by_value() -> None:
    """torch gives a started process tensors by their memory, which the state, made for the pickle, does not outlive."""
    model = fp8graph.compile(MLP(), Policy(default="delayed", min_speedup=0), compiler="eager")
    trained(model)
    backend = fp8graph.backend_of(model)
    sent = bytes(ForkingPickler.dumps(backend))
    assert b"rebuild_storage" not in sent
    assert dict(pickle.loads(sent).state_dict()).keys() == dict(backend.state_dict()).keys()


def check_in_process(_rank: int, model: nn.Module) -> None:
    trained(model, 1)
    assert all(gemm.recipe for gemm in fp8graph.backend_of(model).report.gemms)


@first_slow("how", ["in place", "by name"])
def test_a_spawned_process_runs_a_model_that_ran_before(how: str) -> None:
    model: nn.Module = MLP()
    policy = Policy(default="delayed", min_speedup=0)
    if how == "in place":
        fp8graph.compile(model, policy, compiler="eager")
    else:
        options: dict[str, Any] = {"policy": policy, "compiler": "eager"}
        model = cast(nn.Module, torch.compile(model, backend="fp8graph", options=options))
    trained(model)
    torch.multiprocessing.spawn(check_in_process, (model,), nprocs=2)


def test_a_shallow_copy_is_not_compiled() -> None:
    """torch drops the compiled code, and calls nothing of the model that could bring it back."""
    model = fp8graph.compile(MLP(), ALL, compiler="eager")
    with pytest.raises(fp8graph.ConfigError, match="MLP was not compiled with the fp8graph backend"):
        fp8graph.backend_of(copy.copy(model))


def test_explain_traces_a_compiled_model_and_leaves_it() -> None:
    model = MLP()
    fp8graph.compile(model, ALL, compiler="eager")
    assert fp8graph.explain(model, torch.randn(16, 32), policy=Policy(default=None)).gemms[0].recipe is None
    assert not fp8graph.backend_of(model).report.graphs


def test_pickling_without_the_compilation_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = MLP()
    fp8graph.compile(model, ALL, compiler="eager", inductor_options={"joint_custom_pre_pass": lambda graph: None})
    with caplog.at_level(logging.WARNING, "fp8graph"):
        copied = pickle.loads(pickle.dumps(model))
    assert "MLP is pickled without its compilation" in caplog.text
    copied(torch.randn(16, 32))
    with pytest.raises(fp8graph.ConfigError, match="was not compiled"):
        fp8graph.backend_of(copied)


def test_a_transform_of_a_compiled_model_is_said_to_run_in_eager(caplog: pytest.LogCaptureFixture) -> None:
    model, x = MLP(), torch.randn(4, 16, 32)
    plain = model(x)
    fp8graph.compile(model, compiler="eager")
    mapped = [torch.vmap(model)(x) for _ in range(2)]
    torch.func.grad(lambda x: model(x).sum())(x)
    messages = [r.getMessage() for r in caplog.records if "torch.func" in r.getMessage()]
    assert messages == [
        "MLP is called by a transform of torch.func (vmap, grad, ...). torch does not compile there: the call runs in "
        "eager, in high precision. To transform it in FP8, compile the function that calls the transform."
    ]
    assert all(torch.equal(y, plain) for y in mapped)
    caplog.clear()
    backend = fp8graph.Backend(compiler="eager")
    outer = torch.compile(lambda x: torch.vmap(model)(x), backend=backend)
    assert not torch.equal(outer(x), plain)
    assert len(backend.report.gemms) == 7
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_transform_of_a_compiled_model_is_an_error_in_strict_mode() -> None:
    model = MLP()
    fp8graph.compile(model, compiler="eager", strict=True)
    model(torch.randn(16, 32))
    for _ in range(2):
        with pytest.raises(fp8graph.Fp8CoverageError, match=r"^strict mode: MLP is called by a transform"):
            torch.vmap(model)(torch.randn(4, 16, 32))
