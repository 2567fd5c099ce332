"""GPU code without a GPU: what ``explain(target=...).kernels`` says, and the hooks that it stands on."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import hardware, offline
from fp8graph.models import policy_for
from fp8graph.numerics import history
from fp8graph.recipes import DelayedScaling
from fp8graph.tools.explain import Generating
from generated import (
    OF_ONE_INDUCTOR,
    generate,
    joined_weights,
    kernels_of_mlp,
    quantize_after,
    quantize_after_backward,
    quantize_gradients,
    quantize_inputs,
    report_of_mlp,
    triton_kernels,
    write_weights,
)
from helpers import MLP, NONE, first_fast, first_slow, needs_library, step
from tiny_models import TINY, model_and_inputs

pytestmark = pytest.mark.skipif(not offline.available(), reason="triton is not installed")


def test_every_launch_with_its_ops_and_bytes() -> None:
    found = kernels_of_mlp(policy=NONE, training=False)
    assert [(k.kind, k.name.partition("_fused_")[2] or k.name) for k in found] == [
        ("extern", "extern_kernels.mm"),
        ("extern", "extern_kernels.mm"),
        ("triton", "mul_silu_0"),
        ("extern", "extern_kernels.mm"),
    ]
    assert found[2].ops == ("aten.silu", "aten.mul")
    assert found[2].bytes == 3 * 256 * 512 * 2  # reads gate and up, writes their product
    assert {k.graph for k in found} == {"forward"}


def ops_of(view: fp8graph.GraphView) -> dict[str, str]:
    """The op of each node of a report's graph after all passes; of a result, the op's and its number."""
    found: dict[str, str] = {}
    for name, code in re.findall(r"^(\w+): .*? = (.*)$", view.after, re.MULTILINE):
        result = re.fullmatch(r"(\w+)\[(\d)\]", code)
        found[name] = f"{found[result[1]]}[{result[2]}]" if result else code.partition("(")[0]
    return found


@pytest.mark.slow
@OF_ONE_INDUCTOR
def test_every_launch_with_the_nodes_of_the_report_that_it_computes() -> None:
    """Nodes that lowering replaced go by the names that people see. What forward saves has a writer and a reader."""
    report = report_of_mlp()
    (view,) = report.graphs
    ops = ops_of(view)
    first, gemm, amax, cast, *_ = forward = [kernel for kernel in report.kernels if kernel.graph == "forward"]
    backward = [kernel for kernel in report.kernels if kernel.graph == "backward"]

    def of(names: tuple[str, ...]) -> list[str]:
        return sorted(ops.get(name, name) for name in names)

    quantize, scaled_mm = "fp8graph.quantize", "fp8graph.scaled_mm"
    assert of(first.nodes) == of(first.writes) == [quantize, *(f"{quantize}[{number}]" for number in range(3))]
    assert first.reads == ("primals_2",)
    assert of(gemm.nodes) == of(gemm.writes) == [scaled_mm]
    assert len(gemm.reads) == 2  # the weight's copy and its scale
    # silu(gate) * up is computed for the amax, and again for the cast
    silu = {"aten.neg", "aten.exp", "aten.add.Tensor", "aten.div.Tensor"}
    assert silu < set(of(amax.nodes))
    assert silu < set(of(cast.nodes))
    assert of(amax.writes) == [quantize, f"{quantize}[2]"]
    assert of(cast.writes) == [quantize, f"{quantize}[0]", f"{quantize}[1]"]
    # backward computes silu again, from what forward saved; no GEMM claims the scales that it reads
    assert [of(kernel.nodes) for kernel in backward if kernel.kind == "extern"] == [[scaled_mm]] * 4
    (gradients,) = [kernel for kernel in backward if "aten.sigmoid" in of(kernel.nodes) and kernel.reads]
    assert silu < set(of(gradients.nodes))
    assert of(gradients.reads) == [scaled_mm]
    written = {name for kernel in forward for name in kernel.writes}
    read = {name for kernel in backward for name in kernel.reads if ops.get(name)}
    assert read == written & set(view.saved[1:])  # the first is the model's result
    weights = [kernel for kernel in report.kernels if kernel.graph == "weights"]
    assert {(kernel.number, kernel.nodes, kernel.reads, kernel.writes) for kernel in weights} == {(None, (), (), ())}
    assert {kernel.number for kernel in (*forward, *backward)} == {0}
    assert first.to_dict()["nodes"] == list(first.nodes)


def test_kernels_of_several_graphs_name_theirs() -> None:
    """Graphs around a graph break have nodes of the same names; the first two have the same text."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.last = nn.Linear(128, 128, bias=False), nn.Linear(128, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.block(x)
            torch._dynamo.graph_break()
            x = self.block(x)
            torch._dynamo.graph_break()
            return self.last(x.relu())

    x = torch.empty(256, 128, dtype=torch.bfloat16, device="meta")
    report = fp8graph.explain(Broken().to("meta", torch.bfloat16), x, policy=NONE, target="sm_90", training=False)
    assert len(report.graphs) == 3
    found = [(kernel.number, kernel.nodes) for kernel in report.kernels]
    assert found == [(0, ("mm",)), (1, ("mm",)), (2, ("relu",)), (2, ("mm",))]


