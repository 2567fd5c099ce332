"""A quantize node of a graph: its request, and its outputs by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from fp8graph.numerics import quantization
from fp8graph.numerics.scalings import SCALINGS, QuantizeArguments, Scaling

Arguments = QuantizeArguments[fx.Node]


@dataclass(frozen=True)
class QuantizeNode:
    """A view of ``node``, a ``fp8graph::quantize``: every property is read from the node when it is asked for."""

    node: fx.Node

    @property
    def arguments(self) -> Arguments:
        return QuantizeArguments(*cast(Any, self.node.args), **cast(Any, self.node.kwargs))

    @property
    def kind(self) -> Scaling:
        return SCALINGS[self.arguments.scaling]

    @property
    def names(self) -> list[str]:
        """The names of the outputs, in order."""
        return names(self.arguments)

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """The fake tensors of the outputs, by name."""
        return dict(zip(self.names, cast("list[torch.Tensor]", self.node.meta["val"]), strict=True))

    @property
    def columnwise_differs(self) -> bool:
        """Whether the columnwise data differ from the rowwise ones, transposed."""
        arguments = self.arguments
        tile_rows, _ = arguments.block or (1, 1)
        return bool(arguments.columnwise) and not self.kind.one_scale and (tile_rows == 1 or not arguments.rowwise)

    @property
    def outputs(self) -> dict[str, fx.Node]:
        """The getitem nodes that read the outputs, by name; one per output at most."""
        own = self.names
        return {own[cast(int, user.args[1])]: user for user in self.node.users}

    def ask(self, **changes: Any) -> None:
        """Change the request of the node. Its fake value is not changed: see ``edit.update_value``."""
        self.node.args, self.node.kwargs = call(dataclasses.replace(self.arguments, **changes))

    def replace(self, results: Mapping[str, fx.Node]) -> None:
        """Put ``results``, by name, in the place of the outputs, and erase the node."""
        for name, output in self.outputs.items():
            output.replace_all_uses_with(results[name])
            self.node.graph.erase_node(output)
        self.node.graph.erase_node(self.node)


def names(arguments: QuantizeArguments[Any]) -> list[str]:
    """Return the names of the outputs of a quantize node, in order."""
    return quantization.output_names(arguments.scaling, list(arguments.layouts), keep_scales=arguments.keep_scales)


def call(arguments: QuantizeArguments[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``arguments`` as the args and kwargs of a node, without those that equal their defaults."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        if not field.kw_only:
            args.append(value)
        elif value is not field.default and value != field.default and value != []:
            kwargs[field.name] = value
    return tuple(args), kwargs
