"""The origin of a graph's inputs, as Dynamo and AOTAutograd say it, and the names of sites, which follow from it.

A graph may serve several layers (layers that are compiled one by one share it). The place of a site in the program is
found once (:class:`Place`), from module stacks and parameters; its full name (FQN) follows from the names that the
parameters of a call are bound to.
"""

from __future__ import annotations

import functools
import keyword
import re
from ast import literal_eval
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Final, cast

from torch import fx

from fp8graph.compat import aot
from fp8graph.compat.wrappers import name_in_original
from fp8graph.ir.nodes import module_path

# A string as ``repr`` writes it.
_QUOTED: Final = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_INDEX: Final = rf"\[(?:{_QUOTED}|[^][]*)\]"
# model.compile() compiles a bound method: L['self'] up to torch 2.13, L['fn'].__self__ in 2.15.
# The brackets that follow lead to the model, not into it: L['args'][0] if a decorator took (*args, **kwargs), as
# accelerate's mixed precision does.
_ROOT: Final = re.compile(rf"[LG]\[(?P<root>{_QUOTED})\](?P<more>(?:{_INDEX})*)(?:\.__self__)?")
# A module with a __getattr__ of its own (all of PEFT's) is read as .__dict__['_modules']['base_model'].
_OWN: Final = r"""\.(?:__dict__\[['"])?_(?:modules|parameters|buffers)(?:['"]\])?"""
# ``getattr(layers, "0")``: what no attribute can be written as.
_GETATTR: Final = re.compile(rf"""getattr\(((?:(?!getattr\()[^'"]|{_QUOTED})*?), ({_QUOTED})\)""")
# A function in the place of a module's forward, which calls the method it took the place of (torchtitan's tensor
# parallelism): X.forward.__closure__[0].cell_contents.__self__ is X.
_REPLACED: Final = re.compile(r"(?:\.forward)?(?:\.__closure__\[\d+\]\.cell_contents)+\.__self__")
# Dynamo writes ``._modules['a b']`` in module stacks as ``.a b``, but not where the name has a quote or ``]``.
_STEP: Final = re.compile(
    rf"(?:{_OWN})?\[(?P<quoted>{_QUOTED})\]|\[(?P<index>[^][]*)\]|\.?(?P<bare>(?:[^.[]|\[(?!{_INDEX[2:]}))+)"
)
# The tensors that a parameter wraps are attributes of it: ._parameters['weight'].qdata is of the parameter "weight".
_WRAPPED: Final = re.compile(rf"""(_parameters(?:['"]\])?\[{_QUOTED}\])\..*""")
_PARAMETRIZED: Final = "parametrizations"  # where torch.nn.utils.parametrize puts the parameters of a layer


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A graph input that is a parameter."""

    source: str  # Dynamo's name for it, L['self']._modules[...]...
    index: int  # among the graph's inputs
    bound: str = ""  # its FQN, if the user bound the model (backend.bind)

    @property
    def place(self) -> tuple[str, str]:
        """The root variable and the FQN under it; of a tensor that a parameter wraps, those of the parameter."""
        return split_source(_WRAPPED.sub(r"\1", self.source))


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a site: its module relative to the compiled frame, and the parameter that its weight comes from."""

    root: str  # the variable of the frame under which the module is found
    path: str  # FQN under it; "" at the root of the frame
    parameter: int | None  # graph input
    others: tuple[int, ...] = ()  # further parameters that the weight is computed from


