"""The origin of a graph's inputs: Dynamo's names, AOTAutograd's descriptions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from torch import fx

from fp8graph.compat import aot

# model.compile() compiles a bound method: L['self'] up to torch 2.13, L['fn'].__self__ in 2.15.
# The brackets that follow lead to the model, not into it: L['args'][0] if a decorator took (*args, **kwargs), as
# accelerate's mixed precision does.
_ROOT: Final = re.compile(r"""^[LG]\[['"](?P<root>[^'"]*)['"]\](?P<more>(?:\[[^]]*\])*)(?:\.__self__)?\.?""")
# A module with a __getattr__ of its own (all of PEFT's) is read as .__dict__['_modules']['base_model'].
_OWN: Final = r"""\.(?:__dict__\[['"])?_(?:modules|parameters|buffers)(?:['"]\])?"""
_STEP: Final = re.compile(_OWN + r"""\[['"]([^'"]+)['"]\]|\[['"]?([^'"\]]+)['"]?\]""")


def split_source(text: str) -> tuple[str, str]:
    """Dynamo's name of a value -> (root variable, dotted FQN under it).

    ``L['self']._modules['model']._parameters['w']`` -> ``("self", "model.w")``;
    ``L['model'].__dict__['_modules']['layers'].0.mlp`` -> ``("model", "layers.0.mlp")``; ``L['args'][0].mlp`` ->
    ``("args.0", "mlp")``; a plain path is returned with root "".
    """
    root = ""
    if match := _ROOT.match(text):
        more = match["more"].replace("][", ".").strip("[]").replace("'", "").replace('"', "")
        root = f"{match['root']}.{more}" if more else match["root"]
        text = text[match.end() - (text[match.end() - 1] == ".") :]
    text = _STEP.sub(lambda m: "." + (m[1] or m[2]), text)
    return root, text.strip(".")


def graph_inputs(graph: fx.Graph) -> Iterator[tuple[fx.Node, int | None]]:
    """The placeholders with their position among Dynamo's inputs, as AOTAutograd describes them.

    The position is None for the gradients of the outputs, and for the inputs of a subgraph (a higher-order op's body).
    Of a DTensor, a graph takes the shard (``distributed.local``).
    """
    for node in graph.find_nodes(op="placeholder"):
        yield node, aot.input_position(node)
