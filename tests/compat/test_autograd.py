"""Autograd: recomputation is noticed."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8graph.compat import autograd


def test_recomputation_is_noticed() -> None:
    """What tells a checkpointed forward from its recomputation."""
    seen: list[tuple[bool, bool]] = []

    def forward(x: Tensor) -> Tensor:
        seen.append((autograd.in_backward(), autograd.saved_tensors_hooks()))
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    forward(x)
    torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False).sum().backward()  # pyright: ignore
    assert [backward for backward, _ in seen] == [False, False, True]
    assert [hooks for _, hooks in seen][:2] == [False, True]
