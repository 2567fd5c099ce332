"""Every recipe on a GPU: native or emulated, the numbers are those of the reference. ``python -m pytest -m gpu``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import Policy, hardware, numerics
from fp8graph.numerics import formats, hints
from fp8graph.recipes import RECIPE_NAMES, NVFP4BlockScaling, resolve_recipe
from helpers import compiled_step, multiplied

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES: list[tuple[tuple[int, ...], int, bool]] = [((256, 512), 384, False), ((2, 33, 304), 152, True)]
EXACT_DB = 45.0  # one rounding to bf16 and another order of summation


def on_gpu(recipe: Any, dtype: torch.dtype, shape: Any, outputs: int, bias: bool, compiler: Any) -> Any:
    torch.manual_seed(0)
    module = nn.Linear(shape[-1], outputs, bias=bias).to("cuda", dtype)
    x = torch.randn(shape).to("cuda", dtype).requires_grad_()
    backend = fp8graph.Backend(Policy(default=recipe, min_speedup=0), compiler=compiler)
    return module, x, compiled_step(module, x, backend, fullgraph=True), backend.report.gemms


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "outputs", "bias"), SHAPES)
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_linear(recipe: str, dtype: torch.dtype, shape: Any, outputs: int, bias: bool, compiler: str) -> None:
    # rounded stochastically, gradients are other numbers each time
    found: Any = NVFP4BlockScaling(disable_stochastic_rounding=True) if recipe == "nvfp4" else resolve_recipe(recipe)
    module, x, (y, dx, dw, *_), gemms = on_gpu(found, dtype, shape, outputs, bias, compiler)
    rows, weight = x.detach().flatten(0, -2), module.weight.detach()
    dy = torch.linspace(-1.0, 1.0, y.numel(), device="cuda").to(dtype).reshape(-1, outputs)
    exact = {
        "fprop": multiplied(found, (rows, "input", False), (weight, "weight", False)),
        "dgrad": multiplied(found, (dy, "grad_output", False), (weight, "weight", True)),
        "wgrad": multiplied(found, (dy, "grad_output", True), (rows, "input", True)),
    }
    if bias:
        exact["fprop"] = exact["fprop"] + module.bias.detach().double()
    if recipe == "rowwise_with_gw_hp":
        exact["wgrad"] = dy.double().T @ rows.double()
    got = {"fprop": y.flatten(0, -2), "dgrad": dx.flatten(0, -2), "wgrad": dw}
    for name, value in got.items():
        assert numerics.sqnr_db(exact[name], value) >= EXACT_DB, name
    device = hardware.of_device(torch.device("cuda"))
    operands: dict[str, Any] = {
        "fprop": ("input", "weight"),
        "dgrad": ("grad_output", "weight"),
        "wgrad": ("grad_output", "input"),
    }
    for gemm in gemms:
        if gemm.recipe is not None:
            a, b = (found.quantizer(operand) for operand in operands.get(gemm.gemm, ("grad_output", "input")))  # pyright: ignore
            expected = "native" if device.obstacle(a, b, dtype) is None else "emulated"
            assert gemm.execution == expected, gemm.reason


def test_delayed_scaling_is_the_same_on_cpu_and_gpu() -> None:
    """Scales and histories after five steps of one layer whose inputs are the same on both."""
    recipe = fp8graph.DelayedScaling(amax_history_len=4)
    states: list[dict[str, Tensor]] = []
    for device in ("cpu", "cuda"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = nn.Linear(64, 32).to(device)
        backend = fp8graph.Backend(Policy(default=recipe, min_speedup=0))
        model = torch.compile(module, backend=backend)
        for step in range(5):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)) * (step + 1)
            model(x.to(device)).backward(torch.ones(16, 32, device=device) * (step + 1))
        states.append(dict(backend.state_dict()))
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_are_those_of_a_cpu(dtype: torch.dtype) -> None:
    """Of every number of bf16, NaN and inf included, with scales that underflow, fit and overflow."""

    def cast(x: Tensor, scale: Tensor) -> Tensor:
        return hints.saturating_cast(formats.overflow_as_nan(x) * scale, dtype)

    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for scale in torch.tensor([2.0**-126, 0.3, 1.0, 1000.0, 3e38]):
        expected, found = (y.float().cpu() for y in (cast(x, scale), torch.compile(cast)(x.cuda(), scale.cuda())))
        assert torch.equal(expected.isnan(), found.isnan())
        assert torch.equal(expected.nan_to_num().view(torch.int32), found.nan_to_num().view(torch.int32))
