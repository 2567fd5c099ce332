"""torch's compile cache: bytes that its entry of a graph carries along, and state that its key leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch._guards import TracingContext

# A name in AOTAutograd's metadata of the graph: torch pickles that into its entry, with whatever else it holds.
_NAME: Final = "fp8graph"


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
    entry = getattr(compiled, "serialize", lambda: None)  # None as well, if no entry was made or found
    found: Any = entry() if entry is not None else None
    subclasses = getattr(found, "maybe_subclass_meta", None)  # then the graph that was compiled has metadata of its own
    metadata = found if subclasses is None else subclasses
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
