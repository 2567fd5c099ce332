"""entry: compile a model in place, and find the backend of what was compiled."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import fp8graph
from fp8graph import ConfigError
from helpers import MLP, eager_backend


def test_backend_of_something_else() -> None:
    with pytest.raises(fp8graph.ConfigError, match="was not compiled with the fp8graph backend"):
        fp8graph.backend_of(torch.compile(MLP(), backend="eager"))


def test_fp8graph_compile_binds_names_and_covers_direct_calls() -> None:
    model = nn.Sequential(MLP(), MLP())
    policy = fp8graph.Policy([fp8graph.Rule("0.up", None)])
    returned = fp8graph.compile(model, policy, options={"compiler": "eager"}, fullgraph=True)
    assert returned is model
    model(torch.randn(4, 32))
    report = fp8graph.backend_of(model).report
    assert {g.fqn for g in report.gemms if g.recipe is None} == {"0.up"}


def test_compile_takes_every_setting() -> None:
    model = fp8graph.compile(
        MLP(), save="memory", fuse_linears=False, compiler="eager", inductor_options={"max_autotune": True}
    )
    settings = fp8graph.backend_of(model).settings
    assert (settings.save, settings.fuse_linears, settings.compiler) == ("memory", False, "eager")
    assert settings.inductor == {"max_autotune": True}
    with pytest.raises(ConfigError, match="save must be one of speed, memory"):
        fp8graph.compile(nn.Linear(16, 16), save="disk")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("given", [nn.Linear, torch.relu])
def test_compile_takes_models(given: Any) -> None:
    with pytest.raises(TypeError, match="fp8graph.compile takes a model, an nn.Module, not .*torch.compile\\(function"):
        fp8graph.compile(given)


@pytest.mark.parametrize(
    ("name", "meant"), [("tarjet", "Did you mean 'target'? "), ("ful_graph", "Did you mean 'fullgraph'? "), ("zzz", "")]
)
def test_compile_says_what_it_takes(name: str, meant: str) -> None:
    message = f"fp8graph.compile has no argument {name!r}. {meant}Arguments: policy, recipe, observe, guard, "
    arguments: dict[str, Any] = {name: True}
    with pytest.raises(TypeError, match=re.escape(message)) as caught:
        fp8graph.compile(nn.Linear(16, 16), None, **arguments)
    assert str(caught.value).count("fullgraph, dynamic, mode, options") == 1
    with pytest.raises(
        ConfigError, match=re.escape("fp8graph has no option 'recip'. Did you mean 'recipe'? Options: ")
    ):
        fp8graph.compile(nn.Linear(16, 16), options={"recip": "rowwise"})


def test_weights_are_refreshed_by_method_or_function() -> None:
    linear = nn.Linear(16, 16, bias=False)
    model = fp8graph.compile(linear, compiler="eager")
    backend = fp8graph.backend_of(model)
    with torch.no_grad():
        x = torch.randn(16, 16)
        model(x)
        for refresh in (backend.refresh_weights, lambda: fp8graph.refresh_weights(backend)):
            linear.weight.data.zero_().add_(1)
            refresh()
            assert torch.allclose(model(x), x.sum(-1, keepdim=True).expand(16, 16), rtol=0.1, atol=0.3)
            linear.weight.data.mul_(0)
            refresh()
            assert not model(x).any()


def test_the_backend_of_a_model_whose_blocks_are_compiled() -> None:
    backend, model = eager_backend(), nn.Sequential(MLP(), MLP())
    with pytest.raises(ConfigError, match="Sequential was not compiled with the fp8graph backend"):
        fp8graph.backend_of(model)
    model[1].compile(backend=backend)
    assert fp8graph.backend_of(model) is backend


@pytest.mark.parametrize("first", ["whole", "regions", "by name"])
def test_second_compilation_is_logged(first: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its delayed scales too: nothing else would tell that they are gone."""
    model = nn.Sequential(MLP(), MLP())
    if first == "by name":
        model.compile(backend="fp8graph")
    else:
        fp8graph.compile(model, compiler="eager", regions=["MLP"] if first == "regions" else None)
    assert caplog.records == []
    fp8graph.compile(model, compiler="eager")
    assert [record.getMessage().partition(".")[0] for record in caplog.records] == [
        "Sequential was compiled with fp8graph before"
    ]
    caplog.clear()
    model[0].compile(backend="eager")
    fp8graph.compile(model[0], compiler="eager")
    fp8graph.compile(nn.Sequential(model[1]), compiler="eager")
    assert caplog.records == []


def test_compile_takes_a_backend() -> None:
    """Two models of one class, whose layers are told apart by the names that were given before."""
    backend, teacher, student = eager_backend(), MLP(), MLP()
    backend.bind(teacher, name="teacher")
    for model in (teacher, student):
        fp8graph.compile(model, backend=backend)
        model(torch.randn(4, 32))
        assert fp8graph.backend_of(model) is backend
    names = {gemm.fqn for gemm in backend.report.gemms}
    assert {"teacher.up", "up"} <= names
    message = re.escape("compile(backend=...) has its own recipe, save, mode: give one or the other.")
    with pytest.raises(ConfigError, match=message):
        fp8graph.compile(MLP(), backend=backend, recipe="rowwise", save="memory", mode="max-autotune")
    with pytest.raises(TypeError, match=r"backend must be a fp8graph.Backend, not 'fp8graph'"):
        fp8graph.compile(MLP(), backend="fp8graph")  # pyright: ignore[reportArgumentType]


def test_the_backend_of_a_model_that_compiled_code_calls() -> None:
    backend, model = eager_backend(), MLP()

    def step() -> torch.Tensor:
        return model(torch.ones(4, 32))

    compiled = torch.compile(step, backend=backend)
    with pytest.raises(ConfigError, match="MLP was not compiled .* or the compiled code that calls it has not run yet"):
        fp8graph.backend_of(model)
    compiled()
    assert fp8graph.backend_of(model) is fp8graph.backend_of(model.up) is backend
    with pytest.raises(ConfigError, match="was not compiled"):
        fp8graph.backend_of(MLP())
    torch._dynamo.reset()
    del compiled, step
    with pytest.raises(ConfigError, match="was not compiled"):
        fp8graph.backend_of(model)
