"""torch.distributed.pipelining: the stage of a pipeline that runs now, and whether it runs on data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

_STAGE: Final = "torch.distributed.pipelining.stage"


_RUN: Final = "forward_maybe_with_nosync"  # the method by which a stage runs its module on data


def running_stage() -> Any:
    """The ``PipelineStage`` whose module is being run by this thread; None outside of a pipeline.

    A stage calls its module like any other, so that only the call stack tells. It is read before code is compiled or a
    call is prepared, not at each call.
    """
    return next((frame.f_locals["self"] for frame in _frames_of_stages()), None)


def rehearses() -> bool:
    """Whether a stage runs its module, forward and backward, on uninitialized memory.

    Before the first step stages do so to learn the shapes of what they will send to each other.
    """
    names = [frame.f_code.co_name for frame in _frames_of_stages()]
    return bool(names) and _RUN not in names


def _frames_of_stages() -> Iterator[FrameType]:
    """The calls of methods of stages that led here, innermost first."""
    module = sys.modules.get(_STAGE)
    frame: FrameType | None = sys._getframe() if module is not None else None
    while frame is not None:
        if frame.f_code.co_filename == getattr(module, "__file__", "") and hasattr(
            frame.f_locals.get("self"), "submod"
        ):
            yield frame
        frame = frame.f_back
