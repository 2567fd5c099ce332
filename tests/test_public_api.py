"""The names that users import; explain and compile take the arguments of a Backend."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8graph
from fp8graph import Backend, ConfigError, PolicyError
from fp8graph.extras import planning
from fp8graph.ir.settings import Settings
from helpers import MLP, in_one_test

PAGES = Path(__file__).parents[1] / "docs" / "api"


def documented(module: str) -> set[str]:
    """The names right below ``module`` that have a page."""
    texts = "\n".join(page.read_text(encoding="utf-8") for page in PAGES.glob("*.md"))
    return set(re.findall(rf"^ *\.\. auto\w+:: {re.escape(module)}\.(\w+)(?:\(\))?$", texts, re.MULTILINE))


def test_the_names() -> None:
    """Those of the pages: none vanishes with its page left behind."""
    assert sorted(fp8graph.__all__) == sorted(documented("fp8graph") | {"numerics"})
    others = {
        name
        for name, value in vars(fp8graph).items()
        if not name.startswith("_") and name not in fp8graph.__all__ and not isinstance(value, types.ModuleType)
    }
    assert others <= {"named_backend", "register_backend"}
    assert sorted(planning.__all__) == sorted(documented("fp8graph.extras.planning"))
    for module in (fp8graph, planning, fp8graph.numerics):
        assert [name for name in module.__all__ if not (getattr(module, name).__doc__ or "").strip()] == []


@in_one_test("name", fp8graph._PEERS)
def test_a_peers_name_answers_with_ours(name: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'. Its counterpart: ") as raised:
        getattr(fp8graph, name)
    assert not hasattr(fp8graph, name)
    (ours,) = re.findall(r"fp8graph\.(\w+)", str(raised.value).partition("counterpart")[2])
    assert ours in fp8graph.__all__


@pytest.mark.parametrize(("name", "meant"), [("DelayedScalng", "DelayedScaling"), ("explian", "explain")])
def test_a_misspelt_name_answers_with_the_right_one(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'. Did you mean '{meant}'\\?$"):
        getattr(fp8graph, name)


def test_help_begins_with_the_call_of_the_readme() -> None:
    readme = Path(fp8graph.__file__).parents[1] / "README.md"
    assert "fp8graph.compile(model)" in readme.read_text(encoding="utf-8")
    assert "    fp8graph.compile(model)" in (fp8graph.__doc__ or "")


@pytest.mark.slow
def test_names_are_listed_before_torch_is_imported() -> None:
    code = "import sys, fp8graph; assert 'torch' not in sys.modules; print('explain' in dir(fp8graph))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_a_backend_reads_in_a_line() -> None:
    backend = Backend({"default": "rowwise", "rules": [{"pattern": "a", "recipe": None}]}, compiler="eager")
    assert repr(backend) == "<fp8graph.Backend, default 'rowwise', 1 rule>"


def test_errors_have_parents() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(PolicyError, ConfigError)
    assert issubclass(fp8graph.UnsupportedRecipeError, ConfigError)


def test_a_backend_shows_its_arguments() -> None:
    parameters = inspect.signature(Backend).parameters
    assert list(parameters) == ["policy", "recipe", "observe", "guard", *Settings.names()]
    assert all(parameters[name].default == getattr(Settings(), name) for name in Settings.names())
    message = (
        "Backend has no argument 'cache_weigths'. Did you mean 'cache_weights'? "
        "Arguments: policy, recipe, observe, guard, strict"
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        Backend(cache_weigths=False)  # pyright: ignore[reportCallIssue]


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
