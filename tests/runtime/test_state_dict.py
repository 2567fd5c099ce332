"""Saving and loading the scaling state: what does not fit is said, and then nothing was loaded."""

from __future__ import annotations

import copy
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8graph import Backend, DelayedScaling, Policy, Rule, StateError
from helpers import MLP, eager_backend, in_one_test

RECIPE = DelayedScaling(amax_history_len=4)
UP = "up.input|delayed(amax_history_len=4)"


def trained(recipe: Any = RECIPE, module: nn.Module | None = None) -> tuple[Any, Backend]:
    backend = eager_backend(Policy(default=recipe))
    model = torch.compile(module or MLP(), backend=backend)
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    return model, backend


def test_state_dict_entries() -> None:
    _model, backend = trained()
    state = backend.state_dict()
    assert len(state) == 1 + 9 * 2  # three layers, three operands
    assert state["fp8graph.state_version"].tolist() == [1]
    assert state[f"{UP}|scale"].shape == (1,)
    assert state[f"{UP}|amax_history"].shape == (4,)
    assert all(value.device.type == "cpu" for value in state.values())
    state[f"{UP}|scale"].fill_(7.0)  # a copy
    assert backend.state_dict()[f"{UP}|scale"].item() != 7.0


def test_without_a_recipe_that_has_a_state_it_is_empty() -> None:
    _model, backend = trained("tensorwise")
    assert set(backend.state_dict()) == {"fp8graph.state_version"}
    backend.load_state_dict(backend.state_dict())


def replaced(key: str, value: Any) -> Callable[[dict[str, Tensor]], Any]:
    return lambda state: {**state, key: value}


