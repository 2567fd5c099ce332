"""Batches, losses and sums of what the scoring graph measures."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fp8graph import ConfigError
from fp8graph.extras.planning.scoring import measure
from fp8graph.numerics.gemm_error import ERROR_PARTS
from fp8graph.recipes import resolve_recipe
from helpers import first_fast

X = torch.randn(32, 64)


class Model(nn.Module):
    """Returns its loss as ``form`` says."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.up, self.form = nn.Linear(64, 64), form

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        loss = scale * self.up(x).square().mean()
        return {"tensor": loss, "tuple": (loss, x), "object": SimpleNamespace(loss=loss)}[self.form]


def run(model: nn.Module, batches: list[Any], **settings: Any) -> Any:
    recipe = resolve_recipe("tensorwise")
    assert recipe is not None
    own: dict[str, Any] = {"target": None, "loss": None, "seed": 0, "resume": None, "progress": lambda data: data}
    return measure(model, batches, [recipe], ["tensorwise"], **{**own, **settings})[0]


@first_fast("form", ["tensor", "tuple", "object"])
@first_fast("batch", [X, (X,), {"x": X}])
def test_forms_of_losses_and_batches(form: str, batch: Any) -> None:
    found = run(Model(form), [batch])
    assert {one.gemm for one in found} == {"fprop", "wgrad"}  # nobody wants the gradient of x
    assert all(one.error > 0 for one in found)
    assert {(one.site, one.op, one.m, one.n, one.k) for one in found if one.gemm == "fprop"} == {
        ("up", "linear", 32, 64, 64)
    }


def test_errors_of_batches_add_up() -> None:
    model = Model("tensor")
    one, two = run(model, [X]), run(model, [X, X])
    for a, b in zip(one, two, strict=True):
        assert b.square_error == pytest.approx(2 * a.square_error)
        assert b.weighted_error == pytest.approx(2 * a.weighted_error)


class Attention(nn.Module):
    """q and k read one tensor; o and then up read what comes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o, self.up = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.o(self.q(x) * self.k(x))).square().mean()


def test_upstream_linears_of_dgrad() -> None:
    """The linears before the tensor that one reads: none for q and k, which do not reach each other."""
    found = run(Attention(), [X.clone().requires_grad_()])
    assert {one.site: one.upstream for one in found} == {"q": 0, "k": 0, "o": 2, "up": 3}
    dgrad = {one.site: one for one in found if one.gemm == "dgrad"}
    assert dgrad["up"].error == 4 * dgrad["up"].square_error


def test_a_loss_of_ones_own() -> None:
    found = run(nn.Linear(64, 64), [X], loss=lambda output, batch: (output - batch).square().mean())  # pyright: ignore
    assert len(found) == 2


def test_dropout_is_seeded() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 64))
    settings: dict[str, Any] = {"loss": lambda output, _: output.square().mean()}  # pyright: ignore
    first, again, other = (run(model, [X], seed=seed, **settings) for seed in (0, 0, 1))
    assert first == again != other


def test_model_must_return_a_loss() -> None:
    with pytest.raises(ConfigError, match="the model returns NoneType, and not a loss"):
        run(_Nothing(), [X])


class _Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> Any:
        return {"logits": self.up(x)}


ROW = {"site": "up", "gemm": "fprop", "candidate": 0, "group": "up"} | dict.fromkeys(ERROR_PARTS, 1.0)


@first_fast(
    "batches",
    [
        *([[{**ROW, "square_error": value}]] for value in (float("nan"), float("inf"), -1.0, "1", None)),
        [[{**ROW, "candidate": 1}]],
        [[{**ROW, "site": 3}]],
        *([3], [[3]], {}, "x"),
    ],
)
def test_damaged_file_is_not_resumed(batches: Any, tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    run(Model("tensor"), [X], resume=file)
    saved = json.loads(file.read_text())
    file.write_text(json.dumps({**saved, "batches": [*saved["batches"]]}))
    run(Model("tensor"), [X], resume=file)
    file.write_text(json.dumps({**saved, "batches": batches}))
    with pytest.raises(ConfigError, match=r"tune\(resume=.*measured.json'\): it is damaged. It holds scores"):
        run(Model("tensor"), [X], resume=file)


@pytest.mark.parametrize("text", ["[]", "[" * 100_000, "3", "{}"])
def test_a_file_of_something_else(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    for file in (tmp_path / "a.json", tmp_path):
        with pytest.raises(ConfigError, match=r"tune\(resume=.*it is not a file of tune"):
            run(Model("tensor"), [X], resume=file)


def test_a_file_that_cannot_be_written_is_refused_before_a_batch(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"tune\(resume=.*file is a file, not a folder. Give the path of a file"):
        run(Model("tensor"), [3], resume=tmp_path / "file" / "measured.json")  # the batch is not looked at
    run(Model("tensor"), [X], resume=tmp_path / "new" / "measured.json")
    assert len(json.loads((tmp_path / "new" / "measured.json").read_text())["batches"]) == 1


def test_a_full_disk_loses_no_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    found = run(Model("tensor"), [X, X, X], resume=tmp_path / "measured.json")
    assert len(found) == 2
    assert caplog.text.count("cannot be written (No space left on device). tune goes on") == 1
    assert list(tmp_path.iterdir()) == []
