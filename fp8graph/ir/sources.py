"""The origin of a graph's inputs: Dynamo's names, AOTAutograd's descriptions."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Sequence
from typing import Final

from torch import fx

from fp8graph.compat import aot

# model.compile() compiles a bound method: L['self'] up to torch 2.13, L['fn'].__self__ in 2.15.
# The brackets that follow lead to the model, not into it: L['args'][0] if a decorator took (*args, **kwargs), as
# accelerate's mixed precision does.
_ROOT: Final = re.compile(r"""^[LG]\[['"](?P<root>[^'"]*)['"]\](?P<more>(?:\[[^]]*\])*)(?:\.__self__)?\.?""")
# A module with a __getattr__ of its own (all of PEFT's) is read as .__dict__['_modules']['base_model'].
_OWN: Final = r"""\.(?:__dict__\[['"])?_(?:modules|parameters|buffers)(?:['"]\])?"""
# ``getattr(layers, "0")``: what no attribute can be written as.
_GETATTR: Final = re.compile(r"""getattr\(([^()]*), ['"]([^'"]+)['"]\)""")
_STEP: Final = re.compile(_OWN + r"""\[['"]([^'"]+)['"]\]|\[['"]?([^'"\]]+)['"]?\]""")


def split_source(text: str) -> tuple[str, str]:
    """Dynamo's name of a value -> (root variable, dotted FQN under it).

    ``L['self']._modules['model']._parameters['w']`` -> ``("self", "model.w")``;
    ``L['model'].__dict__['_modules']['layers'].0.mlp`` -> ``("model", "layers.0.mlp")``; ``L['args'][0].mlp`` ->
    ``("args.0", "mlp")``; ``getattr(L['self'].layers, '0')`` -> ``("self", "layers.0")``; a plain path is
    returned with root "".
    """
    root = ""
    while text != (text := _GETATTR.sub(r"\1.\2", text)):
        pass  # the innermost first
    if match := _ROOT.match(text):
        more = match["more"].replace("][", ".").strip("[]").replace("'", "").replace('"', "")
        root = f"{match['root']}.{more}" if more else match["root"]
        text = text[match.end() - (text[match.end() - 1] == ".") :]
    text = _STEP.sub(lambda m: "." + (m[1] or m[2]), text)
    return root, text.strip(".")


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
