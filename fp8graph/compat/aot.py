"""AOTAutograd: its descriptions of graph inputs, the time at which it compiles backward, and the entries of its cache.

An entry carries bytes along, and its key leaves out some state. Its partitioner saves nodes that must be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, cast

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, SubclassGetAttrAOTInput
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext
from torch.utils.checkpoint import CheckpointPolicy

from fp8graph.compat.distributed import SHARD
from fp8graph.compat.dynamo import source_name
from fp8graph.compat.fakes import running_a_graph

# A name in AOTAutograd's metadata of the graph: torch pickles that into its entry, with whatever else it holds.
_NAME: Final = "fp8graph"
_BUDGET: Final = "memory_budget"  # of node.meta: the partitioner takes it for that of the graph
_REGION: Final = "_region_activation_memory_budget"  # the same, in node.meta["custom"]; it comes first
_LEAST: Final = 1e-6  # the memory budget that stands for 0


def input_position(placeholder: fx.Node) -> int | None:
    """Return the position of an AOTAutograd graph's input among Dynamo's inputs; a DTensor's shard has that of the
    DTensor.

    It is None for the gradients of the outputs, and for the inputs of a subgraph.
    """
    desc = placeholder.meta.get("desc")
    if isinstance(desc, SubclassGetAttrAOTInput) and desc.attr == SHARD:
        desc = desc.base
    return desc.idx if isinstance(desc, PlainAOTInput) else None


def is_part_of_subclass(placeholder: fx.Node) -> bool:
    """Return whether a graph's input is one of the tensors that a tensor subclass holds; a DTensor's shard is the
    whole.
    """
    desc = placeholder.meta.get("desc")
    return isinstance(desc, SubclassGetAttrAOTInput) and desc.attr != SHARD


def input_part(placeholder: fx.Node) -> tuple[int, tuple[str, ...]] | None:
    """Return the position of an input among Dynamo's, and the attributes that lead from there to the tensor that it is.

    The latter are those of tensor subclasses.
    """
    desc, attributes = placeholder.meta.get("desc"), list[str]()
    while isinstance(desc, SubclassGetAttrAOTInput):
        attributes.insert(0, desc.attr)
        desc = desc.base
    return (desc.idx, tuple(attributes)) if isinstance(desc, PlainAOTInput) else None


def set_input_position(placeholder: fx.Node, position: int) -> None:
    """Describe a placeholder as AOTAutograd does, for :func:`input_position` to read."""
    placeholder.meta["desc"] = PlainAOTInput(position)


def backward_at_once() -> AbstractContextManager[None]:
    """Compile the backward together with its forward, though it may never run."""
    return cast(AbstractContextManager[None], functorch_config.patch({"force_non_lazy_backward_lowering": True}))


def save_what_must_be_saved(graph: fx.Graph) -> None:
    """Let the partitioner save the nodes of a joint graph that are marked so, also under a memory budget of 0.

    Under that (``torch._functorch.config.activation_memory_budget``, or a region's) it saves the graph's inputs alone,
    and backward computes all nodes again, from inputs that the end of forward may have changed.
    """
    marked = [node for node in graph.nodes if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE]
    if not marked:
        return
    for node in graph.nodes:
        custom = node.meta.get("custom")
        if isinstance(custom, dict) and custom.get(_REGION) == 0:
            node.meta["custom"] = {**custom, _REGION: _LEAST}
        if node.meta.get(_BUDGET) == 0:
            node.meta[_BUDGET] = _LEAST
    if functorch_config.activation_memory_budget == 0 and not any(_BUDGET in node.meta for node in graph.nodes):
        marked[0].meta[_BUDGET] = _LEAST


def carry(content: bytes) -> None:
    """Let torch's entry of the graph that is being compiled carry ``content``.

    An inner_compile calls it for forward's graph, before torch makes the entry. If this torch has no metadata by then,
    nothing is carried.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        setattr(context.fw_metadata, _NAME, content)


def carried(compiled: Callable[..., Any]) -> bytes | None:
    """Give the bytes in the very entry that compile_fx made ``compiled`` of; None if it came from none, or has none."""
    serialize = getattr(compiled, "serialize", lambda: None)  # None as well, if no entry was made or found
    entry: Any = serialize() if serialize is not None else None
    subclasses = getattr(entry, "maybe_subclass_meta", None)  # then the graph that was compiled has metadata of its own
    metadata = entry if subclasses is None else subclasses
    name = "runtime_metadata" if subclasses is None else "fw_metadata"
    content = getattr(getattr(metadata, name, None), _NAME, None)
    return content if isinstance(content, bytes) else None


def state_that_decides() -> tuple[Any, ...]:
    """Return the state outside a graph that changes its dtypes: autocast's dtype on each device, and the default dtype.

    torch 2.11's key reads whether autocast is on, and no dtype; later ones read both.
    """
    devices: list[str] = torch._C._autocast_supported_devices()
    casts = {device: torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)}
    return sorted(casts.items()), torch.get_default_dtype()


