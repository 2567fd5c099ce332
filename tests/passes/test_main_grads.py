"""accumulate_wgrad at run time: gradients are those of autograd, or nearer to FP32, in whatever order a loop has."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8graph
from fp8graph.numerics import sqnr_db
from fp8graph.passes.accumulate_wgrad import Gradient, MainGrads, why_not_accumulated
from fp8graph.runtime.stores import Caller, Slot
from helpers import eager_backend, first_fast


class Block(nn.Module):
    """gate and up are multiplied as one in forward and dgrad; down has a bias, whose gradient is autograd's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.gate, self.up = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Run:
    """A loop's parts: a block, its compiled form, an optimizer, and micro-batches."""

    def __init__(self, accumulate: bool, recipe: Any = "tensorwise", **settings: Any) -> None:
        torch.manual_seed(0)
        self.block = Block()
        settings = {"compiler": "eager", **settings}
        self.backend = fp8graph.Backend(recipe=recipe, accumulate_wgrad=accumulate, **settings)
        self.compiled = torch.compile(self.block, backend=self.backend)
        self.optimizer = torch.optim.SGD(self.block.parameters(), lr=0.1)
        self.batches = iter(torch.randn(40, 16, 32))

    def forward(self) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.compiled(next(self.batches)).float().square().mean()

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.block.named_parameters() if p.grad is not None}

    @property
    def weights(self) -> list[Tensor]:
        return [self.block.gate.weight, self.block.up.weight, self.block.down.weight]


def micro_batches(run: Run) -> None:
    for _ in range(3):
        run.forward().backward()


def zeroed_in_between(run: Run) -> None:
    run.forward().backward()
    loss = run.forward()
    run.optimizer.zero_grad()  # after forward: the gradients of the batch before go, these do not
    loss.backward()


def zeroed_in_place(run: Run) -> None:
    run.forward().backward()
    run.optimizer.zero_grad(set_to_none=False)
    run.forward().backward()


def clipped_in_between(run: Run) -> None:
    run.forward().backward()
    nn.utils.clip_grad_norm_(run.block.parameters(), 1e-3)
    run.forward().backward()


def two_forwards(run: Run) -> None:
    first, second = run.forward(), run.forward()
    second.backward()
    first.backward()


def two_losses(run: Run) -> None:
    loss = run.forward()
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def replaced(run: Run) -> None:
    run.forward().backward()
    for parameter in run.block.parameters():
        parameter.grad = torch.ones_like(parameter)
    run.forward().backward()


def of_others(run: Run) -> None:
    """Something else adds to the same gradients: before, and in the same backward."""
    penalty = sum(weight.square().sum() for weight in run.weights)
    assert isinstance(penalty, Tensor)
    (run.forward() + 0.01 * penalty).backward()
    (0.01 * sum(weight.sum() for weight in run.weights)).backward()  # pyright: ignore[reportAttributeAccessIssue]
    run.forward().backward()


def checkpointed(run: Run) -> None:
    for _ in range(2):
        x = next(run.batches).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = checkpoint(run.compiled, x, use_reentrant=False)
        assert isinstance(y, Tensor)
        y.float().square().mean().backward()


def evaluated_in_between(run: Run) -> None:
    run.forward().backward()
    with torch.no_grad():
        run.forward()
    run.forward().backward()


ORDERS: list[Callable[[Run], None]] = [
    micro_batches,
    zeroed_in_between,
    zeroed_in_place,
    clipped_in_between,
    two_forwards,
    two_losses,
    replaced,
    of_others,
    checkpointed,
    evaluated_in_between,
]


@first_fast("order", ORDERS)
def test_gradients_are_those_of_autograd(order: Callable[[Run], None]) -> None:
    """But for bf16: autograd rounds each wgrad to it. Two steps, so that the buffers of one serve in the next."""
    ours, theirs = Run(True), Run(False)
    for _ in range(2):
        found, wanted = ({}, {})
        for run, result in ((ours, found), (theirs, wanted)):
            order(run)
            result.update(run.gradients())
        assert found.keys() == wanted.keys() == dict(ours.block.named_parameters()).keys()
        assert all(sqnr_db(wanted[name], found[name]) > 40 for name in wanted)  # bf16 alone has 50
        theirs.block.load_state_dict(ours.block.state_dict())  # the second step starts from the same weights
        for run in (ours, theirs):
            run.optimizer.zero_grad()
    assert [r for r in ours.backend.report.refusals if r.what == "FP32 gradient"] == []


def test_fp32_results_are_added_as_they_are() -> None:
    """In FP32 nothing is rounded either way: the same bits as autograd's sum, in the same order."""
    found: list[dict[str, Tensor]] = []
    for accumulate in (True, False):
        run = Run(accumulate)
        for _ in range(3):
            run.compiled(next(run.batches)).square().mean().backward()
        found.append(run.gradients())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])


