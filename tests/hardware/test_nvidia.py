"""Operands for a GPU: torch's rules for ``_scaled_mm`` on CUDA, checked on meta tensors. No GPU is needed.

torch's meta kernel takes meta tensors for CUDA ones and knows the layouts, alignments, scale shapes and types that the
CUDA kernel takes; it refuses the others, as the last test shows. (Whether cuBLAS multiplies them right is for a GPU
to say.)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from fp8graph import Float8BlockScaling, NVFP4BlockScaling, hardware
from fp8graph.compat.torch_build import WHY_NOT_GROUPED
from fp8graph.hardware.nvidia import NVIDIA
from fp8graph.numerics import quantization, tiles
from fp8graph.recipes import LAYOUTS, OperandName, Quantizer, Recipe, resolve_recipe
from helpers import in_one_test, same_bits

# gemm: operand and whether its columnwise layout is multiplied, for a [m, k] and b [n, k]
GEMMS: dict[str, tuple[tuple[OperandName, bool], tuple[OperandName, bool]]] = {
    "fprop": (("input", False), ("weight", False)),
    "dgrad": (("grad_output", False), ("weight", True)),
    "wgrad": (("grad_output", True), ("input", True)),
}
HOPPER = hardware.from_target("sm_90")
M, N, K = 200, 96, 300  # ragged for every tile
SHAPES = {"input": (M, K), "weight": (N, K), "grad_output": (M, N)}


def multiply(recipe: Recipe, gemm: str, calls: list[Any], out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """One GEMM, from high-precision tensors, as pass ``quantize`` pads and names it."""
    sides, settings = [], dict[str, Any]()
    scaling = recipe.quantizer("input").scaling
    m, n, k = HOPPER.alignment(*(recipe.quantizer(operand) for operand, _ in GEMMS[gemm]))
    for side, (operand, columnwise), multiples in zip("ab", GEMMS[gemm], ([m, k], [n, k]), strict=True):
        quantizer = recipe.quantizer(operand)
        layouts: Any = ([], multiples) if columnwise else (multiples, [])
        x = torch.empty(SHAPES[operand], dtype=torch.bfloat16, device="meta")
        outputs = quantization.quantize_layouts(
            x, *quantization.quantizer_args(quantizer), *layouts, **quantization.quantizer_kwargs(quantizer)
        )
        named = dict(
            zip(quantization.output_names(scaling, ["columnwise" if columnwise else "rowwise"]), outputs, strict=True)
        )
        layout = "columnwise" if columnwise else "rowwise"
        sides.append((named[layout], named.get("scale_inv", named.get(f"{layout}_scale_inv"))))
        if any(quantizer.block):
            settings[f"block_{side}"] = quantizer.block
        if "global_scale_inv" in named:
            settings[f"global_scale_inv_{side}"] = named["global_scale_inv"]
    (a, scale_a), (b, scale_b) = sides
    calls.append((a, b, scale_a, scale_b))
    return hardware.scaled_mm(a, b, scale_a, scale_b, None, out_dtype, False, scaling=scaling, **settings)


@in_one_test("gemm", GEMMS)
@in_one_test("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4"])
def test_the_cuda_rules_are_kept(recipe: str, gemm: str) -> None:
    found = resolve_recipe(recipe)
    assert found is not None
    out = multiply(found, gemm, calls := [])
    ((a, b, *_),) = calls
    assert out.dtype == torch.bfloat16
    assert out.shape == (a.shape[0], b.shape[0])
    _, n, k = HOPPER.alignment(*(found.quantizer(operand) for operand, _ in GEMMS[gemm]))
    assert b.shape[0] % n == 0
    assert (a.shape[1] * (2 if recipe == "nvfp4" else 1)) % k == 0


def record(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments that reach torch._scaled_mm."""
    seen: list[Any] = []
    original = torch._scaled_mm

    def scaled_mm(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    return seen


def test_the_gemm_adds_where_torch_has_such_a_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one scale per tensor. What torch itself has for CUDA tensors is checked in tests/compat/test_ops.py."""
    seen: list[Any] = []
    monkeypatch.setattr("fp8graph.hardware.nvidia.HAS_SCALED_ADDMM", True)
    monkeypatch.setattr("fp8graph.hardware.device.ops.scaled_addmm", lambda *args, **_: seen.append(args) or args[0])
    assert [HOPPER.adds(gemm) for gemm in ("tensor", "row", "block_1d")] == [True, False, False]
    a, b = (torch.empty(size, 64, dtype=torch.float8_e4m3fn, device="meta") for size in (32, 48))
    scale, addend = torch.empty((), device="meta"), torch.empty(32, 48, device="meta")
    out = HOPPER.scaled_mm(a, b, scale, scale, None, torch.float32, False, addend=addend)
    assert out is addend
    ((_, data_a, data_b, *_),) = seen
    assert (data_a.shape, data_b.shape, data_b.stride()) == ((32, 64), (64, 48), (1, 64))


def test_scales_of_rows_multiply_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVFP4's FP32 scales: one for an operand, or one for each of its rows, which are rows or columns of the result."""
    monkeypatch.setattr("fp8graph.hardware.device.ops.scaled_mm", lambda *_, out_dtype, **__: torch.ones(4, 6))
    data, scale = torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 2).to(torch.float8_e4m3fn)
    one, rows, columns = torch.tensor(3.0), torch.arange(4.0).reshape(4, 1), torch.arange(6.0).reshape(6, 1)
    for a, b, expected in (
        (one, one, torch.full((4, 6), 9.0)),
        (rows, one, 3 * rows.expand(4, 6)),
        (one, columns, 3 * columns.T.expand(4, 6)),
        (rows, columns, rows * columns.T),
    ):
        settings: dict[str, Any] = {"block_a": (1, 16), "block_b": (1, 16), "scaling": "nvfp4"}
        settings |= {"global_scale_inv_a": a, "global_scale_inv_b": b}
        got = HOPPER.scaled_mm(data, data, scale, scale, None, torch.bfloat16, False, **settings)
        assert torch.equal(got, expected.bfloat16())


