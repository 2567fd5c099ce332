"""torch's structured trace, which tlparse renders."""

from __future__ import annotations

from torch._logging import trace_structured


def trace_artifact(name: str, text: str) -> None:
    """Add a text to the trace of the current compile, if ``TORCH_TRACE`` is set."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)