def without(*keys: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda state: {key: value for key, value in state.items() if key not in keys}


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda state: {key.replace(old, new) if key.startswith(UP) else key: state[key] for key in state}


BAD = [
    pytest.param(replaced(f"{UP}|scale", torch.tensor([math.nan])), "up.input.*contains nan", id="nan scale"),
    pytest.param(replaced(f"{UP}|scale", torch.tensor([math.inf])), "up.input.*contains inf", id="inf scale"),
    pytest.param(replaced(f"{UP}|scale", torch.tensor([0.0])), "up.input.*contains 0.0", id="zero scale"),
    pytest.param(replaced(f"{UP}|scale", torch.tensor([-1.0])), "up.input.*contains -1.0", id="negative scale"),
    pytest.param(replaced(f"{UP}|scale", torch.tensor([1e-42])), "up.input.*contains 1.0.*e-42", id="infinite inverse"),
    pytest.param(replaced(f"{UP}|scale", torch.ones(2)), "up.input.*scale of length 2", id="two scales"),
    pytest.param(replaced(f"{UP}|fp8_max", torch.full((2,), 448.0)), "fp8_max of length 2", id="two maxima"),
    pytest.param(replaced(f"{UP}|amax_history", torch.ones(()).expand(10**12)), "stand for 10{12}", id="expanded"),
    pytest.param(replaced("fp8graph.guard", torch.ones((), dtype=torch.uint8).expand(10**12)), "stand for", id="rules"),
    pytest.param(renamed("len=4", "len=1000000000000"), "up.input.*not a row of any recipe", id="an absurd length"),
    pytest.param(replaced(f"{UP}|scale", torch.ones(1).double()), "not a vector of FP32", id="dtype"),
    pytest.param(replaced(f"{UP}|scale", 1.0), "not a vector of FP32", id="a number"),
    pytest.param(replaced(f"{UP}|amax_history", torch.tensor([0, 1, math.nan, 2])), "contains nan", id="nan history"),
    pytest.param(replaced(f"{UP}|amax_history", torch.zeros(3)), "length 3, its recipe one of 4", id="length"),
    pytest.param(without(f"{UP}|amax_history"), "truncated: up.input.*no amax_history", id="truncated"),
    pytest.param(without(f"{UP}|scale", f"{UP}|amax_history"), "1 of 9 tensors are missing.*up.input", id="a layer"),
    pytest.param(without("fp8graph.state_version"), "'fp8graph.state_version' is missing", id="no version"),
    pytest.param(replaced("fp8graph.state_version", torch.tensor([2])), "version 2, but this fp8graph", id="version"),
    pytest.param(replaced("model.weight", torch.ones(2)), "unknown entry 'model.weight'", id="another state dict"),
    pytest.param(replaced(f"{UP}|fp8_max", torch.tensor([100.0])), "up.input.*maximum 100, which no FP8", id="maximum"),
    pytest.param(replaced(f"{UP}|fp8_max", torch.tensor([0.0])), "up.input.*contains 0.0", id="zero maximum"),
    pytest.param(renamed("len=4", "len=x"), "up.input.*is not a row of any recipe", id="a length that is no number"),
    pytest.param(renamed("delayed(", "delayed(fp8_format=E6M1,"), "up.input.*not a row of any recipe", id="a format"),
    pytest.param(lambda state: [*state], "expected a mapping, not list", id="no mapping"),
    pytest.param(lambda state: {}, "is missing", id="empty"),
]


LONG = "x" * 30_000
LONG_NAMES = [
    pytest.param(LONG, torch.ones(1), id="unknown"),
    pytest.param(f"{LONG}.input|delayed()|scale", torch.ones(1), id="truncated"),
    pytest.param(f"{LONG}.input|delayed()|scale", torch.zeros(1), id="number"),
    pytest.param(f"{LONG}.input|delayed()|scale", 1.0, id="no tensor"),
    pytest.param(f"{LONG}.input|delayed()|scale", torch.ones(1, device="meta"), id="no numbers"),
    pytest.param(f"{LONG}.input|delayed()|amax_history", torch.ones(3), id="length"),
    pytest.param(f"{LONG}.input|delayed(amax_history_len=x)|amax_history", torch.ones(3), id="recipe"),
]


@in_one_test(("name", "value"), LONG_NAMES)
def test_an_error_shows_the_beginning_of_a_long_name(name: str, value: Any) -> None:
    with pytest.raises(StateError) as caught:
        Backend(recipe=RECIPE).load_state_dict({"fp8graph.state_version": torch.tensor([1]), name: value})
    assert 200 < len(str(caught.value)) < 500


def test_a_state_that_no_recipe_uses_is_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    state = {"fp8graph.state_version": torch.tensor([1]), f"{UP}|scale": torch.ones(1)}
    state[f"{UP}|amax_history"] = torch.ones(4)
    later = Policy([Rule("*", RECIPE, steps=(10, None))], default="tensorwise")
    with caplog.at_level("WARNING", "fp8graph"):
        for policy in (Policy(default=RECIPE), Policy([Rule("up", "delayed")], default=None), later):
            Backend(policy).load_state_dict({**state, "fp8graph.step": torch.tensor(0)})
        assert caplog.records == []
        Backend(recipe="tensorwise").load_state_dict(state)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("the loaded scaling state has 1 tensors, the first up.input, and no recipe of the policy")


@pytest.fixture(scope="module")
def two_trained() -> tuple[Any, Any]:
    return trained(), trained()


@in_one_test(("spoil", "message"), BAD)
def test_bad_input_leaves_the_old_state_intact(spoil: Any, message: str, two_trained: Any) -> None:
    (_model, backend), (_other, source) = two_trained
    before, other = backend.state_dict(), source.state_dict()
    with pytest.raises(StateError, match=message) as caught:
        backend.load_state_dict(spoil(other))
    assert "Nothing was loaded" in str(caught.value)
    after = backend.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_state_of_another_recipe_is_loaded_into_layers_that_have_run(caplog: pytest.LogCaptureFixture) -> None:
    model, backend = trained(DelayedScaling(amax_history_len=8))
    _other, source = trained()
    other = source.state_dict()
    with caplog.at_level("WARNING", "fp8graph"):
        backend.load_state_dict(other)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "4 before, 8 now" in message
    loaded, long = backend.state_dict(), UP.replace("len=4", "len=8")
    assert torch.equal(loaded[f"{long}|scale"], other[f"{UP}|scale"])
    assert torch.equal(loaded[f"{long}|amax_history"][:4], other[f"{UP}|amax_history"])
    assert len(loaded) == len(other)
    del model


def test_another_model_is_named_when_it_is_there_already() -> None:
    model, backend = trained(module=nn.Linear(32, 16))
    _other, source = trained()
    other = source.state_dict()
    with pytest.raises(StateError, match="3 of 3 tensors are missing.*the dict has nothing for it"):
        backend.load_state_dict(other)
    del model


def test_unused_state_is_in_the_report(caplog: pytest.LogCaptureFixture) -> None:
    """Loaded before the first step, state waits for its layers; another length by then is logged once."""
    first, source = trained()
    rules = [Rule("up", DelayedScaling(amax_history_len=8)), Rule("down", None)]
    backend = eager_backend(Policy(rules, default=RECIPE))
    backend.load_state_dict(source.state_dict())
    module = MLP()
    model = torch.compile(module, backend=backend)
    with caplog.at_level("WARNING", "fp8graph"):
        model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert caplog.text.count("amax histories of delayed scaling have another length now (up.") == 1
    unused = {name.partition("|")[0] for name in backend.report.unused_state}
    assert unused == {f"down.{o}" for o in ("input", "weight", "grad_output")}
    assert "loaded state that no layer has asked for: down.grad_output" in str(backend.report)
    del first


def of_fnuz(state: Any) -> dict[str, Tensor]:
    """A state dict as a device with fnuz saves it: E4M3's maximum is 240 there, E5M2's the same."""
    result = dict(state)
    for key in state:
        name, _, field = key.rpartition("|")
        if field == "scale" and "grad_output" not in name:
            result |= {f"{name}|scale": state[key] * (240.0 / 448.0), f"{name}|fp8_max": torch.tensor([240.0])}
    return result


@pytest.mark.parametrize("early", [False, True])
def test_a_scale_for_another_maximum_is_converted_and_said_so(early: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Loaded before the first step and after. A file without a maximum is of the recipe's own types."""
    _model, backend = trained(module=(module := MLP()))
    saved, backend = backend.state_dict(), eager_backend(Policy(default=RECIPE))
    assert not any(key.endswith("fp8_max") for key in saved)
    model = torch.compile(module, backend=backend)

    def run_without_recording() -> None:
        with torch.no_grad():
            model(torch.randn(16, 32))

    if not early:
        run_without_recording()
    with caplog.at_level("WARNING", "fp8graph"):
        backend.load_state_dict(of_fnuz(saved))
        run_without_recording()
    assert caplog.text.count("have other maxima") == 1
    assert "240 there, 448 here" in caplog.text
    loaded = backend.state_dict()
    for key, value in saved.items():
        if early and "grad_output" in key:  # still waits for a backward
            assert torch.equal(loaded[key], value)
        elif key.endswith("scale"):
            torch.testing.assert_close(loaded[key], value, rtol=2.0**-23, atol=0)
        else:
            assert torch.equal(loaded[key], value)


def test_a_maximum_is_saved_with_what_waits_for_its_layer() -> None:
    _model, source = trained()
    saved, backend = of_fnuz(source.state_dict()), eager_backend(Policy(default=RECIPE))
    backend.load_state_dict(saved)
    loaded = backend.state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[key], value) for key, value in saved.items())


