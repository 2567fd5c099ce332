"""``fp8graph.rewrite`` and ``fp8graph.lower``: the passes on a graph that another compiler traced and goes on with."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

from torch import Tensor, fx

from fp8graph.backend.compiling import Variant
from fp8graph.backend.coverage import check_records
from fp8graph.backend.dynamo_graph import module_classes, regions_in
from fp8graph.backend.inductor_passes import JointPass, LowerPass, TooFewInputs, add_spare_inputs
from fp8graph.compat import aot
from fp8graph.compat.fakes import fake_values
from fp8graph.errors import ConfigError, expect
from fp8graph.ir.compilation import GraphFacts
from fp8graph.ir.decisions import Decisions, stacks_of
from fp8graph.ir.extra_inputs import SpareInputs
from fp8graph.ir.naming import Parameter
from fp8graph.ir.nodes import BACKWARD, DECIDED_KEY, REPORT_KEY, TAKEN_KEY, aten, is_backward, module_path, nodes
from fp8graph.ir.settings import Settings, choices
from fp8graph.models.general import families_of
from fp8graph.passes.lower import lower as lower_dialect
from fp8graph.recipes import Recipe, RecipeLike, autocast
from fp8graph.report import Report
from fp8graph.runtime.policies import Policies, PolicyLike
from fp8graph.runtime.rank_groups import agree

_log = logging.getLogger("fp8graph")

_SETTINGS: Final = ("strict", "target", "save", "save_activations_in_fp8", "fuse_linears", "batch_invariant")
_WHOLE: Final = (aten.linear.default, aten.matmul.default, aten.einsum.default)  # matmuls before decomposition
_HOOKS: Final = ("fsdp", "c10d")  # namespaces of the ops that FSDP2's hooks run
_ENGINE: Final = "autograd_backward"  # the autograd engine's mark in a node's metadata
_MODULE: Final = "module_fqn"  # in node.meta["custom"]: the module, as torchtitan and others annotate it


def rewrite(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    names: Sequence[str | None],
    policy: PolicyLike | None = None,
    *,
    recipe: RecipeLike = None,
    **settings: Any,
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Rewrite a graph of aten ops that another compiler traced and goes on with.

    It may be a forward and its backward in one graph (of ``aot_export_joint_with_descriptors``, or of a whole step as
    torchtitan's graph trainer traces it), or a forward alone (of ``torch.export``, decomposed). The result consists
    of the same ops, and of quantizations and FP8 GEMMs as ops of fp8graph. It runs as it is; partition it, and then
    :func:`lower` each part. The given graph is not changed.

    On several ranks all of them call this, with the same graph: FP8 is gathered, and amaxes are reduced, by collectives
    in it. Under delayed scaling the first call has scales of 1, whatever ``initial_scale`` says: a warning.
    ``fp8graph.autocast(amax_reduction_group=...)`` around the call names the ranks, if these are not all.

    Args:
        graph_module: nodes of backward are known by what AOTAutograd (``partitioner_tag``) or the autograd engine
            (``autograd_backward``; not on torch 2.11) left in their metadata. Without both, all is taken for
            forward.
        inputs: of one call, real or fake: only shapes, dtypes and devices matter.
        names: the full names of the parameters among the inputs, in order, and None for inputs that are none (buffers,
            batches, gradients). The list may end with the last parameter.
        policy, recipe: see :class:`Backend`.
        settings: ``strict``, ``target``, ``save``, ``save_activations_in_fp8``, ``fuse_linears`` and
            ``batch_invariant`` of :class:`Backend`. Copies of weights are not kept: each call quantizes them. The code
            that the other compiler generates has to round as eager code does for the last of these.

    Returns:
        The rewritten graph, which takes more inputs behind the given ones, and tensors for these. They are the scaling
        state of recipes that have one. Each call updates them in place, so pass the same ones again, and save them in
        checkpoints. The graph's ``meta["fp8graph_report"]`` is a :class:`Report`.

    Raises:
        ConfigError: (a ``ValueError``) for arguments that cannot be used, or a graph that is not decomposed or has
            the collectives of FSDP2's hooks.
        PolicyError: the other ranks have another policy, or other tensors with scales that are reduced.
    """
    expect("rewrite", "graph_module", graph_module, fx.GraphModule, "a torch.fx.GraphModule")
    _check(graph_module, inputs, names)
    given = Settings.taken_from(settings)
    if refused := sorted((given.keys() - set(_SETTINGS)) | settings.keys()):
        raise ConfigError(f"rewrite has no setting {refused[0]!r}{choices('Settings', refused[0], _SETTINGS)}")
    options = Settings(**given, cache_weights=False)
    policies = Policies(options.hardware)
    policies.set(policy, recipe)
    if policies.has_schedule:
        raise ConfigError("rewrite(policy=...): it has a schedule, and a graph no steps. Pass policy.at_step(step).")
    resolved, identity = policies.now.of(tuple(families_of([*module_classes(graph_module)])))
    group = autocast.amax_group()
    decisions = Decisions(
        policy=resolved,
        settings=options,
        regions=regions_in(graph_module),
        stacks=stacks_of(name for name, x in zip(names, inputs, strict=False) if name is not None and x.ndim > 1),
        amax_group=group,
    )
    parameters = {i: Parameter(source=name, index=i, bound=name) for i, name in enumerate(names) if name is not None}
    spares = 0
    while True:
        module = _copy(graph_module, inputs, spares)
        training = _mark(module.graph)
        facts = GraphFacts(
            decisions=decisions,
            sources=tuple(name or "" for name in (*names, *[None] * (len(inputs) - len(names)))),
            parameters=parameters,
            training=training,
            records_amaxes=training,
            reduces_in_graph=True,
            spares=SpareInputs(indices=range(len(inputs), len(inputs) + spares)),
        )
        joint = JointPass(facts, None, check=check_records if options.strict else None)
        try:
            joint(module.graph)
            break
        except TooFewInputs as error:
            spares = error.wanted
    if group is not None:
        agree("\n".join(_decided(policies, options, resolved.recipes(), joint)), group, "rewriting")
    _restore(graph_module.graph, module.graph)
    module.recompile()
    view = joint.view(f"{type(graph_module).__name__} {'training' if training else 'inference'}")
    view = Variant(run=module, spares=0, findings=joint.findings, view=view).under(decisions, parameters).view
    report = Report(graphs=[view], policy=policies.whole, identities=frozenset({identity}))
    if options.strict:
        report.check()
    module.meta[REPORT_KEY] = report
    for warning in dict.fromkeys(each.warning_alone() for each in joint.findings.extra_inputs):
        if warning:
            _log.warning("rewrite: %s", warning)
    return module, [x for each in joint.findings.extra_inputs for x in each.initial()]


