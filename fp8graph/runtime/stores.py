"""Whatever keeps tensors that graphs take beside Dynamo's inputs (``ir/extra_inputs.py``): stores, and their slots.

A store gives a slot: the tensors that the calls of one graph with one set of parameters take. As long as every slot is
fresh, the next call with the same parameters takes the same tensors again. ``passes/__init__.py`` lists the stores;
each stands beside the pass that takes its tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, fx

from fp8graph.ir.decisions import Condition
from fp8graph.ir.extra_inputs import ExtraInput
from fp8graph.ir.settings import Settings
from fp8graph.recipes import Recipe
from fp8graph.runtime.names import Names
from fp8graph.runtime.policies import Policies, Schedule, no_pass
from fp8graph.runtime.rank_groups import RankGroups
from fp8graph.runtime.recomputation import Checkpointed, Recomputations
from fp8graph.runtime.staleness import Epoch, WeightUpdates
from fp8graph.runtime.state_dict import Keeper

_T = TypeVar("_T")
Compile = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]  # a graph of dialect nodes, into a function


@dataclass(frozen=True, kw_only=True)
class CallContext:
    """The call for which slots are made.

    Attributes:
        args: the graph's inputs from Dynamo, the parameters among them.
        gradients: the graph has a backward.
        group: the name of the process group over which it reduces amaxes; None: this rank alone.
        arrived: the parameters that FSDP2 gathered in FP8, by position, with their owners.
        records: amaxes are recorded, though the graph has no backward: of weights that are quantized beside a graph.
        conditions: for which the graph was compiled, beside those of the time of the call; None: they are given.
    """

    args: Sequence[Any]
    gradients: bool
    group: str | None
    arrived: Mapping[int, Any]
    records: bool = False
    conditions: tuple[Condition, ...] | None = None


class Run:
    """One run of a graph, for slots that do something before or after it.

    Attributes:
        args: the graph's inputs from Dynamo, the parameters among them.
        inputs: the tensors that the graph gets for them.
        notes: by store: what a slot notes before a run for what it does after it.
    """

    def __init__(self, args: Sequence[Any], checkpointed: Checkpointed | None) -> None:
        self.args, self.checkpointed = args, checkpointed
        self.inputs = args
        self.notes: dict[str, Any] = {}
        self._entered: ExitStack | None = None

    def enter(self, context: AbstractContextManager[_T]) -> _T:
        """Run the graph inside of ``context``."""
        if self._entered is None:
            self._entered = ExitStack()
        return self._entered.enter_context(context)

    def leave(self) -> None:
        """Leave all of these, also after an error."""
        if self._entered is not None:
            self._entered.close()


@dataclass(kw_only=True, eq=False)
class Slot:
    """The tensors of one store in the calls of one graph with one set of parameters.

    Attributes:
        acts: :meth:`before` and :meth:`after` do something.
        tensors: in the order in which they were asked for.
        fresh: whether they serve later arguments, too, with the same parameters; None: always.
    """

    acts: ClassVar[bool] = False
    tensors: Sequence[Tensor]
    fresh: Callable[[Sequence[Any]], bool] | None = None

    def before(self, run: Run) -> Sequence[Tensor]:
        """Return the tensors for one run."""
        return self.tensors

    def after(self, run: Run, results: Any) -> None:
        """See what a run returned."""


class Store:
    """A keeper of tensors for graphs, or of what else an entry of ``passes/`` adds to a backend.

    Attributes:
        name: as extra inputs have it (``ExtraInput.store``), or the method of a backend that starts it.
        of_stage: its entries in a state dict are those of the layers of one stage of a pipeline.
    """

    name: ClassVar[str]
    of_stage: ClassVar[bool] = True

    def __init__(self, services: Services) -> None:
        """Make the store of one backend, which has ``services``."""

    @staticmethod
    def fact(parameter: Tensor, *, sharded: Any) -> Any:
        """Return the facts that passes need of a parameter (``GraphFacts.parameter_facts``); a part of the cache key.

        Args:
            sharded: the object that gathers it for each call (``compat/fsdp.py``); None for one that stays whole.
        """
        return None

    def report(self) -> Mapping[str, Any]:
        """Its numbers and lists in the report, by field; those of several stores are added up."""
        return {}

    def rename(self, names: Names) -> None:
        """Note that parameters may have been bound to other names."""

    def entries(self) -> Mapping[str, Tensor]:
        """Its entries of the backend's state dict: see :class:`~fp8graph.runtime.state_dict.Keeper`."""
        return {}

    def not_shared(self) -> str:
        """Reason why other ranks may have other entries; "" if all have the same."""
        return ""

    def recognizes(self, name: str) -> bool:
        """Return whether an entry of a state dict is one of its own."""
        return False

    def loader(self, entries: Mapping[str, Any]) -> Callable[[], None]:
        """Return a function that takes them."""
        return lambda: None

    def start(self, backend: Any, arguments: Mapping[str, Any]) -> Any:
        """Do what the method of ``backend`` that has the store's name does (``Backend.observe``)."""
        raise NotImplementedError

    @property
    def started(self) -> Sequence[Any]:
        """Whatever was started so far."""
        return ()

    def check_layers(self, backend: Any) -> None:
        """Check what was started against the bound models.

        Raises:
            ConfigError: it is for a layer that none of them has.
        """

    def first_condition(self, recipes: Collection[Recipe], parameters: Sequence[Tensor]) -> Condition | None:
        """Return the likely condition of a graph's first call with ``parameters``, for which it is compiled first.

        A slot changes it for a call by :class:`Otherwise`. ``recipes``: all that may apply in the graph.
        """
        return None

    def condition(self, *, gradients: bool) -> Condition | None:
        """Return a condition of the call of a graph that begins now; read in every call. A repetition has that of the
        call.
        """
        return None

    def arrived(self, args: Sequence[Any], positions: Iterable[int]) -> Mapping[int, Any]:
        """Return the parameters at ``positions`` that were gathered in FP8 only (``CallContext.arrived``)."""
        return {}

    def slot(self, extra_inputs: Sequence[Any], context: CallContext) -> Slot:
        """Return the slot for what a graph asks for; most give no tensors.

        Args:
            extra_inputs: of this store, the same sequence for each call of the graph.

        Raises:
            GatheredInHighPrecision: the graph does not fit what arrived.
            Otherwise: the graph was compiled for another condition.
        """
        return Slot(tensors=[])

    def forget(self, extra_inputs: Sequence[Any]) -> None:
        """Drop what is kept for the calls of a graph that is gone. Parameters and their state may live on."""


