"""One Dynamo graph and its compiled variants: what ``Backend`` returns to torch.

The same graph may run under several autocast regions opened outside the compiled code, for several layers
(per-layer compilation shares one graph), and under a changed policy. None of these is visible to Dynamo's
guards, so the callable holds one variant per situation and picks it at call time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8graph import compat, delayed
from fp8graph.autocast import REGION_KEY, amax_group, current_region, region_recipe
from fp8graph.errors import Fp8GraphError
from fp8graph.graph import NO_GRAD_KEY
from fp8graph.models.general import families_of
from fp8graph.observe import announce
from fp8graph.pipeline import Found, JointPass, LowerPass, source_hash
from fp8graph.policy import INHERIT, Policy
from fp8graph.recipes import DelayedScaling, Recipe, has_code
from fp8graph.report import GraphView
from fp8graph.sites import Compilation, PageLayout, Parameter, QuantizedWeight
from fp8graph.state import Recomputations

if TYPE_CHECKING:
    from fp8graph.backend import Backend


@dataclasses.dataclass(frozen=True, kw_only=True)
class Situation:
    """Everything outside the graph that decides how it is rewritten."""

    policy: str
    region: str | Recipe | None
    amax_group: str | None  # process group of the amax reduction
    names: tuple[str, ...]  # bound FQNs of the graph's parameters, "" where not bound


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a compiled graph takes after Dynamo's inputs: pages of scaling state, and FP8 copies of weights."""

    pages: Sequence[PageLayout] = ()
    weights: Sequence[QuantizedWeight] = ()


@dataclasses.dataclass(frozen=True)
class _Variant:
    """A compiled graph and what it takes after Dynamo's inputs."""

    run: Callable[..., Any]
    wanted: Wanted
    reduces: bool  # takes part in reductions of amaxes, even if this graph has none to give


