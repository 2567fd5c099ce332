"""Training as users do it: GradScaler, autocast, master weights, several optimizers, EMA, pickled models, modes."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import Policy
from fp8graph.recipes import RECIPE_NAMES
from helpers import MLP, eager_backend, first_fast, first_slow, same_bits, through_torch_save


def batch(step: int) -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(step))


def scaled_steps(module: nn.Module, model: Any) -> list[bool]:
    """Whether GradScaler skipped each of eight steps that start with gradients of 2^18: inf in fp16."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    skipped: list[bool] = []
    for step in range(8):
        before = [p.detach().clone() for p in module.parameters()]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(batch(step) * 0.01).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        skipped.append(scaler.get_scale() < scale)
        unchanged = all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
        assert unchanged == skipped[-1]
        assert all(torch.isfinite(p).all() for p in module.parameters())
    return skipped


@first_fast("recipe", RECIPE_NAMES)
def test_grad_scaler_sees_an_overflow(recipe: str) -> None:
    """Gradients that overflow in fp16 reach the scaler through saturating casts: it skips what it skips without us."""
    torch.manual_seed(0)
    module = MLP()
    with torch.no_grad():  # small numbers: dy is what overflows, nothing else comes close
        for parameter in module.parameters():
            parameter *= 0.1
    plain = copy.deepcopy(module)
    expected = [True] * 3 + [False] * 5  # dy = 2^18, 2^17, 2^16, then 2^15
    assert scaled_steps(plain, plain) == expected
    assert scaled_steps(module, torch.compile(module, backend=eager_backend(Policy(default=recipe)))) == expected


@first_fast(("recipe", "bad"), [*((recipe, math.inf) for recipe in RECIPE_NAMES), ("tensorwise", math.nan)])
def test_a_bad_gradient_is_not_hidden_in_any_layer(recipe: str, bad: float) -> None:
    """A saturated dy = inf would give finite weight gradients."""
    module = MLP()
    model = torch.compile(module, backend=eager_backend(Policy(default=recipe)))
    out = model(batch(0))
    dy = torch.randn_like(out)
    dy[3, 7] = bad
    out.backward(dy)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert not torch.isfinite(parameter.grad).all(), name


@first_fast(("recipe", "fused"), [*((recipe, False) for recipe in RECIPE_NAMES), ("tensorwise", True)])
def test_fp32_master_weights_under_autocast(recipe: str, fused: bool) -> None:
    torch.manual_seed(0)
    module = MLP()
    target = nn.Linear(32, 32)
    backend = eager_backend(Policy(default=recipe))
    model = torch.compile(module, backend=backend)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, fused=fused)
    losses: list[float] = []
    for step in range(20):
        x = batch(step % 4)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        loss = ((out.float() - target(x).detach()) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.dtype == torch.float32 and p.grad is not None for p in module.parameters())
    assert {gemm.dtypes[2] for gemm in backend.report.gemms} == {"bf16"}
    assert len(backend.report.graphs) == 1
    assert losses[-1] < 0.85 * losses[0]


