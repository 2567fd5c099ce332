"""Calls that cannot be right: each is an error at the call, and names its argument."""
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8graph
from fp8graph import (
    Backend,
    ConfigError,
    DelayedScaling,
    Float8CurrentScaling,
    Policy,
    PolicyError,
    StateError,
    numerics,
)
from fp8graph.recipes.recipe import recipe_from_dict
from helpers import MLP

X = torch.randn(8, 32)


def compiled() -> Any:
    model = fp8graph.compile(MLP(), compiler="eager", recipe="delayed")
    model(X)
    return model


def by_name(**arguments: Any) -> Any:
    return torch.compile(MLP(), backend="fp8graph", **arguments)(X)


def loaded(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    backend = fp8graph.backend_of(compiled())
    state = backend.state_dict().items()
    backend.load_state_dict({name: change(x) if name.endswith("|scale") else x for name, x in state})


def left_unentered() -> None:
    fp8graph.autocast().__exit__(None, None, None)


# what is called, the error, what its message says
CALLS: list[tuple[Callable[[Path], Any], type[Exception], str]] = [
    (lambda _: DelayedScaling(amax_history_len=10**12), ConfigError, "amax_history_len=1000000000000"),
    (lambda _: fp8graph.autocast(5), TypeError, "autocast, enabled, must be True or False"),
    (lambda _: left_unentered(), ConfigError, r"autocast\(\): the region was left before it was entered"),
    (lambda _: fp8graph.compile(MLP(), regions=5), ConfigError, "regions must be .* not 5"),
    (lambda _: fp8graph.compile(MLP(), regions=[5]), ConfigError, r"regions must be .* not \[5\]"),
    (lambda _: fp8graph.compile(MLP(), options="x"), ConfigError, r"compile\(options='x'\): options must be a dict"),
    (lambda _: fp8graph.compile(MLP(), mode=[]), ConfigError, r"mode=list\): mode must be the name of a mode"),
    (lambda _: fp8graph.compile(MLP(), dynamic="x"), ConfigError, r"dynamic='x'\): dynamic must be True, False or"),
    (lambda _: fp8graph.compile(MLP(), fullgraph=1), ConfigError, r"fullgraph=1\): fullgraph must be True, False or"),
    (lambda _: by_name(mode=5), ConfigError, r"mode=5\): mode must be the name of a mode"),
    (lambda _: fp8graph.refresh_weights(None), ConfigError, r"refresh_weights\(backend=None\): backend must be"),
    (
        lambda _: fp8graph.refresh_weights(MLP()),
        ConfigError,
        r"refresh_weights\(backend=...\): MLP was not compiled with the fp8graph backend.* It takes a Backend, or",
    ),
    (lambda _: Backend().observe(stats="amax"), ConfigError, r"observe\(stats='amax'\) knows no statistic 'amax'. Did"),
    (lambda _: Float8CurrentScaling(fp8_format="e4m3"), ConfigError, "fp8_format must be one of E4M3, HYBRID"),
    (lambda _: Float8CurrentScaling(fp8_format=4), ConfigError, "fp8_format must be a Format, or its name: E4M3 or"),
    (lambda _: fp8graph.tune(MLP(), iter(())), ConfigError, r"tune\(batches=...\) got no batches.* an iterator gives"),
    (lambda _: fp8graph.supports("tensorwise", 9), ConfigError, "target must be 'cpu', a GPU like .* not 9"),
    (
        lambda _: numerics.quantize(X.to_sparse(), Float8CurrentScaling(), "input", "rowwise"),
        ConfigError,
        r"quantize\(x=...\): x has the layout torch.sparse_coo, and must be dense",
    ),
    *(
        (
            lambda _, scale=scale: numerics.quantize(X, DelayedScaling(), "input", "rowwise", scale=scale),
            ConfigError,
            r"quantize\(scale=...\): scale is torch.float.* must be one FP32 number on the device of x, cpu",
        )
        for scale in (torch.ones(3), torch.ones((), device="meta"), torch.ones((), dtype=torch.float64))
    ),
    *(
        (
            lambda _, given=given: fp8graph.compile(MLP(), **given, options=dict.fromkeys(given, "delayed")),
            ConfigError,
            rf"compile\({next(iter(given))}=.*, options=.*the options have {next(iter(given))} = 'delayed', too. Leave",
        )
        for given in ({"recipe": "rowwise"}, {"strict": False}, {"compiler": "eager"}, {"mode": "default"})
    ),
    (
        lambda _: fp8graph.compile(MLP(), inductor_options={"debug": True}, options={"inductor": {"debug": False}}),
        ConfigError,
        r"compile\(inductor_options={'debug': True}, options=.*: the options have inductor = {'debug': False}, too",
    ),
    (
        lambda _: fp8graph.compile(MLP(), options={"inductor_options": {"debug": True}}),
        ConfigError,
        "no option 'inductor_options'. Did you mean 'inductor'",
    ),
    (lambda _: Policy.load(None), ConfigError, r"Policy.load\(path=None\): path must be a path"),
    (lambda _: Policy.load(5), ConfigError, r"Policy.load\(path=5\): path must be a path"),
    (lambda _: Policy().resolve(None, "linear"), ConfigError, r"Policy.resolve\(fqn=None\): fqn must be"),
    (lambda _: Policy().resolve("a", "conv"), PolicyError, r"Policy.resolve\(op='conv'\): op must be one of linear, m"),
    (lambda _: fp8graph.explain(None), ConfigError, r"explain\(model=None\): model must be"),
    (lambda _: fp8graph.explain(MLP()), ConfigError, r"explain\(model, ...\): MLP does not run .* missing 1 required"),
    (lambda _: fp8graph.explain(MLP(), torch.ones(2, 3)), ConfigError, "MLP does not run with these inputs. .*linear"),
    (lambda _: fp8graph.explain(MLP(), "text"), ConfigError, "MLP does not run with these inputs. linear.*not str"),
    (lambda _: fp8graph.tune(None, [X]), ConfigError, r"tune\(model=None\): model must be"),
    (lambda _: fp8graph.tune(MLP(), None), ConfigError, r"tune\(batches=None\): batches must be a list of batches"),
    (lambda _: fp8graph.tune(MLP(), X), ConfigError, r"batches must be a list of batches.* this is one batch. Write"),
    (lambda _: fp8graph.tune(MLP(), [5]), ConfigError, r"tune\(batches=\[...\], batch=5\)"),
    (lambda _: fp8graph.tune(MLP(), [X], loss="mse"), ConfigError, r"tune\(loss='mse'\): loss must be a function"),
    (lambda path: fp8graph.tune(MLP(), [X], resume=path), ConfigError, r"tune\(resume=.*it is not a file of tune"),
    (lambda _: fp8graph.export(compiled(), None), ConfigError, r"export\(folder=None\): folder must be a path"),
    (
        lambda path: fp8graph.export(compiled(), path / "a", calibration=X),
        ConfigError,
        "calibration must be a list of b",
    ),
    (
        lambda path: fp8graph.export(compiled(), path / "a", calibration=[5]),
        ConfigError,
        r"calibration=\[...\], batch=5",
    ),
    (lambda path: fp8graph.load_checkpoint(None, path), ConfigError, r"load_checkpoint\(model=None\): model must be"),
    (lambda _: fp8graph.load_checkpoint(MLP(), None), ConfigError, r"load_checkpoint\(folder=None\): folder must be"),
    (lambda _: Backend().bind(None), ConfigError, r"Backend.bind\(model=None\): model must be"),
    (lambda _: Backend().bind(MLP(), name=5), ConfigError, r"Backend.bind\(name=5\): name must be a string"),
    (lambda path: fp8graph.package(None, path / "a.pt2"), ConfigError, r"package\(model=None\): model must be"),
    (lambda _: fp8graph.package(MLP(), None), ConfigError, r"package\(path=None\): path must be a path"),
    (lambda _: fp8graph.explain(MLP(), X).to_html(None), ConfigError, r"to_html\(path=None\): path must be a path"),
    (lambda path: fp8graph.explain(MLP(), X).to_html(path), ConfigError, r"to_html\(path='.*'\): cannot be written"),
    (lambda _: fp8graph.export(compiled(), "a\0b"), ConfigError, r"folder must be a path; this has a NUL"),
    (lambda _: fp8graph.Policy.load("a\ud800"), ConfigError, r"path must be a path; this has half of a pair"),
    (lambda _: Backend("a\0b.toml"), ConfigError, "policy file a.+b.toml: cannot be read"),
    (lambda _: Backend(target="a\0b.json"), ConfigError, "a.+b.json: not a calibration"),
    (lambda _: fp8graph.Policy.from_checkpoint("a\ud800"), ConfigError, "a.+ud800: "),
    (lambda _: fp8graph.tune(MLP(), [X], resume="a\0b"), ConfigError, r"tune\(resume=.*this has a NUL"),
    (lambda _: fp8graph.adopt(None), ConfigError, r"adopt\(model=None\): model must be"),
    (lambda _: loaded(lambda x: x.to("meta")), StateError, "scale' is a tensor on the device meta"),
    (lambda _: loaded(lambda x: x.to_sparse()), StateError, "scale' is a tensor .* with the layout torch.sparse_coo"),
    (lambda _: numerics.quantize("x", Float8CurrentScaling(), "input", "rowwise"), ConfigError, r"quantize\(x='x'\)"),
    (lambda _: numerics.quantize(X, "rowwise", "input", "rowwise"), ConfigError, r"recipe='rowwise'\): recipe must be"),
    (lambda _: numerics.quantize(X, Float8CurrentScaling(), "x", "rowwise"), ConfigError, "operand must be one of inp"),
    (
        lambda _: numerics.quantize(X, Float8CurrentScaling(), "input", "x"),
        ConfigError,
        "layout must be one of rowwise",
    ),
    (lambda _: numerics.quantize(X.int(), Float8CurrentScaling(), "input", "rowwise"), ConfigError, "x is torch.int32"),
    (lambda _: numerics.quantize(X[0], Float8CurrentScaling(), "input", "rowwise"), ConfigError, r"x has shape \[32\]"),
    (
        lambda _: numerics.quantize(X, Float8CurrentScaling(), "input", "rowwise", scale=X[0, 0]),
        ConfigError,
        "scale is for DelayedScaling",
    ),
    (lambda _: numerics.dequantize(X), ConfigError, r"dequantize\(q=Tensor\): q must be a result of quantize\(\)"),
    (lambda _: numerics.statistics("x"), ConfigError, r"statistics\(x='x'\): x must be a tensor"),
    (lambda _: numerics.statistics(X, block_size=0), ConfigError, r"statistics\(block_size=0\)"),
    (lambda _: numerics.sqnr_db(X, X[0]), ConfigError, r"sqnr_db\(\): reference has shape \[8, 32\], approximation"),
    (lambda _: numerics.sqnr_db(X, None), ConfigError, r"sqnr_db\(approximation=None\)"),
    (
        lambda _: DelayedScaling(amax_histroy_len=3),
        TypeError,
        "no field 'amax_histroy_len'. Did you mean 'amax_history_",
    ),
    (
        lambda _: recipe_from_dict({"type": "DelayedScaling", "amax_histroy_len": 3}),
        ConfigError,
        "no field 'amax_histroy_len'. Did you mean 'amax_history_len'",
    ),
    (lambda _: Policy.from_dict({"rulse": []}), PolicyError, "unknown key 'rulse'. Did you mean 'rules'"),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_a_wrong_call_names_its_argument(number: int, tmp_path: Path) -> None:
    call, error, message = CALLS[number]
    with pytest.raises(error, match=message) as caught:
        call(tmp_path)
    assert isinstance(caught.value, fp8graph.Fp8GraphError) or type(caught.value) is TypeError
    assert isinstance(caught.value, ValueError | TypeError | StateError)
    assert len(str(caught.value)) < 1000


def test_recipes_show_their_fields() -> None:
    for recipe in (DelayedScaling, fp8graph.Recipe):
        assert [*inspect.signature(recipe).parameters] == [field.name for field in dataclasses.fields(recipe)]


def test_a_compiled_model_stands_for_its_backend() -> None:
    model = fp8graph.compile(nn.Sequential(nn.Linear(32, 32)), compiler="eager")
    before = model(X)
    next(model.parameters()).data.mul_(2)
    fp8graph.refresh_weights(model)
    assert not torch.allclose(model(X), before)
