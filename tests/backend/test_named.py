"""named: a backend by name and options, one for each set of them, as long as somebody uses it."""

from __future__ import annotations

import pickle
import re
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8graph
from fp8graph.backend import NAMED, NamedBackend
from fp8graph.ir.settings import arguments_of
from fp8graph.numerics import sqnr_db
from fp8graph.recipes import RECIPE_NAMES
from helpers import ALL, MLP, first_fast, in_one_test, step


def test_equal_options_are_one_backend() -> None:
    named = NamedBackend()
    first = named.backends_for({"options": {"recipe": "rowwise"}})
    assert named.backends_for({"options": {"recipe": "rowwise"}}) is first
    others = [{"options": {"recipe": "tensorwise"}}, {"options": {"recipe": "rowwise"}, "mode": "default"}, {}]
    backends = [named.backends_for(kwargs) for kwargs in others]
    assert len({*map(id, backends), id(first)}) == 4


def test_a_mode_is_options_of_inductor_and_the_users_own_win() -> None:
    options: dict[str, Any] = {"inductor": {"triton.cudagraphs": False}}
    plain = arguments_of("reduce-overhead", {})
    own = arguments_of("reduce-overhead", options)
    inside = arguments_of(None, {"mode": "reduce-overhead"})
    assert [given["inductor_options"]["triton.cudagraphs"] for given in (plain, own, inside)] == [True, False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inductor": [1]}, "option 'inductor' must be a dict of Inductor options, not [1]"),
        ({"inductor_options": {}}, "fp8graph has no option 'inductor_options'"),
        ({"max_autotune": True}, 'Inductor\'s own options go into a dict: options={"inductor": {...}}'),
    ],
)
def test_unknown_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fp8graph.ConfigError, match=re.escape(message)):
        arguments_of(None, options)


def test_every_argument_of_the_backend_is_an_option_by_name() -> None:
    options: dict[str, Any] = {
        "compiler": "eager",
        "save": "memory",
        "cache_weights": False,
        "fuse_linears": False,
        "recipe": "rowwise",
    }
    compiled = torch.compile(MLP(), backend="fp8graph", options=options)
    compiled(torch.randn(16, 32))
    backend = fp8graph.backend_of(compiled)
    settings = backend.settings
    assert (settings.save, settings.cache_weights, settings.fuse_linears) == ("memory", False, False)


@in_one_test(
    ("options", "message"),
    [
        ({"recipe": "nosuch"}, "unknown recipe 'nosuch'"),
        ({"recipe": "delay"}, "unknown recipe 'delay'"),
        ({"typo": 1}, "no option 'typo'"),
        ({"policy": "nosuch.toml"}, "nosuch.toml: cannot be read"),
        ({"policy": {"rule": []}}, "unknown key 'rule'"),
        ({"inductor": {"typo": 1}}, "Inductor has no option 'typo'"),
        ({"mode": "nosuch"}, "mode must be one of"),
        ({"compiler": "nosuch"}, "compiler must be one of"),
        ({"strict": "yes"}, "strict must be True or False"),
        ({"target": "h100"}, "target must be 'cpu', a GPU like 'sm_90' or 'gfx942', or a calibration"),
    ],
)
def test_bad_options_reach_the_user_as_themselves(options: dict[str, Any], message: str) -> None:
    compiled = torch.compile(MLP(), backend="fp8graph", options=options)
    with pytest.raises(fp8graph.Fp8GraphError, match=re.escape(message)):
        compiled(torch.randn(4, 32))


def test_two_models_of_one_class_compiled_by_name() -> None:
    a, b = MLP(), MLP()
    options: dict[str, Any] = {"compiler": "eager", "policy": ALL}
    x = torch.randn(4, 32, requires_grad=True)
    for model in (a, b):
        expected = step(model, x, parameters=model.parameters())
        compiled = torch.compile(model, backend="fp8graph", options=options)
        got = step(compiled, x, parameters=model.parameters())
        assert all(sqnr_db(e, g) > 17 for e, g in zip(expected, got, strict=True))


@first_fast("recipe", sorted(RECIPE_NAMES))  # the first is not the default
def test_a_name_carries_a_recipe(recipe: str) -> None:
    assert f"fp8graph:{recipe}" in torch._dynamo.list_backends()
    compiled = torch.compile(MLP(), backend=f"fp8graph:{recipe}", options={"compiler": "eager"})
    compiled(torch.randn(16, 32))
    report = fp8graph.backend_of(compiled).report
    assert report.policy.default == recipe
    assert {gemm.recipe for gemm in report.gemms if gemm.gemm == "fprop"} == {recipe.removesuffix("_with_gw_hp")}


def test_a_recipe_in_the_name_and_in_the_options_is_refused() -> None:
    message = "backend 'fp8graph:blockwise' already sets recipe: leave out the argument 'recipe'"
    with pytest.raises(fp8graph.ConfigError, match=re.escape(message)):
        torch.compile(MLP(), backend="fp8graph:blockwise", options={"recipe": "rowwise"})(torch.randn(4, 32))


def test_names_are_those_of_the_entry_points_and_of_pickles() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project["entry-points"]["torch_dynamo_backends"]
    assert points.keys() == NAMED.keys() == {"fp8graph", *(f"fp8graph:{name}" for name in RECIPE_NAMES)}
    for name, value in points.items():
        assert EntryPoint(name, value, "torch_dynamo_backends").load() is NAMED[name]
        assert pickle.loads(pickle.dumps(NAMED[name])) is NAMED[name]