def test_loading_reaches_a_backward_that_is_still_to_come() -> None:
    """The scale of dy is read when backward runs."""
    model, backend = trained()
    state = backend.state_dict()
    out = model(torch.randn(16, 32, requires_grad=True))
    key = "down.grad_output|delayed(amax_history_len=4)|scale"
    backend.load_state_dict({**backend.state_dict(), key: state[key] / 4})
    out.sum().backward()  # no "modified by an inplace operation"


def test_freed_layer_is_not_saved() -> None:
    backend = eager_backend(Policy(default=RECIPE))
    for inner in (64, 48):
        model = torch.compile(MLP(inner=inner), backend=backend)
        model(torch.randn(16, 32, requires_grad=True)).sum().backward()
        torch._dynamo.reset()
    assert len(backend.state_dict()) == 1 + 9 * 2


@pytest.mark.parametrize("bind", [False, True])
def test_two_weights_of_one_module_have_two_names(bind: bool) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.randn(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.first + (2 * x) @ self.second

    module = nn.Sequential(Two())
    backend = eager_backend(Policy(default=RECIPE))
    if bind:
        backend.bind(module)
    model = torch.compile(module, backend=backend)
    model(torch.randn(16, 32)).sum().backward()
    names = {key.partition("|")[0] for key in backend.state_dict() if "|" in key}
    layers = ("0.first", "0.second") if bind else ("0", "0#1")
    assert names == {f"{layer}.{o}" for layer in layers for o in ("input", "weight", "grad_output")}


def test_state_reads_and_pickles_like_a_dict() -> None:
    """``weights_only=True`` refuses everything else; a Mapping torch.distributed.checkpoint would take apart."""
    _model, backend = trained()
    state = backend.state_dict()
    assert not isinstance(state, Mapping)
    assert list(state) == list(state.keys()) == list(dict(state))
    assert f"{UP}|scale" in state
    assert "down" not in state
    assert repr(state).startswith("BackendState({'fp8graph.state_version': tensor([1])")
    assert type(pickle.loads(pickle.dumps(state))) is OrderedDict
    copied = copy.deepcopy(state)
    assert type(copied) is type(state)
    assert all(torch.equal(copied[name], value) and copied[name] is not value for name, value in state.items())
