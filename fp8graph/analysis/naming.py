"""The names of sites: FQNs from the module stacks and parameters of a graph.

A graph may serve several layers (layers that are compiled one by one share it). The place of a site in the program is
found once (:class:`Place`); its name follows from the names that the parameters of a call are bound to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from fp8graph.ir.nodes import module_path
from fp8graph.ir.places import Parameter, Place
from fp8graph.ir.sources import split_source


def place_of(node: fx.Node, weight: fx.Node | None, parameters: Mapping[fx.Node, Parameter]) -> Place:
    """The place of the matmul ``node``, whose weight, if it has one, is computed from ``parameters``."""
    while weight is not None and weight not in parameters:
        weight = weight.all_input_nodes[0] if weight.all_input_nodes else None
    root, path = split_source(module_path(node))
    return Place(root=root, path=path, parameter=None if weight is None else parameters[weight].index)


def names_of(places: Sequence[Place], parameters: Iterable[Parameter]) -> list[tuple[str, int]]:
    """``(fqn, index among the sites of that module)`` of all sites of a graph, in order.

    Paths are relative to the compiled frame; bound parameters make them absolute.
    """
    parameters = list(parameters)
    by_index = {parameter.index: parameter for parameter in parameters}
    prefixes: dict[str, str] = {}  # root variable of the frame -> full name (FQN) of that module
    for parameter in parameters:
        root, path = split_source(parameter.source)
        if parameter.bound == path or parameter.bound.endswith("." + path):
            prefixes[root] = parameter.bound.removesuffix(path).rstrip(".")
    several_roots = len({place.root for place in places if place.path}) > 1
    seen: Counter[str] = Counter()
    names: list[tuple[str, int]] = []
    for place in places:
        parameter = None if place.parameter is None else by_index[place.parameter]
        prefix, root, path = _full_path(place, parameter, prefixes.get(place.root))
        if prefix is None:
            prefix = root if several_roots else ""
        fqn = ".".join(part for part in (prefix, path) if part)
        names.append((fqn, seen[fqn]))
        seen[fqn] += 1
    return names


def _full_path(place: Place, parameter: Parameter | None, prefix: str | None) -> tuple[str | None, str, str]:
    """``(FQN of the root or None, root variable, FQN under it)`` of one site."""
    if parameter is None:
        return prefix, place.root, place.path
    root, path = split_source(parameter.source)
    if parameter.bound and parameter.bound.endswith(path):
        prefix = parameter.bound.removesuffix(path).rstrip(".")
    if not place.path:  # code at the root of the frame: the parameter's own name, or its layer's, compiled alone
        return prefix, root, "" if path == "weight" and prefix else path
    if path.startswith(place.path + "."):
        return prefix, place.root, _owner(place.path, path)
    return prefix, place.root, place.path


def _owner(path: str, parameter_path: str) -> str:
    """The module that owns a parameter by which the module ``path`` multiplies: usually ``path`` itself.

    It may be a child that is not called: a ParameterDict (PEFT's ``lora_embedding_B``), a linear whose weight is
    borrowed. A parametrized weight is its layer's own.
    """
    owner = parameter_path.rpartition(".")[0]
    return path if ".parametrizations." in owner[len(path) :] + "." else owner
