"""GPU code without a GPU: what ``explain(target=...).kernels`` says, and the hooks that it stands on."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import device_interface
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering

import fp8graph
from fp8graph import offline
from fp8graph.numerics import history
from fp8graph.offline import KernelRecord
from fp8graph.tools.explain import Generating
from generated import (
    generate,
    joined_weights,
    quantize_after,
    quantize_after_backward,
    quantize_inputs,
    triton_kernels,
    write_weights,
)
from helpers import ALL, MLP, NONE

pytestmark = pytest.mark.skipif(not offline.available(), reason="triton is not installed")


def kernels(target: str = "sm_90", policy: fp8graph.Policy = ALL, training: bool = True) -> list[KernelRecord]:
    x = torch.empty(256, 128, dtype=torch.bfloat16, device="meta", requires_grad=training)
    model = MLP(128, 512).to("meta", torch.bfloat16)
    return fp8graph.explain(model, x, policy=policy, target=target, training=training).kernels


def test_every_launch_with_its_ops_and_bytes() -> None:
    found = kernels(policy=NONE, training=False)
    assert [(k.kind, k.name.partition("_fused_")[2] or k.name) for k in found] == [
        ("extern", "extern_kernels.mm"),
        ("extern", "extern_kernels.mm"),
        ("triton", "mul_silu_0"),
        ("extern", "extern_kernels.mm"),
    ]
    assert found[2].ops == ("aten.silu", "aten.mul")
    assert found[2].bytes == 3 * 256 * 512 * 2  # reads gate and up, writes their product
    assert {k.graph for k in found} == {"forward"}


@pytest.mark.parametrize("target", ["sm_89", "sm_90", "sm_100"])
def test_each_target_generates_its_own(target: str) -> None:
    found = kernels(target)
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
        for name, sizes, strides in re.findall(r"(\w+) = empty_strided_cuda\(\(([\d, ]+)\), \(([\d, ]+)\)", code)
    }
    calls = re.findall(r"extern_kernels\._scaled_mm\(" + ", ".join([VIEW] * 4), code)
    groups = [[call[i : i + 4] for i in range(0, 16, 4)] for call in calls]
    return [
        [buffers[name] if name else (numbers(sizes), numbers(strides)) for _, sizes, strides, name in views]
        for views in groups
    ]


@pytest.mark.parametrize(
    ("inputs", "outputs", "training"), [(8960, 384, True), (1536, 128, False), (11008, 128, False)]
)
def test_block_scales_have_the_strides_that_torch_and_cublas_read(inputs: int, outputs: int, training: bool) -> None:
    """70 and 3, 12, 86 tiles along k: rows of 128x128 scales are as far apart as there are tiles, and 16 bytes.

    tests/numerics/test_native.py names the sources of both rules.
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


def test_registers_and_spills_of_a_kernel() -> None:
    first = next(k for k in kernels() if k.kind == "triton")
    assert first.registers is not None
    assert 8 <= first.registers <= 255
    assert first.spills == 0
    assert first.to_dict()["registers"] == first.registers
    gemm = next(k for k in kernels() if k.kind == "extern")
    assert gemm.registers is None
    assert gemm.spills is None


EXACT = re.compile(r"triton\.language\.div_rn\(|'div\.rn\.f32 ")


def triton_text(function: Any, *sizes: tuple[int, ...]) -> list[str]:
    inputs = [torch.empty(size, device="meta") for size in sizes] or quantize_inputs(1024, 512)
    return [kernel.source for kernel in triton_kernels(generate(function, inputs).kernels)]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "nvfp4"])
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
    """Under one scale per tensor none is left in the kernels that write the whole tensor, SwiGLU's sigmoid included."""
    sources = triton_text(quantize_after_backward("swiglu", "tensorwise"))
    dividing = [source for source in sources if EXACT.search(source)]
    assert len(dividing) == 1
    assert " / " not in dividing[0]
    assert sum(" / " in source for source in sources) == 2  # the amax and the cast


