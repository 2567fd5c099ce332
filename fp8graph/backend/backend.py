"""The backend that ``torch.compile`` calls, as an object."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final, TypeVar, Unpack

import torch
from torch import fx

from fp8graph.backend.compiled_graph import CompiledGraph, CompiledGraphs, Variants
from fp8graph.backend.coverage import (
    EagerFrames,
    adopt_in_time,
    check_compiled,
    check_dequantized,
    check_faster,
    check_quantized_once,
    check_read,
    check_rules,
    note_dequantized,
)
from fp8graph.backend.dynamo_graph import DynamoGraph, Situation, class_name
from fp8graph.backend.inductor_passes import Stopwatch, compile_backward, compile_dialect, run_eagerly, source_hash
from fp8graph.compat import dynamo
from fp8graph.errors import expect
from fp8graph.ir.settings import Settings, SettingsArguments, choices, show_arguments
from fp8graph.passes import METHODS, STORES, BackendMethods, MethodArguments
from fp8graph.recipes import RecipeLike
from fp8graph.recipes.autocast import current_region
from fp8graph.recipes.policy import Policy
from fp8graph.report import Report
from fp8graph.runtime.names import Names
from fp8graph.runtime.policies import Policies, PolicyFile, PolicyLike, Schedule, tables
from fp8graph.runtime.rank_groups import RankGroups
from fp8graph.runtime.staleness import Epoch, WeightUpdates
from fp8graph.runtime.state_dict import VERSION, VERSION_KEY, BackendState, loader
from fp8graph.runtime.stores import Services, Store

_Store = TypeVar("_Store", bound=Store)


class BackendArguments(MethodArguments, SettingsArguments, total=False):
    """The keyword arguments of :class:`Backend` but for ``recipe``."""


class Backend(BackendMethods):
    """An FP8 backend for ``torch.compile(model, backend=Backend(...))``.

    Args:
        policy: a :class:`Policy`, its dict form, or the path of a policy file. Default: FP8 for every linear
            except heads and MoE routers. They are found by their usual names and by the rules of the model's
            family (``fp8graph.models.FAMILIES``, detected from the modules' classes).
        recipe: the recipe of that default policy: "mxfp8" if the target or this machine's GPU is an NVIDIA one
            that supports it, else "tensorwise". Together with ``policy``, it replaces the policy's default recipe.
        settings: the fields of :class:`~fp8graph.ir.settings.Settings`: strict, compiler, inductor_options, target,
            cache_weights, save, save_activations_in_fp8, fuse_linears, accumulate_wgrad, small_tiles,
            batch_invariant.
        observe, guard: the arguments of :meth:`observe` and :meth:`guard`, which are then called; ``{}``: with their
            defaults. A policy file has them as tables; what is given here replaces the file's. "to_jsonl" is a file to
            which ``observe`` appends each observed step.

    A backend keeps no model and no compiled code alive. Compiled code, the data prepared for its calls and the FP8
    copies of weights are freed with the model and by ``torch._dynamo.reset()``. Scaling state, and the names that
    :meth:`bind` learned, are freed only with the parameters, so that a model that is compiled again finds its scales.
    The report keeps its rows for the last 256 freed graphs, and lists graphs that were alike once.

    Raises:
        ConfigError, UnsupportedRecipeError: (``ValueError``) for arguments that cannot be used.
        TypeError: for an argument that does not exist.
    """

    def __init__(
        self,
        policy: PolicyLike | None = None,
        *,
        recipe: RecipeLike = None,
        **settings: Unpack[BackendArguments],
    ) -> None:
        others: dict[str, Any] = {**settings}
        arguments = Settings.taken_from(others)
        of_methods = {name: others.pop(name, None) for name in METHODS}
        if unknown := sorted(others):
            names = ("policy", "recipe", *METHODS, *Settings.names())
            raise TypeError(f"Backend has no argument {unknown[0]!r}{choices('Arguments', unknown[0], names)}")
        calls: dict[str, Callable[..., Any]] = {name: getattr(self, name) for name in METHODS}
        parameters = {name: [*inspect.signature(call).parameters] for name, call in calls.items()}
        file = PolicyFile.of(policy, parameters)
        with file.named() if file.settings else nullcontext():
            self.settings: Final = Settings(**{**file.settings, **arguments})
        self.stopwatch: Final = Stopwatch()
        epoch, policies, steps = Epoch(), Policies(self.settings.hardware), WeightUpdates()
        self.services: Final = Services(
            settings=self.settings,
            epoch=epoch,
            names=Names(epoch),
            policies=policies,
            schedule=Schedule(policies, steps),
            steps=steps,
            groups=RankGroups(),
            compile=self.compile_weights,
            kinds=STORES,
        )
        self.programs: Final = CompiledGraphs()
        self._eager_frames: Final = EagerFrames(self)
        self.runs = False  # a graph was called
        self.said: set[str] = set()  # the warnings that it gives once
        self.dequantized: dict[str, str] = {}  # by name, the layers that dequantize their weights: the weights' class
        self._checked = False  # all graphs of a step were
        self._agreed: set[str] = set()  # the uses for which the policy was compared with that of other ranks
        given = tables(parameters, of_methods)
        with file.named():
            policies.set(file.policy, recipe)
            for name, values in file.watch.items():
                if name not in given:
                    calls[name](**values)
        for name, values in given.items():
            calls[name](**values)

    def __repr__(self) -> str:
        """Name the policy alone: a debugger and a failed test print a backend when it is half made."""
        policy = self.policy
        default, rules = getattr(policy.default, "value", policy.default), len(policy.rules)
        return f"<fp8graph.Backend, default {default!r:.60}, {rules} rule{'s' * (rules != 1)}>"

    @property
    def policy(self) -> Policy:
        """The policy in force now."""
        return self.services.policies.current

    @property
    def names(self) -> Names:
        """The names of the parameters of bound models."""
        return self.services.names

    @property
    def steps(self) -> WeightUpdates:
        """The updates of parameters that it knows of."""
        return self.services.steps

    @property
    def weights(self) -> Any:
        """The store of FP8 copies of weights: their ``bytes``, and how many it has ``quantized`` so far."""
        return self.stores["weights"]

    @property
    def stores(self) -> Mapping[str, Store]:
        return self.services.stores

    def store(self, kind: type[_Store]) -> _Store:
        """Return the store of a feature (``fp8graph.passes.STORES``): the tensors that it keeps for graphs."""
        return self.services.store(kind)

    @property
    def inner_compile(self) -> Callable[..., Any] | None:
        """The compiler that compile_fx calls for each graph after the passes; None: Inductor."""
        return run_eagerly if self.settings.compiler == "eager" else None

    def compile_weights(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Return a function that quantizes weights. A CPU runs the reference: it has no launches to save."""
        on_cpu = all(x.device.type == "cpu" for x in inputs)
        return module if on_cpu or self.settings.compiler == "eager" else compile_dialect(module, inputs, self.settings)

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Compile one Dynamo graph."""
        if dynamo.compiles_backward():
            return compile_backward(module, example_inputs, self.settings, self.inner_compile)
        return self.compiled(DynamoGraph(module, example_inputs), example_inputs)

    def compiled(
        self, graph: DynamoGraph, inputs: Sequence[Any] | None, variants: Variants | None = None
    ) -> CompiledGraph:
        """See :class:`CompiledGraph`."""
        self._eager_frames.compiled(graph.frame)
        self.services.groups.detect_stage()
        self._agree(graph)
        for model, is_compiled in dynamo.modules_of_frame():
            adopt_in_time(self, model)
            check_read(self, model)
            self.services.steps.adapters.watch(model, compiled=is_compiled)
        check_quantized_once(self, graph.layers().items())
        note_dequantized(self, graph.quantized_weights(inputs or ()))
        compiled = CompiledGraph(self, graph, inputs, variants)
        self.programs.add(compiled)
        return compiled

    def _agree(self, graph: DynamoGraph) -> None:
        """Compare policy and settings with those of the other ranks, once for training and once for inference.

        It waits for them where they run collectives that must fit each other, in the graph or after a step. A rank that
        evaluates alone is not compared at all. A later policy is not compared: ranks need not compile again at the same
        step of a schedule.
        """
        kind = "training" if graph.gradients else "inference"  # one rank may compile for inference alone
        if kind in self._agreed or not (graph.gradients or graph.spread):
            return
        self._agreed.add(kind)
        situation = Situation(self.services.policies.now, current_region(), None, ())
        waits = graph.spread or graph.decisions(situation, self.settings).reduces_amaxes
        self.services.groups.compare(self.decides(training=graph.gradients), kind, waits=waits)

    def decides(self, *, training: bool) -> str:
        """Return all that decides about the rewriting of graphs, line by line, for a comparison with other ranks."""
        services, lines = self.services, [*self.services.policies.lines()]
        if services.schedule.runs and training:
            lines.append(f"step {services.schedule.step()}")
        lines += [f"{name} {value}" for name, value in self.settings.decisions().items()]
        lines += [f"torch {torch.__version__}", f"fp8graph {source_hash()[:12]}"]
        return re.sub(" at 0x[0-9a-f]+", "", "\n".join(lines))  # a function has another address on each rank

    def set_policy(self, policy: PolicyLike | None, *, recipe: RecipeLike = None) -> None:
        """Use another policy from the next call on. Graphs that it changes are then compiled again.

        It is cheap if the new policy decides as the last one did: a training loop can call it at every step, with
        ``policy.at_step(step)``. A policy with a schedule advances by itself, with the steps of optimizers. Graphs keep
        their code for the last four policies that they ran under: going back to one of these compiles nothing.
        """
        self.services.policies.set(policy, recipe)

    def bind(self, model: torch.nn.Module, *, name: str = "") -> None:
        """Learn the full names of ``model``'s parameters, by identity.

        Dynamo names modules relative to the frame that it compiles. Bind the model when layers are compiled one
        by one, when a step function is compiled, or when the forward has graph breaks, so that policies and
        reports see the modules' full names. ``name`` tells models apart that share this backend: the names of their
        layers then begin with it, for policies, too ("teacher.model.layers.0").
        """
        expect("Backend.bind", "model", model, torch.nn.Module, "a model, an nn.Module")
        expect("Backend.bind", "name", name, str, "a string")
        check_quantized_once(self, ((fqn, class_name(type(module))) for fqn, module in model.named_modules()))
        check_read(self, model)
        self.names.bind(model, name)
        for store in self.stores.values():
            store.rename(self.names)
        self.services.steps.adapters.watch(model)

    def state_dict(self) -> BackendState:
        """Return the scaling state: the scale and amax history of each tensor whose recipe is stateful.

        A flat dict of tensors. If no recipe is stateful, it contains only a version. ``torch.save`` writes it as a
        dict (loads with ``weights_only=True``), safetensors takes ``dict(state)``, and ``torch.distributed.checkpoint``
        takes the Backend itself: ``dcp.save({"model": ..., "fp8graph": backend})``, then ``dcp.load`` of the same keys
        into another Backend, before its first call or later, on any number of ranks. It refuses a state that differs
        from rank to rank (``reduce_amax=False``, an ``amax_reduction_group`` of some ranks).

        Raises:
            StateError: two layers have one name (see :meth:`bind`).
        """
        shared, stores = self.services, self.stores.values()
        of_stage, others = (
            {name: x for store in stores if store.of_stage is kind for name, x in store.entries().items()}
            for kind in (True, False)
        )
        entries = {VERSION_KEY: torch.tensor([VERSION]), **of_stage, **shared.schedule.entries(), **others}
        not_shared = next(filter(None, (store.not_shared() for store in stores)), "")
        place = None if shared.groups.in_stage is None else shared.groups.in_stage.stage
        return BackendState(entries, not_shared, place, of_stage)

    def load_state_dict(self, state_dict: Mapping[str, Any] | BackendState) -> None:
        """Load the result of :meth:`state_dict`, all or nothing, before the first step or later.

        Entries of layers that are not compiled yet are kept until they are. ``str(backend.report)`` lists the entries
        that nothing has used.

        Raises:
            StateError: the state has another version or is truncated, a scale is not finite and positive, or a layer
                that is already compiled is missing. The message says which; the old state is then intact.
        """
        loader(state_dict, self.services.keepers)()
        self.services.steps.refresh()  # their scales have changed

    def check_layers(self) -> None:
        """Raise for globs of :meth:`observe` and :meth:`guard` that match no layer of the bound models.

        Raises:
            ConfigError: names the glob.
        """
        for store in self.stores.values():
            store.check_layers(self)

    @property
    def pass_seconds(self) -> float:
        """Time in fp8graph's own passes so far."""
        return self.stopwatch.seconds

    @property
    def report(self) -> Report:
        """A report on every graph compiled so far, including those from a warm compile cache or of freed models."""
        of_stores: dict[str, Any] = {}
        for store in self.stores.values():
            for field, values in store.report().items():
                of_stores[field] = of_stores[field] + values if field in of_stores else values
        return Report(
            graphs=self.programs.views(),
            forgotten=self.programs.forgotten,
            policy=self.policy,
            identities=self.services.policies.identities(),
            eager_frames=self._eager_frames.texts(),
            skipped_frames=dynamo.skipped_frames(self._eager_frames.created),
            **self.names.in_no_graph(),
            pass_seconds=self.pass_seconds,
            weights_until_updated=self.settings.keeps_weights(training=True),
            **of_stores,
        )

    def check_step(self) -> None:
        """Say, or in strict mode raise, what no graph of a step has. Once: graphs are checked as they are compiled."""
        if self._checked:
            return
        check_compiled(self, None)
        if self.settings.strict:
            self.report.check()
        check_rules(self)
        check_dequantized(self)
        check_faster(self)
        self._checked = True

    def called(self, *, again: bool) -> None:
        """Note a call of a graph, ``again`` or for the first time."""
        self.runs = True
        if again and self.settings.refuses_eager and self._eager_frames.texts():
            self.report.check()

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that make another Backend like this one: its settings, and the policy in force now."""
        settings: dict[str, Any] = {name: getattr(self.settings, name) for name in Settings.names()}
        return {"policy": self.services.policies.portable, **settings}  # GPU and family decide again where it is loaded

    def refresh_weights(self) -> None:
        """Quantize every weight again before its next use.

        By default no write needs this call. Where no gradients are computed on a GPU, it makes seen at once what was
        written through ``.data`` or by another process; without it, the numbers of all weights are looked at in one of
        64 calls. With ``cache_weights="update"``, call it after each write that is neither a step of an optimizer nor
        in place.
        """
        self.services.steps.refresh()

    def reset(self) -> None:
        """``torch._dynamo.reset()`` calls this: the compiled code is then gone, and Dynamo counts frames anew."""
        self._eager_frames.reset()

    def backends_for(self, _options: Mapping[str, Any]) -> Backend:
        """Return this backend itself, as code compiled by name asks for the backends of its options."""
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> Backend:
        """Return this backend itself: a copied model (EMA) shares compiled code and report with the original."""
        return self

    def __reduce__(self) -> tuple[Callable[..., Backend], tuple[dict[str, Any], bytes]]:
        """Pickle the settings and the scaling state with the model, which is compiled again where it is loaded."""
        # as bytes: torch sends tensors to a process that it starts by their memory, which would be gone by then
        return _restored, (self.arguments(), pickle.dumps(self.state_dict()))


def _restored(arguments: dict[str, Any], state: bytes) -> Backend:
    backend = Backend(**arguments)
    backend.load_state_dict(pickle.loads(state))
    return backend


show_arguments(Backend, BackendArguments, dict.fromkeys(METHODS) | Settings.defaults())
