"""Compile one variant of a Dynamo graph: passes, code generation, and the findings stored with the code."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from fp8graph.backend.codegen import add_spare_inputs, copy_dynamo_graph, run_eagerly, with_taken_inputs
from fp8graph.backend.coverage import check_records
from fp8graph.backend.dynamo_graph import DynamoGraph
from fp8graph.backend.foresee import spare_inputs
from fp8graph.backend.inductor_passes import JointPass, LowerPass, TooFewInputs, code_identity
from fp8graph.backend.renaming import Decided
from fp8graph.backend.shared import Shared
from fp8graph.backend.situation import Situation
from fp8graph.backend.stored import Stored
from fp8graph.compat import cache_entry, inductor
from fp8graph.compat.dynamo import has_float_input
from fp8graph.compat.inductor import compile_fx, compile_fx_inner
from fp8graph.ir.compilation import Findings, Known
from fp8graph.ir.extra_inputs import SpareInputs, TakesPart
from fp8graph.recipes import DelayedScaling, has_code
from fp8graph.report import GraphView


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """A compiled graph under the names of one layer."""

    run: Callable[..., Any]
    spares: int  # inputs after Dynamo's: those that passes took, and spare ones
    decided: Decided

    @property
    def findings(self) -> Findings:
        return self.decided.findings


Variants = dict[Situation, list[Variant]]  # of one graph


class Compiler:
    """Compiles the variants of one graph."""

    def __init__(self, shared: Shared, graph: DynamoGraph) -> None:
        self._shared = shared
        self._graph = graph

    def known(self, situation: Situation, names: tuple[str, ...], spares: int = 0) -> Known:
        """The frozen input of the passes, for this graph in ``situation`` and with parameters called ``names``."""
        graph, first = self._graph, len(self._graph.sources)
        return Known(
            policy=situation.in_force.of(graph.families)[0],
            settings=self._shared.settings,
            region=situation.region,
            sources=graph.sources,
            records_amaxes=graph.gradients,
            amax_group=situation.amax_group,
            spares=SpareInputs(indices=range(first, first + spares)),
            gathered=graph.gathered,
            facts=graph.facts,
            sent=situation.sent,
            observed=situation.observed,
            parameters=graph.parameters(names),
        )

    def variant(self, situation: Situation, names: tuple[str, ...], inputs: Sequence[Any]) -> Variant:
        """Compile the graph for ``inputs``, whose values do not matter."""
        shared, graph, settings = self._shared, self._graph, self._shared.settings
        options, first = self._options()
        identity = self._identity(situation, names)
        recipes = graph.recipes(situation.in_force.of(graph.families)[0], situation)
        spares = spare_inputs(graph.module, self.known(situation, names), training=graph.gradients)
        if situation.in_force.may_rewrite([situation.region, *graph.regions]):
            options = {**inductor.codegen_patches(settings.hardware, inputs), **options}
        kept = not any(has_code(recipe) for recipe in recipes) and not has_float_input(graph.module)
        while True:
            joint = JointPass(
                self.known(situation, names, spares),
                identity if kept else None,
                first=first,
                check=check_records if settings.strict else None,
                stopwatch=shared.stopwatch,
            )
            try:
                compiled = self._run_compile_fx(
                    joint,
                    options,
                    inputs,
                    spares,
                    inner_compile=shared.generator.inner_compile,
                    after_passes=lambda joint=joint: self._carry(situation, joint),
                )
                break
            except TooFewInputs as found:
                spares = found.wanted
        stored = self._stored(situation, names, joint, compiled, spares)
        findings = stored.findings
        delayed_scaling = any(isinstance(recipe, DelayedScaling) and recipe.reduce_amax for recipe in recipes)
        if graph.gradients and delayed_scaling and situation.amax_group is not None:
            findings = dataclasses.replace(findings, extra_inputs=(*findings.extra_inputs, TakesPart()))
        return Variant(
            run=compiled, spares=spares, decided=Decided.of(findings, self.known(situation, names), stored.view)
        )

    def _options(self) -> tuple[dict[str, Any], Any]:
        """The user's options of Inductor, and the pass that the user runs before ours."""
        options = dict(self._shared.settings.inductor)
        return options, options.pop("joint_custom_pre_pass", inductor.default_option("joint_custom_pre_pass"))

    def _run_compile_fx(
        self,
        joint: JointPass,
        options: dict[str, Any],
        inputs: Sequence[Any],
        spares: int,
        *,
        inner_compile: Callable[..., Any] | None,
        after_passes: Callable[[], None] | None = None,
    ) -> Callable[..., Any]:
        options = dict(options)
        first = options.pop("post_grad_custom_pre_pass", inductor.default_option("post_grad_custom_pre_pass"))
        patches = {
            **options,
            "joint_custom_pre_pass": joint,
            "post_grad_custom_pre_pass": LowerPass(code_identity(), first, self._shared.stopwatch),
        }
        if inner_compile is not None:
            patches["force_disable_caches"] = True
        # compile_fx takes the module; Dynamo reads its graph again
        module = copy_dynamo_graph(self._graph.module, self._graph.gradients)
        more = add_spare_inputs(module, spares, inputs)
        inner = with_taken_inputs(inner_compile or compile_fx_inner)
        inner = joint.noting_saved(inner, tell=inner_compile is not None, then=after_passes)
        return cast(
            Callable[..., Any], compile_fx(module, [*inputs, *more], config_patches=patches, inner_compile=inner)
        )

    @torch.inference_mode(False)  # whatever runs around ``.module``
    def _trace(
        self, situation: Situation, names: tuple[str, ...], spares: int, *, keep_module: bool = False
    ) -> JointPass:
        """Run the passes without code generation: for findings that were not kept, for ``.module``.

        A module that is kept has inputs for all ``spares``: let there be as many as the graph takes.
        """
        known, (_, first) = self.known(situation, names, spares), self._options()
        joint = JointPass(known, "", first=first, keep_module=keep_module, stopwatch=self._shared.stopwatch)
        with torch.set_grad_enabled(self._graph.gradients), self._graph.tracing_anew():
            self._run_compile_fx(joint, {}, self._graph.fake_inputs, spares, inner_compile=run_eagerly)
        return joint

    def _stored(
        self, situation: Situation, names: tuple[str, ...], joint: JointPass, compiled: Callable[..., Any], spares: int
    ) -> Stored:
        """The findings of the passes. On a compile cache hit no pass ran, and torch's entry carries them."""
        found = None
        if joint.records is None:
            content = cache_entry.carried(compiled)
            found = None if content is None else Stored.loaded(content)
            joint = joint if found is not None else self._trace(situation, names, spares)
        found = found or self._found(situation, joint)
        inputs = len(found.findings.titles(self._graph.sources))

        def module() -> fx.GraphModule:
            return cast(fx.GraphModule, self._trace(situation, names, inputs, keep_module=True).module)

        # whoever compiled it first may have called the model something else
        view = dataclasses.replace(found.view, name=self._graph.name, load_module=module)
        return dataclasses.replace(found, view=view)

    def _carry(self, situation: Situation, joint: JointPass) -> None:
        """Put the findings into torch's entry, if torch keeps one of this graph."""
        keeps = self._shared.settings.compiler == "inductor" and joint.uuid() is not None
        if keeps and (content := self._found(situation, joint).dumped()) is not None:
            cache_entry.carry(content)

    def _found(self, situation: Situation, joint: JointPass) -> Stored:
        """The findings of passes that ran."""
        view = GraphView(
            name=self._graph.name,
            training=joint.training,
            inputs=joint.inputs,
            gemms=joint.records or (),
            attention=joint.attention,
            collectives=joint.collectives,
            refusals=joint.refusals,
            before=joint.before,
            after=list(joint.stages.values())[-1],
            stages=joint.stages,
            origins=joint.origins,
            saved=joint.saved,
            policy=situation.policy,
        )
        return Stored(view=view, findings=joint.findings)

    def _identity(self, situation: Situation, names: tuple[str, ...]) -> str:
        """The part of the cache key that torch does not know: our code, the policy, and the names it is applied to."""
        settings = self._shared.settings
        decides = settings.strict, settings.decisions(), settings.hardware, settings.cuda_graphs
        parts = (
            code_identity(),
            repr((situation, names, decides, cache_entry.state_that_decides())),
            self._graph.identity(),
        )
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
