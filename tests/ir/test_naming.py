"""naming: what sites are called, from their places and the names that parameters are bound to."""

from __future__ import annotations

import pytest

from fp8graph.ir.naming import Parameter, Place, names_of, split_source
from helpers import in_one_test


def names(places: list[Place], *parameters: Parameter) -> list[str]:
    return [fqn + (f"[{index}]" if index else "") for fqn, index in names_of(places, parameters)]


def parameter(source: str, index: int = 0, bound: str = "") -> Parameter:
    return Parameter(source=source, index=index, bound=bound)


def place(path: str, owner: int | None = 0, root: str = "self") -> Place:
    return Place(root=root, path=path, parameter=owner)


W = "L['self']._modules['mlp']._modules['up']._parameters['weight']"


def test_a_module_is_named_by_its_path() -> None:
    assert names([place("mlp.up")], parameter(W)) == ["mlp.up"]


def test_a_bound_model_makes_names_absolute() -> None:
    bound = parameter(W, bound="layers.3.mlp.up.weight")
    assert names([place("mlp.up"), place("", None), place("attention", None)], bound) == [
        "layers.3.mlp.up",
        "layers.3",
        "layers.3.attention",
    ]


def test_a_checkpointed_block_has_its_own_name() -> None:
    source = W.replace("_modules['mlp']", "_modules['_checkpoint_wrapped_module']._modules['mlp']")
    bound = parameter(source, bound="layers.3.mlp.up.weight")
    wrapped = place("_checkpoint_wrapped_module.mlp.up").path
    assert names([place(split_source(wrapped)[1]), place("", None)], bound) == ["layers.3.mlp.up", "layers.3"]


def test_further_sites_of_a_module_are_numbered() -> None:
    places = [place("mlp.up"), place("attention", None), place("mlp.up"), place("attention", None)]
    assert names(places, parameter(W)) == ["mlp.up", "attention", "mlp.up[1]", "attention[1]"]


@pytest.mark.parametrize(
    ("source", "bound", "name"),
    [
        pytest.param("L['self']._parameters['w']", "", "w", id="the parameter's own name"),
        pytest.param("L['self']._parameters['weight']", "layers.0.proj.weight", "layers.0.proj", id="a linear alone"),
        pytest.param("L['self']._parameters['weight']", "", "weight", id="a linear alone, not bound"),
    ],
)
def test_code_at_the_root_of_the_frame(source: str, bound: str, name: str) -> None:
    assert names([place("")], parameter(source, bound=bound)) == [name]


def test_a_child_that_is_not_called_owns_its_weight() -> None:
    source = "L['self']._modules['embed']._modules['lora_B']._parameters['default']"
    assert names([place("embed")], parameter(source)) == ["embed.lora_B"]


def test_a_parametrized_weight_is_its_layers_own() -> None:
    source = "L['self']._modules['up']._modules['parametrizations']._modules['weight']._parameters['original']"
    assert names([place("up")], parameter(source)) == ["up"]


def test_several_models_in_one_frame_are_distinguished() -> None:
    sources = [parameter(f"L['{m}']._modules['up']._parameters['weight']", i) for i, m in enumerate(("a", "b"))]
    assert names([place("up", 0, "a"), place("up", 1, "b")], *sources) == ["a.up", "b.up"]
    bound = [parameter(p.source, p.index, f"{m}.up.weight") for p, m in zip(sources, ("old", "new"), strict=True)]
    assert names([place("up", 0, "a"), place("up", 1, "b")], *bound) == ["old.up", "new.up"]


P = "parametrizations.w"


@in_one_test(
    ("sources", "path", "name"),
    [
        pytest.param(("up.w", "up.g"), "up", "up", id="two of the layer's own"),
        pytest.param(("up.a.w", "up.b.w"), "up", "up", id="of two children"),
        pytest.param(("up.a.w", "g"), "up", "up.a", id="of a child and the model"),
        pytest.param(("g", "up.w"), "up", "up", id="the model's first"),
        pytest.param(("up.a.w",), "", "up.a", id="borrowed by code at the root"),
        pytest.param((f"{P}.original0", f"{P}.original1"), "", "w", id="parametrized root"),
        pytest.param((f"up.{P}.original", f"up.{P}.0.b"), "", "up", id="parametrized"),
        pytest.param((f"up.{P}.0.a",), f"up.{P}.0", f"up.{P}.0", id="in the parametrization"),
    ],
)  # fmt: skip
def test_a_computed_weight_is_named_by_all_its_parameters(sources: tuple[str, ...], path: str, name: str) -> None:
    known = [parameter(f"L['self'].{source}", index) for index, source in enumerate(sources)]
    found = Place(root="self", path=path, parameter=0, others=tuple(range(1, len(known))))
    assert names([found], *known) == [name]