def ceil_div(size: int, tile: int) -> int:
    return -(-size // tile)


def torch_reads(data: Tensor, scale: Tensor, tile_rows: int) -> bool:
    """``torch._scaled_mm`` v1's check of the scales of ``data`` [rows, k] for tiles of ``tile_rows`` x 128.

    ``is_blockwise_1x128_scaling`` and ``is_blockwise_128x128_scaling`` of aten/src/ATen/native/cuda/ScaledBlas.cpp,
    pytorch 2.10 and later. Until pytorch#164953 (2025-10-08) rows of 128x128 tiles were 4 * ceil(tiles / 4) apart;
    pytorch#163829 lets a dim of size 1 have any stride.
    """
    rows, tiles = data.shape[0], ceil_div(data.shape[1], 128)
    strides = (1, rows) if tile_rows == 1 else (tiles, 1)
    sizes = (ceil_div(rows, tile_rows), tiles)
    return tuple(scale.shape) == sizes and all(
        size == 1 or found == wanted for size, found, wanted in zip(sizes, scale.stride(), strides, strict=True)
    )


def cublas_reads(data: Tensor, scale: Tensor, tile_rows: int) -> bool:
    """Whether cuBLASLt, which knows no strides, finds each scale of ``data`` [rows, k] where it looks for it.

    cuBLAS, "Scaling factors layouts": 1x128 k-major with ``rows`` apart, 128x128 with L4 = k / 128 rounded up to 4.
    pytorch#166752 ("caused silent wrong answers where (K // 128) % 4 != 0") states the same.
    """
    rows, tiles = scale.shape
    wanted = (1, data.shape[0]) if tile_rows == 1 else (4 * ceil_div(ceil_div(data.shape[1], 128), 4), 1)
    return all(
        size == 1 or found == right for size, found, right in zip((rows, tiles), scale.stride(), wanted, strict=True)
    )


@pytest.mark.parametrize(("n", "k"), [(96, 300), (384, 384), (1152, 1536), (896, 8960), (4096, 11008), (4096, 128)])
def test_block_scales_are_stored_as_torch_and_cublas_read_them(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways at once, which is why k is padded to four tiles where one side has 128x128."""
    monkeypatch.setitem(SHAPES, "weight", (n, k))
    monkeypatch.setitem(SHAPES, "input", (M, k))
    monkeypatch.setitem(SHAPES, "grad_output", (M, n))
    seen = record(monkeypatch)
    for gemm, sides in GEMMS.items():
        multiply(recipe := Float8BlockScaling(), gemm, [])
        a, b, scale_a, scale_b = seen[-1][:4]
        blocks = [recipe.quantizer(operand).block[0] for operand, _ in sides]
        for data, scale, tile_rows in zip((a, b.t()), (scale_a, scale_b.t()), blocks, strict=True):
            assert torch_reads(data, scale, tile_rows), (gemm, scale.shape, scale.stride())
            assert cublas_reads(data, scale, tile_rows), (gemm, scale.shape, scale.stride())
        assert a.shape[1] % 512 == 0 or 128 not in blocks  # wgrad, 1x128 on both sides, needs no more than whole tiles


@pytest.mark.parametrize(("tiles", "stride"), [(3, 3), (3, 4)])
def test_neither_stride_is_right_for_three_tiles(tiles: int, stride: int) -> None:
    """Four can go from ``NVIDIA.alignment`` when torch and cuBLASLt agree about them."""
    data = torch.empty(256, 128 * tiles, dtype=torch.float8_e4m3fn, device="meta")
    scale = torch.empty_strided((2, tiles), (stride, 1), device="meta")
    assert not (torch_reads(data, scale, 128) and cublas_reads(data, scale, 128))


@in_one_test("block", [(1, 128), (128, 128)])
@in_one_test("layout", LAYOUTS)
def test_tiles_of_zeros_change_no_other(block: tuple[int, int], layout: str) -> None:
    """Padded to 512 or not, data and scales are the oracle's; what is added are zeros with scale 1. Joined, too."""
    quantizer = Float8BlockScaling(x_block=block).quantizer("input")
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = x if layout == "rowwise" else x.t().contiguous()
    codes, scales, _ = oracle.quantize_tiles(x, quantizer, columnwise=layout == "columnwise")
    settings = quantization.quantizer_args(quantizer), quantization.quantizer_kwargs(quantizer)
    layouts: Any = ([16, 512], []) if layout == "rowwise" else ([], [16, 512])
    dim = -1 if layout == "rowwise" else -2
    for parts in ([x], list(x.chunk(3, dim))):
        joined = {"more": parts[1:], "dim": dim} if len(parts) > 1 else {}
        data, scale_inv = quantization.quantize_layouts(parts[0], *settings[0], *layouts, **settings[1], **joined)
        assert (data.shape, scale_inv.shape) == ((256, 512), (256 // block[0], 4))
        oracle.assert_codes(data[:, :384], codes)
        assert torch.equal(scale_inv[:, :3].double(), torch.from_numpy(scales))
        assert not data[:, 384:].float().any()
        assert bool((scale_inv[:, 3] == 1).all())


# What multiplies rows and tiles, and into which types, by the CUDA that torch was built with. Torch 2.11 and later:
# ScaledBlas.cpp, ``_scaled_mm_out_cuda``: rows go to CUTLASS where ``major < 9 || CUBLAS_VERSION < 120900`` or
# ``major >= 10``, with the check "Only bf16 and fp16 high precision output types" (2.11; later ones take FP32 too);
# else to cuBLASLt, for any type. CUDABlas.cpp, ``get_scale_mode``: tiles "only supported for CUDA 12.9 and above".
# RowwiseScaledMM.cu has kernels for fp16 (pytorch#166744), bias included.
OLD, NEW = (12, 8), (13, 0)
ROWS_NEED = "one scale per row produces float32 results only on sm_90 with CUDA 12.9 or later, or with torch 2.15"
FP16_ROWS_NEED = ROWS_NEED.replace("32", "16")
ROWS_OF = "one scale per row on"
OTHERS = "torch's are for compute capability 9.0 and 10.x"
CONDITIONS: list[tuple[str, str, tuple[int, ...] | None, torch.dtype, str | None]] = [
    ("rowwise", "sm_90", OLD, torch.bfloat16, None),
    ("rowwise", "sm_90", OLD, torch.float16, f"{FP16_ROWS_NEED}, but torch has 12.8"),
    ("rowwise", "sm_90", OLD, torch.float32, f"{ROWS_NEED}, but torch has 12.8"),
    ("rowwise", "sm_90", NEW, torch.float16, None),
    ("rowwise", "sm_90", NEW, torch.float32, None),
    ("rowwise", "sm_90", (12, 9), torch.float32, None),
    ("rowwise", "sm_90", None, torch.float32, None),
    ("rowwise", "sm_100", NEW, torch.float16, f"{FP16_ROWS_NEED}, but this is sm_100"),
    ("rowwise", "sm_100", NEW, torch.float32, f"{ROWS_NEED}, but this is sm_100"),
    ("rowwise", "sm_89", (12, 6), torch.bfloat16, None),
    ("rowwise", "sm_89", NEW, torch.float32, f"{ROWS_NEED}, but this is sm_89"),
    ("rowwise", "sm_120", OLD, torch.bfloat16, None),
    ("rowwise", "sm_120", (12, 6), torch.bfloat16, f"{ROWS_OF} sm_120 needs CUDA 12.8 or later, but torch has 12.6"),
    ("rowwise", "sm_121", (13, 0), torch.bfloat16, None),
    ("rowwise", "sm_121", (13, 0), torch.float16, f"{FP16_ROWS_NEED}, but this is sm_121"),
    ("rowwise", "sm_121a", (12, 9), torch.bfloat16, f"{ROWS_OF} sm_121a needs CUDA 13.0 or later, but torch has 12.9"),
    ("rowwise", "sm_120a", None, torch.float32, f"{ROWS_NEED}, but this is sm_120a"),
    ("mxfp8", "sm_120", OLD, torch.bfloat16, None),
    ("mxfp8", "sm_120", OLD, torch.float32, None),
    ("mxfp8", "sm_120", (12, 6), torch.bfloat16, "MXFP8 GEMMs need CUDA 12.8 or later, but torch has 12.6"),
    ("nvfp4", "sm_121", OLD, torch.bfloat16, None),
    ("nvfp4", "sm_100", (12, 6), torch.bfloat16, "NVFP4 GEMMs need CUDA 12.8 or later, but torch has 12.6"),
    ("blockwise", "sm_90", NEW, torch.float16, None),
    ("blockwise", "sm_90", OLD, torch.bfloat16, "one scale per tile needs CUDA 12.9 or later, but torch has 12.8"),
    ("tensorwise", "sm_90", OLD, torch.float32, None),
]


@pytest.mark.parametrize(("recipe", "target", "cuda", "dtype", "reason"), CONDITIONS)
def test_obstacle_on_nvidia(
    recipe: str,
    target: str,
    cuda: tuple[int, ...] | None,
    dtype: torch.dtype,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fp8graph.hardware.nvidia.torch_build.ROWS_IN_ALL_DTYPES", False)
    device = dataclasses.replace(hardware.from_target(target), cuda=cuda)
    found = resolve_recipe(recipe)
    assert found is not None
    assert device.obstacle(found.quantizer("input"), found.quantizer("weight"), dtype) == reason


@pytest.mark.parametrize(("target", "takes"), [("sm_89", False), ("sm_90", True), ("sm_120", False)])
def test_torch_for_windows_has_no_cutlass_kernel_for_rows(
    target: str, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8graph.hardware.nvidia.torch_build.HAS_ROWS", False)
    device = dataclasses.replace(hardware.from_target(target), cuda=NEW)
    rows = Quantizer(dtype=torch.float8_e4m3fn, scaling="row")
    reason = f"torch for Windows multiplies rows only on sm_90 with CUDA 12.9 or later, but this is {target}"
    assert device.obstacle(rows, rows, torch.bfloat16) == (None if takes else reason)


@pytest.mark.parametrize("target", ["sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_cutlass_multiplies_rows_into_all_types_from_torch_2_15_on(
    target: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, without a bias, it wrote bf16 into a tensor of fp16 (pytorch#187569)."""
    device = dataclasses.replace(hardware.from_target(target), cuda=OLD)
    rows = Quantizer(dtype=torch.float8_e4m3fn, scaling="row")
    for is_new in (True, False):
        monkeypatch.setattr("fp8graph.hardware.nvidia.torch_build.ROWS_IN_ALL_DTYPES", is_new)
        assert (device.obstacle(rows, rows, dtype) is None) == (is_new or dtype == torch.bfloat16)


@pytest.mark.parametrize(
    ("target", "cuda", "takes"), [("sm_90", NEW, True), ("sm_90", OLD, False), ("sm_100", NEW, False)]
)
def test_rows_in_e5m2_are_multiplied_by_cublas_alone(target: str, cuda: tuple[int, ...], takes: bool) -> None:
    """As the second operand: ``check_inputs`` of CUTLASS's kernel wants E4M3 there, and either of them first."""
    device = dataclasses.replace(hardware.from_target(target), cuda=cuda)
    e4m3, e5m2 = (Quantizer(dtype=dtype, scaling="row") for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
    assert device.obstacle(e5m2, e4m3, torch.bfloat16) is None
    reason = device.obstacle(e4m3, e5m2, torch.bfloat16)
    assert reason is None if takes else (reason or "").startswith("one scale per row goes with E5M2 as the second")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_give_other_results_than_bf16(dtype: torch.dtype) -> None:
    found = resolve_recipe("rowwise")
    assert found is not None
    assert multiply(found, "fprop", [], dtype).dtype == dtype


def test_mxfp8_and_nvfp4_scales_are_swizzled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record(monkeypatch)
    for name in ("mxfp8", "nvfp4"):
        recipe = resolve_recipe(name)
        assert recipe is not None
        multiply(recipe, "fprop", [])
    (mx, fp4) = seen
    assert [(s.dtype, tuple(s.shape)) for s in mx[2:4]] == [
        (torch.float8_e8m0fnu, (256 * 12,)),  # 200 rows, 10 tiles of 32
        (torch.float8_e8m0fnu, (128 * 12,)),
    ]
    assert fp4[0].dtype == fp4[1].dtype == torch.float4_e2m1fn_x2
    assert [(s.dtype, tuple(s.shape)) for s in fp4[2:4]] == [
        (torch.float8_e4m3fn, (256 * 20,)),  # 20 tiles of 16 after padding
        (torch.float8_e4m3fn, (128 * 20,)),
    ]


def swizzled_by_hand(scales: np.ndarray[Any, Any]) -> list[int]:
    """cuBLAS's formula for the offset of scale (row, tile), one at a time."""
    rows, tiles = scales.shape
    padded_rows, padded_tiles = rows + -rows % 128, tiles + -tiles % 4
    out = [0] * (padded_rows * padded_tiles)
    for row in range(rows):
        for tile in range(tiles):
            block = (row // 128) * (padded_tiles // 4) + tile // 4
            out[block * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + tile % 4] = int(scales[row, tile])
    return out


@in_one_test(("rows", "columns"), [(128, 4), (128, 8), (256, 4), (1, 1), (130, 5), (303, 19)])
def test_swizzled_scales(rows: int, columns: int) -> None:
    """The scales as Blackwell's tensor cores read them, byte by byte, padding included."""
    scales = torch.randint(1, 120, (rows, columns), dtype=torch.uint8)
    expected = swizzled_by_hand(scales.numpy())
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        got = tiles.ordered([scales.view(dtype)], tiles.BLOCKS)
        assert (got.dtype, [*got.shape]) == (dtype, tiles.ordered_shape(scales.shape, tiles.BLOCKS))
        assert got.flatten().view(torch.uint8).tolist() == expected
        assert same_bits(tiles.in_rows(got, tiles.BLOCKS, scales.shape).view(torch.uint8), scales)


def test_the_order_of_a_swizzled_block() -> None:
    scales = torch.arange(128, dtype=torch.uint8).reshape(128, 1).expand(128, 4)
    assert tiles.ordered([scales], tiles.BLOCKS).flatten()[:32:4].tolist() == [0, 32, 64, 96, 1, 33, 65, 97]


@in_one_test(
    ("target", "cuda", "dtype", "recipe", "reason"),
    [
        ("sm_100", (12, 8), torch.bfloat16, "mxfp8", None),
        ("sm_103", None, torch.bfloat16, "mxfp8", None),
        ("sm_100", (12, 6), torch.bfloat16, "mxfp8", "grouped MXFP8 GEMMs need CUDA 12.8 or later, but torch has 12.6"),
        ("sm_100", None, torch.float32, "mxfp8", "grouped FP8 GEMMs only produce bf16 output, not float32"),
        ("sm_100", (12, 8), torch.bfloat16, "nvfp4", None),
        ("sm_103", None, torch.bfloat16, "nvfp4", None),
        ("sm_100", (12, 6), torch.bfloat16, "nvfp4", "grouped NVFP4 GEMMs need CUDA 12.8 or later, but torch has 12.6"),
        ("sm_100", None, torch.float16, "nvfp4", "grouped NVFP4 GEMMs only produce bf16 output, not float16"),
        (
            *("sm_100", None, torch.bfloat16, NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True)),
            "grouped NVFP4 GEMMs take one FP32 scale per group, not one per row",
        ),
        ("sm_110", None, torch.bfloat16, "nvfp4", f"sm_110 has no grouped NVFP4 GEMM: {OTHERS}"),
        (
            *("sm_100", None, torch.bfloat16, "blockwise"),
            f"sm_100 has no grouped FP8 GEMM with one scale per tile: {WHY_NOT_GROUPED['block']}",
        ),
        ("sm_110", None, torch.bfloat16, "mxfp8", f"sm_110 has no grouped MXFP8 GEMM: {OTHERS}"),
        ("sm_120", None, torch.bfloat16, "mxfp8", f"sm_120 has no grouped MXFP8 GEMM: {OTHERS}"),
        ("sm_121", None, torch.bfloat16, "nvfp4", f"sm_121 has no grouped NVFP4 GEMM: {OTHERS}"),
        ("sm_120", None, torch.bfloat16, "rowwise", f"sm_120 has no grouped FP8 GEMM with one scale per row: {OTHERS}"),
        ("sm_90", None, torch.bfloat16, "mxfp8", "sm_90 has no grouped MXFP8 GEMM"),
    ],
)
def test_grouped_gemms(target: str, cuda: Any, dtype: torch.dtype, recipe: Any, reason: str | None) -> None:
    """``_scaled_grouped_mm_cuda`` and MSLK: devices 10.x, CUDA 12.8, bf16 results."""
    device: Any = hardware.from_target(target)
    found = resolve_recipe(recipe)
    assert found is not None
    operands = found.quantizer("input"), found.quantizer("weight")
    assert dataclasses.replace(device, cuda=cuda).obstacle(*operands, dtype, grouped=True) == reason


@pytest.mark.parametrize("columns", [False, True], ids=["fprop", "wgrad"])
def test_the_grouped_kernel_of_fp4_gets_what_it_checks(columns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All checks of ``_scaled_grouped_mm_cuda_v2`` and of MSLK's ``f4f4bf16_grouped_mm``."""
    experts, n, k, tokens = 3, 48, 160, 70
    offs = torch.tensor([10, 10, 60], dtype=torch.int32)
    called: list[torch.Tensor] = []

    def up(size: int, multiple: int) -> int:
        return -(-size // multiple) * multiple

    def kernel(a: torch.Tensor, b: torch.Tensor, **given: Any) -> torch.Tensor:
        ends, kinds = given["offs"], torch.nn.functional.ScalingType
        assert a.dtype == b.dtype == torch.float4_e2m1fn_x2
        assert a.is_contiguous()
        assert b.transpose(-2, -1).is_contiguous()
        assert a.shape[-1] == b.shape[-2]
        assert a.shape[-1] % 16 == b.shape[-1] % 16 == 0
        assert (ends.dtype, ends.shape, ends.is_contiguous()) == (torch.int32, (experts,), True)
        assert torch.diff(ends, prepend=ends.new_zeros(1)).remainder(32).eq(0).all() or not columns
        for side, rows in (("a", a.shape[0]), ("b", b.shape[-1])):
            blocks, whole = given[f"scale_{side}"]
            assert given[f"scale_recipe_{side}"] == [kinds.BlockWise1x16, kinds.TensorWise]
            assert (blocks.dtype, whole.dtype) == (torch.float8_e4m3fn, torch.float32)
            assert blocks.is_contiguous()
            assert blocks.ndim == 2
            matrices = experts, up(n, 128) * up(k // 16, 4)
            assert blocks.shape == matrices if side == "b" and b.ndim == 3 else blocks.shape[0] >= rows
        product = given["scale_a"][1] * given["scale_b"][1]
        assert product.shape == (experts,)
        assert product.is_contiguous()
        called.append(a)
        return torch.empty((experts, a.shape[0], b.shape[-1]) if columns else (a.shape[0], b.shape[-1]))

    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", kernel)
    recipe, orders = NVFP4BlockScaling(), {"rowwise_order": tiles.BLOCKS, "columnwise_order": tiles.BLOCKS}
    left, right = (
        (torch.randn(tokens, 50), torch.randn(tokens, n))
        if columns
        else (torch.randn(tokens, k), torch.randn(experts, n, k))
    )
    for ordered in ({}, orders):  # by the GEMM; by the kernels that quantize
        operands: list[list[torch.Tensor]] = []
        for operand, x in zip(("grad_output", "input") if columns else ("input", "weight"), (left, right), strict=True):
            quantizer = recipe.quantizer(operand)
            args, kwargs = quantization.quantizer_args(quantizer), quantization.quantizer_kwargs(quantizer)
            multiples = [1 if x is left else 16, 32]
            layouts = ([], multiples) if columns else (multiples, [])
            groups: Any = {"per_matrix": True} if x.ndim == 3 else {"offs": offs}
            operands.append(quantization.quantize_layouts(x, *args, *layouts, **kwargs, **groups, **ordered))
        (a, scale_a, global_a), (b, scale_b, global_b) = operands
        settings: Any = {f"order_{side}": tiles.BLOCKS for side in "ab"} if ordered else {}
        settings |= {"block_a": (1, 16), "block_b": (1, 16) if columns else (16, 16), "multiple": 32}
        settings |= {"global_scale_inv_a": global_a, "global_scale_inv_b": global_b, "scaling": "nvfp4"}
        NVIDIA.scaled_grouped_mm(a, b, scale_a, scale_b, offs, torch.bfloat16, False, True, **settings)
    assert len(called) == 2


def test_torchs_meta_kernel_refuses_what_cuda_refuses() -> None:
    a, b = (torch.empty(32, 64, dtype=torch.float8_e4m3fn, device="meta") for _ in range(2))
    one, rows = torch.ones((), device="meta"), torch.ones(31, 1, device="meta")
    with pytest.raises(RuntimeError, match="col_major"):
        torch._scaled_mm(a, b.t().contiguous(), one, one, out_dtype=torch.bfloat16)
    # MXFP8's scales: why a weight with 32x32 tiles has two copies
    scales = torch.empty(512, dtype=torch.float8_e8m0fnu, device="meta")
    with pytest.raises(RuntimeError, match="col_major"):
        torch._scaled_mm(a, b.t().contiguous(), scales, scales, out_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="Invalid scaling configuration"):
        torch._scaled_mm(a, b.t(), rows, rows.t(), out_dtype=torch.bfloat16)


@in_one_test(
    ("recipe", "multiples"),
    [
        ("tensorwise", [(1, 16, 16)] * 3),
        ("rowwise", [(1, 16, 16)] * 3),
        ("blockwise", [(4, 16, 512), (4, 16, 512), (4, 16, 128)]),  # the weight has square tiles
        ("mxfp8", [(1, 16, 32)] * 3),  # whole tiles along k
        ("nvfp4", [(1, 16, 32)] * 3),
    ],
)
def test_the_multiples_of_m_n_and_k(recipe: str, multiples: list[tuple[int, int, int]]) -> None:
    found = resolve_recipe(recipe)
    assert found is not None
    assert [
        HOPPER.alignment(*(found.quantizer(operand) for operand, _ in operands)) for operands in GEMMS.values()
    ] == multiples
