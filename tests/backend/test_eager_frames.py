"""Frames that Dynamo has given up to compile: see also ``test_recompiles.py``."""

from __future__ import annotations

from typing import Any

import torch

from fp8graph import Backend
from helpers import ALL, MLP


def test_a_frame_that_fell_back_is_reported_after_reset() -> None:
    model, backend = MLP(), Backend(ALL, compiler="eager")
    compiled = torch.compile(model, backend=backend, dynamic=False)
    config: Any = torch._dynamo.config
    with config.patch(recompile_limit=1):
        for length in range(2, 5):
            compiled(torch.randn(length, 32))
    before = backend.report.eager_frames
    assert len(before) == 1
    torch._dynamo.reset()
    assert backend.report.eager_frames == before
    assert not backend._eager_frames._frames
