"""CUDA graphs in training: torch has no reason to skip them, and copies no input but activations at a replay.

The code is generated for a GPU that is not there, up to the step in which torch would record it.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch._inductor import output_code

from fp8graph import Policy, offline
from fp8graph.tools.explain import Generating
from helpers import MLP

SAVES: dict[str, dict[str, Any]] = {
    "speed": {},
    "memory": {"save": "memory"},
    "memory, activations in FP8": {"save": "memory", "save_activations_in_fp8": True},
    "copies of weights over steps": {"cache_weights": "update"},
}
RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4")


def _tier(recipe: str, save: str) -> Any:
    """Code for tiles of 32 and of 16 numbers takes a quarter of a minute and more."""
    shown = recipe == "tensorwise" or save in ("speed", "memory")
    return pytest.mark.slow if shown and recipe not in ("mxfp8", "nvfp4") else pytest.mark.release


class Recorded(NamedTuple):
    """One graph as torch would record it."""

    direction: str
    skipped: list[Any]  # reasons
    parts: int
    copied: list[str]  # inputs that are copied at each replay
    written: list[str]  # inputs that are written, and not static


def recorded(monkeypatch: pytest.MonkeyPatch, recipe: str, **settings: Any) -> list[Recorded]:
    graphs: list[Any] = []
    monkeypatch.setattr(output_code, "cudagraph_post_compile", lambda _, graph, *args: graphs.append(graph))
    monkeypatch.setattr(output_code, "cudagraph_partition_post_compile", lambda _, graph, *args: graphs.append(graph))
    options, target = {"triton.cudagraphs": True}, "sm_100" if recipe in ("mxfp8", "nvfp4") else "sm_90"
    backend = Generating(Policy(default=recipe, min_speedup=0), target=target, inductor_options=options, **settings)
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(MLP(256, 512).bfloat16(), backend=backend, dynamic=False)(x).sum().backward()
    rows: list[Recorded] = []
    for graph in graphs:
        info = graph.cudagraph_info
        static: set[int] = set(graph.fx_kwargs.get("static_input_idxs") or ())
        names = [placeholder.name for placeholder in info.placeholders]
        rows.append(
            Recorded(
                direction="backward" if graph.fx_kwargs["is_backward"] else "forward",
                skipped=[*info.cudagraph_fail_reasons, *filter(None, [graph.disabled_cudagraphs_reason])],
                parts=len(graph.partition_maps or ()),
                copied=[name for index, name in enumerate(names) if index not in static],
                written=[names[index] for index in graph.mutated_input_idxs if index not in static],
            )
        )
    return rows


@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
@pytest.mark.parametrize(
    ("recipe", "save"),
    [pytest.param(*case, marks=_tier(*case)) for case in itertools.product(RECIPES, SAVES)],
)
def test_training_is_recorded_with_every_recipe(monkeypatch: pytest.MonkeyPatch, recipe: str, save: str) -> None:
    """Weights, their FP8 copies and the pages of delayed scaling stay where they are."""
    forward, backward = recorded(monkeypatch, recipe, **SAVES[save])
    assert (forward.direction, backward.direction) == ("forward", "backward")
    for graph, inputs in ((forward, 1), (backward, 1)):
        assert (graph.skipped, graph.parts, graph.written) == ([], 1, [])
        assert len(graph.copied) == inputs
    assert backward.copied == ["tangents_1"]
