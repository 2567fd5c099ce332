"""Cache artifacts: what ``torch.compiler.save_cache_artifacts`` carries to another machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

_KIND: Final = "fp8graph"


def register(write: Callable[[str, bytes], None]) -> None:
    """Let ``write(key, content)`` store what another process recorded under a key, a hash in hexadecimal digits."""

    class Artifact(CacheArtifact):
        def populate_cache(self) -> None:
            if re.fullmatch(r"[0-9a-f]+", self.key):  # it becomes a file's name
                write(self.key, self.content)

        @staticmethod
        def type() -> str:
            return _KIND

    CacheArtifactFactory.register(Artifact)


def record(key: str, content: bytes) -> None:
    """Add ``content`` to the artifacts that this process saves."""
    CacheArtifactManager.record_artifact(_KIND, key, content)
