"""A graph from Dynamo and its inputs, from which all its variants are compiled, and what decides about it in a call."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fp8graph.compat import anchors, distributed, dynamo, fakes, fsdp
from fp8graph.compat.fakes import TracingContext, tracing
from fp8graph.errors import Fp8GraphError
from fp8graph.ir.decisions import Condition, Decisions, Stacks, stacks_of
from fp8graph.ir.naming import Parameter, possible_names, split_source
from fp8graph.ir.settings import Settings
from fp8graph.models.general import families_of
from fp8graph.passes import STORES
from fp8graph.recipes.autocast import REGION_KEY, Region, region_of
from fp8graph.runtime.policies import ResolvedPolicy
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
        self.buffers = frozenset(index for index, source in enumerate(self.sources) if dynamo.is_buffer(source))
        whole, given = fsdp.gathered(), {index: example_inputs[index] for index in self._parameters}
        self.gathered = frozenset(index for index, x in given.items() if id(x) in whole)
        self._sharded = bool(self.gathered) or any(distributed.mesh_of(x) is not None for x in example_inputs)
        self.parameter_facts = {
            store.name: {index: store.fact(x, sharded=whole.get(id(x))) for index, x in given.items()}
            for store in STORES
        }
        # for variants that are compiled later; the real inputs must not be kept alive
        self.fake_inputs = [
            fakes.fake_input(node, x, self.context) for node, x in zip(placeholders, example_inputs, strict=True)
        ]
        self.regions = regions_in(module)
        self._stacks = stacks_of(
            name
            for index, source in self._parameters.items()
            if example_inputs[index].ndim > 1
            for root, path in [split_source(source)]
            for name in (path, f"{root}.{path}")
        )
        self.families = tuple(families_of([*_called_classes(), *module_classes(module)]))
        self.device = accelerator_of(example_inputs)

    @property
    def positions(self) -> list[int]:
        """The positions of the inputs that are parameters."""
        return list(self._parameters)

    def parameters(self, names: Sequence[str]) -> dict[int, Parameter]:
        """Return the parameters by position, bound to ``names`` (none if they are not bound)."""
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
        anchors.let_torch_swap(self.fake_inputs, self.context)

    def tracing_anew(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context like Dynamo's that knows nothing of earlier compilations."""
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
        """Return the modules that the graph was traced through: classes in full, by name relative to the frame."""
        stacks = (node.meta.get("nn_module_stack") or {} for node in _nodes(self.module))
        entries = (entry for stack in stacks for entry in stack.values())
        return {split_source(path)[1]: class_name(owner) for path, owner in entries}

    def quantized_weights(self, inputs: Sequence[Any]) -> Iterator[tuple[str, str, torch.dtype]]:
        """Yield the parameters of wrapper subclasses that hold integers: module relative to the frame, class, dtype."""
        for index, source in self._parameters.items() if inputs else ():
            held = [x.dtype for x in fakes.wrapped_tensors(inputs[index]) if x.ndim > 1]
            if held and not (held[0].is_floating_point or held[0] == torch.bool):
                yield split_source(source)[1].rpartition(".")[0], type(inputs[index]).__name__, held[0]

    @property
    def spread(self) -> bool:
        """Whether its calls run collectives, with those of other ranks: the graph has some, or parameters in shards."""
        return self._sharded or any("c10d" in str(node.target) for node in self.module.graph.nodes)

    def decisions(
        self, situation: Situation, settings: Settings, names: Sequence[str] = (), stacks: Stacks = frozenset()
    ) -> Decisions:
        """Return all that decides about this graph in ``situation``, with parameters called ``names``.

        Args:
            stacks: of the models that these are bound in; without names, those of the graph itself count.
        """
        policy, _ = situation.policy.of(self.families)
        return Decisions(
            policy=policy,
            settings=settings,
            region=situation.region,
            regions=self.regions,
            stacks=stacks if any(names) else self._stacks,
            amax_group=situation.amax_group,
            conditions=situation.conditions,
        )

    def possible_names(self, names: Sequence[str]) -> list[str]:
        """Return every name that a site may have, if the parameters are called ``names``."""
        stacks = (node.meta.get("nn_module_stack") or {} for node in _nodes(self.module))
        modules = dict.fromkeys(split_source(path) for stack in stacks for path, _ in stack.values())
        return possible_names(self.parameters(names).values(), modules)

    @functools.cached_property
    def has_subgraphs(self) -> bool:
        """Whether a higher-order op has a graph of its own, whose sites keep the names that they were compiled with."""
        return any(isinstance(child, fx.GraphModule) for child in self.module.children())

    def identity(self) -> str:
        """Return the properties that decide how this graph is rewritten, beside its code: modules, parameters."""
        digest = hashlib.sha256()
        digest.update(repr((self._parameters, sorted(self.buffers), sorted(self.gathered))).encode())
        digest.update(repr(self.parameter_facts).encode())
        for node in _nodes(self.module):
            stack = node.meta.get("nn_module_stack") or {}
            path = next(reversed(stack.values()))[0] if stack else ""
            digest.update(f"{path} {(node.meta.get('custom') or {}).get(REGION_KEY)};".encode())
        return digest.hexdigest()


def class_name(owner: type | str) -> str:
    """Return the full name of a class. Dynamo's graph has some classes as names."""
    return owner if isinstance(owner, str) else f"{owner.__module__}.{owner.__qualname__}"


def _called_classes() -> Iterator[type]:
    """Yield the class of the module whose call is compiled: no node of Dynamo's graph is in its stack."""
    for module, called in dynamo.modules_of_frame():
        if called:
            yield type(module)


def module_classes(module: fx.GraphModule) -> Iterator[Any]:
    """Yield the classes of the modules that a graph was traced through (or their full names), the outer ones first."""
    for node in module.graph.nodes:
        for _, owner in (node.meta.get("nn_module_stack") or {}).values():
            yield owner


def _nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes of a graph, and those of the bodies of its higher-order ops (checkpointed functions are such)."""
    for each in module.modules():
        if isinstance(each, fx.GraphModule):
            yield from each.graph.nodes


def regions_in(module: fx.GraphModule) -> dict[Any, Region | Fp8GraphError]:
    """Return the autocast regions in a graph, by their text, with the recipes that their names have now."""
    regions: dict[Any, Region | Fp8GraphError] = {}
    for node in _nodes(module):
        given = (node.meta.get("custom") or {}).get(REGION_KEY)
        if given is not None and given not in regions:
            try:
                regions[given] = region_of(given)
            except Fp8GraphError as error:  # the pass `assign` raises it, and says where
                regions[given] = error
    return regions


class Situation(NamedTuple):
    """Everything beside the graph, and the names of its parameters, that decides about a call: objects made before it.

    A forward that activation checkpointing repeats has the situation of its first time.
    """

    policy: ResolvedPolicy
    region: Region | None  # around the call
    amax_group: str | None  # process group of the amax reduction
    conditions: tuple[Condition, ...]  # what stores say of the call; the last field, see ``Recomputations``

    @property
    def passes(self) -> bool:
        """Whether it is an exception, which a report does not show beside the rule."""
        return any(each.passes for each in self.conditions)

    def without(self, *, passing: bool) -> Situation:
        """Return the same situation without the conditions that pass, or without those that last."""
        return self._replace(conditions=tuple(each for each in self.conditions if each.passes != passing))

    def under(self, *conditions: Condition) -> Situation:
        """Return the same situation under more conditions."""
        return self._replace(conditions=(*self.conditions, *conditions)) if conditions else self
