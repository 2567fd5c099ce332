"""Programs of users on a GPU: CUDA graphs, optimizers, scalers, experts, a model. ``python -m pytest -m gpu``.

Each test runs one of its cases on a CPU as well, with compiler="eager" and what exists there, so that its own code is
known to work.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fp8graph import Backend, Policy, Rule, hardware, numerics
from fp8graph.recipes import resolve_recipe
from helpers import MLP, compiled_step, multiplied, same_bits, step

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
EXACT_DB = 45.0  # one rounding to bf16 and another order of summation
# Beside exact differences, 2 % of the FP8 numbers that Inductor makes behind a fused producer are one step apart.
FUSED_DB = 30.0


def on_devices(names: str, *cases: Any) -> pytest.MarkDecorator:
    """Parametrize a test with ``names`` and ``device``: all cases on a GPU, the first on a CPU."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    cuda = [pytest.param(*value, torch.device("cuda"), marks=GPU) for value in values]
    return pytest.mark.parametrize(f"{names}, device", [(*values[0], torch.device("cpu")), *cuda])


def backend_on(device: torch.device, policy: Any, **settings: Any) -> Backend:
    if not isinstance(policy, Policy):
        policy = Policy(default=policy, min_speedup=0)
    settings.setdefault("compiler", "inductor" if device.type == "cuda" else "eager")
    return Backend(policy, **settings)


def native(device: torch.device, recipe: str, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the device multiplies what ``recipe`` makes of an input and a weight."""
    found = resolve_recipe(recipe)
    assert found is not None
    return hardware.of_device(device).obstacle(found.quantizer("input"), found.quantizer("weight"), dtype) is None


def batch(number: int, device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(device, dtype)


def clones(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Results of a replayed graph live in its memory: the next replay writes over them."""
    return [tensor.detach().clone() for tensor in tensors if tensor is not None]


@on_devices("recipe, training", ("delayed", True), ("delayed", False), ("tensorwise", True), ("tensorwise", False))
def test_cuda_graphs(recipe: str, training: bool, device: torch.device) -> None:
    """The same bits with them, nothing skipped, and only what changes from call to call is copied into them.

    That is the input of forward and the gradient of its result. Parameters, FP8 copies of weights and the pages of
    delayed scaling, which are written in place, stay where they are.
    """
    module = MLP(128, 256).to(device, torch.bfloat16)
    results: list[list[Tensor]] = []
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        counters.clear()
        options: dict[str, Any] = {"triton.cudagraphs": mode == "reduce-overhead"}
        backend = backend_on(device, recipe, inductor_options=options if device.type == "cuda" else None)
        model = torch.compile(module, backend=backend)
        results.append([])
        for number in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            x = batch(number, device, 64, 128).requires_grad_(training)
            module.zero_grad(set_to_none=True)
            with torch.set_grad_enabled(training):
                y = model(x)
            if training:
                y.float().square().sum().backward()
            results[-1] += clones([y, x.grad, *(p.grad for p in module.parameters())])
        results[-1] += [value.cpu() for value in backend.state_dict().values() if isinstance(value, Tensor)]
        if device.type == "cuda" and mode == "reduce-overhead":
            assert counters["inductor"]["cudagraph_skips"] == 0
            assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] == (2 if training else 1)
    assert same_bits(*results)


@pytest.mark.slow
@on_devices("recipe", "tensorwise", "delayed", "rowwise", "blockwise")
def test_fused_adamw_with_kept_weights(recipe: str, device: torch.device) -> None:
    """Weights change without a new version: four steps are bit for bit those of weights quantized in the graph."""
    first = MLP(128, 256).to(device, torch.bfloat16)
    results: list[list[Tensor]] = []
    for cache_weights in ("update", False):
        torch._dynamo.reset()
        module = copy.deepcopy(first)
        backend = backend_on(device, recipe, cache_weights=cache_weights)
        model = torch.compile(module, backend=backend)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
        results.append([])
        for number in range(4):
            optimizer.zero_grad()
            loss = model(batch(number, device, 64, 128)).float().square().mean()
            loss.backward()
            optimizer.step()
            results[-1] += clones([loss])
        results[-1] += clones(list(module.parameters()))
        assert bool(backend.weights.bytes) == bool(cache_weights)
    assert same_bits(*results)
    assert not torch.equal(results[0][0], results[0][3])


@on_devices("recipe", "tensorwise", "delayed", "rowwise", "blockwise")
def test_saving_memory(recipe: str, device: torch.device) -> None:
    """Backward quantizes the numbers again that forward had; exactly those, where no producer is fused."""
    module, x = MLP(128, 256).to(device, torch.bfloat16), batch(0, device, 64, 128).requires_grad_()
    results: list[list[Tensor]] = []
    for save in ("speed", "memory"):
        torch._dynamo.reset()
        results.append(compiled_step(module, x, backend_on(device, recipe, save=save)))
    if device.type == "cpu":
        assert same_bits(*results)
    for a, b in zip(*results, strict=True):
        assert numerics.sqnr_db(a, b) >= FUSED_DB


