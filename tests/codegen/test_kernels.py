"""The kernels of Inductor for a quantization, the bytes they move, the code of the largest ones: without a GPU.

tests/data holds what each torch generates (tools/record_kernels.py records it). A count that grows is a lost fusion.

Two reductions of one tensor are two kernels: as a combo kernel they would count as one that reads it once, but share
their blocks and registers (compat.gpu_codegen_patches). Scales that a second kernel casts with are stored, not divided
again by each of its threads: 1 MiB per 32 MiB of 1x128 tiles.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recorded
from fp8graph import offline
from fp8graph.ir import ops
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.offline import KernelRecord
from fp8graph.recipes.policy import Policy
from fp8graph.tools.explain import Generating, explain
from generated import MIXTURES, generate, quantize_after, quantize_inputs, triton_kernels
from helpers import first_fast, first_slow, in_one_test
from recorded import (
    CASES,
    COMPILED,
    DEQUANTIZED,
    DIRECTIONS,
    EXPERTS,
    LAYERS,
    LAYOUTS,
    MEASURED,
    QUANTIZING,
    Case,
)

pytestmark = pytest.mark.skipif(not offline.available(), reason="triton is not installed")


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    """The record for the torch that runs the tests."""
    if not recorded.FILE.exists():
        pytest.skip(f"nothing is recorded for torch {recorded.TORCH}: make record-kernels TORCH={recorded.TORCH}")
    return json.loads(recorded.FILE.read_text(encoding="utf-8"))


class Autocast(nn.Module):
    """A linear with an FP32 weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 1024, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return self.linear(x).float().sin().sum()


def marks_of(case: Case) -> pytest.MarkDecorator | tuple[()]:
    """One producer is enough in the fast tests; "add" and "gelu" are fused as "silu_mul" is."""
    if (case.producer, case.recipe, case.layouts) in FAST:
        return ()
    slow = case.producer in ("nothing", "silu_mul") and case.layouts == "both" and case.recipe in SLOW
    return pytest.mark.slow if slow else pytest.mark.release


SLOW = ("tensorwise", "rowwise", "mxfp8")
FAST = {("nothing", "rowwise", "row"), ("nothing", "tensorwise", "both"), ("rms_norm", "delayed", "both")}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=marks_of(case), id=str(case)) for case in CASES],
)
def test_kernels_and_bytes_of_one_tensor(case: Case, data: dict[str, Any]) -> None:
    kernels, mib = recorded.of_case(case)
    assert kernels <= data["tensors"][str(case)][0]
    assert mib <= data["tensors"][str(case)][1]


@first_fast("size", [(8192, 4090), (8190, 4096)])
@first_fast("layouts", ["row", "both"])
@first_fast("recipe", ["tensorwise", "delayed", "rowwise"])
def test_padding_costs_no_pass(recipe: str, layouts: str, size: tuple[int, int]) -> None:
    """4090 columns become 4096 while they are quantized, 8190 rows 8192: one more kernel, which writes the zeros.

    Scales of rows are padded as well, by a second one.
    """
    aligned, padded = (
        triton_kernels(
            generate(quantize_after("rms_norm", recipe, "input", *LAYOUTS[layouts]), quantize_inputs(*s)).kernels
        )
        for s in ((8192, 4096), size)
    )
    assert len(padded) <= len(aligned) + (2 if recipe == "rowwise" else 1)
    assert sum(k.bytes for k in padded) <= 1.001 * sum(k.bytes for k in aligned)


@first_slow(("producer", "layouts"), [("rms_norm", "both"), ("silu_mul", "both"), ("nothing", "row")])
def test_tiles_of_zeros_cost_no_pass(producer: str, layouts: str) -> None:
    """70 tiles become 72, for torch and cuBLASLt to agree on the scales' strides: one more kernel writes the zeros, and
    one their scales, which are copied (2 x 2.25 MiB of 212)."""
    unpadded, padded = (
        triton_kernels(
            generate(
                quantize_after(producer, "blockwise", "input", *LAYOUTS[layouts], multiple=multiple),
                quantize_inputs(8192, 8960),
            ).kernels
        )
        for multiple in (128, 512)
    )
    assert len(padded) <= len(unpadded) + 2
    assert sum(k.bytes for k in padded) <= 1.035 * sum(k.bytes for k in unpadded)


