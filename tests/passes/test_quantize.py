"""quantize: each planned GEMM in the dialect, operand by operand; everything else as it was."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8graph import Policy, Rule
from helpers import ALL, NONE, Weight, brief, stage, view_of


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def body(text: str) -> list[str]:
    """The lines of a graph between the inputs and the result, without the settings of the quantizers."""
    return [line for line in brief(text).splitlines() if "=" in line]


def test_linear() -> None:
    assert body(stage(nn.Linear(32, 48, bias=False), x(16, 32), after="quantize")) == body(
        dedent("""
        quantize_input: (e4m3[16, 32], f32[]) = fp8graph.quantize(primals_2, dtype=e4m3, rowwise=[1, 16], columnwise=[])
        input_rowwise: e4m3[16, 32] = quantize_input[0]
        input_scale_inv: f32[] = quantize_input[1]
        quantize_weight: (e4m3[48, 32], f32[]) = fp8graph.quantize(primals_1, dtype=e4m3, rowwise=[16, 16], columnwise=[])
        weight_rowwise: e4m3[48, 32] = quantize_weight[0]
        weight_scale_inv: f32[] = quantize_weight[1]
        fprop: f32[16, 48] = fp8graph.scaled_mm(input_rowwise, weight_rowwise, input_scale_inv, weight_scale_inv, bias=None, out_dtype=f32, use_fast_accum=True)
        quantize_grad_output: (e5m2[48, 16], f32[]) = fp8graph.quantize(tangents_1, dtype=e5m2, rowwise=[], columnwise=[1, 16])
        grad_output_columnwise: e5m2[48, 16] = quantize_grad_output[0]
        grad_output_scale_inv: f32[] = quantize_grad_output[1]
        quantize_input_1: (e4m3[32, 16], f32[]) = fp8graph.quantize(primals_2, dtype=e4m3, rowwise=[], columnwise=[16, 16])
        input_columnwise: e4m3[32, 16] = quantize_input_1[0]
        input_scale_inv_1: f32[] = quantize_input_1[1]
        wgrad: f32[48, 32] = fp8graph.scaled_mm(grad_output_columnwise, input_columnwise, grad_output_scale_inv, input_scale_inv_1, bias=None, out_dtype=f32, use_fast_accum=False)
        permute_2: f32[32, 48] = aten.permute(wgrad, [1, 0])
        quantize_grad_output_1: (e5m2[16, 48], f32[]) = fp8graph.quantize(tangents_1, dtype=e5m2, rowwise=[1, 16], columnwise=[])
        grad_output_rowwise: e5m2[16, 48] = quantize_grad_output_1[0]
        grad_output_scale_inv_1: f32[] = quantize_grad_output_1[1]
        quantize_weight_1: (e4m3[32, 48], f32[]) = fp8graph.quantize(primals_1, dtype=e4m3, rowwise=[], columnwise=[16, 16])
        weight_columnwise: e4m3[32, 48] = quantize_weight_1[0]
        weight_scale_inv_1: f32[] = quantize_weight_1[1]
        dgrad: f32[16, 32] = fp8graph.scaled_mm(grad_output_rowwise, weight_columnwise, grad_output_scale_inv_1, weight_scale_inv_1, bias=None, out_dtype=f32, use_fast_accum=False)
        permute_4: f32[48, 32] = aten.permute(permute_2, [1, 0])
        """)  # noqa: E501
    )


def forward(module: Any, *args: Tensor, policy: Policy = ALL) -> list[str]:
    """The rewritten forward half, quantize nodes aside."""
    text = stage(module, *args, after="quantize", policy=policy).split("# backward")[0]
    return [line for line in body(text) if "quantize" not in line]


def test_a_16_bit_bias_goes_into_the_gemm() -> None:
    assert forward(nn.Linear(32, 48).bfloat16(), x(16, 32, dtype=torch.bfloat16)) == [
        "fprop: bf16[16, 48] = fp8graph.scaled_mm(input_rowwise, weight_rowwise, input_scale_inv, "
        "weight_scale_inv, bias=primals_2, out_dtype=bf16, use_fast_accum=True)"
    ]


def test_a_bias_that_cublas_cannot_add_is_added_after() -> None:
    assert forward(nn.Linear(32, 48), x(16, 32))[-2:] == [
        "fprop: f32[16, 48] = fp8graph.scaled_mm(input_rowwise, weight_rowwise, input_scale_inv, "
        "weight_scale_inv, bias=None, out_dtype=f32, use_fast_accum=True)",
        "add_tensor: f32[16, 48] = aten.add.Tensor(fprop, primals_2)",
    ]


def test_a_padded_result_is_sliced_before_the_bias() -> None:
    assert forward(nn.Linear(20, 40).bfloat16(), x(7, 20, dtype=torch.bfloat16))[-3:] == [
        "fprop: bf16[7, 48] = fp8graph.scaled_mm(input_rowwise, weight_rowwise, input_scale_inv, "
        "weight_scale_inv, bias=None, out_dtype=bf16, use_fast_accum=True)",
        "slice_tensor: bf16[7, 40] = aten.slice.Tensor(fprop, 1, 0, 40)",
        "add_tensor: bf16[7, 40] = aten.add.Tensor(slice_tensor, primals_2)",
    ]


def test_a_padded_result_that_leaves_the_graph_has_the_strides_it_had() -> None:
    assert forward(nn.Linear(20, 40, bias=False).bfloat16(), x(7, 20, dtype=torch.bfloat16))[-2:] == [
        "slice_tensor: bf16[7, 40] = aten.slice.Tensor(fprop, 1, 0, 40)",
        "clone_default: bf16[7, 40] = aten.clone(slice_tensor, memory_format=torch.contiguous_format)",
    ]


def test_a_view_that_a_padded_result_does_not_have_is_one_of_a_copy() -> None:
    """[4, 40] of [4, 48]: no view has its 4 rows side by side."""
    flat = Weight(lambda w, a: (a @ w).view(-1) * 2.0, 32, 40)
    assert forward(flat, x(4, 32))[-4:] == [
        "slice_tensor: f32[4, 40] = aten.slice.Tensor(fprop, 1, 0, 40)",
        "clone_default: f32[4, 40] = aten.clone(slice_tensor, memory_format=torch.contiguous_format)",
        "view: f32[160] = aten.view(clone_default, [-1])",
        "mul: f32[160] = aten.mul.Tensor(view, 2.0)",
    ]


def test_a_padded_result_that_torch_reads_is_not_copied() -> None:
    rows = Weight(lambda w, a: (a @ w).view(2, 2, 40) * 2.0, 32, 40)
    assert forward(rows, x(4, 32))[-3:] == [
        "slice_tensor: f32[4, 40] = aten.slice.Tensor(fprop, 1, 0, 40)",
        "view: f32[2, 2, 40] = aten.view(slice_tensor, [2, 2, 40])",
        "mul: f32[2, 2, 40] = aten.mul.Tensor(view, 2.0)",
    ]


def test_a_weight_stored_transposed_is_turned_round() -> None:
    lines = body(stage(Weight(lambda w, a: a @ w, 32, 48), x(16, 32), after="quantize"))
    assert "permute_default: f32[48, 32] = aten.permute(primals_1, [1, 0])" in lines
    assert (
        "quantize_weight: (e4m3[48, 32], f32[]) = fp8graph.quantize(permute_default, dtype=e4m3, "
        "rowwise=[16, 16], columnwise=[])"
    ) in lines


def test_addmm_with_alpha_and_beta() -> None:
    scaled = Weight(lambda w, a, c: torch.addmm(c, a, w, alpha=0.5, beta=2.0), 32, 48)
    assert forward(scaled, x(16, 32), x(16, 48))[-3:] == [
        "mul_tensor: f32[16, 48] = aten.mul.Tensor(fprop, 0.5)",
        "mul_tensor_1: f32[16, 48] = aten.mul.Tensor(primals_2, 2.0)",
        "add_tensor: f32[16, 48] = aten.add.Tensor(mul_tensor, mul_tensor_1)",
    ]


def test_a_batch_of_one_is_a_plain_gemm() -> None:
    class Product(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.bmm(a, b)

    matmul = Policy([Rule("*", "tensorwise", op="matmul")])
    text = stage(Product(), x(1, 16, 32), x(1, 32, 16), after="quantize", policy=matmul)
    assert "fprop: f32[16, 16] = fp8graph.scaled_mm(" in text
    assert "unsqueeze_default: f32[1, 16, 16] = aten.unsqueeze(fprop, 0)" in text


def test_emulation_multiplies_dequantized_fp32() -> None:
    module = nn.Linear(32, 48).bfloat16()
    view = view_of(module, x(16, 32, dtype=torch.bfloat16), target="sm_80")
    lines = [line for line in body(view.after.split("# backward")[0]) if "= fp8graph.quantize(" not in line]
    assert [line for line in lines if line.startswith(("deq", "perm", "mm", "conv", "add"))] == [
        "dequantize_default: f32[16, 32] = fp8graph.dequantize(input_rowwise, input_scale_inv, dtype=f32)",
        "dequantize_default_1: f32[48, 32] = fp8graph.dequantize(weight_rowwise, weight_scale_inv, dtype=f32)",
        "permute_default: f32[32, 48] = aten.permute(dequantize_default_1, [1, 0])",
        "mm_default: f32[16, 48] = aten.mm(dequantize_default, permute_default)",
        "convert_element_type_default: bf16[16, 48] = prims.convert_element_type(mm_default, bf16)",
        "add_tensor: bf16[16, 48] = aten.add.Tensor(convert_element_type_default, primals_2)",
    ]


@pytest.mark.parametrize("policy", [NONE, Policy([Rule("*", None)])])
def test_a_graph_without_a_plan_is_not_touched(policy: Policy) -> None:
    view = view_of(nn.Linear(32, 48), x(16, 32), policy=policy)
    assert view.stages["quantize"] == view.before


def test_a_layer_left_alone_keeps_its_nodes() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, h: Tensor) -> Tensor:
            return self.b(self.a(h).relu())

    view = view_of(Two(), x(16, 32), policy=Policy([Rule("a", None)]))
    for line in view.before.splitlines():
        if re.search(r"= aten\.(mm|addmm)\(", line) and line.endswith("# a"):
            assert line in view.after.splitlines()
    assert sum("fp8graph.scaled_mm" in line for line in view.after.splitlines()) == 3


def test_one_matmul_feeds_the_next() -> None:
    chain = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    text = stage(chain, x(16, 32), after="quantize")
    assert "fp8graph.quantize(fprop, dtype=e4m3" in text
    assert "aten.mm(" not in text
