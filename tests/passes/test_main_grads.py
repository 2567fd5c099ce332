"""accumulate_wgrad at run time: gradients are those of autograd, or nearer to FP32, in whatever order a loop has."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8graph
from fp8graph.numerics import sqnr_db
from fp8graph.passes.accumulate_wgrad import Gradient, MainGrads, why_not_accumulated
from fp8graph.runtime.stores import CallContext, Slot
from helpers import eager_backend, first_fast, in_one_test


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
    buffers = addresses(run)
    run.optimizer.zero_grad()
    run.forward().backward()
    assert addresses(run) == buffers
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


def addresses(run: Run) -> list[int]:
    return [weight.grad.data_ptr() for weight in run.weights if weight.grad is not None]


def reasons(run: Run) -> set[str]:
    return {refusal.reason for refusal in run.backend.report.refusals if refusal.what == "FP32 gradient"}


KEPT = "its gradient of an earlier backward was kept"
OTHERS = "a backward was for other tensors (inputs=...), or torch.autograd.grad returned it"
HOOKED = "hooks wait for its gradient"
HELD = "something else has its .grad, too"


def kept(run: Run, end: Callable[[Run], None], keep: Callable[[Any], Any] = lambda grad: grad) -> list[Any]:
    """Gradients of three tasks, and their sum."""
    found: list[list[Any]] = []
    for _ in range(3):
        end(run)
        run.forward().backward()
        found.append([keep(weight.grad) for weight in run.weights])
    sums = [sum(torch.as_tensor(grad) for grad in grads) for grads in zip(*found, strict=True)]
    return [torch.as_tensor(grad) for grads in found for grad in grads] + sums


def removed(run: Run) -> None:
    for parameter in run.block.parameters():
        parameter.grad = None


def kept_by_zero_grad(run: Run) -> list[Tensor]:
    return kept(run, lambda run: run.optimizer.zero_grad())


def kept_by_none(run: Run) -> list[Tensor]:
    return kept(run, removed)


def kept_as_views(run: Run) -> list[Tensor]:
    return kept(run, removed, lambda grad: grad.view(-1))


def kept_as_arrays(run: Run) -> list[Tensor]:
    return kept(run, removed, lambda grad: grad.numpy())


def kept_and_put_back(run: Run) -> list[Tensor]:
    run.forward().backward()
    old = [weight.grad for weight in run.weights]
    run.optimizer.zero_grad()
    run.forward().backward()
    new = [weight.grad for weight in run.weights]
    for weight, grad in zip(run.weights, old, strict=True):
        weight.grad = grad
    run.forward().backward()
    assert all(weight.grad is grad for weight, grad in zip(run.weights, old, strict=True))
    return [grad for grad in (*old, *new) if grad is not None]


def into_views_of_one_tensor(run: Run) -> list[Tensor]:
    """Optimizers with flat buffers make each gradient a view of one tensor, and read that."""
    flat = torch.zeros(sum(weight.numel() for weight in run.weights))
    for weight, part in zip(run.weights, flat.split([weight.numel() for weight in run.weights]), strict=True):
        weight.grad = part.view_as(weight)
    for _ in range(2):
        run.forward().backward()
    return [flat]


def for_other_tensors(run: Run) -> list[Tensor]:
    run.forward().backward()
    run.forward().backward(inputs=[run.block.down.weight, run.block.norm.weight])
    run.forward().backward()
    return [*run.gradients().values()]


def at_first_for_other_tensors(run: Run) -> list[Tensor]:
    run.forward().backward(inputs=[run.block.down.weight])
    assert [name for name, p in run.block.named_parameters() if p.grad is not None] == ["down.weight"]
    return [*run.gradients().values()]


def returned(run: Run) -> list[Tensor]:
    found = [*torch.autograd.grad(run.forward(), [run.block.down.weight, run.block.gate.weight])]
    assert run.gradients() == {}
    run.forward().backward()
    found += torch.autograd.grad(run.forward(), [run.block.down.bias, run.block.up.weight])
    x = next(run.batches).requires_grad_()
    found += torch.autograd.grad(run.compiled(x).sum(), [x])
    return [*found, *run.gradients().values()]


def hooked_late(run: Run) -> list[Tensor]:
    """A hook that changes gradients, and one that reads them, come and go."""
    seen: list[Tensor] = []
    run.forward().backward()
    run.optimizer.zero_grad()
    for _ in range(2):
        several = torch.autograd.graph.register_multi_grad_hook(run.weights, lambda grads: seen.extend(grads))  # pyright: ignore
        hooks = [weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3)) for weight in run.weights]
        run.forward().backward()
        for hook in (several, *hooks):
            hook.remove()
        run.forward().backward()
    assert len(seen) == 6
    return [*seen, *run.gradients().values()]


def hooked_before_backward(run: Run) -> list[Tensor]:
    loss = run.forward()
    hook = run.block.up.weight.register_hook(lambda grad: grad * 3)
    loss.backward(retain_graph=True)
    hook.remove()
    loss.backward()
    return [*run.gradients().values()]


@first_fast(
    ("order", "reason"),
    [
        (kept_by_zero_grad, KEPT),
        (kept_by_none, KEPT),
        (kept_as_views, KEPT),
        (kept_as_arrays, KEPT),
        (kept_and_put_back, KEPT),
        (into_views_of_one_tensor, HELD),
        (for_other_tensors, OTHERS),
        (at_first_for_other_tensors, OTHERS),
        (returned, OTHERS),
        (hooked_late, HOOKED),
        (hooked_before_backward, HOOKED),
    ],
)
def test_autograd_gets_gradients_that_more_wait_for(order: Callable[[Run], list[Tensor]], reason: str) -> None:
    """A backward that the buffers cannot serve is as it is without the option, and the report has the reason."""
    ours, theirs = Run(True), Run(False)
    found, wanted = order(ours), order(theirs)
    assert len(found) == len(wanted)
    assert all(sqnr_db(b, a) > 40 for a, b in zip(found, wanted, strict=True))
    assert reasons(ours) == {reason}
    assert len(ours.backend.report.graphs) == len(theirs.backend.report.graphs)
    del found, wanted
    buffers: list[list[int]] = []
    for _ in range(3):  # and the next backward adds to the buffers again
        ours.optimizer.zero_grad()
        ours.forward().backward()
        buffers.append(addresses(ours))
    assert buffers[1] == buffers[2]
    assert reasons(ours) == {reason}


def test_main_grad_is_left_alone_by_a_backward_for_others() -> None:
    block = Block()
    for weight in (block.gate.weight, block.up.weight, block.down.weight):
        weight.main_grad = torch.ones(weight.shape)  # pyright: ignore[reportAttributeAccessIssue]
    compiled = torch.compile(block, backend=eager_backend(accumulate_wgrad=True))
    compiled(torch.randn(16, 32)).sum().backward(inputs=[block.norm.weight, block.down.weight])
    torch.autograd.grad(compiled(torch.randn(16, 32)).sum(), [block.norm.weight])
    changed = [
        not torch.equal(weight.main_grad, torch.ones(weight.shape))  # pyright: ignore[reportAttributeAccessIssue]
        for weight in (block.gate.weight, block.up.weight, block.down.weight)
    ]
    assert changed == [False, False, True]
    assert block.down.weight.grad is None


@pytest.mark.parametrize("later", [None, torch.zeros(64, 32, dtype=torch.bfloat16)])
def test_gradient_without_the_main_grad_that_it_had_goes_through_autograd(later: Tensor | None) -> None:
    block = nn.Linear(32, 64, bias=False).bfloat16()
    block.weight.main_grad = torch.zeros(64, 32)  # pyright: ignore[reportAttributeAccessIssue]
    backend = eager_backend(accumulate_wgrad=True)
    compiled, x = torch.compile(block, backend=backend), torch.randn(16, 32).bfloat16()
    compiled(x).sum().backward()
    expected: Tensor = block.weight.main_grad  # pyright: ignore
    block.weight.main_grad = later  # pyright: ignore[reportAttributeAccessIssue]
    compiled(x).sum().backward()
    assert block.weight.grad is not None
    assert block.weight.grad.dtype == torch.bfloat16
    assert sqnr_db(expected, block.weight.grad) > 35
    assert later is None or not later.any()


def test_hooks_for_saved_tensors_do_not_move_the_buffers() -> None:
    """Offloading saves copies of tensors: one of them would get the sum."""
    found: list[dict[str, Tensor]] = []
    for accumulate in (True, False):
        run = Run(accumulate)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            loss = run.forward()
        loss.backward()
        found.append(run.gradients())
    assert all(sqnr_db(found[1][name], found[0][name]) > 40 for name in found[1])


def test_failed_backward_gives_no_numbers_to_the_next() -> None:
    ours, theirs = Run(True), Run(False)
    for run in (ours, theirs):
        run.forward().backward()
        y = run.forward()
        hooks = [weight.register_hook(lambda grad: grad) for weight in run.weights]
        hooks.append(run.block.norm.weight.register_hook(lambda grad: 1 / 0))
        with pytest.raises(ZeroDivisionError):
            y.backward()
        for hook in hooks:
            hook.remove()
        run.optimizer.zero_grad(set_to_none=False)
        run.forward().backward()
    wanted = theirs.gradients()
    assert all(sqnr_db(wanted[name], grad) > 40 for name, grad in ours.gradients().items())


def nodes_that_return_gradients(y: Tensor) -> list[weakref.ref[Any]]:
    """Of the graph behind ``y``: their notes on the run."""
    found, behind = set[Any](), set[Any]([y.grad_fn])
    while behind:
        found |= behind
        behind = {node for each in behind for node, _ in each.next_functions} - found - {None}
    return [weakref.ref(node.backward_of_run) for node in found if hasattr(node, "backward_of_run")]


def test_run_is_freed_with_its_results() -> None:
    """Without the garbage collector: a loop that holds on to nothing keeps no activations."""
    run = Run(True)
    run.forward().backward()
    gc.collect()
    gc.disable()
    try:
        for backward in (True, False):
            loss = run.forward()
            (note,) = nodes_that_return_gradients(loss)
            assert note() is not None
            if backward:
                loss.backward()
            del loss
            assert note() is None
    finally:
        gc.enable()


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
    grads, weight = MainGrads(cast(Any, None)), nn.Parameter(torch.randn(2, 3))
    asked = [Gradient(parameter=0, shape=(2, 3), device=weight.device)]

    def slot(parameter: nn.Parameter) -> Slot:
        return grads.slot(asked, CallContext(args=[parameter], gradients=True, group=None, arrived={}))

    first = slot(weight)
    (memory,) = first.tensors
    assert slot(weight).tensors[0] is memory
    assert memory.shape == weight.shape
    assert not memory.requires_grad
    assert first.fresh is not None
    assert first.fresh([weight])
    assert not first.fresh([nn.Parameter(torch.randn(2, 3))])
    assert grads.report() == {"gradient_bytes": 24, "refusals_of_calls": []}


@in_one_test(
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
