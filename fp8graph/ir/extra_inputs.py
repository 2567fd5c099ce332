"""The inputs that a graph takes beside Dynamo's: FP8 copies of weights, pages of scaling state, and more.

A pass takes them (``Compilation.take``); the order in which passes took them is the order in which the graph has them.
They are stored with the code. At a call, the store that each names (``runtime/stores.py``) gives the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import fx

from fp8graph.ir.naming import graph_inputs
from fp8graph.ir.nodes import TAKEN_KEY

Rename = Callable[[str, int], tuple[str, int]]  # (fqn, index) of a site -> that of the same site in another layer


class ExtraInput:
    """A request of a graph to a store: for tensors that the graph takes, or (without any) to know something.

    Attributes:
        store: whoever gives the tensors; "" for a note that only readers of the findings see.
    """

    store: ClassVar[str] = ""

    def stand_ins(self) -> list[torch.Tensor]:
        """Empty tensors for those that the graph takes, in order, in the active fake mode."""
        return []

    def initial(self) -> list[torch.Tensor]:
        """Tensors to begin with, for a graph that no store serves; none if only a store can make them."""
        return []

    def warning_alone(self) -> str:
        """Return the thing to know about a graph that no store serves; "": there is none."""
        return ""

    def titles(self, name: Callable[[int], str]) -> list[str]:
        """Their titles. ``name``: of a parameter, by its place among the graph's inputs."""
        return []

    def kind(self) -> Any:
        """Return a key equal for requests that differ in their owners alone."""
        return type(self)

    def renamed(self, rename: Rename) -> Self:
        """Return the same for another layer that runs the same code."""
        return self


@dataclass(kw_only=True)
class SpareInputs:
    """Graph inputs without a meaning yet. A pass that needs tensors from outside takes some and gives them one.

    AOTAutograd has to know all inputs before the passes run, but only the passes find out which inputs they need
    (scaling state, FP8 copies of weights). So a graph is traced with as many empty tensors as it may need
    (``backend/foresee.py``), and an input that a pass takes gets the shape, dtype and device that the pass asks for.
    """

    indices: Sequence[int] = ()  # among the graph's inputs
    wanted: int = 0  # how many so far; if more than there are, the graph has to be traced again with enough of them

    def take(self, graph: fx.Graph, values: Sequence[torch.Tensor]) -> list[fx.Node] | None:
        """Return the inputs that stand for ``values`` (fake tensors) from now on; None if there are too few."""
        start, self.wanted = self.wanted, self.wanted + len(values)
        if self.wanted > len(self.indices):
            return None
        by_index = {index: node for node, index in graph_inputs(graph)}
        inputs = [by_index[index] for index in self.indices[start : self.wanted]]
        for node, fake in zip(inputs, values, strict=True):
            node.meta.update({"val": fake, TAKEN_KEY: True})
            node.meta.pop("tensor_meta", None)
        return inputs
