"""Autograd: recomputation is noticed."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8graph.compat import autograd


def test_recomputation_is_noticed() -> None:
    """The difference between a checkpointed forward and its recomputation."""
    seen: list[tuple[bool, bool]] = []

    def forward(x: Tensor) -> Tensor:
        seen.append((autograd.in_backward(), autograd.saved_tensors_hooks()))
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    forward(x)
    torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False).sum().backward()  # pyright: ignore
    assert [backward for backward, _ in seen] == [False, False, True]
    assert [hooks for _, hooks in seen][:2] == [False, True]


def test_hooks_that_wait_for_a_gradient() -> None:
    plain, hooked, told = (torch.ones(3, requires_grad=True) for _ in range(3))
    hooked.register_hook(lambda grad: grad)
    told.register_post_accumulate_grad_hook(lambda _: None)
    assert [autograd.has_gradient_hooks(x) for x in (plain, hooked, told)] == [False, True, True]


def test_a_transform_of_torch_func_is_seen_inside_it_only() -> None:
    seen: list[bool] = []

    def function(x: Tensor) -> Tensor:
        seen.append(autograd.in_transform())
        return x.sum()

    torch.vmap(function)(torch.ones(2, 3))
    torch.func.grad(function)(torch.ones(3))
    function(torch.ones(3, requires_grad=True)).backward()
    assert seen == [True, True, False]
