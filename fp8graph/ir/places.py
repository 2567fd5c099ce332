"""The place of a matmul in the program: its module and its weight."""

from __future__ import annotations

from dataclasses import dataclass


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
