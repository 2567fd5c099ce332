"""torch.compile's side: one call of the backend per Dynamo graph, one variant per decision."""

from fp8graph.backend.backend import Backend, PolicyLike
from fp8graph.backend.entry import backend_of, compile, find_backend, refresh_weights
from fp8graph.backend.named import NamedBackend, named_backend

__all__ = [
    "Backend",
    "NamedBackend",
    "PolicyLike",
    "backend_of",
    "compile",
    "find_backend",
    "named_backend",
    "refresh_weights",
]