def lower(graph_module: fx.GraphModule, state: Sequence[Tensor] = ()) -> fx.GraphModule:
    """Replace quantizations and FP8 GEMMs in a rewritten graph by aten ops, which Inductor fuses.

    Ops of fp8graph remain where they tell Inductor what to keep in memory, and, on a CPU, in products of FP8 numbers.

    A partitioner that comes later sees aten ops, and may save a tensor in high precision and quantize it again in
    backward. So partition the graph before, and lower its parts.

    Args:
        graph_module: of :func:`rewrite`, or a part of it. It is not changed.
        state: the tensors that :func:`rewrite` returned, for a caller that passes no more inputs than before. The
            result keeps them as buffers, in place of its last inputs, and updates them: all of it must be one graph.

    Raises:
        ConfigError: (a ``ValueError``) for something that is not a graph, or a state that is not of this one.
    """
    expect("lower", "graph_module", graph_module, fx.GraphModule, "a torch.fx.GraphModule")
    module = _copy(graph_module, (), 0)
    _keep(module, state)
    LowerPass("", passes=(lower_dialect,))(module.graph)  # the bits of the graph that was given
    module.recompile()
    return module


def _check(graph_module: fx.GraphModule, inputs: Sequence[Any], names: Sequence[str | None]) -> None:
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    if len(inputs) != len(placeholders):
        raise ConfigError(f"rewrite(inputs=...): {len(inputs)} values, and the graph takes {len(placeholders)} inputs.")
    if isinstance(names, str) or not all(name is None or isinstance(name, str) for name in names):
        raise ConfigError("rewrite(names=...): names must be a list with a parameter's full name, or None, per input.")
    if len(names) > len(inputs):
        raise ConfigError(f"rewrite(names=...): {len(names)} names, and the graph takes {len(inputs)} inputs.")
    if whole := next(nodes(graph_module.graph, _WHOLE), None):
        raise ConfigError(
            f"rewrite: node {whole.name} is {whole.target}, which passes do not read. Decompose the graph first: "
            "ExportedProgram.run_decompositions(), or trace it with make_fx or aot_export_joint_with_descriptors."
        )
    if hook := next((node for node in graph_module.graph.nodes if _space(node) in _HOOKS), None):
        raise ConfigError(
            f"rewrite: node {hook.name} is {hook.target}, with which FSDP2's hooks gather into memory of their own. "
            "Passes cannot tell when weights are there. Trace a model whose gathers are functional collectives "
            "(DTensors that are redistributed, as torchtitan's simple_fsdp does), or compile its layers with "
            'backend="fp8graph", which gathers in FP8 under FSDP2.'
        )
    if any(DECIDED_KEY in node.meta for node in graph_module.graph.nodes):
        raise ConfigError("rewrite: this graph was rewritten before. Pass the graph as it was traced.")


