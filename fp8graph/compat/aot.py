"""AOTAutograd: what it says of the inputs of its graphs, when it compiles backward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import cast

from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, SubclassGetAttrAOTInput

from fp8graph.compat.distributed import SHARD


def input_position(placeholder: fx.Node) -> int | None:
    """Where an input of an AOTAutograd graph is among Dynamo's inputs; a DTensor's shard is where the DTensor is.

    None for the gradients of the outputs, and for the inputs of a subgraph.
    """
    desc = placeholder.meta.get("desc")
    if isinstance(desc, SubclassGetAttrAOTInput) and desc.attr == SHARD:
        desc = desc.base
    return desc.idx if isinstance(desc, PlainAOTInput) else None


def set_input_position(placeholder: fx.Node, position: int) -> None:
    """Describe a placeholder as AOTAutograd does: what :func:`input_position` reads."""
    placeholder.meta["desc"] = PlainAOTInput(position)


def backward_at_once() -> AbstractContextManager[None]:
    """Compile the backward together with its forward, though it may never run."""
    return cast(AbstractContextManager[None], functorch_config.patch({"force_non_lazy_backward_lowering": True}))
