"""AOTAutograd: its descriptions of graph inputs, and the time at which it compiles backward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import cast

from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, SubclassGetAttrAOTInput

from fp8graph.compat.distributed import SHARD


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