class Starter:
    """The part of a backend that starts stores. What entries of ``passes/`` add to a backend is a subclass.

    Each function of such a subclass starts the store that has its name. It also is an argument of ``Backend``, and a
    table of policy files, that call it.
    """

    @property
    def stores(self) -> Mapping[str, Store]:
        """All of them by name, each before those that depend on it."""
        raise NotImplementedError

    def start(self, name: str, **arguments: Any) -> Any:
        """Start what an entry of ``passes/`` adds to a backend, by the name of its store.

        Raises:
            ConfigError: there is no such entry.
        """
        if (store := self.stores.get(name)) is None:
            raise no_pass(name)
        return store.start(self, arguments)

    def started(self, name: str) -> Sequence[Any]:
        """Whatever that entry started so far."""
        store = self.stores.get(name)
        return () if store is None else store.started


class KeptScales(Store):
    """A store of scales that outlive a call, for weights that are quantized outside of its graph.

    Attributes:
        before_commit: called before amaxes are recorded, to stage those that were seen outside of graphs.
    """

    before_commit: list[Callable[[], None]]

    def commit(self) -> None:
        """Record the amaxes of the last step, if it is over."""
        raise NotImplementedError

    def scales_in(self, tensor: Tensor) -> Tensor:
        """Return a table of the scales in a tensor of this store, as a copy: see ``numerics.formats.table_of``."""
        raise NotImplementedError

    def stage(self, tensors: Sequence[Tensor], amaxes: Sequence[Sequence[Tensor]]) -> None:
        """Stage amaxes [] FP32, perhaps several, for each of some tensors of this store, which have one row."""
        raise NotImplementedError

    def peek(self, extra_input: Any, owners: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        """Return a copy of the tensor that a weight's graph takes as ``extra_input``, with the present scale of
        ``owners``.

        A collective if that is yet to come from ``parameters``: the same as the model has them, perhaps sharded.
        """
        raise NotImplementedError

    def input_scale_inv(self, extra_input: Any, owner: Tensor) -> Tensor | None:
        """FP32 []: of the input of the layer whose weight is ``owner``. None before training has seen any."""
        raise NotImplementedError


class GatheredInHighPrecision(Exception):
    """From now on, the parameters at ``positions`` arrive in high precision: the call needs another variant."""

    def __init__(self, positions: frozenset[int]) -> None:
        super().__init__(positions)
        self.positions = positions


class Otherwise(Exception):
    """The call needs the variant with ``condition`` (``holds``), or that without it."""

    def __init__(self, condition: Condition, *, holds: bool) -> None:
        super().__init__(condition)
        self.condition, self.holds = condition, holds


_Kind = TypeVar("_Kind", bound=Store)


@dataclass(frozen=True, kw_only=True, eq=False)
class Services:
    """The parts of a backend that its graphs and its stores use, and the stores."""

    settings: Settings
    epoch: Epoch
    names: Names
    policies: Policies
    schedule: Schedule
    steps: WeightUpdates
    groups: RankGroups
    compile: Compile
    kinds: Sequence[type[Store]] = ()  # each before those that depend on it
    recomputations: Recomputations = field(default_factory=Recomputations)
    _made: dict[str, Store] = field(default_factory=dict[str, Store])

    @functools.cached_property
    def stores(self) -> Mapping[str, Store]:
        """All of them by name, in the order of ``kinds``."""
        return {kind.name: self.store(kind) for kind in self.kinds}

    @functools.cached_property
    def keepers(self) -> Sequence[Keeper]:
        """Whatever has entries in a state dict, in the order in which they are loaded."""
        return [self.schedule, *self.stores.values()]

    @functools.cached_property
    def deciding(self) -> Sequence[Store]:
        """The stores that may have a condition."""
        return [store for store in self.stores.values() if type(store).condition is not Store.condition]

    def store(self, kind: type[_Kind]) -> _Kind:
        """Return the one store of a kind, made when it is first asked for."""
        if kind.name not in self._made:
            self._made[kind.name] = kind(self)
        return cast(_Kind, self._made[kind.name])

    def kept_scales(self, extra_inputs: Sequence[ExtraInput]) -> KeptScales | None:
        """Return the store of the scales that a weight's graph takes as ``extra_inputs``; None if it takes none."""
        return cast(KeptScales, self._made[extra_inputs[0].store]) if extra_inputs else None

    def tensors(
        self, extra_inputs: Sequence[ExtraInput], args: Sequence[Any], *, records: bool = False
    ) -> Sequence[Tensor]:
        """Return the tensors of another store that one needs to make its own.

        Args:
            extra_inputs: of one store. The same sequence finds the same tensors at once.
            args: the inputs of the graph that is about to run, the parameters among them.
            records: see :class:`CallContext`.
        """
        if not extra_inputs:
            return []
        (name,) = {each.store for each in extra_inputs}
        context = CallContext(args=args, gradients=False, group=None, arrived={}, records=records)
        return self._made[name].slot(extra_inputs, context).tensors


def accelerator_of(args: Sequence[Any]) -> torch.device:
    """Return the device that a model runs on. One on a GPU may have inputs on the CPU, too: numbers held in tensors."""
    devices = [x.device for x in args if isinstance(x, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
