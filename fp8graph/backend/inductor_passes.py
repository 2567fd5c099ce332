"""Hand graphs to AOTAutograd and Inductor, and run the passes when they call.

``JointPass`` runs the joint pipeline, ``LowerPass`` the lowering; both have their part of Inductor's cache key. Beside
them: copies of Dynamo's graph with spare inputs, and code for graphs of dialect nodes alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx

from fp8graph.compat import aot, dynamo, inductor, torch_build
from fp8graph.compat.autograd import unnoticed_writes
from fp8graph.compat.fakes import TracingContext, assert_sizes, detect_fake_mode
from fp8graph.compat.inductor import CustomGraphPass, compile_fx
from fp8graph.errors import Fp8GraphError
from fp8graph.ir import ops, verify
from fp8graph.ir.compilation import Compilation, Findings, GraphFacts
from fp8graph.ir.edit import insert, sign
from fp8graph.ir.naming import graph_inputs, named_placeholders
from fp8graph.ir.nodes import DECIDED_KEY, NO_GRAD_KEY, TAKEN_KEY, TEXT_KEY, aten, nodes
from fp8graph.ir.settings import Settings
from fp8graph.ir.text import GraphText
from fp8graph.passes import JOINT_PIPELINE, LOWERING, WEIGHT_LOWERING
from fp8graph.passes.lower import lower
from fp8graph.records import CollectiveRecord, GemmRecord, Origin, OtherRecord, RefusalRecord, SiteRecord
from fp8graph.report.graph_view import GraphView, add_origins, collective_records, input_origins
from fp8graph.runtime.stores import accelerator_of

GraphPass = Callable[[fx.Graph], None]


@functools.cache
def source_hash() -> str:
    """Return a hash of every source file of the package, at any depth: passes, their order, the numerics."""
    return hash_of(Path(__file__).parent.parent)


def code_identity() -> str:
    """Return a text that differs where our passes may make other code of one graph: another source, CPU or process.

    Whatever they read of those has its place here or in ``Pass.reads``, unless torch's own key reads it.
    """
    read = [each.reads() for each in JOINT_PIPELINE]
    return repr((source_hash(), torch_build.multiplies_bf16_on_cpu(), read))


def hash_of(package: Path) -> str:
    """Return a hash of the names and contents of all Python files under ``package``, and of torch's version."""
    digest = hashlib.sha256(torch.__version__.encode())
    for folder in (package, package / "passes", package / "models"):  # rglob may skip the last two, which are links
        for file in sorted(folder.rglob("*.py")):
            digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    return digest.hexdigest()


class Stopwatch:
    """Seconds that were spent in passes."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def __call__(self) -> Generator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


def _run(graph: fx.Graph, name: str, run: Callable[[], None], **settings: Any) -> None:
    """Run one pass and check the graph it leaves (with ``settings``). Every failure names the pass to the user.

    Some exceptions of fake tensors would turn into a silent graph break inside Dynamo; an Fp8GraphError does not.
    """
    try:
        run()
        sign(graph, name)
        verify.verify(graph, after=name, **settings)
    except Fp8GraphError:
        raise
    except Exception as error:
        raise Fp8GraphError(
            f"internal error in pass '{name}': {type(error).__name__}: {error}. Please report this with the model."
        ) from error


class _Pass(CustomGraphPass):
    """A custom pass of Inductor that runs another one (the user's) first."""

    def __init__(
        self, identity: str | None, first: GraphPass | Sequence[GraphPass] | None, stopwatch: Stopwatch | None = None
    ) -> None:
        self._identity = identity
        self.stopwatch = stopwatch or Stopwatch()
        self._first = [first] if callable(first) else list(first or ())

    def __call__(self, graph: fx.Graph) -> None:
        for other in self._first:
            other(graph)

    def uuid(self) -> Any:
        others = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self._first]
        if self._identity is None or None in others:
            return None  # a pass without a uuid: torch must not cache
        return json.dumps([type(self).__name__, self._identity, *map(str, others)])


class TooFewInputs(Exception):
    """Ends a compilation whose graph needs more spare inputs than it has: ``wanted`` of them."""

    def __init__(self, wanted: int) -> None:
        super().__init__(wanted)
        self.wanted = wanted


