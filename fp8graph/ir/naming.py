"""The origin of a graph's inputs, as Dynamo and AOTAutograd say it, and the names of sites, which follow from it.

A graph may serve several layers (layers that are compiled one by one share it). The place of a site in the program is
found once (:class:`Place`), from module stacks and parameters; its full name (FQN) follows from the names that the
parameters of a call are bound to.
"""

from __future__ import annotations

import functools
import keyword
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch import fx

from fp8graph.compat import aot
from fp8graph.compat.wrappers import name_in_original
from fp8graph.ir.nodes import module_path

# model.compile() compiles a bound method: L['self'] up to torch 2.13, L['fn'].__self__ in 2.15.
# The brackets that follow lead to the model, not into it: L['args'][0] if a decorator took (*args, **kwargs), as
# accelerate's mixed precision does.
_ROOT: Final = re.compile(r"""^[LG]\[['"](?P<root>[^'"]*)['"]\](?P<more>(?:\[[^]]*\])*)(?:\.__self__)?\.?""")
# A module with a __getattr__ of its own (all of PEFT's) is read as .__dict__['_modules']['base_model'].
_OWN: Final = r"""\.(?:__dict__\[['"])?_(?:modules|parameters|buffers)(?:['"]\])?"""
# ``getattr(layers, "0")``: what no attribute can be written as.
_GETATTR: Final = re.compile(r"""getattr\(([^()]*), ['"]([^'"]+)['"]\)""")
# A function in the place of a module's forward, which calls the method it took the place of (torchtitan's tensor
# parallelism): X.forward.__closure__[0].cell_contents.__self__ is X.
_REPLACED: Final = re.compile(r"(?:\.forward)?(?:\.__closure__\[\d+\]\.cell_contents)+\.__self__")
_STEP: Final = re.compile(_OWN + r"""\[['"]([^'"]+)['"]\]|\[['"]?([^'"\]]+)['"]?\]""")


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A graph input that is a parameter."""

    source: str  # Dynamo's name for it, L['self']._modules[...]...
    index: int  # among the graph's inputs
    bound: str = ""  # its FQN, if the user bound the model (backend.bind)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a site: its module relative to the compiled frame, and the parameter that its weight comes from."""

    root: str  # the variable of the frame under which the module is found
    path: str  # FQN under it; "" at the root of the frame
    parameter: int | None  # graph input


@functools.lru_cache(maxsize=1 << 14)  # a graph asks for the same few thousand names after each pass
def split_source(text: str) -> tuple[str, str]:
    """Dynamo's name of a value -> (root variable, dotted FQN under it).

    ``L['self']._modules['model']._parameters['w']`` -> ``("self", "model.w")``;
    ``L['model'].__dict__['_modules']['layers'].0.mlp`` -> ``("model", "layers.0.mlp")``; ``L['args'][0].mlp`` ->
    ``("args.0", "mlp")``; ``getattr(L['self'].layers, '0')`` -> ``("self", "layers.0")``; a plain path is
    returned with root "". Parts of wrappers are left out.
    """
    root, text = "", _REPLACED.sub("", text)
    while text != (text := _GETATTR.sub(r"\1.\2", text)):
        pass  # the innermost first
    if match := _ROOT.match(text):
        more = match["more"].replace("][", ".").strip("[]").replace("'", "").replace('"', "")
        root = f"{match['root']}.{more}" if more else match["root"]
        text = text[match.end() - (text[match.end() - 1] == ".") :]
    text = _STEP.sub(lambda m: "." + (m[1] or m[2]), text)
    return root, name_in_original(text.strip("."))


def named_placeholders(graph: fx.Graph, copy: fx.Graph, sources: Sequence[str]) -> dict[fx.Node, fx.Node]:
    """The placeholders of ``graph`` in ``copy``, under names that its module takes as keywords."""
    found: dict[fx.Node, fx.Node] = {}
    taken: set[str] = set()
    placeholders = graph.find_nodes(op="placeholder")
    for node, source in zip(placeholders, sources, strict=len(placeholders) == len(sources)):
        root, path = split_source(source)
        name = re.sub(r"\W+", "_", path or root)
        name = f"_{name}" if name[:1].isdigit() or keyword.iskeyword(name) else name
        while name in taken:
            name += "_"
        taken.add(name)
        found[node] = copy.placeholder(name)
        found[node].meta = dict(node.meta)
    return found


def graph_inputs(graph: fx.Graph) -> Iterator[tuple[fx.Node, int | None]]:
    """The placeholders with their position among Dynamo's inputs, as AOTAutograd describes them.

    The position is None for the gradients of the outputs, and for the inputs of a subgraph (a higher-order op's body).
    Of a DTensor, a graph takes the shard (``distributed.local``).
    """
    for node in graph.find_nodes(op="placeholder"):
        yield node, aot.input_position(node)


def parameters_of(graph: fx.Graph, known: Mapping[int, Parameter]) -> dict[fx.Node, Parameter]:
    """The placeholders that are parameters. ``known``: those by their position among Dynamo's inputs."""
    return {node: known[index] for node, index in graph_inputs(graph) if index is not None and index in known}


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
