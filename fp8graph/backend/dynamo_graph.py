"""A graph from Dynamo and its inputs, from which all its variants are compiled, and the situation of a call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fp8graph.compat import distributed, dynamo, fakes, fsdp, lives
from fp8graph.compat.fakes import TracingContext, tracing
from fp8graph.errors import Fp8GraphError
from fp8graph.ir.compilation import Condition
from fp8graph.ir.naming import Parameter, split_source
from fp8graph.models.general import families_of
from fp8graph.passes import STORES
from fp8graph.recipes import Recipe
from fp8graph.recipes.autocast import REGION_KEY, region_recipe
from fp8graph.recipes.policy import Policy
from fp8graph.recipes.rules import INHERIT
from fp8graph.runtime.policies import InForce
from fp8graph.runtime.stores import accelerator_of


class DynamoGraph:
    """One graph from Dynamo. It keeps no parameter alive."""

    def __init__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self.module = module
        self.context = TracingContext.try_get()
        self.frame = dynamo.current_frame_id()  # "" outside of Dynamo
        self.gradients = torch.is_grad_enabled()
        placeholders = module.graph.find_nodes(op="placeholder")
        self.sources = tuple(map(dynamo.source_name, placeholders))
        self._parameters = {
            index: source
            for index, (source, x) in enumerate(zip(self.sources, example_inputs, strict=True))
            if isinstance(x, torch.nn.Parameter) or dynamo.is_part_of_parameter(source)
        }
        whole, given = fsdp.gathered(), {index: example_inputs[index] for index in self._parameters}
        self.gathered = frozenset(index for index, x in given.items() if id(x) in whole)
        self._sharded = bool(self.gathered) or any(distributed.mesh_of(x) is not None for x in example_inputs)
        self.facts = {
            store.name: {index: store.fact(x, sharded=whole.get(id(x))) for index, x in given.items()}
            for store in STORES
        }
        # for variants that are compiled later; the real inputs must not be kept alive
        self.fake_inputs = [
            fakes.fake_input(node, x, self.context) for node, x in zip(placeholders, example_inputs, strict=True)
        ]
        self.families = tuple(families_of([*_called_classes(), *module_classes(module)]))
        self.device = accelerator_of(example_inputs)

    @property
    def positions(self) -> list[int]:
        """The positions of the inputs that are parameters."""
        return list(self._parameters)

    def parameters(self, names: Sequence[str]) -> dict[int, Parameter]:
        """The parameters by position, bound to ``names`` (none if they are not bound)."""
        bound = names or ("",) * len(self._parameters)
        return {
            index: Parameter(source=source, index=index, bound=name)
            for (index, source), name in zip(self._parameters.items(), bound, strict=True)
        }

    def tracing(self) -> contextlib.AbstractContextManager[Any]:
        """Dynamo's context, for variants that are compiled after Dynamo has finished with the graph."""
        return fakes.later(self.context)

    def let_torch_swap(self) -> None:
        """Leave no weak reference of Dynamo to parameters, now that it has finished with the graph."""
        lives.let_torch_swap(self.fake_inputs, self.context)

    def tracing_anew(self) -> contextlib.AbstractContextManager[Any]:
        """A context like Dynamo's that knows nothing of earlier compilations."""
        if self.context is None:
            return contextlib.nullcontext()
        return tracing(TracingContext(self.context.fake_mode))

    @property
    def name(self) -> str:
        """A name for people to read: the class of the outermost module, and whether it trains."""
        kind = "training" if self.gradients else "inference"
        for node in self.module.graph.nodes:
            if stack := node.meta.get("nn_module_stack"):
                owner = next(iter(stack.values()))[1]
                return f"{owner if isinstance(owner, str) else owner.__name__} {kind}".rpartition(".")[2]
        return f"function {kind}"

    def layers(self) -> dict[str, str]:
        """The modules that the graph was traced through: full names of their classes, by name relative to the frame."""
        stacks = (node.meta.get("nn_module_stack") or {} for node in self.module.graph.nodes)
        found = (entry for stack in stacks for entry in stack.values())
        return {split_source(path)[1]: class_name(owner) for path, owner in found}

    def quantized_weights(self, inputs: Sequence[Any]) -> Iterator[tuple[str, str, torch.dtype]]:
        """The parameters of wrapper subclasses that hold integers: module relative to the frame, class, dtype."""
        for index, source in self._parameters.items() if inputs else ():
            held = [x.dtype for x in fakes.wrapped_tensors(inputs[index]) if x.ndim > 1]
            if held and not (held[0].is_floating_point or held[0] == torch.bool):
                yield split_source(source)[1].rpartition(".")[0], type(inputs[index]).__name__, held[0]

    @functools.cached_property
    def regions(self) -> frozenset[Any]:
        """The autocast regions inside the graph; None is among them if some of its nodes are in no region."""
        custom = (node.meta.get("custom") or {} for node in self.module.graph.nodes)
        return frozenset(values.get(REGION_KEY) for values in custom)

    @property
    def spread(self) -> bool:
        """Whether its calls run collectives, with those of other ranks: the graph has some, or parameters in shards."""
        return self._sharded or any("c10d" in str(node.target) for node in self.module.graph.nodes)

    def recipes(self, policy: Policy, region: str | Recipe | None) -> frozenset[Recipe]:
        """Every recipe that may apply to a GEMM of this graph, in a call under ``region``."""
        found: set[Recipe] = set(policy.recipes())
        for each in (region, *self.regions):
            with contextlib.suppress(Fp8GraphError):  # the pass `assign` raises this error, and says where
                recipe = region_recipe(each)
                if isinstance(recipe, Recipe):
                    found.add(recipe)
        return frozenset(found)

    def identity(self) -> str:
        """The properties that decide how this graph is rewritten, beside its code: modules, regions, parameters."""
        digest = hashlib.sha256()
        regions = sorted(str(region) for region in self.regions if region is not None)
        digest.update(repr([(region, region_text(region)) for region in regions]).encode())
        digest.update(repr((self._parameters, sorted(self.gathered))).encode())
        digest.update(repr(self.facts).encode())
        for node in self.module.graph.nodes:
            stack = node.meta.get("nn_module_stack") or {}
            path = next(reversed(stack.values()))[0] if stack else ""
            digest.update(f"{path} {(node.meta.get('custom') or {}).get(REGION_KEY)};".encode())
        return digest.hexdigest()