@first_slow("recipe", ["tensorwise", "delayed", "rowwise"])
def test_padding_of_a_dynamic_size_costs_no_pass(recipe: str) -> None:
    """wgrad contracts over the tokens: their number is padded to a multiple of 16 when it is known."""
    counts: list[int] = []
    for dynamic in (False, True):
        torch._dynamo.reset()
        backend = Generating(Policy(default=recipe, min_speedup=0), target="sm_90")
        model = torch.compile(torch.nn.Linear(64, 128, bias=False).bfloat16(), backend=backend, dynamic=dynamic)
        x = torch.randn(48 if not dynamic else 50, 64, dtype=torch.bfloat16, requires_grad=True)
        model(x).sum().backward()
        counts.append(len(triton_kernels(backend.generator.kernels, "forward", "backward")))
    assert counts[1] <= counts[0] + 2  # the zeros of x and of dy


@first_fast(("a", "b"), [((), (1,)), ((1,), ()), ((1,), (1,)), ((), ())])
def test_scales_of_both_shapes_are_multiplied(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """An own amax gives [], a table [1]. Inductor's templates for GPUs want both operands' alike."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        data, *_, scale_inv_a = ops.quantize(x, torch.float8_e4m3fn, False, 0.0, [1, 16], [])
        other, *_, scale_inv_b = ops.quantize(y, torch.float8_e4m3fn, False, 0.0, [1, 16], [])
        scales = scale_inv_a.reshape(a), scale_inv_b.reshape(b)
        return ops.scaled_mm(data, other, *scales, None, torch.bfloat16, True)

    offline_generate = generate(function, [torch.empty(256, 256, dtype=torch.bfloat16)] * 2)
    assert "_scaled_mm" in [kernel.name.rpartition(".")[2] for kernel in offline_generate.kernels]


@pytest.mark.slow
def test_adding_wgrad_to_a_gradient_moves_12_bytes_for_each_number() -> None:
    """Gradient and GEMM's result are read, one is written. Otherwise a cast moves 6, and autograd's addition 12."""
    found: list[list[int]] = []
    for accumulate in (True, False):
        view = explain(
            Autocast(),
            torch.randn(256, 512, requires_grad=True),
            policy=Policy(default="tensorwise", min_speedup=0),
            target="sm_90",
            accumulate_wgrad=accumulate,
        )
        found.append([kernel.bytes for kernel in view.kernels])
    numbers = 512 * 1024
    ours, theirs = ([size for size in sizes if size in (6 * numbers, 12 * numbers)] for sizes in found)
    assert len(found[0]) == len(found[1])
    assert (ours, theirs) == ([12 * numbers], [6 * numbers])


OF_EXPERTS = ("bf16", "rowwise", "mxfp8", "nvfp4")
SLOW_LAYERS = ("delayed", "blockwise", f"rowwise {DEQUANTIZED}", f"Mixtral-8x7B {EXPERTS} mxfp8")


@pytest.mark.parametrize(
    "layer",
    [pytest.param(x, marks=pytest.mark.slow if x in SLOW_LAYERS else pytest.mark.release) for x in LAYERS],
)
def test_kernels_and_bytes_of_a_layer(layer: str, data: dict[str, Any]) -> None:
    found = recorded.of_layer(layer)
    for direction in DIRECTIONS:
        kernels, mib = data["layers"][layer][direction]
        assert found[direction][0] <= kernels, direction
        assert found[direction][1] <= mib, direction
    if (copies := data["layers"][layer].get("copies")) is not None:
        assert recorded.copies_of_layer(layer) == copies
    if EXPERTS in layer:
        assert recorded.called_by_layer(layer) == data["layers"][layer]["called"]


@pytest.mark.release
@pytest.mark.parametrize("layer", QUANTIZING)
def test_kernels_and_bytes_of_weights_in_a_step(layer: str, data: dict[str, Any]) -> None:
    found = recorded.weights_in_step(layer)
    for direction, (kernels, mib) in data["layers"][layer]["weights_in_step"].items():
        assert found[direction][0] <= kernels, direction
        assert found[direction][1] <= mib, direction


def test_weights_are_read_as_often_as_the_recipe_needs(data: dict[str, Any]) -> None:
    """416 MiB of weights in bf16, and as much of both FP8 layouts. Tiles of 1x32 read q, k and v a third time.

    Tiles of 128x128 do so twice with torch 2.11. In a step, backward reads weights once more for the columnwise copy,
    unless that has scales of its own, and one kernel takes the amaxes of tiles of 128x128 and casts them.
    """
    again = 48 / 416
    reads = {"delayed": 1, "tensorwise": 2, "rowwise": 2, "blockwise": 2, "mxfp8": 2 + again}
    reads["blockwise"] += 2 * again if data["torch"].startswith("2.11") else 0
    in_step = {"delayed": 2, "tensorwise": 3, "rowwise": 3, "blockwise": 2, "mxfp8": 2 + again}
    for layer, times in reads.items():
        counts = data["layers"][layer]
        step = sum(mib for _, mib in counts["weights_in_step"].values())
        for mib, read in ((counts["weights"][1], times), (step, in_step[layer])):
            assert mib <= 1.015 * 416 * (read + 1), layer  # scales
        recipe, _ = LAYERS[layer]
        assert recipe is not None
        kind = SCALINGS[recipe.quantizer("weight").scaling]  # as the speed model has it
        if not data["torch"].startswith("2.11"):
            assert 1 + kind.reads[1] + kind.reads_apart == pytest.approx(step / 416 - 1, abs=0.3), layer


def test_no_kernel_copies_between_quantize_and_gemm(data: dict[str, Any]) -> None:
    """Scales are written in the order in which the GEMM reads them, and once for all that read them."""
    counted = {layer: counts["copies"] for layer, counts in data["layers"].items() if "copies" in counts}
    moving = (f"{EXPERTS} bf16", f"{EXPERTS} rowwise")  # tokens to experts; mxfp8 quantizes each where it finds it
    quantizing = {layer: copies for layer, copies in counted.items() if not layer.endswith(moving)}
    assert {"blockwise", *(f"{name} {EXPERTS} mxfp8" for name in MIXTURES)} <= quantizing.keys()
    for layer, copies in quantizing.items():  # experts' weights are still copied once they are quantized
        assert not any(copies[direction] for direction in DIRECTIONS[: 2 if EXPERTS in layer else 3]), layer


@first_fast("name", MIXTURES)
def test_experts_launch_few_kernels_beside_those_that_quantize(name: str, data: dict[str, Any]) -> None:
    """Every routing's places are computed once for all operands, and no kernel but GEMMs and a seed is a library's."""
    bf16, rowwise, mxfp8, nvfp4 = (data["layers"][f"{name} {EXPERTS} {recipe}"] for recipe in OF_EXPERTS)
    assert bf16["called"] == {"_grouped_mm": 6}
    assert rowwise["called"] == mxfp8["called"] == {"_scaled_grouped_mm": 6}
    assert nvfp4["called"] == {"grouped_mm_of_fp4": 6, "bmm": 4, "random_seed": 1}  # wgrad's operands are transformed
    # two operands in two layouts; ends, places, and zeros: of many scales in a kernel of their own
    assert mxfp8["forward"][0] <= 4 + 3 + 1
    assert mxfp8["backward"][0] <= 4 + 3 + 1 + 2  # the gradient of the tokens


_COPY = """
    tmp0 = x0
    tmp1 = tl.full([1], 4096, tl.int64)
    tmp2 = tmp0 < tmp1
    tmp3 = tl.load(in_ptr0 + (x0 + 4096*y1), tmp2 & xmask)
    tmp4 = 0.0
    tmp5 = tl.where(tmp2, tmp3, tmp4)
    tl.store(out_ptr0 + (y1 + 8192*x0), tmp5, xmask)
"""


@in_one_test(
    ("source", "is_copy"),
    [
        (_COPY, True),
        (_COPY.replace("tmp5 = tl.where(tmp2, tmp3, tmp4)", "tmp5 = tmp3 * tmp3"), False),
        (_COPY.replace("tmp5 = tl.where(tmp2, tmp3, tmp4)", "tmp5 = tl_math.abs(tmp3)"), False),
        ("    tmp0 = tl.load(in_ptr0 + (x0), None).to(tl.float32)\n    tl.store(out_ptr0 + (x1), tmp0, None)\n", True),
        ("    tmp0 = 0.0\n    tl.store(out_ptr0 + (x1), tmp0, xmask)\n", True),
    ],
    ids=["padded", "squared", "absolute", "moved", "zeros"],
)
def test_copies_are_told_from_arithmetic(source: str, is_copy: bool) -> None:
    kernel = KernelRecord(name="k", graph="forward", kind="triton", ops=(), bytes=2**20, source=source)
    assert recorded.copies(kernel) == is_copy
    assert recorded.copies(kernel, zeros=False) == (is_copy and "tl.load" in source and "tl.where" not in source)
    assert not recorded.copies(dataclasses.replace(kernel, bytes=64))  # a page of scales


@first_slow("layer", COMPILED)
def test_the_largest_kernels_of_a_layer(layer: str, data: dict[str, Any]) -> None:
    """No more registers, spills and instructions, no narrower stores, in the configuration that was best.

    One torch with one triton generates and compiles the same each time: there is no tolerance.
    """
    if data["triton"] != importlib.metadata.version("triton"):
        pytest.skip(f"recorded with triton {data['triton']}, which compiles otherwise")
    rows = data["layers"][layer]["largest"]
    worse: list[tuple[dict[str, Any], dict[str, Any]]] = []  # as recorded, as generated
    for row, (identity, kernel) in zip(rows, recorded.largest(layer), strict=True):
        compiled = offline.compile_kernel(kernel.source, kernel.target, configuration=row["configuration"])
        now = identity | (recorded.costs(compiled[0]) if compiled else dict.fromkeys(row.keys() - identity))
        if recorded.is_worse(row, now):
            worse.append((row, now))
    lines = recorded.table([row for pair in worse for row in pair]) if worse else ""
    assert not worse, f"better, or meant: make record-kernels. Recorded, and below each what is generated:\n{lines}"


@pytest.mark.parametrize("file", sorted(recorded.FILE.parent.glob("kernels-*.json")), ids=lambda file: file.stem)
def test_the_largest_kernels_spill_nothing_and_store_tiles_in_16_bytes(file: Path) -> None:
    """Loops along rows store 4 or 8 bytes: their tiles have 16 or 32 warps, so few numbers to each thread."""
    layers = json.loads(file.read_text(encoding="utf-8"))["layers"]
    rows = [row for layer in COMPILED for row in layers[layer]["largest"]]
    spilling = [(layer, row["ops"]) for layer in COMPILED for row in layers[layer]["largest"] if row["spills"]]
    # the backward of the program's own norm, 8 bytes: none of its configurations spills less
    norm = ("mxfp8 sm_120", "add _to_copy mul sum pow expand div")
    assert spilling == ([norm] if file.stem == "kernels-2.15.0" else [])
    tiles = [row for row in rows if row["loop"] in ("poi", "unk") and "R0_BLOCK" not in row["configuration"]]
    stores = {(row["loop"], row["fp8_store"]) for row in tiles}
    assert ("unk", 16) in stores  # large casts
    assert {fp8_store for _, fp8_store in stores} <= {16, None}


@in_one_test(
    "change",
    [{"registers": 65}, {"spills": 8}, {"instructions": 401}, {"store": 4}, {"fp8_store": None}, {"mib": 127}]
    + [{"configuration": None}, {"ops": "silu"}, {"launches": 2}],
    ids=str,
)
def test_any_worse_cost_is_noticed(change: dict[str, Any]) -> None:
    identity = {"graph": "forward", "loop": "poi", "ops": "mul", "launches": 1, "mib": 128}
    cost = {"configuration": "XBLOCK=1024 num_warps=4 num_stages=1", "registers": 64, "spills": 0, "instructions": 400}
    row = identity | cost | {"fp8_store": 8, "store": 8}
    assert not recorded.is_worse(row, row | {"registers": 63, "instructions": 399, "fp8_store": 16, "store": 16})
    assert recorded.is_worse(row, row | change)


@pytest.mark.release
@pytest.mark.parametrize("layer", MEASURED)
def test_the_kernels_of_a_layer_compile_without_spills(layer: str) -> None:
    """Every configuration that Inductor would try, for sm_90a."""
    sources = {k.source for k in recorded.layer_kernels(layer) if k.graph != "weights"}
    used = [offline.compile_kernel(source, "sm_90") for source in sources]
    assert max(result.registers for results in used for result in results) <= 255
    # a configuration that spills is one that the autotuner will not choose: each kernel has one that does not
    assert all(min(result.spills for result in results) == 0 for results in used)
    assert all(".target sm_90a" in result.ptx for results in used for result in results)
    if layer == "tensorwise":  # SwiGLU's backward: with exact divisions in each thread more than 100
        largest = max(recorded.layer_kernels(layer), key=lambda kernel: kernel.bytes)
        results = offline.compile_kernel(largest.source, "sm_90")
        assert max(result.registers for result in results) <= 64


def totals(counts: dict[str, Any]) -> tuple[int, float]:
    """Kernels and MiB of forward and backward."""
    kernels, mib = (sum(pair) for pair in zip(counts["forward"], counts["backward"], strict=True))
    return int(kernels), mib


def test_the_tables_of_the_recipes() -> None:
    layers = json.loads((recorded.FILE.parent / "kernels-2.13.0.json").read_text(encoding="utf-8"))["layers"]
    names = {"bf16": "bf16, plain Inductor", "tensorwise sm_100": "`tensorwise` (sm_100)"}
    names |= {recipe: f"`{recipe}` (sm_100)" for recipe in ("mxfp8", "nvfp4")} | {"mxfp8 sm_120": "`mxfp8` (sm_120)"}
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
    for name in MIXTURES:
        found = [totals(layers[f"{name} {EXPERTS} {recipe}"]) for recipe in OF_EXPERTS]
        assert "".join(f" {kernels} | {round(mib):,} |" for kernels, mib in found).join((f"| {name} |", "\n")) in page
    for layer, counts in layers.items():
        kernels, mib = totals(counts)
        if EXPERTS in layer:
            continue
        row = f"| {names.get(layer, f'`{layer}`')} | {kernels} | {round(mib):,} |\n"
        assert (row in page) == (DEQUANTIZED not in layer and layer != "tensorwise sm_100"), layer
        if (other := layers.get(f"{layer} {DEQUANTIZED}")) is not None:
            pairs = [f"{kernels}, {round(mib):,}" for kernels, mib in (totals(counts), totals(other))]
            assert f"| {names.get(layer, f'`{layer}`')} | {' | '.join(pairs)} |\n" in page, layer


def test_the_table_of_weights() -> None:
    layers = json.loads((recorded.FILE.parent / "kernels-2.13.0.json").read_text(encoding="utf-8"))["layers"]
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
    for layer in QUANTIZING:
        step = layers[layer]["weights_in_step"]
        pairs = [step["forward"], step["backward"], layers[layer]["weights"]]
        cells = " | ".join(f"{kernels}, {round(mib):,}" for kernels, mib in pairs)
        assert f"| `{layer}`{' (sm_100)' if layer == 'mxfp8' else ''} | {cells} |\n" in page, layer


def test_dequantized_backward_makes_no_columnwise_copy(data: dict[str, Any]) -> None:
    """Nor does it quantize a gradient; instead each operand is decoded, in a kernel of its own."""
    for layer, counts in data["layers"].items():
        if (other := data["layers"].get(f"{layer} {DEQUANTIZED}")) is not None:
            assert other["forward"][1] < counts["forward"][1], layer  # x and its columnwise copy are not saved
            assert other["weights"][1] < counts["weights"][1], layer
            # in the kernels that make its operands, or both layouts in one: fewer than those that decode
            if layer not in ("delayed", "blockwise"):
                assert totals(other)[0] <= totals(counts)[0] + 1, layer
