"""Settings are checked where they are made, whatever Python optimizes away."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

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