def test_region_recipes_by_name_train_with_state() -> None:
    """autocast(recipe="delayed") in compiled code and around it, beside the policy's recipe."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            with fp8graph.autocast(recipe="delayed"):
                x = self.a(x)
            return self.b(x)

    module = Half()
    backend = eager_backend(Policy(default="mxfp8"))
    model = torch.compile(module, backend=backend)
    model(batch(0)).sum().backward()
    owners = lambda: {key.partition(".")[0] for key in backend.state_dict() if "|" in key}  # noqa: E731
    assert owners() == {"a"}
    with fp8graph.autocast(recipe="delayed"):
        model(batch(1)).sum().backward()
    assert owners() == {"a", "b"}
    kinds: dict[str, Any] = {g.fqn: g.recipe for g in backend.report.graphs[0].gemms}
    assert kinds == {"a": "delayed", "b": "mxfp8"}


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_torch_save,
    "EMA": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
}


@first_fast(
    ("how", "recipe"), [*((how, "rowwise") for how in COPIES), ("pickle", "delayed"), ("torch.save", "delayed")]
)
def test_copies_of_a_compiled_model(how: str, recipe: str) -> None:
    """A copy computes the same; a pickled one with a backend of its own, which has the settings and the state.

    (The scaling state of a deep copy is its own and starts anew: tests/passes/test_scaling_state.py.)
    """
    module = MLP()
    backend = eager_backend(Policy(default=recipe), cache_weights="update", save="memory", target="cpu")
    model: Any = torch.compile(module, backend=backend)
    for step in range(3):
        model(batch(step)).sum().backward()
    copied = COPIES[how](model)
    fp8graph.refresh_weights(backend)  # delayed: to the scales of now, as the copy does
    with torch.no_grad():
        assert torch.equal(model(batch(3)), copied(batch(3)))
        copied.down.weight.mul_(2)  # the copy's own
        assert not torch.equal(model(batch(3)), copied(batch(3)))
    found = fp8graph.backend_of(copied)
    assert (found is backend) == (how in ("deepcopy", "EMA"))
    assert found.policy == backend.policy
    settings = found.settings
    assert (settings.save, settings.target, settings.compiler) == ("memory", "cpu", "eager")
    if found is not backend and recipe == "delayed":
        assert found.state_dict().keys() == backend.state_dict().keys()


def test_pickled_models_compiled_by_name_or_in_place() -> None:
    module = MLP()
    named: Any = torch.compile(module, backend="fp8graph", options={"compiler": "eager", "recipe": "rowwise"})
    copied = COPIES["pickle"](named)
    assert torch.equal(named(batch(0)), copied(batch(0)))
    backends = [fp8graph.backend_of(model) for model in (copied, named)]
    assert backends[0] is not backends[1]  # each model has its own
    assert backends[0].settings == backends[1].settings
    assert {gemm.recipe for backend in backends for gemm in backend.report.gemms} == {"rowwise"}
    module.compile(backend=eager_backend())
    copied = COPIES["pickle"](module)  # torch drops the compiled code
    with pytest.raises(fp8graph.ConfigError, match="was not compiled"):
        fp8graph.backend_of(copied)


def test_an_averaged_model() -> None:
    """EMA as torch does it: its in-place updates make its FP8 weights stale, nobody else's."""
    module = MLP()
    backend = eager_backend(cache_weights="update")
    model: Any = torch.compile(module, backend=backend)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)).sum().backward()
        optimizer.step()
        average.update_parameters(model)
        with torch.no_grad():
            plain: Any = copy.deepcopy(average.module._orig_mod)
            expected = torch.compile(plain, backend=eager_backend())(batch(9))
            assert torch.equal(average(batch(9)), expected)
    assert backend.weights.quantized == 3 * 2 * 3  # three weights of two models in three steps


@pytest.mark.slow
def test_two_optimizers_make_their_own_weights_stale() -> None:
    module = MLP()
    backend = eager_backend(cache_weights="update", fuse_linears=False)
    model = torch.compile(module, backend=backend)
    optimizers = [
        torch.optim.AdamW([module.gate.weight, module.up.weight], lr=0.1, fused=True),
        torch.optim.SGD([module.down.weight], lr=0.1),
    ]
    model(batch(0)).sum().backward()
    # the first step of the first one: nobody is known to hold the third weight
    for optimizer, quantized in zip(optimizers * 2, (3 + 3, 6 + 1, 7 + 2, 9 + 1), strict=True):
        optimizer.step()
        fresh = torch.compile(copy.deepcopy(module), backend=eager_backend(fuse_linears=False))
        assert torch.equal(model(batch(1)), fresh(batch(1)))
        assert backend.weights.quantized == quantized


@first_slow("mode", ["reduce-overhead", "max-autotune"])
def test_modes_of_torch_compile(mode: str) -> None:
    module = MLP()
    losses: list[list[float]] = []
    for named in (False, True):
        torch._dynamo.reset()
        trained = copy.deepcopy(module)
        how: dict[str, Any] = {"backend": "fp8graph", "mode": mode} if named else {"backend": eager_backend()}
        model: Any = torch.compile(trained, **how)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, fused=True)
        losses.append([])
        for step in range(4):
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
        if named:
            assert {g.recipe for g in fp8graph.backend_of(model).report.gemms} == {"tensorwise"}
    assert max(abs(b / a - 1) for a, b in zip(*losses, strict=True)) < 1e-3


@pytest.mark.parametrize("restored", [False, True])
def test_a_resumed_run_under_nvfp4_needs_torchs_rng_state(restored: bool) -> None:
    """Gradients are rounded stochastically, with numbers of torch's generator; scales need no state."""

    def steps(model: nn.Module, compiled: Any, numbers: range) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in numbers:
            compiled(batch(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def compiled(model: nn.Module) -> Any:
        return torch.compile(model, backend=eager_backend(Policy(default="nvfp4", min_speedup=0)))

    model = MLP()
    run = compiled(model)
    steps(model, run, range(1))
    saved, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    steps(model, run, range(1, 3))
    other = MLP()
    other.load_state_dict(saved)
    resumed = compiled(other)
    torch.manual_seed(2)
    if restored:
        torch.set_rng_state(random)
    steps(other, resumed, range(1, 3))
    assert same_bits(model.parameters(), other.parameters()) == restored
