"""The names of sites: FQNs from the module stacks and parameters of a graph."""

from __future__ import annotations

from collections import Counter

from torch import fx

from fp8graph.graph import SITES, module_path, nodes, split_source
from fp8graph.sites import Parameter


class Naming:
    """FQNs for sites. Paths are relative to the compiled frame; bound parameters make them absolute."""

    def __init__(self, graph: fx.Graph, parameters: dict[fx.Node, Parameter]) -> None:
        self._parameters = parameters
        self._prefix: dict[str, str] = {}  # root variable of the frame -> FQN of that module
        for parameter in parameters.values():
            root, path = split_source(parameter.source)
            if parameter.bound == path or parameter.bound.endswith("." + path):
                self._prefix[root] = parameter.bound.removesuffix(path).rstrip(".")
        paths = (split_source(module_path(node)) for node in nodes(graph, SITES))
        self._several_roots = len({root for root, path in paths if path}) > 1
        self._seen: Counter[str] = Counter()

    def name(self, node: fx.Node, weight: fx.Node | None) -> tuple[str, int, int | None]:
        """``(fqn, index among the sites of that module, graph input of the weight's parameter)``."""
        root, path = split_source(module_path(node))
        prefix = self._prefix.get(root)
        parameter = self._parameter_under(weight)
        if parameter is not None:
            parameter_root, parameter_path = split_source(parameter.source)
            if parameter.bound and parameter.bound.endswith(parameter_path):
                prefix = parameter.bound.removesuffix(parameter_path).rstrip(".")
            if not path:  # code at the root of the frame: the parameter's own name
                root, path = parameter_root, parameter_path
            elif parameter_path.startswith(path + "."):
                path = _owner(path, parameter_path)
        if prefix is None:
            prefix = root if self._several_roots else ""
        fqn = ".".join(part for part in (prefix, path) if part)
        self._seen[fqn] += 1
        return fqn, self._seen[fqn] - 1, None if parameter is None else parameter.index

    def _parameter_under(self, node: fx.Node | None) -> Parameter | None:
        while node is not None and node not in self._parameters:
            node = node.all_input_nodes[0] if node.all_input_nodes else None
        return None if node is None else self._parameters[node]


def _owner(path: str, parameter_path: str) -> str:
    """The module that owns a parameter which the module ``path`` multiplies by: itself, as a rule.

    It may be a child that is not called: a ParameterDict (PEFT's ``lora_embedding_B``), a linear whose weight is
    borrowed. A parametrized weight is its layer's own.
    """
    owner = parameter_path.rpartition(".")[0]
    return path if ".parametrizations." in owner[len(path) :] + "." else owner