class Program:
    """A callable with the signature of the Dynamo graph."""

    def __init__(self, backend: Backend, module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self._backend = backend
        self._module = module
        self._tracing_context = TracingContext.try_get()
        placeholders = module.graph.find_nodes(op="placeholder")
        self._sources = tuple(map(compat.source_name, placeholders))
        self._parameters = {
            index: source
            for index, (source, x) in enumerate(zip(self._sources, example_inputs, strict=True))
            if isinstance(x, torch.nn.Parameter)
        }
        whole = compat.gathered_by_fsdp()
        self._gathered = frozenset(index for index in self._parameters if id(example_inputs[index]) in whole)
        # Fake inputs for variants that are compiled later; the real ones must not be kept alive.
        self._fake_inputs = [
            compat.fake_input(node, x, self._tracing_context)
            for node, x in zip(placeholders, example_inputs, strict=True)
        ]
        self._variants: dict[Situation, _Variant] = {}
        self._families = tuple(families_of(_module_classes(module)))
        self._gradients = torch.is_grad_enabled()
        self._recomputations = Recomputations()
        self._calls = 0
        self.views: dict[Situation, GraphView] = {}
        situation = self._situation(example_inputs)
        self._variants[situation] = self._compile(situation, example_inputs)

    def __call__(self, *args: Any) -> Any:
        if compat.called_to_trace(args):
            return self._run_on_fakes(args)
        self._calls += 1
        if self._backend.strict and self._calls > 1:  # every graph of the first step is known now
            self._backend.check_strictly(everything=self._calls == 2)
        situation = self._situation(args)
        variant = self._variants.get(situation)
        if variant is None:
            context = self._tracing_context
            with tracing(context) if context is not None else contextlib.nullcontext():
                variant = self._variants[situation] = self._compile(situation, self._fake_inputs)
        backend, wanted = self._backend, variant.wanted
        if variant.reduces:  # before this call reads scales; reentrant checkpointing trains in backward only
            backend.state.reduces(str(situation.amax_group), accelerator_of(args))
            backend.state.commit()
        pages: list[torch.Tensor] = []
        weights: list[torch.Tensor] = []
        if wanted.pages:
            pages = backend.state.tensors(wanted.pages, args, backend.names)
            if self._gradients:
                backend.state.recorded_by(situation.amax_group)
                pages = self._recomputations.pages(wanted.pages, pages, args)
        if wanted.weights:
            weights = backend.weights.tensors(wanted.weights, args, self._pages_of(args), backend.compile_weights)
        results = variant.run(*args, *pages, *weights)
        if variant.reduces:
            backend.state.watch(results, pages)
        return results

    def _run_on_fakes(self, args: Sequence[Any]) -> Any:
        """A call that only asks what comes out: no scale, no copy of a weight is for these parameters.

        DDPOptimizer (``DistributedDataParallel`` under Dynamo) cuts a graph into buckets, and calls each part on fake
        tensors before it compiles the next.
        """
        variant = self._variants[self._situation(args)]
        with cast(FakeTensorMode, detect_fake_mode(args)):
            return variant.run(*args, *_more_fakes(variant.wanted))

    def _pages_of(self, args: Sequence[Any]) -> Callable[[Sequence[PageLayout]], list[torch.Tensor]]:
        return lambda layouts: self._backend.state.tensors(layouts, args, self._backend.names)

    def _situation(self, args: Sequence[Any]) -> Situation:
        names = self._backend.names
        bound = tuple(names.get(args[index]) for index in self._parameters) if names else ()
        return Situation(policy=self._policy[1], region=current_region(), amax_group=amax_group(), names=bound)

    @property
    def _policy(self) -> tuple[Policy, str]:
        return self._backend.policy_of(self._families)

    def _compilation(self, situation: Situation, wanted: Wanted) -> Compilation:
        first = len(self._sources) + len(wanted.pages)
        copies = sum(len(weight.outputs) for weight in wanted.weights)
        bound = situation.names or ("",) * len(self._parameters)
        return Compilation(
            policy=self._policy[0],
            hardware=self._backend.hardware,
            region=situation.region,
            sources=self._sources,
            records_amaxes=self._gradients,
            amax_group=situation.amax_group,
            page_inputs=tuple(range(len(self._sources), first)),
            cache_weights=self._backend.cache_weights,
            group=self._backend.group,
            save=self._backend.save,
            save_activations_in_fp8=self._backend.save_activations_in_fp8,
            weight_inputs=tuple(range(first, first + copies)),
            gathered=self._gathered,
            parameters={
                index: Parameter(source=source, index=index, bound=name)
                for (index, source), name in zip(self._parameters.items(), bound, strict=True)
            },
        )

    def _compile(self, situation: Situation, inputs: Sequence[Any]) -> _Variant:
        backend = self._backend
        options = dict(backend.inductor_options)
        identity = self._identity(situation)
        recipes = self._recipes(situation)
        wanted = self._wanted(situation, recipes)
        joint = JointPass(
            self._compilation(situation, wanted),
            None if any(has_code(r) for r in recipes) else identity,
            first=options.pop("joint_custom_pre_pass", inductor_config.joint_custom_pre_pass),
            check=backend.check_records if backend.strict else None,
            stopwatch=backend.stopwatch,
        )
        if backend.may_rewrite(situation.region, self._regions()):
            options = {**compat.codegen_patches(backend.hardware, inputs), **options}
        compiled = self._run_compile_fx(joint, options, inputs, wanted, inner_compile=backend.inner_compile)
        self.views[situation] = self._view(situation, joint, identity, options, wanted)
        announce(self.views[situation])
        if backend.strict:
            backend.check_records(self.views[situation].gemms)
        delayed_scaling = any(isinstance(r, DelayedScaling) and r.reduce_amax for r in recipes)
        return _Variant(compiled, wanted, self._gradients and delayed_scaling and situation.amax_group is not None)

    def _run_compile_fx(
        self,
        joint: JointPass,
        options: dict[str, Any],
        inputs: Sequence[Any],
        wanted: Wanted,
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
        extra: dict[str, Any] = {}
        if inner_compile is not None:
            patches["force_disable_caches"] = True
            extra["inner_compile"] = inner_compile
        module = copy_dynamo_graph(self._module, self._gradients)  # compile_fx takes it; Dynamo reads its graph again
        more = _more_inputs(module, wanted, inputs)
        return cast(Callable[..., Any], compile_fx(module, [*inputs, *more], config_patches=patches, **extra))

    def _wanted(self, situation: Situation, recipes: set[Recipe]) -> Wanted:
        """What the graph takes beside Dynamo's inputs: found by running the passes once without it."""
        if not (recipes if self._backend.cache_weights else any(isinstance(r, DelayedScaling) for r in recipes)):
            return Wanted()
        joint = self._trace(situation, Wanted(), only_find=True)
        return Wanted(pages=joint.pages, weights=joint.weights)

    def _trace(self, situation: Situation, wanted: Wanted, *, only_find: bool = False) -> JointPass:
        """Run the passes without code generation: to find inputs, for a cached report, for ``.module``."""
        joint = JointPass(
            self._compilation(situation, wanted),
            "",
            keep_module=True,
            only_find=only_find,
            stopwatch=self._backend.stopwatch,
        )
        context = self._tracing_context
        fresh = TracingContext(context.fake_mode) if context is not None else None
        with tracing(fresh) if fresh is not None else contextlib.nullcontext():
            with contextlib.suppress(Found):
                self._run_compile_fx(joint, {}, self._fake_inputs, wanted, inner_compile=run_eagerly)
        return joint

    def _view(
        self,
        situation: Situation,
        joint: JointPass,
        identity: str,
        options: dict[str, Any],
        wanted: Wanted,
    ) -> GraphView:
        """The report's view of a variant. On a compile cache hit no pass ran: it comes from the cache too."""

        def module() -> fx.GraphModule:
            return cast(fx.GraphModule, self._trace(situation, wanted).module)

        store = Path(cache_dir()) / "fp8graph" / f"{self._key(identity, options)}.json"
        if joint.records is None:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                stored = GraphView.from_dict(json.loads(store.read_text(encoding="utf-8")))
                return dataclasses.replace(stored, load_module=module)
            joint = self._trace(situation, wanted)
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
            load_module=module,
        )
        if self._backend.compiler == "inductor" and joint.uuid() is not None:
            with contextlib.suppress(OSError):  # a report that is not stored is traced again
                _write(store, json.dumps(view.to_dict()))
        return view

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

    def _identity(self, situation: Situation) -> str:
        """What torch's cache key does not cover: our code, the policy, and the names that it is applied to."""
        digest = hashlib.sha256(source_hash().encode())
        backend = self._backend
        settings = backend.strict, backend.cache_weights, backend.save, backend.save_activations_in_fp8, backend.group
        digest.update(repr((situation, backend.hardware, settings)).encode())
        regions = sorted(str(region) for region in self._regions() if region is not None)
        digest.update(repr([(r, _region_text(r)) for r in regions]).encode())
        digest.update(repr((self._parameters, sorted(self._gathered))).encode())
        for node in self._module.graph.nodes:
            stack = node.meta.get("nn_module_stack") or {}
            path = next(reversed(stack.values()))[0] if stack else ""
            digest.update(f"{path} {(node.meta.get('custom') or {}).get(REGION_KEY)};".encode())
        return digest.hexdigest()

    def _key(self, identity: str, options: dict[str, Any]) -> str:
        """The name under which the report of this graph is kept beside torch's compiled code."""
        digest = hashlib.sha256(identity.encode())
        digest.update(self._module.code.encode())
        for x in self._fake_inputs:
            if isinstance(x, torch.Tensor):
                facts = tuple(map(str, x.shape)), tuple(map(str, x.stride())), x.dtype, x.requires_grad
                digest.update(repr((facts, str(x.device))).encode())
        state = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        digest.update(repr((state, sorted((k, str(v)) for k, v in options.items()))).encode())
        return digest.hexdigest()


def accelerator_of(args: Sequence[Any]) -> torch.device:
    """The device that a model runs on: a number may be a tensor on the CPU beside tensors on a GPU."""
    devices = [x.device for x in args if isinstance(x, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _module_classes(module: fx.GraphModule) -> Iterator[Any]:
    """The classes of the modules that Dynamo's graph was traced through (or their full names), the outer ones first."""
    for node in module.graph.nodes:
        for _, owner in (node.meta.get("nn_module_stack") or {}).values():
            yield owner


def _region_text(region: Any) -> str:
    """What a region stands for now: a recipe registered again under one name is another recipe."""
    try:
        recipe = region_recipe(region)
    except Fp8GraphError:
        return "unknown"  # `assign` says so, and where
    return "policy" if recipe is INHERIT else repr(recipe)


def _write(path: Path, text: str) -> None:
    """Write atomically: another process may read or write the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def run_eagerly(module: fx.GraphModule, _inputs: Sequence[Any], **_kwargs: Any) -> Callable[..., Any]:
    """``compiler="eager"``: the partitioned graph as it is, dialect included, in place of compile_fx_inner."""
    placeholders = module.graph.find_nodes(op="placeholder")
    copies = module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = [placeholders.index(copy.args[0]) for copy in copies if copy.args[0] in placeholders]

    def run(args: list[Any]) -> Any:
        values = list(args)
        args.clear()  # boxed calling convention: the caller's references go
        # a page may be saved for the backward of another call, which is to read what this one writes
        with torch.autograd._unsafe_preserve_version_counter(tuple(values[index] for index in written)):
            return module(*values)

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


def compile_dialect(
    module: fx.GraphModule, inputs: list[Any], backend: Backend, inner_compile: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Generate code for a graph of dialect nodes that has no gradients."""
    options = {**compat.codegen_patches(backend.hardware, inputs), **backend.inductor_options}
    options["post_grad_custom_pre_pass"] = LowerPass(source_hash(), first=None)
    extra: dict[str, Any] = {} if inner_compile is None else {"inner_compile": inner_compile}
    return cast(Callable[..., Any], compile_fx(module, inputs, config_patches=options, **extra))


def copy_dynamo_graph(module: fx.GraphModule, gradients: bool = True) -> fx.GraphModule:
    """A copy of Dynamo's graph that AOTAutograd takes for the original.

    Nodes inside ``torch.no_grad`` regions are marked (``NO_GRAD_KEY``): nothing else tells them apart later.
    """
    graph, copies = fx.Graph(), cast("dict[fx.Node, fx.Node]", {})
    graph.output(graph.graph_copy(module.graph, copies))
    enabled = gradients
    for original, copy in copies.items():
        if hasattr(original, "_dynamo_source"):
            copy._dynamo_source = original._dynamo_source  # pyright: ignore
        if original.target is torch._C._set_grad_enabled:
            enabled = cast(bool, original.args[0])
        elif gradients and not enabled:
            copy.meta["custom"] = {**(original.meta.get("custom") or {}), NO_GRAD_KEY: True}
    result = fx.GraphModule(module, graph)
    result.meta = module.meta
    return result


def _more_inputs(module: fx.GraphModule, wanted: Wanted, inputs: Sequence[Any]) -> list[Any]:
    """Append a graph input for each page and each copy of a weight; returns the fake tensors to trace with."""
    if not wanted.pages and not wanted.weights:
        return []
    mode = detect_fake_mode(list(inputs)) or TracingContext.get().fake_mode
    assert mode is not None
    with mode:
        fakes = _more_fakes(wanted)
    last = module.graph.find_nodes(op="placeholder")[-1] if inputs else None
    for index, fake in enumerate(fakes):
        with module.graph.inserting_after(last):
            last = module.graph.placeholder(f"fp8graph_input_{index}")
        last._dynamo_source = None  # pyright: ignore[reportAttributeAccessIssue]
        # a tensor that stays where it is, like a parameter: no copy of it for a CUDA graph
        last.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
        last.meta["example_value"] = fake
    module.recompile()
    return fakes


def _more_fakes(wanted: Wanted) -> list[Any]:
    """What stands for the pages and copies of weights; in the fake mode that is on."""
    fakes: list[Any] = []
    for layout in wanted.pages:
        shape = delayed.page_shape(layout.recipe.amax_history_len, len(layout.rows))
        fakes.append(torch.empty(shape, device=layout.device))
    for weight in wanted.weights:
        made = weight.made_outputs()
        for name in weight.outputs:
            fakes.append(torch.empty(made[name].shape, dtype=made[name].dtype, device=made[name].device))
    return fakes
