"""Give NVFP4's quantize nodes what they cannot make themselves: the matrix of the transform, and random numbers.

    q = quantize(x, rotation=s)         ->      h = hadamard(x, s)
                                                q = quantize(x, rotation=s, matrix=h)

    p = quantize(dy, stochastic=True)   ->      r = random_seed(cpu)
    q = quantize(du, stochastic=True)           p = quantize(dy, stochastic=True, seed=r)
                                                q = quantize(du, stochastic=True, seed=r, draw=1)

One matrix serves all nodes of one direction of the graph, and one seed; each node draws its own numbers from it. The
seed is drawn when the graph runs, from torch's generator of the device. Gradients are quantized in backward alone, once
each, so nothing is drawn again when a checkpointed forward is recomputed.

Refuses (leaves alone) nodes that neither transform a columnwise copy nor round stochastically.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import insert, set_direction
from fp8graph.ir.nodes import is_backward, nodes, value
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.transforms import hadamard_matrix


def rotates_or_draws(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether some tensor is transformed or rounded stochastically before it is quantized."""
    return any({"rotation", "stochastic"} & node.kwargs.keys() for node in nodes(graph, (ops.quantize,)))


def prepare_fp4(graph: fx.Graph, compilation: Compilation) -> None:
    made: dict[Any, fx.Node] = {}
    draws: dict[fx.Node, int] = {}

    def once(node: fx.Node, target: Any, *args: Any, key: Any) -> fx.Node:
        """``target(*args)``, once for all that have this ``key``, before the first node that needs it."""
        key = target, key, is_backward(node)
        if key not in made:
            with graph.inserting_before(node):
                made[key] = insert(graph, target, args, like=node)
            set_direction(made[key], node.meta.get("partitioner_tag"))
        return made[key]

    for node in list(nodes(graph, (ops.quantize,))):
        quantized, changes = QuantizeNode(node), dict[str, Any]()
        arguments, x = quantized.arguments, value(quantized.arguments.x)
        if arguments.rotation is not None and arguments.columnwise:
            kind = arguments.rotation, x.dtype, x.device
            changes["matrix"] = once(node, hadamard_matrix, arguments.x, arguments.rotation, key=kind)
        if arguments.stochastic:
            seed = changes["seed"] = once(node, ops.random_seed, x.device, key=x.device)
            changes["draw"] = draws[seed] = draws.get(seed, -1) + 1
        quantized.ask(**changes)
