"""A graph as text: one line per node, written anew where it has changed."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fp8graph import Policy
from fp8graph.backend import inductor_passes
from fp8graph.ir.text import GraphText
from helpers import MLP, RECIPES, first_fast, graph_text, view_of


@first_fast("recipe", RECIPES)
def test_lines_that_are_kept_are_those_that_would_be_written(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    class Checked(GraphText):
        def __call__(self, graph_: fx.Graph) -> str:
            text = super().__call__(graph_)
            assert text == graph_text(graph_)
            texts.append(text)
            return text

    monkeypatch.setattr(inductor_passes, "GraphText", Checked)
    view_of(MLP(128, 256), torch.randn(128, 128, requires_grad=True), policy=Policy(default=recipe, min_speedup=0))
    assert len(set(texts)) > 2