class JointPass(_Pass):
    """Runs the joint pipeline on the joint graph, and keeps the findings as its attributes.

    Inductor calls it once for the graph and once more for each subgraph of a higher-order op; the findings add up. The
    body of a nested_compile_region comes three times in training: whole, and then both of its parts, which are done.
    """

    def __init__(
        self,
        facts: GraphFacts,
        identity: str | None,
        first: GraphPass | Sequence[GraphPass] | None = None,
        check: Callable[[Sequence[SiteRecord]], None] | None = None,
        keep_module: bool = False,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        super().__init__(identity, first, stopwatch)
        self._facts = facts
        self._check = check  # strict mode: raises before anything is generated
        self._keep_module = keep_module
        self.inputs: tuple[str, ...] = ()
        self._texts: list[dict[str, str]] = []  # of each graph: before all passes (""), and after each by its name
        self.origins: dict[str, Origin] = {}  # of the nodes of all stages, by name
        self.saved: tuple[str, ...] = ()  # the nodes that forward returns for backward; set after the partitioner
        self.others: tuple[OtherRecord, ...] = ()  # of sites that are no matmuls
        self.collectives: tuple[CollectiveRecord, ...] = ()
        self.refusals: tuple[RefusalRecord, ...] = ()
        self._explained: tuple[SiteRecord, ...] = ()  # the rows of both, with the sources in their reasons
        self.records: tuple[GemmRecord, ...] | None = None  # None: the pass never ran (a compile cache hit)
        self.training = False
        self.findings = Findings()
        self.module: fx.GraphModule | None = None

    def __call__(self, graph: fx.Graph) -> None:
        super().__call__(graph)
        with self.stopwatch():
            if not any(DECIDED_KEY in node.meta for node in graph.nodes):
                _spell_out_dropout(graph)
                self._rewrite(graph)
                aot.save_what_must_be_saved(graph)
                for node in graph.nodes:
                    node.meta[DECIDED_KEY] = True

    def _rewrite(self, graph: fx.Graph) -> None:
        text = GraphText()
        texts = {"": text(graph)}
        self._texts.append(texts)
        add_origins(self.origins, graph)
        inputs = list(graph_inputs(graph))
        subgraph = bool(inputs) and all(index is None for _, index in inputs)
        training = self._facts.training or any(str(node.target).startswith("tangents") for node, _ in inputs)
        compilation = Compilation(facts=dataclasses.replace(self._facts, subgraph=subgraph, training=training))
        self.training |= training
        for each in JOINT_PIPELINE:
            if not each.needed(graph, compilation):
                continue
            rows = len(compilation.rows)
            run = functools.partial(each.run, graph, compilation)
            _run(graph, each.name, run, hardware_of=compilation.hardware_of, sites=compilation.sites)
            if self._check is not None and len(compilation.rows) > rows:
                self._check([compilation.explain(row) for row in compilation.rows[rows:]])
            texts[each.name] = text(graph)
            add_origins(self.origins, graph)
        self._explained += tuple(map(compilation.explain, compilation.rows))
        self.records = (*(self.records or ()), *(row for row in compilation.rows if isinstance(row, GemmRecord)))
        self.others += tuple(row for row in compilation.rows if isinstance(row, OtherRecord))
        self.collectives = (*self.collectives, *collective_records(graph))
        self.refusals = (*self.refusals, *compilation.refusals)
        self.findings = self.findings.and_those_of(compilation)
        if not subgraph:
            names = dict(enumerate((*self._facts.sources, *self.findings.titles(self._facts.sources))))
            texts = {node: node.name if index is None else names.get(index) for node, index in inputs}
            self.inputs = tuple(text for text in texts.values() if text is not None)  # nobody took the other spares
            self.origins |= input_origins(texts)
        if self._facts.spares.wanted > len(self._facts.spares.indices):
            raise TooFewInputs(self._facts.spares.wanted)
        verify.check_connected(graph)
        if self._keep_module:
            copy = fx.Graph()
            copy.output(copy.graph_copy(graph, val_map=named_placeholders(graph, copy, self.inputs)))
            self.module = fx.GraphModule(graph.owning_module or torch.nn.Module(), copy)

    @property
    def before(self) -> str:
        """The text of all graphs before the passes."""
        return "\n\n".join(texts[""] for texts in self._texts)

    @property
    def stages(self) -> dict[str, str]:
        """The text of all graphs after each pass that one of them needed, by its name."""
        texts: dict[str, str] = {}
        current = [texts[""] for texts in self._texts]
        for each in JOINT_PIPELINE:
            if any(each.name in texts for texts in self._texts):
                current = [texts.get(each.name, text) for texts, text in zip(self._texts, current, strict=True)]
                texts[each.name] = "\n\n".join(current)
        return texts

    def view(self, name: str) -> GraphView:
        """Return the findings in the graph called ``name``, without a policy.

        Its rows have no sources in their reasons, unless it has graphs of higher-order ops: these may have sites of
        one name.
        """
        stages, apart = self.stages, self.findings.has_subgraphs
        gemms = tuple(row for row in self._explained if isinstance(row, GemmRecord)) if apart else self.records or ()
        others = tuple(row for row in self._explained if isinstance(row, OtherRecord)) if apart else self.others
        return GraphView(
            name=name,
            training=self.training,
            inputs=self.inputs,
            gemms=gemms,
            others=others,
            collectives=self.collectives,
            refusals=self.refusals,
            before=self.before,
            after=list(stages.values())[-1],
            stages=stages,
            origins=self.origins,
            saved=self.saved,
            policy="",
        )

    def noting_saved(
        self, inner_compile: Callable[..., Any], *, tell: bool, then: Callable[[], None] | None = None
    ) -> Callable[..., Any]:
        """Return the same ``inner_compile``, which sees the partitioned graphs; forward's results are noted on the way.

        Args:
            tell: leave the text in the metadata of each (``TEXT_KEY``). Only without torch's cache, whose key it is in.
            then: called when all is noted, and before torch makes a cache entry of the graph.
        """

        @functools.wraps(inner_compile)
        def compile(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            if not kwargs.get("is_backward"):
                self.saved = tuple(node.name for node in module.graph.output_node().all_input_nodes)
                if then is not None:
                    then()
            if tell:
                module.meta[TEXT_KEY] = list(self.stages.values())[-1]
            return inner_compile(module, inputs, **kwargs)

        return compile


class LowerPass(_Pass):
    """Lowers the dialect to aten, in the forward and in the backward graph, after the partitioner.

    Args:
        passes: ``LOWERING``, or a longer list for a graph that quantizes weights.
    """

    def __init__(
        self,
        identity: str,
        first: GraphPass | Sequence[GraphPass] | None = None,
        stopwatch: Stopwatch | None = None,
        passes: Sequence[GraphPass] = LOWERING,
    ) -> None:
        super().__init__(" ".join((identity, *(run.__name__ for run in passes))), first, stopwatch)
        self._passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        super().__call__(graph)
        with self.stopwatch():
            for index, run in enumerate(self._passes):
                lowered = lower in self._passes[: index + 1]
                _run(graph, run.__name__, functools.partial(run, graph), lowered=lowered, partitioned=True)


def _spell_out_dropout(graph: fx.Graph) -> None:
    """Let ``native_dropout`` only draw its mask: the product is written as Inductor writes it, for passes to read.

    The op itself is in graphs that draw as the eager program does.
    """
    for node in nodes(graph, (aten.native_dropout.default,)):
        x, p, _ = node.args
        parts = {cast(int, part.args[1]): part for part in node.users}
        if not {0, 1} <= parts.keys() or not isinstance(p, float) or p >= 1:
            continue
        y, mask = parts[0], parts[1]
        node.append(mask)
        with graph.inserting_after(mask):
            kept = insert(graph, aten.mul.Tensor, (mask, x), like=y)
        with graph.inserting_after(kept):
            product = insert(graph, aten.mul.Tensor, (kept, 1 / (1 - p)), like=y)
        y.replace_all_uses_with(product)
        graph.erase_node(y)


def run_eagerly(module: fx.GraphModule, inputs: Sequence[Any], **_kwargs: Any) -> Callable[..., Any]:
    """``compiler="eager"``: run the partitioned graph, dialect included, in place of compile_fx_inner."""
    assert_sizes(module, inputs)
    placeholders = module.graph.find_nodes(op="placeholder")
    copies = module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = [placeholders.index(copy.args[0]) for copy in copies if copy.args[0] in placeholders]

    def run(args: list[Any]) -> Any:
        values = list(args)
        args.clear()  # boxed calling convention: drop the caller's references
        # a page may be saved for the backward of another call, which must read the values that this one writes
        with unnoticed_writes([values[index] for index in written]):
            return module(*values)

    return inductor.boxed(run)


def compile_dialect(
    module: fx.GraphModule, inputs: list[Any], settings: Settings, inner_compile: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Generate code for a graph of dialect nodes that has no gradients."""
    options = {**inductor.codegen_patches(settings.hardware, inputs), **settings.inductor}
    options["triton.cudagraphs"] = False  # the graph writes into tensors that stay: torch would skip them and warn
    options["post_grad_custom_pre_pass"] = LowerPass(code_identity(), passes=WEIGHT_LOWERING)
    extra: dict[str, Any] = {} if inner_compile is None else {"inner_compile": inner_compile}
    return cast(Callable[..., Any], compile_fx(module, inputs, config_patches=options, **extra))


def compile_backward(
    module: fx.GraphModule, inputs: Sequence[Any], settings: Settings, inner_compile: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Generate code for a backward that compiled autograd traced. Its GEMMs were decided, and reported, with forward.

    Those in FP8 are dialect nodes, which are lowered. A matmul that is left was left by the policy, or belongs to a
    forward that was not compiled.
    """
    decided = any(node.target in ops.REFERENCE for node in module.graph.nodes)
    options = {**(inductor.codegen_patches(settings.hardware, inputs) if decided else {}), **settings.inductor}
    first = options.pop("post_grad_custom_pre_pass", inductor.default_option("post_grad_custom_pre_pass"))
    options["post_grad_custom_pre_pass"] = LowerPass(code_identity(), first)
    extra: dict[str, Any] = {} if inner_compile is None else {"inner_compile": inner_compile}
    copy = copy_dynamo_graph(module, gradients=False)  # Dynamo reads the original again
    return compile_under(settings, copy, list(inputs), options, **extra)


def compile_under(
    settings: Settings, module: fx.GraphModule, inputs: list[Any], options: dict[str, Any], **more: Any
) -> Callable[..., Any]:
    """Call ``compile_fx``: a graph for which no code is generated draws the random numbers of the eager program."""
    if settings.compiler == "eager":
        random, more["decompositions"] = inductor.draws_as_eager()
        options |= random
    return cast(Callable[..., Any], compile_fx(module, inputs, config_patches=options, **more))


def copy_dynamo_graph(module: fx.GraphModule, gradients: bool = True) -> fx.GraphModule:
    """Copy Dynamo's graph so that AOTAutograd accepts the copy as the original.

    Nodes inside ``torch.no_grad`` regions are marked (``NO_GRAD_KEY``): they cannot be recognized later otherwise.
    """
    graph, copies = fx.Graph(), cast("dict[fx.Node, fx.Node]", {})
    graph.output(graph.graph_copy(module.graph, copies))
    enabled = gradients
    for original, copy in copies.items():
        dynamo.copy_source(original, copy)
        if original.target is dynamo.SET_GRAD_ENABLED:
            enabled = cast(bool, original.args[0])
        elif gradients and not enabled:
            copy.meta["custom"] = {**(original.meta.get("custom") or {}), NO_GRAD_KEY: True}
    result = fx.GraphModule(module, graph)
    result.meta = module.meta
    dynamo.keep_parameter_sources(module, result)
    return result


def add_spare_inputs(module: fx.GraphModule, number: int, inputs: Sequence[Any]) -> list[Any]:
    """Append graph inputs for passes to take (``extra_inputs.SpareInputs``); returns the fake tensors to trace with."""
    if not number:
        return []
    mode = detect_fake_mode(list(inputs)) or TracingContext.get().fake_mode
    assert mode is not None
    device = accelerator_of(inputs)  # an unused tensor on the CPU would keep CUDA graphs off
    with mode:
        fakes = [torch.empty(0, device=device) for _ in range(number)]
    last = module.graph.find_nodes(op="placeholder")[-1] if inputs else None
    for index, fake in enumerate(fakes):
        with module.graph.inserting_after(last):
            last = module.graph.placeholder(f"fp8graph_input_{index}")
        dynamo.describe_own_input(last)
        last.meta["example_value"] = fake
    module.recompile()
    return fakes


def with_taken_inputs(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``inner_compile`` for compile_fx that passes on the tensors which the spare inputs stand for by now.

    AOTAutograd itself passes on the empty tensors that it traced with.
    """

    @functools.wraps(inner_compile)
    def compile(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        placeholders = module.graph.find_nodes(op="placeholder")
        became = [
            node.meta["val"] if TAKEN_KEY in node.meta else x for node, x in zip(placeholders, inputs, strict=True)
        ]
        return inner_compile(module, became, **kwargs)

    return compile