def _decided(policies: Policies, settings: Settings, recipes: Iterable[Recipe], joint: JointPass) -> list[str]:
    """Get all that decides which collectives a rewritten graph has, line by line, for a comparison with other ranks."""
    lines = [*policies.lines(), *(f"{name} {value}" for name, value in settings.decisions().items())]
    rows = (joint.records or ()) if any(recipe.reduces_amax for recipe in recipes) else ()
    return lines + [f"{row.name} {row.gemm} {row.recipe}" for row in rows]


def _keep(module: fx.GraphModule, state: Sequence[Tensor]) -> None:
    """Let the module have the tensors of its last inputs as buffers."""
    placeholders = module.graph.find_nodes(op="placeholder")
    inputs = [node for node in placeholders if TAKEN_KEY in node.meta]
    if state and [node.meta["val"].shape for node in inputs] != [x.shape for x in state]:
        raise ConfigError(
            f"lower(state=...): {len(state)} tensors, and the graph takes {len(inputs)} inputs of scaling state. Pass "
            "the list that rewrite returned with this graph."
        )
    for index, (node, tensor) in enumerate(zip(inputs, state, strict=False)):
        name = f"fp8graph_state_{index}"
        module.register_buffer(name, tensor, persistent=False)
        with module.graph.inserting_after(placeholders[-1]):
            kept = module.graph.get_attr(name)
        kept.meta = dict(node.meta)
        node.replace_all_uses_with(kept)
        module.graph.erase_node(node)


def _space(node: fx.Node) -> str:
    """Return the namespace of the op of a node."""
    return str(getattr(node.target, "namespace", ""))


def _copy(given: fx.GraphModule, inputs: Sequence[Any], spares: int) -> fx.GraphModule:
    """Return a copy with nodes of its own, and with ``spares`` more inputs behind those that it has."""
    graph, copies = fx.Graph(), cast("dict[fx.Node, fx.Node]", {})
    graph.output(graph.graph_copy(given.graph, copies))
    graph.output_node().meta = dict(given.graph.output_node().meta)
    module = fx.GraphModule(given, graph)
    module.meta = dict(given.meta)
    if inputs:
        fake_values(module, inputs)
    values = [node.meta["val"] for node in graph.find_nodes(op="placeholder")] if spares else ()
    add_spare_inputs(module, spares, values)
    for node in graph.find_nodes(op="placeholder")[len(values) :]:
        node.meta["val"] = node.meta.pop("example_value", node.meta.get("val"))
    return module


def _mark(graph: fx.Graph) -> bool:
    """Describe inputs, directions and modules as AOTAutograd does; whether the graph has a backward."""
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        node.meta.pop("desc", None)
        if not is_backward(node):
            aot.set_input_position(node, index)
    if not any("partitioner_tag" in node.meta for node in graph.nodes):
        _tag(graph)
    training = any(map(is_backward, graph.nodes))
    for node in graph.nodes:  # others are named by their weights, as all graphs are (``naming.names_of``)
        if not module_path(node) and (path := (node.meta.get("custom") or {}).get(_MODULE)):
            node.meta["nn_module_stack"] = {"": (path, "")}
    return training


def _tag(graph: fx.Graph) -> None:
    """Tag the nodes that the autograd engine ran, and those that read from them."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "output" and (node.meta.get(_ENGINE) or not backward.isdisjoint(node.all_input_nodes)):
            backward.add(node)
    for node in graph.nodes if backward else ():
        node.meta["partitioner_tag"] = BACKWARD if node in backward else "is_forward"


def _restore(given: fx.Graph, graph: fx.Graph) -> None:
    """Describe the inputs as the tracer did, drop the spare ones, and mark new nodes of backward as the engine does."""
    placeholders = graph.find_nodes(op="placeholder")
    originals = given.find_nodes(op="placeholder")
    for node, original in zip(placeholders, originals, strict=False):
        node.meta.pop("desc", None)
        node.meta |= {"desc": original.meta["desc"]} if "desc" in original.meta else {}
    for node in placeholders[len(originals) :]:
        if TAKEN_KEY not in node.meta:
            graph.erase_node(node)
    if any(_ENGINE in node.meta for node in given.nodes):
        for node in filter(is_backward, graph.nodes):
            node.meta[_ENGINE] = True
