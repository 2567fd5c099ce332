"""The facts that are followed through a graph: inputs, scales, casts, and the state of a node; the faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor, fx

FP8: Final = frozenset(
    dtype
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2")
    if (dtype := getattr(torch, name, None)) is not None
)
E8M0: Final = torch.float8_e8m0fnu
STEPS: Final = (3.0, 5.0, 7.0)  # the exponents of a scale's elements: their multiples by 1, 2 and -1 differ


Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Source:
    """A graph input: its name in the program, whether a gradient is computed for it, and its numbers, if known."""

    name: str
    stored: bool = False  # a module of the model holds it
    trains: bool = False
    update: fx.Node | None = None  # what the graph writes to it
    tensor: Tensor | None = None
    traced_as: str = ""  # Dynamo's name for it

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    def is_beside(self, stored: Source) -> bool:
        """Return whether it is in the module of ``stored``, or an attribute of that parameter."""
        return self.module in (stored.module, stored.name)

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def numbers(self) -> Tensor | None:
        """The numbers of a scale, decoded if they are bytes of E8M0."""
        bits = self.tensor is not None and self.tensor.dtype == torch.uint8
        return self.tensor.view(E8M0).float() if self.tensor is not None and bits else self.tensor

    def holds_exponents(self, dtype: torch.dtype | None) -> bool:
        """Return whether it is a scale as the bytes of E8M0."""
        return dtype == torch.uint8 and "scal" in self.leaf


@dataclass(frozen=True)
class Fault:
    """One fault of one product or cast."""

    rule: str
    severity: Severity
    node: fx.Node
    text: str


@dataclass(frozen=True)
class Operands:
    """The operands of one product: casts and scales."""

    casts: tuple[torch.dtype | None, ...]  # the type of eight bits or fewer that their numbers were cast to last
    scales: tuple[str, ...] = ()  # of a scaled product: where they come from
    kept: tuple[torch.dtype | None, ...] = ()  # of a forward product: in which backward reads each operand, if it does


@dataclass(frozen=True, eq=False)
class Root:
    """A scale that is computed from no other: the amax of a tensor, or an input of the graph."""

    node: fx.Node
    exponents: Tensor  # one for each element
    sources: frozenset[Any]  # keys of the tensors whose amax it is
    source: Source | None = None  # the input
    table: bool = False  # an input of which parts are scales: nothing says how these belong together

    @property
    def text(self) -> str:
        return self.source.name if self.source is not None else f"the amax at {self.node.name}"


@dataclass(frozen=True, eq=False)
class Cast:
    """One cast to FP8, or FP8 bytes that are an input."""

    node: fx.Node
    dtype: torch.dtype
    degrees: Mapping[Root, float | None]  # by its scales: the multiple of their exponents that the cast value has
    stored: Source | None = None


@dataclass(frozen=True)
class State:
    """A node's exponents by scale; missing scales have none."""

    exponents: Mapping[Root, Tensor] = field(default_factory=dict)
    casts: tuple[Cast, ...] = ()
    product: fx.Node | None = None  # the product that it is a result of, with exponents left
    origin: Any = None  # the key of the tensor before it was scaled
    clamped: bool = False
    bounded: bool = False
    zero: bool = False  # a zero point, which symmetric quantization has as well
    values: Mapping[Root | None, Any] | None = None  # of a scale: made up, and changed by the exponents of each root
    first: Mapping[Root | None, Any] | None = None  # the same for the first roots, if it is proportional to later ones

    @property
    def left(self) -> bool:
        return any(bool((x != 0).any()) for x in self.exponents.values())


NOTHING: Final = State()
Values = Mapping[Root | None, Any]


def multiple(x: Tensor, root: Root) -> float | None:
    """Return the number of times that ``x`` has a scale's exponents; None if it has others."""
    values = set(x.unique().tolist())
    for times in (1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 4.0, -4.0, 0.5, -0.5):
        if values <= {times * step for step in STEPS}:
            return times
    return None


def same_exponents(a: Mapping[Root, Tensor], b: Mapping[Root, Tensor]) -> bool:
    roots = dict.fromkeys((*a, *b))
    zero = torch.zeros(())
    try:
        return all(bool((a.get(root, zero) == b.get(root, zero)).all()) for root in roots)
    except RuntimeError:
        return False