class Attention(nn.Module):
    """q, k and v of one input, of unequal sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(256, size, bias=False) for size in (256, 128, 128))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return torch.cat([q.relu(), k.sigmoid(), v], -1)


# blockwise: tiles lie within one linear, only sums differ; one scale for joined tensors or rows is another number
@on_devices("recipe, db", ("tensorwise", 22.0), ("rowwise", 22.0), ("blockwise", FUSED_DB))
def test_joined_linears(recipe: str, db: float, device: torch.device) -> None:
    module, x = Attention().to(device, torch.bfloat16), batch(0, device, 128, 256).requires_grad_()
    results: list[list[Tensor]] = []
    for fuse in (True, False):
        torch._dynamo.reset()
        backend = backend_on(device, recipe, fuse_linears=fuse)
        results.append(compiled_step(module, x, backend))
        joined = {gemm.gemm for gemm in backend.report.gemms if "one GEMM with" in gemm.reason}
        assert ({"dgrad", "wgrad"} <= joined) == (fuse and native(device, recipe))
    for a, b in zip(*results, strict=True):
        assert numerics.sqnr_db(b, a) >= db


class Experts(nn.Module):
    """[t, 128] -> [t, 256], four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 256, 128) / 8)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.w.transpose(-2, -1), offs=offs)


class Loop(nn.Module):
    """The same, one linear after another."""

    def __init__(self, w: nn.Parameter, sizes: Sequence[int]) -> None:
        super().__init__()
        self.w, self.sizes = w, list(sizes)

    def forward(self, x: Tensor, _offs: Tensor) -> Tensor:
        return torch.cat([rows @ w.t() for rows, w in zip(x.split(self.sizes), self.w, strict=True)])


@on_devices("sizes", [10, 1, 70, 47], [32, 64, 16, 16], [0, 128, 0, 0])
def test_experts(sizes: list[int], device: torch.device) -> None:
    """One scale per row: ``torch._scaled_grouped_mm`` multiplies all three GEMMs where it exists (sm_90)."""
    module = Experts().to(device, torch.bfloat16)
    x = batch(0, device, 128, 128).requires_grad_()
    offs = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    policy = Policy([Rule("*", "rowwise", op="*")], default=None, min_speedup=0)
    backend = backend_on(device, policy)
    got = step(torch.compile(module, backend=backend, fullgraph=True), x, offs, parameters=[module.w])
    found = {gemm.execution for gemm in backend.report.gemms}
    assert found == {"native" if "row" in hardware.of_device(device).grouped else "emulated"}
    loop = torch.compile(Loop(module.w, sizes), backend=backend_on(device, policy, compiler="eager"))
    for a, b in zip(step(loop, x, offs, parameters=[module.w]), got, strict=True):
        assert numerics.sqnr_db(a, b) >= EXACT_DB


