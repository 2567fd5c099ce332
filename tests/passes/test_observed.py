"""The layers that are measured."""

from __future__ import annotations

from fp8graph.passes.observe.measuring import Observed
from fp8graph.passes.observe.observation import together
from fp8graph.recipes import MXFP8BlockScaling


def test_layers_are_globs() -> None:
    asked = Observed(layers=("model.layers.[01].*", "lm_head"))
    assert [asked.takes(name) for name in ("model.layers.0.up", "model.layers.2.up", "lm_head")] == [True, False, True]
    assert Observed().takes("")
    assert hash(asked) == hash(Observed(layers=("model.layers.[01].*", "lm_head")))


def test_together() -> None:
    """One variant measures for everybody who asks."""
    recipe = MXFP8BlockScaling()
    first = Observed(layers=("a", "b"), copies=False, block_size=0, what_if=(recipe,))
    second = Observed(layers=("b", "c"), block_size=32, what_if=(recipe,))
    assert together([first, second]) == Observed(layers=("a", "b", "c"), what_if=(recipe,))
    assert together([first]) == first
    assert together([]) is None
