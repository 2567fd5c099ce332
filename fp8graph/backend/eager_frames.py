"""The frames of one backend that Dynamo has given up to compile, and runs in eager."""

from __future__ import annotations

import time
import weakref
from typing import Any, Final, Protocol

from fp8graph.compat import dynamo, wrappers
from fp8graph.errors import Fp8CoverageError
from fp8graph.ir.settings import Settings


class _Compiles(Protocol):
    settings: Final[Settings]


class EagerFrames:
    """Hears of them when Dynamo reaches its recompile limit, or fails.

    Args:
        backend: that compiles the frames. It is not kept alive.
    """

    def __init__(self, backend: _Compiles) -> None:
        self.created: Final = time.time_ns() // 1000  # microseconds
        self._frames: set[str] = set()  # Dynamo's ids of the frames compiled here
        self._found: list[str] = []  # frames that reached the recompile limit
        reference, found = weakref.ref(backend), self._found

        def at_limit(compiles: Any, text: str) -> None:
            backend = reference()
            backends = wrappers.fp8graph_backends(compiles)
            if backend is None or (backends is not backend and backend not in getattr(backends, "known", ())):
                return
            if backend.settings.strict:
                raise Fp8CoverageError(
                    f"strict mode: {text}. TORCH_LOGS=recompiles shows what changes from call to call; compile with "
                    "dynamic=True if it is a size, or raise torch._dynamo.config.recompile_limit."
                )
            found.append(text)

        dynamo.on_recompile_limit(backend, at_limit)

    def compiled(self, frame: str) -> None:
        """Remember that a frame ("" outside of Dynamo) was compiled here."""
        if frame:
            self._frames.add(frame)

    def texts(self) -> list[str]:
        """The frames that Dynamo runs in eager, each once."""
        return list(dict.fromkeys([*self._found, *dynamo.failed_frames(self._frames, self.created)]))

    def reset(self) -> None:
        """``torch._dynamo.reset()``: the compiled code is gone, and Dynamo counts frames anew."""
        self._found[:] = self.texts()
        self._frames.clear()