@first_slow("target", ["sm_89", "sm_90", "sm_100"])
def test_each_target_generates_its_own(target: str) -> None:
    found = kernels_of_mlp(target)
    assert {k.graph for k in found} == {"forward", "backward", "weights"}
    assert sum(k.name == "extern_kernels._scaled_mm" for k in found) == 6  # gate and up are one
    assert {k.target for k in found} == {target}
    code = next(k.source for k in found if k.kind == "triton")
    assert f"cc={target.removeprefix('sm_')}" in code


VIEW = r"(?:reinterpret_tensor\((\w+), \(([\d, ]+)\), \(([\d, ]+)\), \w+\)|(\w+))"


def block_gemms(code: str) -> list[list[tuple[tuple[int, int], tuple[int, int]]]]:
    """Sizes and strides of a, b, scale_a and scale_b of each ``_scaled_mm`` in Inductor's text."""

    def numbers(text: str) -> Any:
        return tuple(int(number) for number in text.split(", "))

    buffers: dict[str, Any] = {
        name: (numbers(sizes), numbers(strides))
        for made in (r"(\w+) = empty_strided_cuda\(", r"assert_size_stride\((\w+), ")  # results, and inputs
        for name, sizes, strides in re.findall(made + r"\(([\d, ]+)\), \(([\d, ]+)\)", code)
    }
    calls = re.findall(r"extern_kernels\._scaled_mm\(" + ", ".join([VIEW] * 4), code)
    groups = [[call[i : i + 4] for i in range(0, 16, 4)] for call in calls]
    return [
        [buffers[name] if name else (numbers(sizes), numbers(strides)) for _, sizes, strides, name in views]
        for views in groups
    ]


@first_slow(
    ("recipe", "settings"),
    [(DelayedScaling(amax_history_len=3), {}), ("delayed", {}), ("tensorwise", {"save": "memory"})],
)
def test_scales_are_at_addresses_that_cublas_reads(recipe: Any, settings: dict[str, Any]) -> None:
    """Multiples of 16 bytes: at others an H200 refuses the GEMM (CUBLAS_STATUS_NOT_SUPPORTED, CUDA 13.0)."""
    backend = Generating(fp8graph.Policy(default=recipe, min_speedup=0), target="sm_90", **settings)
    step(torch.compile(MLP(64, 128).bfloat16(), backend=backend), torch.randn(32, 64, dtype=torch.bfloat16))
    gemms = [line for _, code in backend.generator.code for line in code.splitlines() if "._scaled_mm(" in line]
    offsets = [
        int(n) for gemm in gemms for n in re.findall(r"reinterpret_tensor\(\w+, \(1, \), \(1, \), (\d+)\)", gemm)
    ]
    assert gemms
    assert offsets
    assert [offset for offset in offsets if offset % 4] == []


