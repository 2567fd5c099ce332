"""The sites of a backend's graphs, as a guard sees them."""

from __future__ import annotations

import torch

from fp8graph import Backend, DelayedScaling, Policy, Rule
from fp8graph.passes.observe.guard import sites_of
from helpers import MLP


def latest(history: torch.Tensor) -> torch.Tensor:
    return history[0]


def sites(policy: Policy) -> dict[str, tuple[object, ...]]:
    torch._dynamo.reset()
    backend = Backend(policy, compiler="eager")
    model = torch.compile(MLP(), backend=backend)
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    found = sites_of(backend.programs, backend.services.policies)
    return {name: (site.by_user, site.recipes, site.runs, site.obstacle) for name, site in found.items()}


def test_recipes_by_name_and_what_runs() -> None:
    rules = [Rule("up", "rowwise_with_gw_hp"), Rule("down", DelayedScaling(amax_history_len=4), fprop=None)]
    found = sites(Policy(rules, default="tensorwise", min_speedup=0))
    gemms = ("fprop", "dgrad", "wgrad")
    assert found["gate"] == (False, dict.fromkeys(gemms, "tensorwise"), dict.fromkeys(gemms, "tensorwise"), "")
    assert found["up"][:3] == (
        True,
        dict.fromkeys(gemms, "rowwise_with_gw_hp"),
        {"fprop": "rowwise", "dgrad": "rowwise", "wgrad": None},
    )
    recipe = DelayedScaling(amax_history_len=4).to_dict()
    assert found["down"][1] == {"fprop": "high_precision", "dgrad": recipe, "wgrad": recipe}


def test_a_recipe_with_code_cannot_be_written() -> None:
    found = sites(Policy(default=DelayedScaling(amax_compute_algo=latest), min_speedup=0))
    assert "code cannot be written to a file" in str(found["up"][3])


def test_the_last_observation_is_at_hand() -> None:
    backend = Backend(compiler="eager")
    assert backend.statistics is None
    assert backend.guards == ()
    statistics = backend.observe()
    assert backend.statistics is statistics
    guard = backend.guard()
    assert backend.guards == (guard,)
