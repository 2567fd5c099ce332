"""What is kept beside compiled code: findings with their graphs come back as they were, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8graph import Policy
from fp8graph.backend import stored
from fp8graph.backend.stored import Stored
from fp8graph.compat import inductor
from fp8graph.ir.compilation import Findings
from fp8graph.ir.text import graph_text
from helpers import MLP, eager_backend


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(inductor, "inductor_cache_folder", lambda: tmp_path)
    return tmp_path / "fp8graph"


def found(recipe: str = "delayed") -> Stored:
    """Copies of joined weights, and pages."""
    backend = eager_backend(Policy(default=recipe, min_speedup=0), cache_weights="update")
    torch.compile(MLP(128, 256), backend=backend)(torch.randn(16, 128, requires_grad=True))
    ((program,),) = [list(backend.programs)]
    ((_, variant),) = program._variants.items()
    return Stored(view=variant.decided.view, findings=variant.findings)


def described(findings: Findings) -> list[Any]:
    weights = [
        (
            *(graph_text(graph) for graph in (weight.quantizing, weight.recording)),
            *(weight.name, weight.parameters, weight.signature, weight.layouts, weight.outputs, weight.page),
        )
        for weight in findings.weights
    ]
    return [*weights, findings.pages, [(x.shape, x.stride(), x.dtype) for x in findings.stand_ins()]]


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_what_is_kept_comes_back(recipe: str) -> None:
    kept = found(recipe)
    kept.write("key")
    again = stored.read("key")
    assert again is not None
    assert len(kept.findings.weights) == (3 if recipe == "blockwise" else 2)  # emulated, they are not joined
    assert described(again.findings) == described(kept.findings)
    assert again.view.to_dict() == kept.view.to_dict()


def cut(values: dict[str, Any]) -> str:
    return json.dumps(values)[:-20]


def without_findings(values: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in values.items() if key != "findings"})


def cut_findings(values: dict[str, Any]) -> str:
    return json.dumps(values | {"findings": values["findings"][:400]})


def of_a_class_that_is_gone(values: dict[str, Any]) -> str:
    import base64

    pickled = base64.b64decode(values["findings"]).replace(b"fp8graph.ir.compilation", b"fp8graph.ir.compilatiom")
    return json.dumps(values | {"findings": base64.b64encode(pickled).decode()})


@pytest.mark.parametrize("damage", [cut, without_findings, cut_findings, of_a_class_that_is_gone])
def test_what_is_damaged_is_not_there(damage: Any, folder: Path) -> None:
    found().write("key")
    file = folder / "key.json"
    text = damage(json.loads(file.read_text(encoding="utf-8")))
    assert stored.read("key") is not None
    file.write_text(text, encoding="utf-8")
    assert stored.read("key") is None
    assert stored.read("another") is None
