"""Sequences of operations that decide about recipes, as data, and the recipes that each call in them must run with.

A name means what it was registered as when it passes the door: a policy's when the backend gets the policy, that of a
region when it is entered, that of a region inside compiled code when its graph is first seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

import torch
from hypothesis import strategies
from torch import Tensor, nn

import fp8graph
from fp8graph import Backend, Float8CurrentScaling, Float8RowwiseScaling, Policy, Recipe, Rule
from helpers import eager_backend, same_bits, step

RECIPES: Final[tuple[Recipe, ...]] = (
    Float8CurrentScaling(),
    Float8CurrentScaling(power_2_scale=True),
    Float8RowwiseScaling(),
)
NAMES: Final = ("first", "second")  # at first, those of RECIPES[0] and RECIPES[1]
NAME: Final = "mine"  # in tests of one name
INNER: Final = NAMES[0]  # of the region inside compiled code
POLICY: Final = "policy"  # a region that returns to it

Value = int | str | None  # a recipe: an index of RECIPES for an object, a name, or high precision
Meaning = int | None  # the same without names


class Register(NamedTuple):
    """Register a recipe under a name."""

    name: str
    recipe: int


class RuleOf(NamedTuple):
    """A rule, from step ``since`` on."""

    pattern: str
    recipe: Value
    since: int = 0


class SetPolicy(NamedTuple):
    """Give the backend a policy; as it is at one step, if ``at`` is a number."""

    default: Value
    rules: tuple[RuleOf, ...] = ()
    at: int | None = None

    def policy(self) -> Policy:
        rules = [Rule(r.pattern, _recipe(r.recipe), steps=(r.since, None) if r.since else None) for r in self.rules]
        policy = Policy(rules, default=_recipe(self.default))
        return policy if self.at is None else policy.at_step(self.at)


class Enter(NamedTuple):
    """Enter a region around compiled code."""

    recipe: Value


class Leave(NamedTuple):
    """Leave the innermost region, if there is one."""


class Optimize(NamedTuple):
    """Take a step of an optimizer, which changes no weight."""


class Call(NamedTuple):
    """Run a layer, "a" or "b", or the "whole" model."""

    layer: str
    rows: int
    trains: bool = True  # whether gradients are computed


Operation = Register | SetPolicy | Enter | Leave | Optimize | Call


def _recipe(value: Value) -> Any:
    return RECIPES[value] if isinstance(value, int) else value


class Linear(nn.Module):
    """A linear, in a region with the recipe called ``inner``."""

    def __init__(self, inner: str | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64, bias=False)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if self.inner is None:
            return self.up(x)
        with fp8graph.autocast(recipe=self.inner):
            return self.up(x)


class Layer(nn.Module):
    """A linear that policies and regions around it decide about, and one in a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(32, 32, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.up(x))
        with fp8graph.autocast(recipe=INNER):
            return self.down(x)


