"""Settings are checked where they are made, whatever Python optimizes away."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8graph
from fp8graph import ConfigError
from fp8graph.ir import settings


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"target": "h100"}, "target must be 'cpu', a GPU like 'sm_90'"),
        ({"inductor_options": {"typo": 1}}, "Inductor has no option 'typo'"),
        ({"save": "disk"}, "save must be one of speed, memory"),
    ],
)
@pytest.mark.parametrize("optimize", [0, 1], ids=["python", "python -O"])
def test_invalid_settings_are_refused(wrong: Any, message: str, optimize: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("optimized_settings")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(Path(settings.__file__).read_bytes(), settings.__file__, "exec", optimize=optimize), vars(module))
    with pytest.raises(ConfigError, match=re.escape(message)):
        module.Settings(**wrong)


def test_a_former_name_still_works() -> None:
    """``group``, in every place that takes settings; never beside the name of today."""
    options: dict[str, Any] = {"group": False, "compiler": "eager"}
    linear = torch.nn.Linear(16, 16)
    x = torch.randn(16, 16)
    by_name = torch.compile(torch.nn.Linear(16, 16), backend="fp8graph", options=options)
    by_name(x)
    compiled = fp8graph.compile(torch.nn.Linear(16, 16), **options)
    assert not fp8graph.backend_of(by_name).settings.fuse_linears
    assert not fp8graph.backend_of(compiled).settings.fuse_linears
    assert not fp8graph.Backend(group=False).settings.fuse_linears
    assert fp8graph.explain(linear, x, group=False).gemms
    with pytest.raises(ConfigError, match="group is the former name of fuse_linears: pass fuse_linears alone"):
        fp8graph.Backend(group=False, fuse_linears=True)
