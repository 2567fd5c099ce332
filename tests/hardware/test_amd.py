"""AMD's GPUs: what is decided for them, and their numbers on a CPU. Nothing here has run on an AMD GPU."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import hardware
from fp8graph.hardware.amd import AMD, BOARDS
from fp8graph.numerics import quantization
from fp8graph.recipes import RECIPE_NAMES, Recipe, resolve_recipe
from helpers import MLP, eager_backend, first_fast, in_one_test, step

E4M3, E5M2, BF16 = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.bfloat16
MULTIPLIED = {
    "gfx90a": set[str](),
    "gfx942": {"tensorwise", "delayed", "rowwise"},
    "gfx950": {"tensorwise", "delayed", "rowwise", "mxfp8"},
    "gfx1200": {"tensorwise", "delayed", "rowwise"},
    "gfx1201": {"tensorwise", "delayed", "rowwise"},
}


def named(recipe: str) -> Recipe:
    found = resolve_recipe(recipe)
    assert found is not None
    return found


@in_one_test("target", MULTIPLIED)
def test_which_recipes_are_multiplied(target: str) -> None:
    device = hardware.from_target(target)
    names = {"tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4"}
    assert names < {*RECIPE_NAMES}
    assert {name for name in names if fp8graph.supports(name, target)} == MULTIPLIED[target]
    assert device.default_recipe == "tensorwise"
    assert not device.grouped


REASONS: list[tuple[str, str, torch.dtype, str | None]] = [
    ("mxfp8", "gfx942", BF16, "gfx942 has no MXFP8 GEMM"),
    ("nvfp4", "gfx950", BF16, "gfx950 has no NVFP4 GEMM"),
    ("blockwise", "gfx950", BF16, "gfx950 has no FP8 GEMM with one scale per tile"),
    ("tensorwise", "gfx942", torch.float32, None),
    ("rowwise", "gfx942", BF16, None),
    (
        "rowwise",
        "gfx950",
        torch.float32,
        "GEMMs with one scale per row only produce bfloat16 results on AMD's GPUs, not float32",
    ),
    ("mxfp8", "gfx950", torch.float16, None),
    ("mxfp8", "gfx950", torch.float32, "MXFP8 GEMMs only produce bfloat16 or float16 results on AMD's GPUs"),
]


@in_one_test(("recipe", "target", "dtype", "reason"), REASONS)
def test_obstacle_on_amd(recipe: str, target: str, dtype: torch.dtype, reason: str | None) -> None:
    device, found = hardware.from_target(target), named(recipe)
    assert device.obstacle(device.quantizer(found, "input"), device.quantizer(found, "weight"), dtype) == reason


def test_the_second_operand_of_rows_is_e4m3() -> None:
    recipe = fp8graph.Float8RowwiseScaling(fp8_format=fp8graph.Format.HYBRID)
    for target in ("gfx942", "gfx950"):
        device = hardware.from_target(target)
        weight, dy = (device.quantizer(recipe, operand) for operand in ("weight", "grad_output"))
        assert device.obstacle(dy, weight, BF16) is None
        assert "only take E4M3 as the second operand" in str(device.obstacle(weight, dy, BF16))


@in_one_test(("rocm", "fits"), [(None, True), ((7, 0), True), ((7, 2), True), ((6, 4), False), ((7, 14), False)])
def test_mx_needs_a_rocm_whose_order_of_scales_is_written(rocm: tuple[int, ...] | None, fits: bool) -> None:
    device = dataclasses.replace(hardware.from_target("gfx950"), rocm=rocm)  # pyright: ignore[reportCallIssue]
    a, b = (device.quantizer(named("mxfp8"), operand) for operand in ("input", "weight"))
    assert (device.obstacle(a, b, BF16) is None) == fits


def test_grouped_matmuls_are_emulated() -> None:
    device = hardware.from_target("gfx950")
    a, b = (device.quantizer(named("rowwise"), operand) for operand in ("input", "weight"))
    assert device.obstacle(a, b, BF16, grouped=True) == "gfx950 has no grouped FP8 GEMM with one scale per row"


@in_one_test("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4"])
def test_only_gfx942_has_types_of_its_own_and_only_where_it_multiplies(recipe: str) -> None:
    found = named(recipe)
    for target in MULTIPLIED:
        device = hardware.from_target(target)
        for operand in ("input", "grad_output"):
            dtype, of_recipe = device.quantizer(found, operand).dtype, found.quantizer(operand).dtype
            own = target == "gfx942" and recipe in MULTIPLIED[target]
            fnuz = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
            assert dtype == (fnuz[of_recipe] if own else of_recipe)


@in_one_test(
    ("target", "name", "board"),
    [
        ("gfx942", "", "MI300X"),
        ("gfx942", "AMD Instinct MI325X", "MI325X"),
        ("gfx942", "AMD Instinct MI300A", "MI300A"),
        ("gfx950", "AMD Instinct MI350X VF", "MI350X"),
        ("gfx950", "", "MI355X"),
        ("gfx1201", "AMD Radeon RX 9070 XT", "RX 9070 XT"),
        ("gfx1200", "", None),
    ],
)
def test_which_gpu(target: str, name: str, board: str | None) -> None:
    assert hardware.from_target(target, name).speed == (BOARDS[board] if board else None)


def test_a_rocm_build_of_torch_finds_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    properties = types.SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "7.1.25424")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "AMD Instinct MI325X")
    found = hardware.of_device(device)
    assert isinstance(found, AMD)
    assert (found.name, found.speed) == ("gfx942", BOARDS["MI325X"])


@pytest.mark.parametrize(("recipe", "target"), [("tensorwise", "gfx942"), ("rowwise", "gfx942"), ("mxfp8", "gfx950")])
@pytest.mark.parametrize("sizes", [(200, 96, 300), (32, 32, 128), (1, 40, 64)])
def test_torchs_meta_kernel_takes_it(
    recipe: str, target: str, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes and strides of data and scales, padded: for MX the scales of all rows lie one behind the other."""
    monkeypatch.setattr(torch.version, "hip", "7.1.25424")
    seen: list[Any] = []
    original = torch._scaled_mm

    def scaled_mm(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    m, n, k = sizes
    device = hardware.from_target(target)
    a, b = (device.quantizer(named(recipe), operand) for operand in ("input", "weight"))
    multiple = device.alignment(a, b)
    quantized: list[list[Tensor]] = []
    for quantizer, rows, of_rows in ((a, m, multiple[0]), (b, n, multiple[1])):
        x = torch.empty(rows, k, dtype=BF16, device="meta")
        settings = quantization.quantizer_args(quantizer), quantization.quantizer_kwargs(quantizer)
        quantized.append(quantization.quantize_layouts(x, *settings[0], [of_rows, multiple[2]], [], **settings[1]))
    (data_a, scale_a), (data_b, scale_b) = quantized
    blocks: Any = {"block_a": a.block, "block_b": b.block} if any(a.block) else {}
    out = hardware.scaled_mm(data_a, data_b, scale_a, scale_b, None, BF16, False, scaling=a.scaling, **blocks)
    assert out.shape == (data_a.shape[0], data_b.shape[0])
    if recipe == "mxfp8":
        rows_a, depth = data_a.shape
        assert (rows_a % 32, data_b.shape[0] % 32, depth % 128) == (0, 0, 0)
        assert seen[0][2].shape == ((rows_a + -rows_a % 128) * depth // 32,)


def test_mx_scales_are_not_swizzled() -> None:
    scales = torch.arange(40 * 8, dtype=torch.int32).remainder(251).to(torch.uint8).reshape(40, 8)
    data, flat = AMD.operand(torch.empty(40, 256), scales, "mxfp8", (1, 32))
    assert data.shape == (40, 256)
    assert torch.equal(flat.view(torch.uint8)[: 40 * 8], scales.reshape(-1))
    assert not flat.view(torch.uint8)[40 * 8 :].any()


# ---- numbers


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """By torch's own cast: one scale per tensor."""
    largest = torch.finfo(dtype).max
    scale = torch.tensor(largest) / x.float().abs().max()
    return (x.float() * scale).clamp(-largest, largest).to(dtype), 1 / scale


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """a [m, k] and b [n, k], each with its scale, in FP64."""
    return (a[0].double() @ b[0].double().t()) * (a[1].double() * b[1].double())


def is_rounded(got: Tensor, exact: Tensor) -> bool:
    """Whether ``got`` is ``exact`` in bf16, but for errors of the accumulation in FP32."""
    slack = 2.0**-16 * exact.abs().max()
    return bool(((exact - slack).to(BF16) <= got).all() and (got <= (exact + slack).to(BF16)).all())


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_gfx942_on_a_cpu_is_torchs_own_casts(compiler: Any) -> None:
    """Forward and backward of a linear, but for the order of additions."""
    policy = fp8graph.Policy(default="tensorwise", min_speedup=0)
    backend = fp8graph.Backend(policy, target="gfx942", compiler=compiler, cache_weights=False)
    linear = nn.Linear(64, 48, bias=False).to(BF16)
    x = torch.randn(32, 64).to(BF16).requires_grad_()
    out, dx, dw = step(torch.compile(linear, backend=backend), x, parameters=[linear.weight])
    dy = torch.linspace(-1.0, 1.0, out.numel()).reshape(out.shape).to(BF16)
    qx, qw, qdy = quantized(x.detach(), E4M3), quantized(linear.weight.detach(), E4M3), quantized(dy, E5M2)
    assert is_rounded(out, product(qx, qw))
    assert is_rounded(dx, product(qdy, (qw[0].t(), qw[1])))
    assert is_rounded(dw, product((qdy[0].t(), qdy[1]), (qx[0].t(), qx[1])))
    assert {g.dtypes for g in backend.report.gemms} == {
        ("e4m3fnuz", "e4m3fnuz", "bf16"),
        ("e5m2fnuz", "e4m3fnuz", "bf16"),
    }


@first_fast("recipe", ["delayed", "rowwise", "mxfp8"])
@first_fast("settings", [{}, {"save": "memory", "save_activations_in_fp8": True}])
def test_a_model_trains_as_for_gfx942(recipe: str, settings: dict[str, Any]) -> None:
    """Every graph is valid after every pass, whatever FP8 types are in it."""
    policy = fp8graph.Policy(default=recipe, min_speedup=0)
    module = MLP(64, 128).to(BF16)
    backend = fp8graph.Backend(policy, target="gfx942", compiler="eager", **settings)
    model = torch.compile(module, backend=backend)
    for _ in range(2):
        model(torch.randn(32, 64).to(BF16).requires_grad_()).sum().backward()
    text = "".join(view.after for view in backend.report.graphs)
    assert ("fnuz" in text) == (recipe != "mxfp8" or bool(settings))
    assert all(torch.isfinite(parameter.grad).all() for parameter in module.parameters() if parameter.grad is not None)


def test_explain_decides_and_says_why() -> None:
    x = torch.empty(32768, 2048, dtype=BF16, device="meta")
    module = MLP(2048, 4096).to(BF16)
    report = fp8graph.explain(module, x, target="gfx942")
    assert {(g.recipe, g.execution) for g in report.gemms} == {("tensorwise", "native")}
    report = fp8graph.explain(module, x, target="gfx942", recipe="mxfp8")
    assert {(g.execution, g.reason) for g in report.gemms} == {
        ("emulated", "default; emulated: gfx942 has no MXFP8 GEMM")
    }
    with pytest.raises(fp8graph.Fp8GraphError, match="kernels for gfx942 cannot be generated without that GPU"):
        print(report.kernels)


@pytest.mark.slow
def test_a_state_dict_goes_from_ocp_types_to_fnuz_and_back(caplog: pytest.LogCaptureFixture) -> None:
    """Scales are for 448 here and for 240 there: they are converted, and that is said. Histories are the same."""
    policy, module, x = fp8graph.Policy(default="delayed", min_speedup=0), MLP(), torch.randn(16, 32)
    states: dict[str | None, Any] = {}
    for target in (None, "gfx942"):
        backend = eager_backend(policy, target=target)
        torch.compile(module, backend=backend)(x.clone().requires_grad_()).sum().backward()
        states[target] = backend.state_dict()
    ocp, fnuz = states[None], states["gfx942"]
    other = eager_backend(policy, target="gfx942")
    model = torch.compile(module, backend=other)
    with torch.no_grad():
        model(x)
    with caplog.at_level("WARNING", "fp8graph"):
        other.load_state_dict(ocp)
    assert "have other maxima" in caplog.text
    loaded = other.state_dict()
    key = "up.input|delayed()"
    torch.testing.assert_close(loaded[f"{key}|scale"], fnuz[f"{key}|scale"], rtol=2.0**-23, atol=0)
    assert torch.equal(loaded[f"{key}|amax_history"], ocp[f"{key}|amax_history"])
    assert (fnuz[f"{key}|fp8_max"].item(), f"{key}|fp8_max" in ocp) == (240.0, False)
    caplog.clear()
    back = eager_backend(policy)
    back.load_state_dict(loaded)
    with torch.no_grad(), caplog.at_level("WARNING", "fp8graph"):
        torch.compile(module, backend=back)(x)
    assert "have other maxima" in caplog.text
    torch.testing.assert_close(back.state_dict()[f"{key}|scale"], ocp[f"{key}|scale"], rtol=2.0**-22, atol=0)
