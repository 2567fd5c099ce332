"""The report on code that compiled nothing. On models that ``fp8graph.compile`` compiled: test_backend."""

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


def test_attention_that_nobody_asked_for_hides_nothing() -> None:
    """The attention is in the report; in strict mode a model without a compiled GEMM is an error all the same."""

    up = nn.Linear(32, 32)
    outside: Any = torch.compiler.disable(lambda y: up(y))

    class Eager(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return outside(nn.functional.scaled_dot_product_attention(x, x, x))

    torch._dynamo.reset()
    backend = fp8graph.Backend(recipe="tensorwise", strict=True, compiler="eager")
    compiled, x = torch.compile(Eager(), backend=backend), torch.randn(2, 4, 16, 32)
    compiled(x)  # all graphs are known in the second call
    with pytest.raises(fp8graph.Fp8CoverageError, match="no GEMM of it was compiled"):
        compiled(x)
    assert len(backend.report.attention) == 1