def class_name(owner: type | str) -> str:
    """The full name of a class. Dynamo's graph has some classes as names."""
    return owner if isinstance(owner, str) else f"{owner.__module__}.{owner.__qualname__}"


def _called_classes() -> Iterator[type]:
    """The class of the module whose call is compiled: no node of Dynamo's graph is in its stack."""
    for module, called in dynamo.modules_of_frame():
        if called:
            yield type(module)


def module_classes(module: fx.GraphModule) -> Iterator[Any]:
    """The classes of the modules that a graph was traced through (or their full names), the outer ones first."""
    for node in module.graph.nodes:
        for _, owner in (node.meta.get("nn_module_stack") or {}).values():
            yield owner


class Moment(NamedTuple):
    """The part of a situation that the time of a call decides. A forward is repeated as it was the first time."""

    region: str | Recipe | None
    amax_group: str | None
    in_force: InForce
    conditions: tuple[Condition, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Situation:
    """Everything outside the graph, but for names, that decides how it is rewritten."""

    policy: str
    region: str | Recipe | None
    amax_group: str | None  # process group of the amax reduction
    conditions: tuple[Condition, ...] = ()  # what stores say of the call
    in_force: InForce = dataclasses.field(repr=False, compare=False)  # what ``policy`` is the identity of

    @property
    def passes(self) -> bool:
        """Whether it is an exception, which a report does not show beside the rule."""
        return any(each.passes for each in self.conditions)

    def without(self, *, passing: bool) -> Situation:
        """The same situation without the conditions that pass, or without those that last."""
        kept = tuple(each for each in self.conditions if each.passes != passing)
        return dataclasses.replace(self, conditions=kept)


def region_text(region: Any) -> str:
    """A region's present meaning: a recipe that is registered again under its name is another recipe."""
    try:
        recipe = region_recipe(region)
    except Fp8GraphError:
        return "unknown"  # the pass `assign` raises this error, and says where
    return "policy" if recipe is INHERIT else repr(recipe)