@functools.lru_cache(maxsize=1 << 14)  # a graph asks for the same few thousand names after each pass
def split_source(text: str) -> tuple[str, str]:
    """Dynamo's name of a value -> (root variable, dotted FQN under it).

    ``L['self']._modules['model']._parameters['w']`` -> ``("self", "model.w")``;
    ``L['model'].__dict__['_modules']['layers'].0.mlp`` -> ``("model", "layers.0.mlp")``; ``L['args'][0].mlp`` ->
    ``("args.0", "mlp")``; ``getattr(L['self'].layers, '0')`` -> ``("self", "layers.0")``;
    ``L['self']._modules["x'y"]`` -> ``("self", "x'y")``; a plain path is returned with root "". Parts of wrappers are
    left out.
    """
    if not text.startswith(("L[", "G[", "getattr(")):
        return "", name_in_original(text.strip("."))
    text = _REPLACED.sub("", text)
    while text != (text := _GETATTR.sub(r"\1._modules[\2]", text)):
        pass  # the innermost first
    root = ""
    if match := _ROOT.match(text):
        root = ".".join([literal_eval(match["root"]), *_steps(match["more"])])
        text = text[match.end() :]
    return root, name_in_original(".".join(_steps(text)))


def _steps(text: str) -> list[str]:
    """Return the names on the way that Dynamo writes as attributes and indices."""
    return [
        literal_eval(step["quoted"]) if step["quoted"] else step["index"] or _unescaped(step["bare"] or "")
        for step in _STEP.finditer(text)
    ]


def _unescaped(bare: str) -> str:
    """Return a name that was taken out of the quotes of its ``repr``, in which it had no quote."""
    try:
        return cast(str, literal_eval(f"'{bare}'")) if "\\" in bare else bare
    except (SyntaxError, ValueError):
        return bare


def named_placeholders(graph: fx.Graph, copy: fx.Graph, sources: Sequence[str]) -> dict[fx.Node, fx.Node]:
    """Return the placeholders of ``graph`` in ``copy``, under names that its module takes as keywords."""
    copies: dict[fx.Node, fx.Node] = {}
    names: set[str] = set()
    placeholders = graph.find_nodes(op="placeholder")
    for node, source in zip(placeholders, sources, strict=len(placeholders) == len(sources)):
        root, path = split_source(source)
        name = re.sub(r"\W+", "_", path or root)
        name = f"_{name}" if name[:1].isdigit() or keyword.iskeyword(name) else name
        while name in names:
            name += "_"
        names.add(name)
        copies[node] = copy.placeholder(name)
        copies[node].meta = dict(node.meta)
    return copies


def graph_inputs(graph: fx.Graph) -> Iterator[tuple[fx.Node, int | None]]:
    """Yield the placeholders with their position among Dynamo's inputs, as AOTAutograd describes them.

    The position is None for the gradients of the outputs, and for the inputs of a subgraph (a higher-order op's body).
    Of a DTensor, a graph takes the shard (``distributed.local``).
    """
    for node in graph.find_nodes(op="placeholder"):
        yield node, aot.input_position(node)


def parameters_of(graph: fx.Graph, by_index: Mapping[int, Parameter]) -> dict[fx.Node, Parameter]:
    """Return the placeholders that are parameters. ``by_index``: those by their position among Dynamo's inputs."""
    return {node: by_index[index] for node, index in graph_inputs(graph) if index is not None and index in by_index}


def place_of(node: fx.Node, weight: fx.Node | None, parameters: Mapping[fx.Node, Parameter]) -> Place:
    """Return the place of the matmul ``node``, whose weight, if it has one, is computed from ``parameters``."""
    first = weight
    while first is not None and first not in parameters:
        first = first.all_input_nodes[0] if first.all_input_nodes else None
    root, path = split_source(module_path(node))
    if weight is None or first is None:
        return Place(root=root, path=path, parameter=None)
    indices = [parameters[source].index for source in sources_of(weight, parameters) if source is not first]
    return Place(root=root, path=path, parameter=parameters[first].index, others=tuple(indices))


def sources_of(weight: fx.Node, parameters: Mapping[fx.Node, object]) -> list[fx.Node]:
    """Return the parameters that ``weight`` is computed from."""
    if weight in parameters:
        return [weight]
    waiting, met = [weight], {weight: None}
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in met:
                met[source] = None
                waiting.append(source)
    return [source for source in met if source in parameters]


