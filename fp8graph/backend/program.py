"""One Dynamo graph and its compiled variants: what ``Backend`` returns to torch.

The same graph may run under several autocast regions opened outside the compiled code, for several layers
(per-layer compilation shares one graph), and under a changed policy. None of these is visible to Dynamo's
guards, so the callable holds one variant per situation and picks it at call time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8graph.backend.codegen import accelerator_of, add_spare_inputs, copy_dynamo_graph, run_eagerly, with_taken_inputs
from fp8graph.backend.foresee import spare_inputs
from fp8graph.backend.inductor_passes import JointPass, LowerPass, TooFewInputs, source_hash
from fp8graph.backend.renaming import Decided
from fp8graph.backend.stored import Stored, read
from fp8graph.compat import distributed, dynamo, fakes, inductor
from fp8graph.errors import Fp8GraphError
from fp8graph.hardware.roofline import launches_are_replayed
from fp8graph.ir.compilation import Compilation, Findings
from fp8graph.ir.extra_inputs import PageLayout, SpareInputs
from fp8graph.ir.places import Parameter
from fp8graph.models.general import families_of
from fp8graph.recipes import DelayedScaling, Recipe, has_code
from fp8graph.recipes.autocast import REGION_KEY, amax_group, current_region, region_recipe
from fp8graph.recipes.policy import Policy
from fp8graph.report import GraphView
from fp8graph.report.logs import announce
from fp8graph.runtime.call import Prepared, PreparedCalls
from fp8graph.runtime.recomputation import Recomputations

if TYPE_CHECKING:
    from fp8graph.backend.backend import Backend
from fp8graph.backend.situation import Situation, region_text


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Variant:
    """A compiled graph under the names of one layer."""

    run: Callable[..., Any]
    spares: int  # inputs after Dynamo's: copies of weights, pages, and those that nobody took
    decided: Decided
    reduces: bool  # takes part in reductions of amaxes, even if this graph has none to give

    @property
    def findings(self) -> Findings:
        return self.decided.findings


class Program:
    """A callable with the signature of the Dynamo graph."""

    def __init__(self, backend: Backend, module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self._backend = backend
        self._module = module
        self._tracing_context = TracingContext.try_get()
        placeholders = module.graph.find_nodes(op="placeholder")
        self._sources = tuple(map(dynamo.source_name, placeholders))
        self._parameters = {
            index: source
            for index, (source, x) in enumerate(zip(self._sources, example_inputs, strict=True))
            if isinstance(x, torch.nn.Parameter)
        }
        whole = distributed.gathered_by_fsdp()
        self._gathered = frozenset(index for index in self._parameters if id(example_inputs[index]) in whole)
        # Fake inputs for variants that are compiled later; the real ones must not be kept alive.
        self._fake_inputs = [
            fakes.fake_input(node, x, self._tracing_context)
            for node, x in zip(placeholders, example_inputs, strict=True)
        ]
        self._compiled: dict[Situation, list[_Variant]] = {}
        self._variants: dict[tuple[Situation, tuple[str, ...]], _Variant] = {}  # by the names of the parameters
        self._families = tuple(families_of(_module_classes(module)))
        self._gradients = torch.is_grad_enabled()
        self._recomputations = Recomputations()
        self._empty = torch.empty(0, device=accelerator_of(example_inputs))  # for inputs that nobody took
        self._prepared = PreparedCalls(backend.epoch, list(self._parameters))
        self._calls = 0
        self._variant(self._situation(), self._names(example_inputs), example_inputs)

    @property
    def views(self) -> list[GraphView]:
        """The report's view of each variant, once for each layer that runs it."""
        return [variant.decided.view for variant in self._variants.values()]

    def __call__(self, *args: Any) -> Any:
        if fakes.called_to_trace(args):
            return self._run_on_fakes(args)
        if self._backend.strict:
            self._calls += 1
            if self._calls > 1:  # every graph of the first step is known now
                self._backend.check_strictly(everything=self._calls == 2)
        call = self._prepared.get(args, (current_region(), amax_group())) or self._prepare(args)
        if call.pages is None:
            return call.run(*args, *call.more)
        return self._run_with_state(call, args)

    def _prepare(self, args: Sequence[Any]) -> Prepared:
        """Find what a call needs, and keep it for the calls that will need the same."""
        situation, names = self._situation(), self._names(args)
        variant = self._variants.get((situation, names))
        if variant is None:
            context = self._tracing_context
            with tracing(context) if context is not None else contextlib.nullcontext():
                variant = self._variant(situation, names, self._fake_inputs)
        backend, findings, epoch = self._backend, variant.findings, self._backend.epoch.now
        self._take_part(variant.reduces, args)
        pages = backend.state.tensors(findings.pages, args, backend.names) if findings.pages else []
        if pages and self._gradients:
            backend.state.recorded_by(situation.amax_group)
        weights = backend.weights.tensors(findings.weights, args, self._pages_of(args), backend.compile_weights)
        # without copies, pages and names that decide, any parameters will do
        by_name = bool(names) and backend.may_rewrite(situation.region, self._regions())
        known = bool(findings.weights or pages or by_name)
        call = Prepared(
            run=variant.run,
            more=[*weights, *pages, *[self._empty] * (variant.spares - len(weights) - len(pages))],
            pages=slice(len(weights), len(weights) + len(pages)) if pages or variant.reduces else None,
            layouts=findings.pages,
            reduces=variant.reduces,
            epoch=epoch,
            parameters=self._prepared.ids(args) if known else (),
            unchanged=backend.weights.unchanged(findings.weights, args),
        )
        self._prepared.keep(args, (situation.region, situation.amax_group), call)
        return call

    def _run_with_state(self, call: Prepared, args: Sequence[Any]) -> Any:
        """Run a graph that reads scaling state, and may record in it."""
        self._take_part(call.reduces, args)
        where = cast(slice, call.pages)
        more, pages = call.more, list(call.more[where])
        if pages and self._gradients:
            more = [*more[: where.start], *self._recomputations.pages(call.layouts, pages, args), *more[where.stop :]]
        results = call.run(*args, *more)
        if call.reduces:
            self._backend.state.watch(results, pages)
        return results

    def _take_part(self, reduces: bool, args: Sequence[Any]) -> None:
        """Record the amaxes of the last step on all ranks, before this call reads scales."""
        if reduces:  # reentrant checkpointing trains in backward only
            self._backend.state.reduces(str(amax_group()), accelerator_of(args))
            self._backend.state.commit()

    def _run_on_fakes(self, args: Sequence[Any]) -> Any:
        """A call that only asks what comes out: no scale, no copy of a weight is for these parameters.

        DDPOptimizer (``DistributedDataParallel`` under Dynamo) cuts a graph into buckets, and calls each part on fake
        tensors before it compiles the next.
        """
        variant = self._variants[self._situation(), self._names(args)]
        with cast(FakeTensorMode, detect_fake_mode(args)):
            taken = variant.findings.stand_ins()
            dead = [torch.empty(0, device=self._empty.device) for _ in range(variant.spares - len(taken))]
            return variant.run(*args, *taken, *dead)

    def _pages_of(self, args: Sequence[Any]) -> Callable[[Sequence[PageLayout]], list[torch.Tensor]]:
        return lambda layouts: self._backend.state.tensors(layouts, args, self._backend.names)

    def _situation(self) -> Situation:
        return Situation(policy=self._policy[1], region=current_region(), amax_group=amax_group())

    def _names(self, args: Sequence[Any]) -> tuple[str, ...]:
        """The FQNs that the graph's parameters are bound to, "" where they are not; () if nothing is bound."""
        names = self._backend.names
        return tuple(names.get(args[index]) for index in self._parameters) if names else ()

    @property
    def _policy(self) -> tuple[Policy, str]:
        return self._backend.policy_of(self._families)

    def _compilation(self, situation: Situation, names: tuple[str, ...], spares: int = 0) -> Compilation:
        first = len(self._sources)
        bound = names or ("",) * len(self._parameters)
        return Compilation(
            policy=self._policy[0],
            hardware=self._backend.hardware,
            cuda_graphs=launches_are_replayed(self._backend.inductor_options),
            region=situation.region,
            sources=self._sources,
            records_amaxes=self._gradients,
            amax_group=situation.amax_group,
            spares=SpareInputs(indices=range(first, first + spares)),
            cache_weights=self._backend.cache_weights,
            group=self._backend.group,
            save=self._backend.save,
            save_activations_in_fp8=self._backend.save_activations_in_fp8,
            gathered=self._gathered,
            parameters={
                index: Parameter(source=source, index=index, bound=name)
                for (index, source), name in zip(self._parameters.items(), bound, strict=True)
            },
        )

    def _variant(self, situation: Situation, names: tuple[str, ...], inputs: Sequence[Any]) -> _Variant:
        """The variant for a situation and for parameters called ``names``: one that was decided alike, or a new one."""
        known = self._compiled.setdefault(situation, [])
        compilation = self._compilation(situation, names)
        for other in known:
            if (decided := other.decided.under(compilation)) is not None:
                variant = dataclasses.replace(other, decided=decided)
                break
        else:
            known.append(variant := self._compile(situation, names, inputs))
            announce(variant.decided.view)
        self._variants[situation, names] = variant
        if self._backend.strict:
            self._backend.check_records(variant.decided.view.gemms)
        return variant

    def _compile(self, situation: Situation, names: tuple[str, ...], inputs: Sequence[Any]) -> _Variant:
        backend = self._backend
        options = dict(backend.inductor_options)
        identity = self._identity(situation, names)
        recipes = self._recipes(situation)
        spares = spare_inputs(self._module, self._compilation(situation, names), training=self._gradients)
        first = options.pop("joint_custom_pre_pass", inductor_config.joint_custom_pre_pass)
        if backend.may_rewrite(situation.region, self._regions()):
            options = {**inductor.codegen_patches(backend.hardware, inputs), **options}
        while True:
            joint = JointPass(
                self._compilation(situation, names, spares),
                None if any(has_code(r) for r in recipes) else identity,
                first=first,
                check=backend.check_records if backend.strict else None,
                stopwatch=backend.stopwatch,
            )
            try:
                compiled = self._run_compile_fx(joint, options, inputs, spares, inner_compile=backend.inner_compile)
                break
            except TooFewInputs as found:
                spares = found.wanted
        stored = self._stored(situation, names, joint, self._key(identity, options, spares), spares)
        delayed_scaling = any(isinstance(r, DelayedScaling) and r.reduce_amax for r in recipes)
        return _Variant(
            run=compiled,
            spares=spares,
            decided=Decided.of(stored.findings, self._compilation(situation, names), stored.view),
            reduces=self._gradients and delayed_scaling and situation.amax_group is not None,
        )

    def _run_compile_fx(
        self,
        joint: JointPass,
        options: dict[str, Any],
        inputs: Sequence[Any],
        spares: int,
        *,
        inner_compile: Callable[..., Any] | None,
    ) -> Callable[..., Any]:
        options = dict(options)
        first = options.pop("post_grad_custom_pre_pass", inductor_config.post_grad_custom_pre_pass)
        patches = {
            **options,
            "joint_custom_pre_pass": joint,
            "post_grad_custom_pre_pass": LowerPass(source_hash(), first, self._backend.stopwatch),
        }
        if inner_compile is not None:
            patches["force_disable_caches"] = True
        module = copy_dynamo_graph(self._module, self._gradients)  # compile_fx takes it; Dynamo reads its graph again
        more = add_spare_inputs(module, spares, inputs)
        inner = with_taken_inputs(inner_compile or compile_fx_inner)
        return cast(
            Callable[..., Any], compile_fx(module, [*inputs, *more], config_patches=patches, inner_compile=inner)
        )

    def _trace(self, situation: Situation, names: tuple[str, ...], spares: int) -> JointPass:
        """Run the passes without code generation: for a report that was not kept, for ``.module``."""
        joint = JointPass(
            self._compilation(situation, names, spares), "", keep_module=True, stopwatch=self._backend.stopwatch
        )
        context = self._tracing_context
        fresh = TracingContext(context.fake_mode) if context is not None else None
        with torch.set_grad_enabled(self._gradients), tracing(fresh) if fresh is not None else contextlib.nullcontext():
            self._run_compile_fx(joint, {}, self._fake_inputs, spares, inner_compile=run_eagerly)
        return joint

    def _stored(self, situation: Situation, names: tuple[str, ...], joint: JointPass, key: str, spares: int) -> Stored:
        """What is known of a variant. On a compile cache hit no pass ran: that was kept beside the code."""
        keeps = self._backend.compiler == "inductor" and joint.uuid() is not None
        found = read(key) if keeps and joint.records is None else None
        if found is None:
            if joint.records is None:
                joint = self._trace(situation, names, spares)
            view = GraphView(
                name=self._name(),
                training=joint.training,
                inputs=joint.inputs,
                gemms=joint.records or (),
                collectives=joint.collectives,
                before=joint.before,
                after=list(joint.stages.values())[-1],
                stages=joint.stages,
                policy=situation.policy,
            )
            found = Stored(view=view, findings=joint.findings)
            if keeps:
                found.write(key)
        inputs = found.findings.inputs

        def module() -> fx.GraphModule:
            return cast(fx.GraphModule, self._trace(situation, names, inputs).module)

        return dataclasses.replace(found, view=dataclasses.replace(found.view, load_module=module))

    def _name(self) -> str:
        kind = "training" if torch.is_grad_enabled() else "inference"
        for node in self._module.graph.nodes:
            if stack := node.meta.get("nn_module_stack"):
                owner = next(iter(stack.values()))[1]
                return f"{owner if isinstance(owner, str) else owner.__name__} {kind}".rpartition(".")[2]
        return f"function {kind}"

    def _recipes(self, situation: Situation) -> set[Recipe]:
        """Every recipe that may apply to a GEMM of this graph."""
        found: set[Recipe] = set(self._policy[0].recipes())
        for region in (situation.region, *self._regions()):
            with contextlib.suppress(Fp8GraphError):  # `assign` says so, and where
                recipe = region_recipe(region)
                if isinstance(recipe, Recipe):
                    found.add(recipe)
        return found

    def _regions(self) -> set[Any]:
        custom = (node.meta.get("custom") or {} for node in self._module.graph.nodes)
        return {values.get(REGION_KEY) for values in custom}

    def _identity(self, situation: Situation, names: tuple[str, ...]) -> str:
        """What torch's cache key does not cover: our code, the policy, and the names that it is applied to."""
        digest = hashlib.sha256(source_hash().encode())
        backend = self._backend
        settings = backend.strict, backend.cache_weights, backend.save, backend.save_activations_in_fp8, backend.group
        replayed = launches_are_replayed(backend.inductor_options)
        digest.update(repr((situation, names, backend.hardware, settings, replayed)).encode())
        regions = sorted(str(region) for region in self._regions() if region is not None)
        digest.update(repr([(r, region_text(r)) for r in regions]).encode())
        digest.update(repr((self._parameters, sorted(self._gathered))).encode())
        for node in self._module.graph.nodes:
            stack = node.meta.get("nn_module_stack") or {}
            path = next(reversed(stack.values()))[0] if stack else ""
            digest.update(f"{path} {(node.meta.get('custom') or {}).get(REGION_KEY)};".encode())
        return digest.hexdigest()

    def _key(self, identity: str, options: dict[str, Any], spares: int) -> str:
        """The name under which the report of this graph is kept beside torch's compiled code."""
        digest = hashlib.sha256(identity.encode())
        digest.update(self._module.code.encode())
        for x in self._fake_inputs:
            if isinstance(x, torch.Tensor):
                facts = tuple(map(str, x.shape)), tuple(map(str, x.stride())), x.dtype, x.requires_grad
                digest.update(repr((facts, str(x.device))).encode())
        state = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        digest.update(repr((state, spares, sorted((k, str(v)) for k, v in options.items()))).encode())
        return digest.hexdigest()


def _module_classes(module: fx.GraphModule) -> Iterator[Any]:
    """The classes of the modules that Dynamo's graph was traced through (or their full names), the outer ones first."""
    for node in module.graph.nodes:
        for _, owner in (node.meta.get("nn_module_stack") or {}).values():
            yield owner