@first_slow(("inputs", "outputs", "training"), [(8960, 384, True), (1536, 128, False), (11008, 128, False)])
def test_block_scales_have_the_strides_that_torch_and_cublas_read(inputs: int, outputs: int, training: bool) -> None:
    """70 and 3, 12, 86 tiles along k: rows of 128x128 scales are as far apart as there are tiles, and 16 bytes.

    tests/hardware/test_nvidia.py names the sources of both rules.
    """
    backend = Generating(fp8graph.Policy(default="blockwise", min_speedup=0), target="sm_90")
    model = torch.compile(nn.Linear(inputs, outputs, bias=False).bfloat16(), backend=backend)
    with torch.set_grad_enabled(training):
        y = model(torch.randn(200, inputs, dtype=torch.bfloat16, requires_grad=training))
    if training:
        y.sum().backward()
    gemms = [gemm for direction, code in backend.generator.code if direction != "weights" for gemm in block_gemms(code)]
    assert len(gemms) == (3 if training else 1)
    for a, b, scale_a, scale_b in gemms:
        (m, k), (_, n) = a[0], b[0]
        assert (a[1], b[1]) == ((k, 1), (1, k))
        assert scale_a == ((m, k // 128), (1, m))
        if m == 200:  # fprop, dgrad: the weight has 128x128 tiles
            assert scale_b == ((k // 128, -(-n // 128)), (1, k // 128))
            assert (k // 128) % 4 == 0
            assert 0 <= k - (inputs if n == outputs else outputs) < 512
        else:
            assert scale_b == ((k // 128, n), (n, 1))
            assert k == 256  # of 200 tokens
    code = "".join(code for _, code in backend.generator.code)
    assert "use_fast_accum=True" not in code  # cuBLASLt has no such kernel for tiles, and torch says so


@pytest.mark.slow
def test_registers_and_spills_of_a_kernel() -> None:
    first = next(k for k in kernels_of_mlp() if k.kind == "triton")
    assert first.registers is not None
    assert 8 <= first.registers <= 255
    assert first.spills == 0
    assert first.to_dict()["registers"] == first.registers
    gemm = next(k for k in kernels_of_mlp() if k.kind == "extern")
    assert gemm.registers is None
    assert gemm.spills is None


EXACT = re.compile(r"triton\.language\.div_rn\(|'div\.rn\.f32 ")


def triton_text(function: Any, *sizes: tuple[int, ...]) -> list[str]:
    inputs = [torch.empty(size, device="meta") for size in sizes] or quantize_inputs(1024, 512)
    return [kernel.source for kernel in triton_kernels(generate(function, inputs).kernels)]


@first_fast("recipe", ["tensorwise", "rowwise", "blockwise", "nvfp4"], others=pytest.mark.release)
def test_scales_are_divided_exactly(recipe: str) -> None:
    """Triton's ``a / b`` is approximate; CPU and interpreter cannot see it, the text can."""
    text = "".join(triton_text(quantize_after("nothing", recipe, "grad_output", True, True)))
    assert EXACT.search(text)
    assert " / " not in text


def test_delayed_scales_are_divided_exactly() -> None:
    def update(page: Tensor, amax: Tensor) -> Tensor:
        return history.updated_page(page, [amax], 448.0, 0.0, "max")

    text = "".join(triton_text(update, (1, 18), (256,)))
    assert EXACT.search(text)
    assert " / " not in text


def test_only_scales_are_divided_exactly() -> None:
    """One scale per tensor leaves none in the kernels that write the whole tensor; SwiGLU has one sigmoid."""
    sources = triton_text(quantize_after_backward("swiglu", "tensorwise"))
    dividing = [source for source in sources if EXACT.search(source)]
    assert len(dividing) == 1
    assert " / " not in dividing[0]
    assert [source.count("tl.sigmoid(") for source in sources if "tl.sigmoid(" in source] == [1, 1]  # amax and cast
    assert not any(" / " in source for source in sources)


@first_fast(("rows", "kernels"), [(16, 1), (64, 1), (128, 3)])
def test_few_rows_are_quantized_by_one_kernel(rows: int, kernels: int) -> None:
    """Their amax, the scale and the cast, behind a decoding step's SwiGLU. More rows want more than one program."""
    function = quantize_after("silu_mul", "tensorwise", "input", True, False)
    assert len(triton_kernels(generate(function, quantize_inputs(rows, 4096)).kernels)) == kernels


@pytest.mark.slow
def test_gradients_of_several_sizes_are_computed_one_by_one() -> None:
    """As q, k and v after a rotary embedding: in one loop, each element would compute all of them."""

    def rotated(x: Tensor, angles: Tensor) -> Tensor:
        heads = x.reshape(len(x), -1, 64).transpose(0, 1)
        a, b = heads.chunk(2, -1)
        turned = heads * angles.cos() + torch.cat([-b, a], -1) * angles.sin()
        return turned.transpose(0, 1).reshape(len(x), -1)

    def gradients(x: Tensor, weight: Tensor, y: Tensor) -> list[Tensor]:
        half = y[:, : y.shape[1] // 2]
        return [rotated(x, weight[:64]), rotated(half, weight[:64]), half]

    kernels = generate(quantize_gradients("tensorwise", gradients), quantize_inputs(64, 256)).kernels
    computing = [kernel.source for kernel in kernels if "tl_math.sin(" in kernel.source]
    assert sum(source.count("tl.store(") for source in computing) == 3  # each its own columns
    assert "maximum" not in "".join(computing)  # the amax reads them from memory


@first_fast("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"])
def test_joined_weights_are_written_where_they_are_kept(recipe: str) -> None:
    weights = [torch.empty(256, 4096, dtype=torch.bfloat16) for _ in range(2)]  # loops, not one block per row
    buffers = joined_weights(recipe, *weights)
    generated = generate(write_weights(recipe), [*weights, *buffers])
    ((_, code),) = generated.code
    allocated = re.findall(r"= empty_strided_cuda\(.*", code)
    assert not [line for line in allocated if "float8" in line]
    assert not [kernel for kernel in generated.kernels if kernel.kind == "extern"]


@pytest.mark.parametrize("target", [None, "cpu"])
def test_only_a_gpu_target_has_kernels(target: str | None) -> None:
    report = fp8graph.explain(nn.Linear(32, 32), torch.randn(16, 32), target=target)
    with pytest.raises(ValueError, match='target="sm_90"'):
        _ = report.kernels


class Embedding(nn.Module):
    """An embedding, a linear, a loss: the embedding's backward adds up rows, a slice is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(64, 128), nn.Linear(128, 128)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.linear(self.embedding(ids))
        rows = x.new_zeros(x.shape)
        rows[:, 1:] = x[:, :-1]
        return rows.square().sum()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_an_embedding_and_a_loss(recipe: str) -> None:
    """Torch without CUDA indexes no fake CUDA tensor, which the decompositions of its operators do."""
    model = Embedding().bfloat16()
    policy = fp8graph.Policy(default=recipe, min_speedup=0)
    report = fp8graph.explain(model, torch.zeros(2, 16, dtype=torch.int64), policy=policy, target="sm_90")
    assert all(gemm.recipe for gemm in report.gemms)
    assert any("index_put" in op or "embedding" in op for kernel in report.kernels for op in kernel.ops)


# the code for another GPU has other GEMMs, whatever the family: one of each kind of model is enough there
SERVED_ON_SM_100 = ("llama", "qwen3_moe", "whisper", "clip", "diffusers_flux")


@pytest.mark.release
@pytest.mark.parametrize(
    ("family", "target", "training"),
    [
        pytest.param(name, target, training, marks=needs_library(name))
        for names, target, training in ((TINY, "sm_90", True), (SERVED_ON_SM_100, "sm_100", False))
        for name in names
    ],
)
def test_every_family_whole(family: str, target: str, training: bool) -> None:
    model, inputs = model_and_inputs(family, 1)
    policy = dataclasses.replace(policy_for(model), min_speedup=0)
    report = fp8graph.explain(model, policy=policy, target=target, training=training, **inputs)
    scaled = [kernel for kernel in report.kernels if "_scaled_mm" in kernel.name or "_scaled_grouped_mm" in kernel.name]
    assert scaled
    assert {kernel.graph for kernel in report.kernels} >= ({"forward", "backward"} if training else {"forward"})


def test_a_calibration_file_is_not_a_target(tmp_path: Path) -> None:
    """Kernels are generated for the GPU that the file was measured on."""
    speed = dataclasses.asdict(cast(Any, hardware.from_target("sm_90").speed))
    file = tmp_path / "h200.json"
    file.write_text(json.dumps({"target": "sm_90", "speed": {**speed, "rates": dict(speed["rates"])}}))
    report = fp8graph.explain(nn.Linear(64, 64).bfloat16(), torch.zeros(32, 64).bfloat16(), target=str(file))
    assert {kernel.target for kernel in report.kernels} == {"sm_90"}


@first_fast(("recipe", "settings"), [("blockwise", {}), ("rowwise", {"small_tiles": True})])
def test_decoding_hands_cublas_what_it_multiplies_in_small_tiles(recipe: str, settings: dict[str, Any]) -> None:
    """Scales of 1x128 on both sides; unit scales and an FP32 result, which the next kernel scales."""
    launches: list[list[tuple[str, str]]] = []
    for rows in (16, 256):
        torch._dynamo.reset()
        backend = Generating(fp8graph.Policy(default=recipe, min_speedup=0), target="sm_90", **settings)
        model = nn.Sequential(nn.Linear(512, 384, bias=False), nn.ReLU()).bfloat16()
        with torch.no_grad():
            torch.compile(model, backend=backend)(torch.randn(rows, 512, dtype=torch.bfloat16))
        (code,) = (code for direction, code in backend.generator.code if direction != "weights")
        kernels = [k for k in backend.generator.kernels if k.graph != "weights"]
        launches.append([(k.kind, k.name.partition("_fused_")[2] or k.name) for k in kernels])
        few = rows == 16
        if recipe == "blockwise":
            ((_, _, scale_a, scale_b),) = block_gemms(code)
            assert scale_a == ((rows, 4), (1, rows))
            assert scale_b == (((4, 384), (384, 1)) if few else ((4, 3), (1, 4)))
        else:
            (gemm,) = (line for line in code.splitlines() if "._scaled_mm(" in line)
            assert ("out_dtype=torch.float32" in gemm) == few
    few, many = launches
    if recipe == "blockwise":
        assert few == many  # the scales are repeated once per weight, in no kernel of this graph
    else:
        assert len(few) == len(many) + 1  # one writes the scale 1
