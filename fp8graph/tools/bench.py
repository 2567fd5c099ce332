"""``fp8graph bench``: measures what FP8 gains on this machine, and the rates that the speed model decides with.

``calibrate`` measures the fields of ``speed.Speed``: the rates that large GEMMs reach, the bandwidth of a copy, and
what one more kernel costs the GPU and the host. A scaling whose GEMM fails is left out and keeps the model's rate.
``linears`` measures forward and backward of one compiled linear, in bf16 and FP8 in turns, and compares them with the
model's prediction.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fp8graph import hardware
from fp8graph.errors import ConfigError
from fp8graph.files import write_file
from fp8graph.hardware import Hardware
from fp8graph.hardware.speed import Speed
from fp8graph.numerics import quantization
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import OperandName, Recipe, Scaling, resolve_recipe

SIZE: Final = 8192  # of the square GEMMs
COPY: Final = 2**30  # bytes
SHAPES: Final = ((512, 4096, 4096), (4096, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (16384, 8192, 8192))
SMALL: Final = 50  # kernels behind a large GEMM: the host launches them while that runs
LAYERS: Final = (4, 20)  # of the two compiled models whose steps differ by the launches of layers alone
LAUNCHES: Final = 5  # of one: fprop and GELU; GELU's gradient, dgrad and wgrad
_RECIPES: Final[dict[Scaling, str]] = {
    "tensor": "tensorwise", "row": "rowwise", "block": "blockwise", "mxfp8": "mxfp8", "nvfp4": "nvfp4",
}  # fmt: skip


def fp8_gpu() -> torch.device:
    """Return the current GPU.

    Raises:
        ConfigError: there is no GPU, or it does not multiply FP8.
    """
    device = hardware.current_device()
    gpu = hardware.of_device(device)
    if not gpu.is_gpu or not gpu.scalings:
        raise ConfigError(
            f"nothing to measure: {gpu.name} has no fast FP8 GEMM. Run this on a GPU that has one, like an H100."
        )
    return device


def elapsed(run: Callable[[], Any], iterations: int) -> float:
    """Return the seconds per call, over ``iterations`` consecutive calls."""
    wait = torch.accelerator.synchronize if torch.accelerator.is_available() else (lambda: None)
    wait()
    start = time.perf_counter()
    for _ in range(iterations):
        run()
    wait()
    return (time.perf_counter() - start) / iterations


def seconds(run: Callable[[], Any], *, rounds: int = 5, iterations: int = 10) -> float:
    """Return the seconds per call in the fastest of ``rounds`` rounds (disturbances only make a machine slower)."""
    for _ in range(3):
        run()
    return min(elapsed(run, iterations) for _ in range(rounds))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The measurements of a device so far: a complete ``Speed``, and the scalings whose rates are measured."""

    speed: Speed
    measured: tuple[Scaling, ...] = ()
    failed: str = ""  # why the last scaling has no measured rate; it keeps the one of ``RATES``