class KeptGraph(NamedTuple):
    """One graph, forward and backward in one, and Dynamo's inputs of it."""

    graph: fx.Graph
    names: list[str]  #: Dynamo's sources of the inputs
    inputs: list[Any]  #: those of the first call


def updates(output: fx.Node) -> set[int]:
    """Return the positions of the results of a graph of AOTAutograd that are written to its inputs."""
    descriptions = enumerate(output.meta.get("desc") or ())
    return {i for i, each in descriptions if getattr(each, "mutated_input", None) is not None}


def watching(
    start: Callable[[fx.GraphModule, KeptGraph], Callable[[Sequence[Any]], Any]],
    compute: Callable[[fx.GraphModule, Sequence[Any]], Any],
) -> Callable[..., Any]:
    """Return a backend that compiles nothing: the graphs run node by node, on the tensors that they are called with.

    Args:
        start: gets each graph, forward and backward in one. What it returns is called before the graph runs, with the
            inputs; for a graph that is forward alone, it runs the graph.
        compute: runs the forward or backward of a graph that has both.
    """

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        names = [source_name(node) for node in module.graph.find_nodes(op="placeholder")]
        first: list[Any] = []
        joint: list[Callable[[Sequence[Any]], Any]] = []  # until forward is compiled

        def run(graph_module: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
            watch = joint.pop() if joint else None

            def call(*args: Any) -> Any:
                if watch is not None:
                    watch(args)
                return compute(graph_module, args)

            return cast(Any, make_boxed_func)(call)

        def infer(graph_module: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
            watch = start(graph_module, KeptGraph(graph_module.graph, names, first))

            def call(*args: Any) -> Any:
                return watch(args)

            return cast(Any, make_boxed_func)(call)

        def partition(joint_module: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Any:
            copy = fx.Graph()
            (output,) = joint_module.graph.find_nodes(op="output")
            copy.output(copy.graph_copy(joint_module.graph, {})).meta = dict(output.meta)
            copied = fx.GraphModule(joint_module, copy)
            joint.append(start(copied, KeptGraph(copied.graph, names, first)))
            return default_partition(joint_module, joint_inputs, **options)

        compile_: Any = aot_autograd(fw_compiler=run, bw_compiler=run, inference_compiler=infer, partition_fn=partition)
        return _noting(first, cast("Callable[..., Any]", compile_(module, inputs)))

    return backend


def _noting(first: list[Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``compiled``, which puts the arguments of its first call into ``first``."""

    def call(*args: Any) -> Any:
        first[:] = first or args
        return compiled(*args)

    return call


def keeping(graphs: list[KeptGraph]) -> Callable[..., Any]:
    """Return a backend that compiles nothing: it adds each graph to ``graphs``."""

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        names = [source_name(node) for node in module.graph.find_nodes(op="placeholder")]
        first: list[Any] = []

        def keep(graph_module: fx.GraphModule) -> None:
            graph, copy, copies = graph_module.graph, fx.Graph(), cast("dict[fx.Node, fx.Node]", {})
            (output,) = graph.find_nodes(op="output")
            results = copy.graph_copy(graph, copies)
            copy.output(results).meta = dict(output.meta)
            for node in graph.find_nodes(op="get_attr"):
                constant = getattr(graph_module, str(node.target), None)
                constant = getattr(constant, "constant", constant)  # of a fake tensor
                copies[node].meta["constant"] = constant if type(constant) is torch.Tensor else None
            graphs.append(KeptGraph(copy, names, first))

        def run(graph_module: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                with running_a_graph():
                    return graph_module.forward(*args)

            return cast(Any, make_boxed_func)(call)

        def infer(graph_module: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
            keep(graph_module)
            return run(graph_module, _inputs)

        def partition(joint: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Any:
            keep(joint)
            return default_partition(joint, joint_inputs, **options)

        compile_: Any = aot_autograd(fw_compiler=run, bw_compiler=run, inference_compiler=infer, partition_fn=partition)
        return _noting(first, cast("Callable[..., Any]", compile_(module, inputs)))

    return backend


def updated_inputs(graph: fx.Graph) -> dict[int, fx.Node]:
    """Return what a graph of AOTAutograd writes into its inputs, by their positions."""
    (output,) = graph.find_nodes(op="output")
    described = zip(output.meta.get("desc") or (), cast("Sequence[Any]", output.args[0]), strict=True)
    written = ((getattr(each, "mutated_input", None), x) for each, x in described)
    return {each.idx: x for each, x in written if isinstance(each, PlainAOTInput)}