def owner_of(paths: Sequence[str]) -> str:
    """Return the innermost module that has all parameters at ``paths``; of a parametrized weight, its layer."""
    common = commonprefix([path.split(".")[:-1] for path in paths])
    return ".".join(common[:-2] if common[-2:-1] == [_PARAMETRIZED] else common)


def names_of(places: Sequence[Place], parameters: Iterable[Parameter]) -> list[tuple[str, int]]:
    """``(fqn, index among the sites of that module)`` of all sites of a graph, in order.

    Paths are relative to the compiled frame; bound parameters make them absolute.
    """
    parameters = list(parameters)
    by_index = {parameter.index: parameter for parameter in parameters}
    prefixes = _prefixes(parameters)
    several_roots = len({place.root for place in places if place.path}) > 1
    seen: Counter[str] = Counter()
    names: list[tuple[str, int]] = []
    for place in places:
        parameter = None if place.parameter is None else by_index[place.parameter]
        others = [by_index[index] for index in place.others]
        prefix, root, path = _full_path(place, parameter, others, prefixes.get(place.root))
        if prefix is None:
            prefix = root if several_roots else ""
        fqn = ".".join(part for part in (prefix, path) if part)
        names.append((fqn, seen[fqn]))
        seen[fqn] += 1
    return names


def _prefixes(parameters: Iterable[Parameter]) -> dict[str, str]:
    """Root variables of the frame, and the full names (FQNs) of their modules."""
    prefixes: dict[str, str] = {}
    for parameter in parameters:
        root, path = parameter.place
        if parameter.bound == path or parameter.bound.endswith("." + path):
            prefixes[root] = parameter.bound.removesuffix(path).rstrip(".")
    return prefixes


def possible_names(parameters: Collection[Parameter], modules: Iterable[tuple[str, str]]) -> list[str]:
    """Return every name that :func:`names_of` may give a site, in an order that does not depend on bound names.

    That is each module around a parameter, or a parameter itself, and each module that a node was traced in.

    Args:
        modules: root variable and FQN under it of the latter.
    """
    prefixes, paths = dict.fromkeys([""]), dict.fromkeys([""])
    places = [parameter.place for parameter in parameters]
    for parameter, (root, path) in zip(parameters, places, strict=True):
        prefixes |= {root: None, parameter.bound.removesuffix(path).rstrip("."): None}
    for root, path in (*places, *modules):
        parts = path.split(".")
        prefixes[root] = None
        paths |= {".".join(parts[:length]): None for length in range(1, len(parts) + 1)}
    return list(dict.fromkeys(f"{prefix}.{path}".strip(".") for prefix in prefixes for path in paths))


def _full_path(
    place: Place, parameter: Parameter | None, others: Sequence[Parameter], prefix: str | None
) -> tuple[str | None, str, str]:
    """``(FQN of the root or None, root variable, FQN under it)`` of one site."""
    if parameter is None:
        return prefix, place.root, place.path
    root, path = parameter.place
    if parameter.bound and parameter.bound.endswith(path):
        prefix = parameter.bound.removesuffix(path).rstrip(".")
    paths = [path, *(other.place[1] for other in others)]
    if not place.path:  # code at the root of the frame: the parameter's layer, or its own name
        own = path.split(".")[1] if path.startswith(f"{_PARAMETRIZED}.") else path
        if own.rpartition(".")[2].isdigit():  # of a ParameterList, which is no layer
            return prefix, root, own
        return prefix, root, "" if own == "weight" and prefix else owner_of(paths) or own
    # The owner may be a child that is not called: a ParameterDict (PEFT's lora_embedding_B), a linear whose weight is
    # borrowed. A parametrized weight is its layer's own.
    inside = [each for each in paths if each.startswith(place.path + ".")]
    owner = owner_of(inside)
    parametrized = f".{_PARAMETRIZED}." in owner[len(place.path) :]
    return prefix, place.root, owner if inside and not parametrized else place.path
