"""AOTAutograd: its descriptions of graph inputs, the time at which it compiles backward, and the entries of its cache.

An entry carries bytes along, and its key leaves out some state. Its partitioner saves nodes that must be saved.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, cast

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, SubclassGetAttrAOTInput
from torch._guards import TracingContext
from torch.utils.checkpoint import CheckpointPolicy

from fp8graph.compat.distributed import SHARD

# A name in AOTAutograd's metadata of the graph: torch pickles that into its entry, with whatever else it holds.
_NAME: Final = "fp8graph"
_BUDGET: Final = "memory_budget"  # of node.meta: the partitioner takes it for that of the graph
_REGION: Final = "_region_activation_memory_budget"  # the same, in node.meta["custom"]; it comes first
_LEAST: Final = 1e-6  # the memory budget that stands for 0


def input_position(placeholder: fx.Node) -> int | None:
    """The position of an AOTAutograd graph's input among Dynamo's inputs; a DTensor's shard has that of the DTensor.

    It is None for the gradients of the outputs, and for the inputs of a subgraph.
    """
    desc = placeholder.meta.get("desc")
    if isinstance(desc, SubclassGetAttrAOTInput) and desc.attr == SHARD:
        desc = desc.base
    return desc.idx if isinstance(desc, PlainAOTInput) else None


def is_part_of_subclass(placeholder: fx.Node) -> bool:
    """Whether a graph's input is one of the tensors that a tensor subclass holds; a DTensor's shard is the whole."""
    desc = placeholder.meta.get("desc")
    return isinstance(desc, SubclassGetAttrAOTInput) and desc.attr != SHARD


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
    """The bytes in the very entry that compile_fx made ``compiled`` of; None if it came from none, or has none."""
    serialize = getattr(compiled, "serialize", lambda: None)  # None as well, if no entry was made or found
    entry: Any = serialize() if serialize is not None else None
    subclasses = getattr(entry, "maybe_subclass_meta", None)  # then the graph that was compiled has metadata of its own
    metadata = entry if subclasses is None else subclasses
    name = "runtime_metadata" if subclasses is None else "fw_metadata"
    content = getattr(getattr(metadata, name, None), _NAME, None)
    return content if isinstance(content, bytes) else None


def state_that_decides() -> tuple[Any, ...]:
    """The state outside a graph that changes its dtypes: autocast's dtype on each device, and the default dtype.

    torch 2.11's key reads whether autocast is on, and no dtype; later ones read both.
    """
    devices: list[str] = torch._C._autocast_supported_devices()
    casts = {device: torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)}
    return sorted(casts.items()), torch.get_default_dtype()