def calibrate(
    device: torch.device, gpu: Hardware, *, size: int = SIZE, copy: int = COPY, compiler: str = "inductor"
) -> Iterator[Calibration]:
    """Measure ``device``: first the rates that every prediction needs, then each scaling. Each yield is complete.

    Args:
        size: the size of the square GEMMs; large ones reach their full rate.
        copy: the bytes of the copy, many times the size of the caches.
        compiler: of the steps whose launches are timed.
    """
    flops = 2.0 * size**3
    one = torch.ones((), device=device)

    def gpu_launch() -> float:
        """Seconds from the end of one kernel to that of a next one that does next to nothing."""
        a = torch.randn(size, size, device=device, dtype=torch.bfloat16)

        def run(kernels: int) -> None:
            torch.mm(a, a)
            for _ in range(kernels):
                one.add_(1.0)

        return _slope(0, SMALL, [seconds(lambda kernels=kernels: run(kernels)) for kernels in (0, SMALL)])

    def rate(dtype: torch.dtype) -> float:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        return flops / seconds(lambda: a @ b)

    def fp8_rate(scaling: Scaling) -> float:
        recipe = resolve_recipe(_RECIPES[scaling])
        assert isinstance(recipe, Recipe)
        return flops / seconds(_scaled_mm(gpu, recipe, size, device))

    first, *others = _RECIPES
    fp8 = fp8_rate(first)
    source = torch.empty(copy, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    speed = Speed(
        name=hardware.device_name(device),
        bf16_flops=rate(torch.bfloat16),
        fp32_flops=rate(torch.float32),
        fp8_flops=fp8,
        fp4_flops=fp8,
        bandwidth=2 * copy / seconds(lambda: target.copy_(source)),
        launch=gpu_launch(),
        host_launch=_slope(*LAYERS, [seconds(narrow_step(n, device, compiler)) for n in LAYERS]) / LAUNCHES,
    )
    yield (done := Calibration(speed=speed, measured=(first,)))
    for scaling in others:
        if scaling not in gpu.scalings:
            continue
        try:
            flops_reached = fp8_rate(scaling)
        except (RuntimeError, ValueError) as error:  # raised by torch and cuBLAS for a GEMM that they do not have
            yield dataclasses.replace(done, failed=f"{_RECIPES[scaling]}: {str(error).strip().splitlines()[0]}")
            continue
        if SCALINGS[scaling].packed > 1:
            speed = dataclasses.replace(done.speed, fp4_flops=flops_reached)
        else:
            speed = dataclasses.replace(done.speed, rates={**done.speed.rates, scaling: flops_reached / fp8})
        yield (done := Calibration(speed=speed, measured=(*done.measured, scaling)))


def _slope(few: int, many: int, times: Sequence[float]) -> float:
    """Seconds of each that is more; the least that a clock tells where noise hides it."""
    return max((times[1] - times[0]) / (many - few), 1e-9)


def narrow_step(layers: int, device: torch.device, compiler: str) -> Callable[[], None]:
    """Forward and backward of linears and GELUs so narrow that the host sets the pace: ``LAUNCHES`` kernels each."""
    torch.compiler.reset()
    model = torch.nn.Sequential(*narrow(layers)).to(device, torch.bfloat16)
    x, dy = (torch.randn(64, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    return training_step(torch.compile(model, backend=compiler), x.requires_grad_(), dy)


def narrow(layers: int) -> Iterator[torch.nn.Module]:
    """Linears and GELUs."""
    for _ in range(layers):
        yield from (torch.nn.Linear(64, 64, bias=False), torch.nn.GELU())


def _scaled_mm(gpu: Hardware, recipe: Recipe, size: int, device: torch.device) -> Callable[[], Tensor]:
    """Return the fprop of a square linear, with operands as ``gpu`` has them."""
    operands: tuple[OperandName, OperandName] = ("input", "weight")
    a, b = (gpu.quantizer(recipe, operand) for operand in operands)
    m, n, k = gpu.alignment(a, b)
    settings: dict[str, Any] = {"scaling": a.scaling}
    data: list[Tensor] = []
    scales: list[Tensor] = []
    for side, quantizer, multiples in (("a", a, [m, k]), ("b", b, [n, k])):
        x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        arguments = quantization.quantizer_args(quantizer)
        outputs = quantization.quantize_layouts(
            x, *arguments, multiples, [], **quantization.quantizer_kwargs(quantizer)
        )
        named = dict(zip(quantization.output_names(a.scaling, ["rowwise"]), outputs, strict=True))
        data.append(named["rowwise"])
        scales.append(named["scale_inv" if "scale_inv" in named else "rowwise_scale_inv"])
        settings |= {
            f"block_{side}": list(quantizer.block),
            f"global_scale_inv_{side}": named.get("rowwise_global_scale_inv"),
        }
    args: list[Any] = [*data, *scales, None, torch.bfloat16, recipe.fast_accum("fprop")]
    return lambda: hardware.scaled_mm(*args, **settings)  # puts scales in order, if the device needs that


def describe(done: Calibration, gpu: Hardware) -> str:
    """Return one line about the last measurement."""
    if done.failed:
        return f"left out: {done.failed}"
    speed, last = done.speed, done.measured[-1]
    if len(done.measured) == 1:
        return (
            f"{speed.name} ({gpu.name}): bf16 {speed.bf16_flops / 1e12:.0f} TFLOP/s, "
            f"FP8 {speed.fp8_flops / 1e12:.0f} TFLOP/s, {speed.bandwidth / 1e12:.2f} TB/s, "
            f"{1e6 * speed.launch:.1f} us of the GPU and {1e6 * speed.host_launch:.0f} us of the host for each kernel"
        )
    reached = speed.low_precision_flops(SCALINGS[last])
    return f"{_RECIPES[last]}: {reached / 1e12:.0f} TFLOP/s"


def write(path: Path, gpu: Hardware, done: Calibration) -> None:
    """Write a file for ``Backend(target=path)`` and ``explain(..., target=path)``, with the measured rates."""
    speed = dataclasses.asdict(done.speed)
    speed["rates"] = {name: done.speed.rates[name] for name in done.measured}
    values = {"target": gpu.name, "speed": speed, "torch": torch.__version__}
    write_file(path, json.dumps(values, indent=1) + "\n", str(path))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearResult:
    """The times of one linear, forward and backward."""

    tokens: int
    inputs: int
    outputs: int
    recipe: str
    bf16_ms: float
    fp8_ms: float
    speedup: float  # median over the rounds
    predicted: float


def linears(
    device: torch.device, recipes: Sequence[str], shapes: Sequence[tuple[int, int, int]] = SHAPES, *, rounds: int = 5
) -> Iterator[LinearResult]:
    """Measure each linear [tokens, inputs] -> [tokens, outputs] in bf16 and under each recipe; predict it too."""
    from fp8graph.backend.backend import Backend
    from fp8graph.recipes.policy import Policy

    for tokens, inputs, outputs in shapes:
        x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(tokens, outputs, device=device, dtype=torch.bfloat16)
        linear = torch.nn.Linear(inputs, outputs, bias=False, device=device, dtype=torch.bfloat16)
        for recipe in recipes:
            torch.compiler.reset()
            backend = Backend(Policy(default=recipe, min_speedup=0))
            plain, fp8 = (training_step(torch.compile(linear, backend=b), x, dy) for b in ("inductor", backend))
            times = [[seconds(run, rounds=1) for run in (plain, fp8)] for _ in range(rounds)]
            parts = [g.speedup for g in backend.report.gemms if g.speedup]
            yield LinearResult(
                tokens=tokens,
                inputs=inputs,
                outputs=outputs,
                recipe=recipe,
                bf16_ms=1e3 * min(before for before, _ in times),
                fp8_ms=1e3 * min(after for _, after in times),
                speedup=statistics.median(before / after for before, after in times),
                predicted=statistics.harmonic_mean(parts) if parts else float("nan"),
            )


def training_step(model: Any, x: Tensor, dy: Tensor) -> Callable[[], None]:
    """Forward and backward of ``model`` at ``x`` for the gradient ``dy``."""

    def run() -> None:
        model(x).backward(dy)
        x.grad = None
        model.zero_grad(set_to_none=True)

    return run