@pytest.mark.parametrize(("rows", "kernels"), [(16, 1), (64, 1), (128, 3)])
def test_few_rows_are_quantized_by_one_kernel(rows: int, kernels: int) -> None:
    """Their amax, the scale and the cast, behind a decoding step's SwiGLU. More rows want more than one program."""
    function = quantize_after("silu_mul", "tensorwise", "input", True, False)
    assert len(triton_kernels(generate(function, quantize_inputs(rows, 4096)).kernels)) == kernels


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
def test_joined_weights_are_written_where_they_are_kept(recipe: str) -> None:
    weights = [torch.empty(256, 4096, dtype=torch.bfloat16) for _ in range(2)]  # loops, not one block per row
    buffers = joined_weights(recipe, *weights)
    generated = generate(write_weights(recipe), [*weights, *buffers])
    ((_, code),) = generated.code
    allocated = re.findall(r"= empty_strided_cuda\(.*", code)
    assert not [line for line in allocated if "float8" in line]
    assert not [kernel for kernel in generated.kernels if kernel.kind == "extern"]


def test_what_a_kernel_compiles_to() -> None:
    """A cast is stored as it is read along rows, 8 numbers per thread; no load or store is narrower than its tensor."""
    [kernel] = triton_kernels(
        generate(quantize_after("nothing", "delayed", "input", True, False), quantize_inputs(256, 1024)).kernels
    )
    assert kernel.compiled is not None
    assert kernel.compiled.fp8_store in kernel.compiled.stores
    assert kernel.compiled.fp8_store >= 4
    assert max(kernel.compiled.loads) >= 2 * kernel.compiled.fp8_store
    assert kernel.compiled.instructions > 50
    assert kernel.compiled.configuration.startswith("XBLOCK=")
    again = offline.compile_kernel(kernel.source, "sm_90", configuration=kernel.compiled.configuration)
    assert again == [kernel.compiled]
    assert offline.compile_kernel(kernel.source, "sm_90", configuration="XBLOCK=3 num_warps=1 num_stages=1") == []
    assert kernel.to_dict()["instructions"] == kernel.compiled.instructions
    json.dumps(kernel.to_dict())


def test_each_launch_has_its_own_bytes() -> None:
    """A combo node that becomes two launches: the first had the bytes of both."""

    def function(x: Tensor, y: Tensor, amaxes: Tensor) -> list[Tensor]:
        return [x + y, amaxes.amax(-1)]

    like = torch.empty(1024, 1024, device="meta")
    with inductor_config.patch({"combo_kernels": True}):
        found = triton_kernels(generate(function, [like, like, torch.empty(4, 4096, device="meta")]).kernels)
    assert [(kernel.name.split("_")[1], kernel.bytes) for kernel in sorted(found, key=lambda k: k.name)] == [
        ("poi", 3 * 2**22),
        ("red", 4 * 4096 * 4 + 4 * 4),
    ]


def test_bytes_of_what_is_written_in_place() -> None:
    """What is overwritten is not read, though the scheduler says that it depends on it."""

    def function(x: Tensor, cache: Tensor) -> list[Tensor]:
        cache.copy_(x.to(cache.dtype))
        return []

    inputs = [torch.empty(1024, 512, dtype=dtype, device="meta") for dtype in (torch.float32, torch.bfloat16)]
    [kernel] = triton_kernels(generate(function, inputs).kernels)
    assert kernel.bytes == 1024 * 512 * (4 + 2)


def test_nothing_stays_replaced() -> None:
    before = torch.cuda.get_device_properties, GraphLowering.compile_to_module  # pyright: ignore
    interface = device_interface.get_interface_for_device("cuda")
    kernels(training=False)
    assert before == (torch.cuda.get_device_properties, GraphLowering.compile_to_module)  # pyright: ignore
    assert device_interface.get_interface_for_device("cuda") is interface
    x = torch.randn(16, 32)
    model = nn.Linear(32, 48)
    torch.testing.assert_close(torch.compile(model, backend="inductor")(x), model(x))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what is pretended")
def test_the_replacement_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete the replacement of compile_to_module from ``offline`` when this fails: torch can do without it."""
    patch_object = mock.patch.object

    def all_but_one(target: Any, name: str, new: Any) -> Any:
        return contextlib.nullcontext() if name == "compile_to_module" else patch_object(target, name, new)

    monkeypatch.setattr(mock.patch, "object", all_but_one)
    with pytest.raises(Exception, match="NVIDIA|CUDA|cuda|Unsupported"):
        kernels()


@pytest.mark.parametrize("target", [None, "cpu"])
def test_only_a_gpu_target_has_kernels(target: str | None) -> None:
    report = fp8graph.explain(nn.Linear(32, 32), torch.randn(16, 32), target=target)
    with pytest.raises(ValueError, match='target="sm_90"'):
        _ = report.kernels