@pytest.mark.slow
def test_generated_code_adds_to_the_same_memory() -> None:
    """With Inductor: the gradients of autograd, but for bf16."""
    found: list[dict[str, Tensor]] = []
    for accumulate in (True, False):
        run = Run(accumulate, compiler="inductor")
        micro_batches(run)
        run.optimizer.zero_grad()
        micro_batches(run)
        found.append(run.gradients())
    assert all(sqnr_db(found[1][name], found[0][name]) > 40 for name in found[1])


def test_buffers_stay_and_the_report_says_what_they_take() -> None:
    run = Run(True)
    run.forward().backward()
    kept = [weight.grad for weight in run.weights]
    run.optimizer.zero_grad()
    run.forward().backward()
    assert all(weight.grad is grad for weight, grad in zip(run.weights, kept, strict=True))
    report = run.backend.report
    assert report.gradient_bytes == 4 * 3 * 32 * 64
    assert "24.0 KiB of FP32 gradients that stay between steps, for wgrad to add to" in str(report)
    assert len(report.graphs) == 1  # traced once, and nothing is compiled again


def test_main_grad_is_added_to_and_grad_stays_none() -> None:
    """Megatron's convention: bf16 weights with a main_grad in FP32, which the loop zeroes."""
    torch.manual_seed(0)
    block = Block().bfloat16()
    plain = copy.deepcopy(block)
    main_grads = {
        weight: torch.zeros(weight.shape) for weight in (block.gate.weight, block.up.weight, block.down.weight)
    }
    for weight, main_grad in main_grads.items():
        weight.main_grad = main_grad  # pyright: ignore[reportAttributeAccessIssue]
    compiled = torch.compile(block, backend=eager_backend(accumulate_wgrad=True))
    reference = torch.compile(plain, backend=eager_backend())
    for x in torch.randn(3, 16, 32).bfloat16():
        compiled(x).square().mean().backward()
        reference(x).square().mean().backward()
    for weight, theirs in zip(main_grads, (plain.gate.weight, plain.up.weight, plain.down.weight), strict=True):
        assert weight.grad is None
        assert theirs.grad is not None
        assert sqnr_db(theirs.grad, main_grads[weight]) > 35  # theirs is rounded to bf16 five times
    assert block.down.bias.grad is not None
    for weight in main_grads:  # another one in its place is noticed
        weight.main_grad = torch.ones(weight.shape)  # pyright: ignore[reportAttributeAccessIssue]
    before = [main_grad.clone() for main_grad in main_grads.values()]
    compiled(torch.randn(16, 32).bfloat16()).square().mean().backward()
    assert all(torch.equal(a, b) for a, b in zip(main_grads.values(), before, strict=True))
    assert all(not torch.equal(w.main_grad, torch.ones(w.shape)) for w in main_grads)  # pyright: ignore


def test_hooks_that_come_later_run_when_the_gradient_is_whole() -> None:
    """As with autograd's gradients. (A weight that has one when the graph is compiled is left to autograd.)"""
    run, seen = Run(True), list[Tensor]()
    run.forward().backward()
    run.optimizer.zero_grad()
    weight = run.block.down.weight
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(run.gradients()["down.weight"]))
    run.forward().backward()
    assert [torch.equal(grad, run.gradients()["down.weight"]) for grad in seen] == [True]
    assert seen[0].abs().max() > 0


@pytest.mark.slow
def test_freed_model_leaves_no_buffer() -> None:
    run = Run(True)
    run.forward().backward()
    backend = run.backend
    assert backend.report.gradient_bytes > 0
    del run
    torch._dynamo.reset()
    gc.collect()
    assert backend.report.gradient_bytes == 0


def test_another_parameter_has_another_buffer() -> None:
    grads, weight = MainGrads(), nn.Parameter(torch.randn(2, 3))
    asked = [Gradient(parameter=0, shape=(2, 3), device=weight.device)]

    def slot(parameter: nn.Parameter) -> Slot:
        return grads.slot(asked, Caller(args=[parameter], gradients=True, group=None, arrived={}))

    first = slot(weight)
    (memory,) = first.tensors
    assert slot(weight).tensors[0] is memory
    assert memory.shape == weight.shape
    assert not memory.requires_grad
    assert first.fresh is not None
    assert first.fresh([weight])
    assert not first.fresh([nn.Parameter(torch.randn(2, 3))])
    assert grads.report() == {"gradient_bytes": 24}


@pytest.mark.parametrize(
    ("weight", "gathered", "reason"),
    [
        (nn.Parameter(torch.ones(2, 2)), False, None),
        (nn.Parameter(torch.ones(2, 2)), True, "FSDP2 waits for its gradient"),
        (
            nn.Parameter(torch.ones(2, 2, dtype=torch.float16)),
            False,
            "its .grad is float16, and it has no main_grad in FP32",
        ),
        (nn.Parameter(torch.ones(2, 3).t()), False, "it is not contiguous"),
    ],
)
def test_reasons_against_accumulation(weight: nn.Parameter, gathered: bool, reason: str | None) -> None:
    assert why_not_accumulated(weight, gathered=gathered) == reason
