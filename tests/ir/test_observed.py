"""The layers that are measured."""

from __future__ import annotations

from fp8graph.ir.observed import Observed


def test_layers_are_globs() -> None:
    asked = Observed(layers=("model.layers.[01].*", "lm_head"))
    assert [asked.takes(name) for name in ("model.layers.0.up", "model.layers.2.up", "lm_head")] == [True, False, True]
    assert Observed().takes("")
    assert hash(asked) == hash(Observed(layers=("model.layers.[01].*", "lm_head")))
