"""What is said of code that compiled nothing; of models that ``fp8graph.compile`` compiled, see test_backend."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import fp8graph


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("how", ["by name", "with a backend"])
def test_nothing_compiled_is_said_in_the_second_call_of_what_nobody_watches(
    how: str, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """torch calls the backend for each graph, and then the graphs: in the second call all are known."""
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.LayerNorm(32)), torch.randn(16, 32)
    options: dict[str, Any] = {"compiler": "eager", "strict": strict}
    compiled = (
        torch.compile(model, backend="fp8graph", options=options)
        if how == "by name"
        else torch.compile(model, backend=fp8graph.Backend(**options))
    )
    with caplog.at_level(logging.WARNING, "fp8graph"):
        compiled(x)
        assert not caplog.records
        if strict:
            with pytest.raises(fp8graph.Fp8CoverageError, match="Compiled code was called, and no GEMM"):
                compiled(x)
            return
        compiled(x)
        compiled(x)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("Compiled code was called, and no GEMM of it was compiled: Dynamo made 1 graph(s)")
