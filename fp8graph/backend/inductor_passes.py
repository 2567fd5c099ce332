"""The two objects that Inductor calls: the joint pipeline and the lowering, with their cache identity."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fp8graph.compat import attention, torch_build
from fp8graph.compat.inductor import CustomGraphPass
from fp8graph.errors import Fp8GraphError
from fp8graph.ir import verify
from fp8graph.ir.compilation import Compilation, Findings, Known
from fp8graph.ir.keys import DECIDED_KEY, TEXT_KEY
from fp8graph.ir.sources import graph_inputs, named_placeholders
from fp8graph.ir.text import GraphText
from fp8graph.passes import JOINT_PIPELINE, LOWERING
from fp8graph.records import AttentionRecord, CollectiveRecord, GemmRecord, Origin, RefusalRecord
from fp8graph.report.graph_view import add_origins, collective_records, input_origins

GraphPass = Callable[[fx.Graph], None]


@functools.cache
def source_hash() -> str:
    """A hash of every source file of the package, at any depth: passes, their order, the numerics."""
    return hash_of(Path(__file__).parent.parent)


def code_identity() -> str:
    """A text that differs where our passes may make other code of one graph: another source, CPU or process.

    Whatever they read of those has its place here, unless torch's own key reads it.
    """
    return repr((source_hash(), torch_build.multiplies_bf16_on_cpu(), attention.active_implementation()))


def hash_of(package: Path) -> str:
    """A hash of the names and contents of all Python files under ``package``, and of torch's version."""
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
        verify.verify(graph, after=name, **settings)
    except Fp8GraphError:
        raise
    except Exception as error:
        raise Fp8GraphError(
            f"internal error in pass '{name}': {type(error).__name__}: {error}. Please report this with the model."
        ) from error


def _append(text: str, more: str) -> str:
    return f"{text}\n\n{more}" if text else more


class _Pass(CustomGraphPass):
    """A custom pass of Inductor that runs another one (the user's) first."""

    def __init__(
        self, identity: str | None, first: GraphPass | Sequence[GraphPass] | None, stopwatch: Stopwatch | None = None
    ) -> None:
        self._identity = identity
        self._stopwatch = stopwatch or Stopwatch()
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
        known: Known,
        identity: str | None,
        first: GraphPass | Sequence[GraphPass] | None = None,
        check: Callable[[Sequence[GemmRecord | AttentionRecord]], None] | None = None,
        keep_module: bool = False,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        super().__init__(identity, first, stopwatch)
        self._known = known
        self._check = check  # strict mode: raises before anything is generated
        self._keep_module = keep_module
        self.before = ""
        self.inputs: tuple[str, ...] = ()
        self.stages: dict[str, str] = {}  # pass name -> graph text after it
        self.origins: dict[str, Origin] = {}  # of the nodes of all stages, by name
        self.saved: tuple[str, ...] = ()  # the nodes that forward returns for backward; set after the partitioner
        self.attention: tuple[AttentionRecord, ...] = ()
        self.collectives: tuple[CollectiveRecord, ...] = ()
        self.refusals: tuple[RefusalRecord, ...] = ()
        self.records: tuple[GemmRecord, ...] | None = None  # None: the pass never ran (a compile cache hit)
        self.training = False
        self.findings = Findings()
        self.module: fx.GraphModule | None = None

    def __call__(self, graph: fx.Graph) -> None:
        super().__call__(graph)
        with self._stopwatch():
            if not any(DECIDED_KEY in node.meta for node in graph.nodes):
                self._rewrite(graph)
                for node in graph.nodes:
                    node.meta[DECIDED_KEY] = True

    def _rewrite(self, graph: fx.Graph) -> None:
        text = GraphText()
        self.before = _append(self.before, text(graph))
        add_origins(self.origins, graph)
        inputs = list(graph_inputs(graph))
        subgraph = bool(inputs) and all(index is None for _, index in inputs)
        training = any(str(node.target).startswith("tangents") for node, _ in inputs)
        compilation = Compilation(known=dataclasses.replace(self._known, subgraph=subgraph, training=training))
        self.training |= training
        for run in JOINT_PIPELINE:
            rows = len(compilation.rows)
            checking = functools.partial(run, graph, compilation)
            _run(graph, run.__name__, checking, hardware_of=compilation.hardware_of)
            if self._check is not None and len(compilation.rows) > rows:
                self._check(compilation.rows[rows:])
            self.stages[run.__name__] = _append(self.stages.get(run.__name__, ""), text(graph))
            add_origins(self.origins, graph)
        self.records = (*(self.records or ()), *(row for row in compilation.rows if isinstance(row, GemmRecord)))
        self.attention += tuple(row for row in compilation.rows if isinstance(row, AttentionRecord))
        self.collectives = (*self.collectives, *collective_records(graph))
        self.refusals = (*self.refusals, *compilation.refusals)
        self.findings = self.findings.and_those_of(compilation)
        if not subgraph:
            names = dict(enumerate((*self._known.sources, *self.findings.titles(self._known.sources))))
            texts = {node: node.name if index is None else names.get(index) for node, index in inputs}
            self.inputs = tuple(text for text in texts.values() if text is not None)  # nobody took the other spares
            self.origins |= input_origins(texts)
        if self._known.spares.wanted > len(self._known.spares.indices):
            raise TooFewInputs(self._known.spares.wanted)
        if self._keep_module:
            copy = fx.Graph()
            copy.output(copy.graph_copy(graph, val_map=named_placeholders(graph, copy, self.inputs)))
            self.module = fx.GraphModule(graph.owning_module or torch.nn.Module(), copy)

    def noting_saved(
        self, inner_compile: Callable[..., Any], *, tell: bool, then: Callable[[], None] | None = None
    ) -> Callable[..., Any]:
        """The same ``inner_compile``, which sees the partitioned graphs; forward's results are noted on the way.

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
        with self._stopwatch():
            for run in self._passes:
                _run(graph, run.__name__, functools.partial(run, graph), lowered=True)