def scaled_steps(module: nn.Module, model: Any, device: torch.device) -> list[bool]:
    """Whether GradScaler skipped each of six steps that start with gradients of 2^18: inf in fp16."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**18)
    skipped: list[bool] = []
    for number in range(6):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16):
            loss = model(batch(number, device, 64, 128, dtype=torch.float32) * 0.01).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        skipped.append(scaler.get_scale() < scale)
        assert all(torch.isfinite(p).all() for p in module.parameters())
    return skipped


@on_devices("recipe", "tensorwise", "delayed", "rowwise", "blockwise")
def test_grad_scaler_sees_an_overflow(recipe: str, device: torch.device) -> None:
    module = MLP(128, 256).to(device)
    with torch.no_grad():  # small numbers: dy is what overflows, nothing else comes close
        for parameter in module.parameters():
            parameter *= 0.1
    plain, model = copy.deepcopy(module), torch.compile(module, backend=backend_on(device, recipe))
    assert scaled_steps(module, model, device) == scaled_steps(plain, plain, device) == [True] * 3 + [False] * 3


def linear_results(
    recipe: str, device: torch.device, x: Tensor, outputs: int, **settings: Any
) -> tuple[list[Tensor], Callable[[Tensor], dict[str, Tensor]], Backend]:
    """One step of a linear, the function of dy that computes its three GEMMs in float64, and its backend."""
    module = nn.Linear(x.shape[-1], outputs, bias=False).to(x)
    backend = backend_on(device, recipe, **settings)
    results = compiled_step(module, x.requires_grad_(), backend, fullgraph=True)
    found, rows, weight = resolve_recipe(recipe), x.detach(), module.weight.detach()

    def exact(dy: Tensor) -> dict[str, Tensor]:
        return {
            "fprop": multiplied(found, (rows, "input", False), (weight, "weight", False)),
            "dgrad": multiplied(found, (dy, "grad_output", False), (weight, "weight", True)),
            "wgrad": multiplied(found, (dy, "grad_output", True), (rows, "input", True)),
        }

    return results, exact, backend


@on_devices("inputs, outputs", (384, 1152), (1536, 384))
def test_tiles_that_are_not_a_multiple_of_four(inputs: int, outputs: int, device: torch.device) -> None:
    """3, 9, 12 and 3 tiles along k: cuBLASLt reads the scales of 128x128 tiles in fours."""
    x = batch(0, device, 64, inputs)
    results, exact, backend = linear_results("blockwise", device, x, outputs)
    dy = torch.linspace(-1.0, 1.0, 64 * outputs, device=device).bfloat16().reshape(64, outputs)
    for got, (gemm, expected) in zip(results, exact(dy).items(), strict=True):
        assert numerics.sqnr_db(expected, got) >= EXACT_DB, gemm
    assert {gemm.execution for gemm in backend.report.gemms} == {
        "native" if native(device, "blockwise") else "emulated"
    }


@on_devices("recipe, rows", *itertools.product(("tensorwise", "delayed", "rowwise", "blockwise"), (1, 3, 8)))
def test_few_rows(recipe: str, rows: int, device: torch.device) -> None:
    """Decoding: one token, and the next batch; its number of rows is dynamic from then on."""
    module = nn.Linear(256, 512, bias=False).to(device, torch.bfloat16)
    model = torch.compile(module, backend=backend_on(device, recipe))
    found = resolve_recipe(recipe)
    with torch.no_grad():
        for number in (rows, rows + 4):
            x = batch(number, device, number, 256)
            expected = multiplied(found, (x, "input", False), (module.weight.detach(), "weight", False))
            assert numerics.sqnr_db(expected, model(x)) >= EXACT_DB


@on_devices("offset", 4, 8, 12)
def test_scales_inside_a_page(offset: int, device: torch.device) -> None:
    """The rows of delayed scaling's page start at multiples of 16 bytes; cuBLASLt reads one FP32 number there."""
    a, b = (batch(number, device, 64, 128).to(torch.float8_e4m3fn) for number in range(2))
    page = torch.rand(20, device=device) + 0.5
    results = [
        torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)
        for scales in (
            (page[offset : offset + 1], page[offset + 4 : offset + 5]),
            (page[offset : offset + 1].clone(), page[offset + 4 : offset + 5].clone()),
        )
    ]
    assert page[offset:].data_ptr() % 64
    assert same_bits(results[:1], results[1:])


@on_devices("dtype", torch.float16, torch.float32)
def test_rows_give_other_results_than_bf16(dtype: torch.dtype, device: torch.device) -> None:
    """cuBLASLt multiplies rows into fp16 and FP32 on sm_90."""
    x = batch(0, device, 64, 256, dtype=dtype)
    results, exact, backend = linear_results("rowwise", device, x, 128)
    dy = torch.linspace(-1.0, 1.0, 64 * 128, device=device).to(dtype).reshape(64, 128)
    for got, (gemm, expected) in zip(results, exact(dy).items(), strict=True):
        assert numerics.sqnr_db(expected, got) >= EXACT_DB, gemm
    assert {g.execution for g in backend.report.gemms} == {"native" if native(device, "rowwise", dtype) else "emulated"}


@pytest.mark.slow
@on_devices("recipe", "tensorwise", "blockwise")
def test_a_model_of_transformers(recipe: str, device: torch.device) -> None:
    """A Llama of one layer: loss and gradients of generated code are those of the graph, and close to bf16's."""
    pytest.importorskip("transformers")
    from tiny_models import TINY

    model = TINY["llama"].build(1).to(device, torch.bfloat16)
    inputs = {name: value.to(device) for name, value in TINY["llama"].inputs().items()}
    results: dict[str, list[Tensor]] = {}
    for compiler in ("bf16", "eager", *(["inductor"] if device.type == "cuda" else [])):
        torch._dynamo.reset()
        fp8 = compiler != "bf16"
        policy = Policy([Rule("lm_head", None)], default=recipe if fp8 else None, min_speedup=0)
        backend = backend_on(device, policy, compiler=compiler if fp8 else "eager")
        model.zero_grad()
        output = torch.compile(model.forward, backend=backend)(**inputs)
        output.loss.backward()
        results[compiler] = clones([output.loss, *(p.grad for p in model.parameters())])
        assert sum(g.recipe is not None for g in backend.report.gemms) == (21 if fp8 else 0)
    for name, value in results.items():
        assert abs(float(value[0]) / float(results["bf16"][0]) - 1) < 0.02
        if name == "inductor":
            sizes = [numerics.sqnr_db(a, b) for a, b in zip(results["eager"][1:], value[1:], strict=True)]
            assert min(sizes) >= 15.0  # gradients through several FP8 layers, some of whose numbers are one step apart