class Model(nn.Module):
    """Two layers of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class CompiledModel:
    """A new model and its parts, compiled with one backend."""

    def __init__(self, backend: Backend) -> None:
        torch.manual_seed(0)
        self.model = Model()
        backend.bind(self.model)
        parts = {"a": self.model.a, "b": self.model.b, "whole": self.model}
        self._parts = {name: torch.compile(part, backend=backend, dynamic=False) for name, part in parts.items()}

    def run(self, call: Call) -> list[Tensor]:
        """Return the output and the gradients."""
        x = 3 * torch.randn(call.rows, 32, generator=torch.Generator().manual_seed(1))
        if call.trains:
            return step(self._parts[call.layer], x.requires_grad_(), parameters=self.model.parameters())
        with torch.no_grad():
            return [self._parts[call.layer](x)]


class Decisions(NamedTuple):
    """The recipes of a call: of the linears that the policy or a region around it decides about, and of the others."""

    call: Call
    sites: tuple[tuple[str, Meaning], ...]
    inner: int

    def alone(self) -> list[Tensor]:
        """Return the results of this call in a backend that runs nothing else, and gets recipes as objects."""
        torch._dynamo.reset()
        fp8graph.register_recipe(INNER, RECIPES[self.inner])
        rules = [Rule(name, _recipe(meaning)) for name, meaning in self.sites]
        return CompiledModel(eager_backend(Policy(rules, default=None))).run(self.call)


class Rules:
    """The meanings of all names, by the rules above."""

    def __init__(self) -> None:
        self._registered = {name: index for index, name in enumerate(NAMES)}
        self._policy: list[tuple[str, Meaning, int]] = []  # pattern, recipe, first step
        self._regions: list[Meaning | str] = []  # the innermost last
        self._inner: dict[tuple[bool, int, bool], int] = {}  # by the graph: of a layer or whole, its rows, training
        self._step = 0

    def _meaning(self, value: Value) -> Meaning:
        return self._registered[value] if isinstance(value, str) else value

    def _of(self, name: str) -> Meaning:
        region = self._regions[-1] if self._regions else POLICY
        if not isinstance(region, str):
            return region
        return next(
            recipe for pattern, recipe, since in self._policy if fnmatchcase(name, pattern) and since <= self._step
        )

    def take(self, operation: Operation) -> Decisions | None:
        """Follow an operation; return the recipes of a call."""
        match operation:
            case Register(name, recipe):
                self._registered[name] = recipe
            case SetPolicy(default, rules, at):
                there = [rule for rule in rules if at is None or rule.since <= at]
                self._policy = [(r.pattern, self._meaning(r.recipe), 0 if at is not None else r.since) for r in there]
                self._policy.append(("*", self._meaning(default), 0))
            case Enter(recipe):
                self._regions.append(POLICY if recipe == POLICY else self._meaning(recipe))
            case Leave():
                del self._regions[-1:]
            case Optimize():
                self._step += 1
            case Call(layer, rows, trains):
                layers = ("a", "b") if layer == "whole" else (layer,)
                inner = self._inner.setdefault((layer == "whole", rows, trains), self._registered[INNER])
                return Decisions(operation, tuple((f"{name}.up", self._of(f"{name}.up")) for name in layers), inner)
        return None


def assert_decided(operations: Sequence[Operation], alone: dict[Decisions, list[Tensor]]) -> None:
    """Run ``operations`` with one backend, and compare each call with the same call alone.

    Args:
        alone: results of calls alone, so far.
    """
    torch._dynamo.reset()
    for name, recipe in zip(NAMES, RECIPES, strict=False):
        fp8graph.register_recipe(name, recipe)
    first, *others = operations
    assert isinstance(first, SetPolicy)
    backend, rules = eager_backend(first.policy(), cache_weights=True), Rules()
    rules.take(first)
    compiled = CompiledModel(backend)
    optimizer = torch.optim.SGD(compiled.model.parameters(), lr=0.0)
    results: list[tuple[int, Decisions, list[Tensor]]] = []
    regions: list[Any] = []
    try:
        for number, operation in enumerate(others, 1):
            decisions = rules.take(operation)
            match operation:
                case Register(name, recipe):
                    fp8graph.register_recipe(name, RECIPES[recipe])
                case SetPolicy():
                    backend.set_policy(operation.policy())
                case Enter(recipe):
                    regions.append(_region(recipe))
                    regions[-1].__enter__()
                case Leave():
                    if regions:
                        regions.pop().__exit__(None, None, None)
                case Optimize():
                    optimizer.step()
                case Call():
                    assert decisions is not None
                    results.append((number, decisions, compiled.run(operation)))
    finally:
        while regions:
            regions.pop().__exit__(None, None, None)
    for number, decisions, got in results:
        if decisions not in alone:
            alone[decisions] = decisions.alone()
        assert same_bits(got, alone[decisions]), f"operation {number} must run with {decisions}"


def _region(value: Value) -> Any:
    if value is None:
        return fp8graph.autocast(enabled=False)
    return fp8graph.autocast(recipe=None if value == POLICY else _recipe(value))


def programs() -> strategies.SearchStrategy[list[Operation]]:
    """Draw sequences of calls with operations before them. The first operation gives the backend its policy."""
    draw = strategies
    names, indices = draw.sampled_from(NAMES), draw.integers(0, len(RECIPES) - 1)
    values: strategies.SearchStrategy[Value] = names | names | indices | draw.none()
    rules = draw.builds(RuleOf, draw.sampled_from(["*", "a.*", "b.up", "nothing"]), values, draw.integers(0, 2))
    policies = draw.builds(
        SetPolicy, values, draw.lists(rules, max_size=2).map(tuple), draw.none() | draw.integers(0, 2)
    )
    operations = draw.one_of(
        draw.builds(Register, names, indices),
        policies,
        draw.builds(Enter, values | draw.just(POLICY)),
        draw.builds(Leave),
        draw.builds(Optimize),
    )
    layers, trains = draw.sampled_from(["a", "b", "whole"]), draw.sampled_from([True, False])
    calls = draw.builds(Call, layers, draw.sampled_from([16, 32]), trains)
    turns = draw.lists(draw.tuples(draw.lists(operations, max_size=2), calls), min_size=2, max_size=6)
    return draw.tuples(policies, turns).map(
        lambda drawn: [drawn[0], *(each for before, call in drawn[1] for each in (*before, call))]
    )
