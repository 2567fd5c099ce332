"""split_decoding: bitsandbytes' op that decodes and multiplies becomes its parts, or stays as it is."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from helpers import ALL, NONE, around, eager_backend, step, view_of

library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")


class Base(nn.Module):
    """A ``Linear4bit`` [96, k], whose input has a gradient."""

    def __init__(
        self, k: int = 64, *, nested: bool = False, bias: bool = False, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        linear = library.nn.Linear4bit(k, 96, bias=bias, compute_dtype=dtype, quant_type="nf4")
        kind = {"quant_type": "nf4", "compress_statistics": nested}
        linear.weight = library.nn.Params4bit(torch.randn(96, k).bfloat16(), requires_grad=False, **kind)
        self.linear = linear.to("cpu").requires_grad_(False)
        if bias:
            self.linear.bias.data = self.linear.bias.data.bfloat16()  # the library does it in the first call

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def lines(text: str, *ops: str) -> list[str]:
    """The lines that call one of ``ops``, without the names and shapes of their results."""
    return [line.partition(" = ")[2] for line in text.splitlines() if re.search(rf" = ({'|'.join(ops)})\(", line)]


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (32, 64))).bfloat16().requires_grad_()


OPS = r"bitsandbytes\.\w+", r"aten\.(?:add)?mm", r"aten\.add\.Tensor", r"prims\.\w+"


def test_before_and_after() -> None:
    view = view_of(Base(), x())
    before, after = (lines(text, *OPS) for text in around(view, "split_decoding"))
    assert before == [
        "bitsandbytes.gemm_4bit(primals_2, view_1, [96, 64], primals_3, 64, nf4)",
        "bitsandbytes.dequantize_4bit(view_1, primals_3, 64, nf4, [96, 64], bf16)",
        "aten.mm(tangents_1, dequantize_4bit)  # linear",
    ]
    assert after == [
        "bitsandbytes.dequantize_4bit(view_1, primals_3, 64, nf4, [96, 64], bf16)",
        "aten.mm(primals_2, permute_default)  # linear",
        "aten.mm(tangents_1, dequantize_4bit_default)  # linear",
    ]


def test_absmaxes_in_8_bits_and_a_bias_and_an_input_of_three_dims() -> None:
    text = around(view_of(Base(nested=True, bias=True), x(2, 16, 64)), "split_decoding")[1]
    nested, added, decoded, fprop, dgrad = lines(text, *OPS)
    assert re.fullmatch(r"bitsandbytes.dequantize_blockwise\(primals_\d, primals_\d, primals_\d, 256, f32\)", nested)
    assert added.startswith("aten.add.Tensor(dequantize_blockwise_default, primals_")
    assert decoded.startswith("bitsandbytes.dequantize_4bit(view_1, add_tensor, 64, nf4, [96, 64], bf16)")
    assert re.fullmatch(r"aten.addmm\(primals_\d, view_default, permute_default\)  # linear", fprop)
    assert re.fullmatch(r"aten.mm\(view_\d, dequantize_4bit_default\)  # linear", dgrad)


def test_a_weight_that_backward_rounds_to_another_dtype_is_rounded_in_forward_too() -> None:
    text = around(view_of(Base(dtype=torch.float32), x()), "split_decoding")[1]
    of_weight = [line for line in lines(text, *OPS) if "dequantize" in line]
    decoded, rounded = of_weight[:2]
    assert decoded.endswith("[96, 64], bf16)")
    assert rounded == "prims.convert_element_type(dequantize_4bit_default, f32)"


@torch.no_grad()
def test_without_backward_it_is_decoded_to_the_dtype_of_the_input() -> None:
    text = around(view_of(Base(dtype=torch.float32), x()), "split_decoding")[1]
    (decoded,) = lines(text, r"bitsandbytes\.\w+")
    assert decoded.endswith("[96, 64], f32)")


@pytest.mark.parametrize("policy", [NONE, fp8graph.Policy([fp8graph.Rule("linear", None, dgrad="tensorwise")])])
def test_an_op_in_high_precision_is_put_together_again(policy: Any) -> None:
    view = view_of(Base(bias=True), x(2, 16, 64), policy=policy)
    before, after = around(view, "split_decoding")[0], around(view, "join_decoding")[1]
    assert lines(before, r"bitsandbytes\.gemm_4bit") == lines(after, r"bitsandbytes\.gemm_4bit")
    assert not lines(after, r"aten\.addmm")


def test_a_gemm_in_fp8_stays_split() -> None:
    view = view_of(Base(), x(), policy=ALL)
    before, after = around(view, "join_decoding")
    assert before == after


@pytest.mark.parametrize(("rows", "left"), [(1, True), (4, True), (5, False)])
@torch.no_grad()
def test_few_rows_are_left_to_one_kernel(rows: int, left: bool) -> None:
    view = view_of(Base(), x(rows, 64))
    assert bool(lines(around(view, "join_decoding")[1], r"bitsandbytes\.gemm_4bit")) == left


@torch.no_grad()
def test_a_graph_for_any_number_of_rows_stays_split() -> None:
    first = x(3, 64)
    torch._dynamo.mark_dynamic(first, 0)
    assert not lines(around(view_of(Base(), first), "join_decoding")[1], r"bitsandbytes\.gemm_4bit")


class Halves(nn.Module):
    """Two bases, one behind the other; of the result's gradient the second gets a part with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Base().linear, Base().linear

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x)[..., :64]
        return torch.cat([self.second(inner), inner], dim=-1)


