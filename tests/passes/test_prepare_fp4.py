"""passes/prepare_fp4: what NVFP4's quantize nodes cannot make themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8graph import NVFP4BlockScaling, Policy, Rule
from helpers import around, compiled_step, eager_backend, same_bits


def prepared(policy: Policy, module: nn.Module | None = None) -> list[str]:
    """The lines that the pass added or changed, of a training graph."""
    module = nn.Linear(64, 32, bias=False) if module is None else module
    backend = eager_backend(policy)
    compiled_step(module, torch.randn(16, 64, requires_grad=True), backend)
    before, after = around(backend.report.graphs[0], "prepare_fp4")
    return [line for line in after.splitlines() if line not in before.splitlines()]


def test_one_matrix_for_each_direction_and_one_seed() -> None:
    got = prepared(Policy(default="nvfp4"))
    assert [line.partition(" = ")[2].partition("(")[0] for line in got] == [
        "fp8graph.hadamard",
        "fp8graph.quantize",
        "fp8graph.hadamard",
        "fp8graph.random_seed",
        "fp8graph.quantize",
    ]
    assert got[0].endswith("fp8graph.hadamard(primals_2, signs=55272)")
    assert got[1].endswith("rotation=55272, matrix=hadamard_default)")
    assert got[3] == "random_seed_default: i64[1] = fp8graph.random_seed(device=cpu)"
    assert got[4].endswith("rotation=55272, stochastic=True, matrix=hadamard_default_1, seed=random_seed_default)")


def test_each_gradient_draws_its_own_numbers() -> None:
    module = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32))
    got = prepared(Policy(default="nvfp4"), module)
    assert sum("fp8graph.random_seed" in line for line in got) == 1
    assert sum("fp8graph.hadamard" in line for line in got) == 2
    draws = [line.rpartition("draw=")[2].rstrip(")") if "draw=" in line else "0" for line in got if "seed=" in line]
    assert sorted(draws) == ["0", "1"]


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        (Policy(default="mxfp8"), []),
        (Policy(default=NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)), []),
        (Policy(default=NVFP4BlockScaling(disable_stochastic_rounding=True)), ["hadamard", "hadamard"]),
        (Policy(default=NVFP4BlockScaling(disable_rht=True)), ["random_seed"]),
        # the columnwise copies are for wgrad alone
        (Policy([Rule("*", "nvfp4", wgrad=None)]), ["random_seed"]),
        (Policy([Rule("*", "nvfp4", wgrad=None, dgrad=None)]), []),
    ],
)
def test_only_operands_that_need_a_transform_or_a_seed_get_one(policy: Policy, left: list[str]) -> None:
    made = [line.partition("fp8graph.")[2].partition("(")[0] for line in prepared(policy)]
    assert [name for name in made if name != "quantize"] == left


def test_inference_needs_nothing() -> None:
    backend = eager_backend(Policy(default="nvfp4"))
    with torch.no_grad():
        torch.compile(nn.Linear(64, 32), backend=backend)(torch.randn(16, 64))
    text = backend.report.graphs[0].after
    assert "hadamard" not in text
    assert "random_seed" not in text


def test_a_seed_repeats_a_step_and_each_step_draws_again() -> None:
    module, backend = nn.Linear(64, 32), eager_backend(Policy(default="nvfp4"))
    compiled, x = torch.compile(module, backend=backend), torch.randn(16, 64, requires_grad=True)

    def gradients() -> list[torch.Tensor]:
        return list(torch.autograd.grad(compiled(x).square().sum(), [x, module.weight]))

    torch.manual_seed(3)
    first, second = gradients(), gradients()
    state = torch.get_rng_state()
    third = gradients()
    torch.manual_seed(3)
    assert same_bits(gradients(), first)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    torch.set_rng_state(state)  # as a checkpoint of Trainer's does
    assert same_bits(gradients(), third)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit(reentrant: bool) -> None:
    """Forward is recomputed; gradients are quantized once."""
    module = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(16, 64, requires_grad=True)

    def run(checkpointed: bool) -> list[torch.Tensor]:
        torch._dynamo.reset()
        compiled = torch.compile(module, backend=eager_backend(Policy(default="nvfp4")))
        torch.manual_seed(5)
        if checkpointed:
            y = checkpoint(compiled, x, use_reentrant=reentrant)
        else:
            y = compiled(x)
        return list(torch.autograd.grad(y.square().sum(), [x, *module.parameters()])) if not reentrant else _all(y)

    def _all(y: torch.Tensor) -> list[torch.Tensor]:
        for tensor in (x, *module.parameters()):
            tensor.grad = None
        y.square().sum().backward()
        return [tensor.grad.clone() for tensor in (x, *module.parameters()) if tensor.grad is not None]

    assert same_bits(run(True), run(False))
