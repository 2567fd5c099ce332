"""What users import, and that explain and compile take what a Backend takes."""

from __future__ import annotations

import inspect
import re
import types
from typing import Any

import pytest
import torch
from torch import nn

import fp8graph
from fp8graph import Backend, ConfigError, Float8RowwiseScaling, PolicyError, planning, supports
from fp8graph.ir.settings import Settings
from helpers import MLP

NAMES = """
    INHERIT Backend CollectiveRecord ConfigError DelayedScaling Float8BlockScaling Float8CurrentScaling
    Float8RowwiseScaling Format Fp8CoverageError Fp8GraphError GemmRecord GraphView KernelRecord MXFP8BlockScaling
    NVFP4BlockScaling Policy PolicyError QuantizedTensor Recipe RefusalRecord Report Rule StateError
    UnsupportedRecipeError __version__ autocast backend_of compile explain models numerics planning refresh_weights
    register_recipe supports
"""


def test_the_names() -> None:
    assert sorted(fp8graph.__all__) == sorted(NAMES.split())
    others = {
        name
        for name, value in vars(fp8graph).items()
        if not name.startswith("_") and name not in fp8graph.__all__ and not isinstance(value, types.ModuleType)
    }
    assert others <= {"named_backend", "register_backend"}
    assert {"Linear", "Mesh", "Network", "Plan", "Step", "Workload", "of_model", "plan"} == set(planning.__all__)
    for module in (fp8graph, planning, fp8graph.numerics):
        assert [name for name in module.__all__ if not (getattr(module, name).__doc__ or "").strip()] == []


def test_errors_have_parents() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(PolicyError, ConfigError)
    assert issubclass(fp8graph.UnsupportedRecipeError, ConfigError)


def test_a_backend_shows_its_arguments() -> None:
    parameters = inspect.signature(Backend).parameters
    assert list(parameters) == ["policy", "recipe", *Settings.names()]
    assert all(parameters[name].default == getattr(Settings(), name) for name in Settings.names())
    message = "Backend has no argument 'cache_weigths'. Did you mean 'cache_weights'? Arguments: policy, recipe, strict"
    with pytest.raises(TypeError, match=re.escape(message)):
        Backend(cache_weigths=False)


@pytest.mark.parametrize(
    ("recipe", "target", "native"),
    [
        ("tensorwise", "sm_89", True),
        ("rowwise", "sm_89", False),
        ("blockwise", "sm_90", True),
        ("mxfp8", "sm_90", False),
        (Float8RowwiseScaling(), "sm_90", True),
        ("high_precision", "sm_80", True),
    ],
)
def test_supports(recipe: Any, target: str, native: bool) -> None:
    found = supports(recipe, target)
    assert bool(found) == native
    assert str(found).startswith(f"{target} multiplies") if native else "fprop is emulated: " in str(found)


def test_supports_says_which_gemms() -> None:
    found = supports("blockwise", "sm_100")
    assert not found.native
    assert str(found).count("is emulated") == 3
    assert supports("tensorwise")  # this machine's CPU has a reference kernel
    with pytest.raises(ConfigError, match="target must be"):
        supports("tensorwise", "h100")
    with pytest.raises(ConfigError, match="unknown recipe"):
        supports("tensorwize")


def test_explain_shows_the_program_that_will_run() -> None:
    model, x = MLP(), torch.randn(16, 32, requires_grad=True)
    apart = fp8graph.explain(model, x, recipe="rowwise", fuse_linears=False, save="memory")
    assert {gemm.recipe for gemm in apart.gemms} == {"rowwise"}
    assert not any("one GEMM with" in gemm.reason for gemm in apart.gemms)
    backend = Backend(recipe="tensorwise", fuse_linears=False, compiler="eager")
    torch.compile(model, backend=backend)(x)
    assert fp8graph.explain(model, x, backend=backend).graphs[0].after == backend.report.graphs[0].after


def test_explain_takes_a_backend_or_its_settings() -> None:
    with pytest.raises(ConfigError, match=r"explain\(backend=...\) has its own recipe, save: give one or the other"):
        fp8graph.explain(MLP(), torch.randn(16, 32), backend=Backend(), recipe="rowwise", save="memory")
    wrongs: list[dict[str, Any]] = [{"save": "disk"}, {"strict": 1}, {"compiler": "gcc"}]
    for wrong in wrongs:
        (name,) = wrong
        with pytest.raises(ConfigError, match=f"^{name} must be "):
            fp8graph.explain(MLP(), torch.randn(16, 32), **wrong)


def test_compile_takes_every_setting() -> None:
    model = fp8graph.compile(
        MLP(), save="memory", fuse_linears=False, compiler="eager", inductor_options={"max_autotune": True}
    )
    settings = fp8graph.backend_of(model).settings
    assert (settings.save, settings.fuse_linears, settings.compiler) == ("memory", False, "eager")
    assert settings.inductor == {"max_autotune": True}
    with pytest.raises(ConfigError, match="save must be one of speed, memory"):
        fp8graph.compile(nn.Linear(16, 16), save="disk")


@pytest.mark.parametrize(
    ("name", "meant"), [("tarjet", "Did you mean 'target'? "), ("ful_graph", "Did you mean 'fullgraph'? "), ("zzz", "")]
)
def test_compile_says_what_it_takes(name: str, meant: str) -> None:
    message = f"fp8graph.compile has no argument {name!r}. {meant}Arguments: policy, recipe, regions, strict, "
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