def test_a_batched_dgrad_becomes_a_gemm() -> None:
    view = view_of(Halves(), x(2, 16, 64))
    before, after = (lines(text, r"aten\.bmm") for text in around(view, "split_decoding"))
    assert (len(before), len(after)) == (1, 0)
    view = view_of(Halves(), x(2, 16, 64), policy=NONE)
    assert lines(view.stages["join_decoding"], r"aten\.bmm") == before


def test_ops_that_read_each_other_are_put_together_again() -> None:
    model = nn.Sequential(Base().linear, Base(96).linear)
    backend = eager_backend(NONE)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    a = x()
    expected, got = (step(each, a) for each in (model, compiled))
    assert all(map(torch.equal, expected, got))
    assert [row.fqn for row in backend.report.others] == ["0", "1"]
    assert len(lines(backend.report.graphs[0].after, r"bitsandbytes\.gemm_4bit")) == 2


@torch.no_grad()
def test_a_gemm_that_is_not_faster_is_left_to_the_library() -> None:
    """A rule of the user's names it, and has matched it."""
    backend = eager_backend(fp8graph.Policy([fp8graph.Rule("linear", "tensorwise")], default=None), target="sm_90")
    torch.compile(Base(), backend=backend, fullgraph=True)(x(512, 64))
    (row,) = backend.report.others
    assert (row.fqn, row.recipe, row.rule) == ("linear", None, 0)
    assert "not faster in FP8: predicted" in row.reason
    assert 'rule "linear" asked for tensorwise' in row.reason
    backend.report.check()


class Chosen(Base):
    """A base that multiplies as many rows as the data say."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.linear.weight
        state = weight.quant_state
        settings = state.shape, state.absmax, state.blocksize, state.quant_type
        return torch.ops.bitsandbytes.gemm_4bit(x[x[:, 0] > 0], weight.data.view(-1, 1), *settings)


@torch.no_grad()
def test_a_gemm_that_a_rule_names_in_vain_is_an_error() -> None:
    """Its row is that of any linear."""
    backend = eager_backend(fp8graph.Policy([fp8graph.Rule("linear", "tensorwise")], default=None))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(Chosen(), backend=backend, fullgraph=True)(x())
    with pytest.raises(fp8graph.Fp8CoverageError, match="a size is known at run time only"):
        backend.report.check()
