"""spec: mistakes that every CPU kernel forgives are found in the graph."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fp8graph
from fp8graph import hardware
from fp8graph.compat.ops import named_arguments
from fp8graph.ir import ops, verify
from fp8graph.ir.edit import insert
from fp8graph.ir.nodes import BACKWARD, GEMM_KEY, PASS_KEY, aten, matmul_arguments, nodes, value
from fp8graph.ir.settings import Settings
from helpers import first_fast, graph_inputs_for, in_one_test, passed
from stored_weights import stored

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def check(graph: fx.Graph, target: str = "sm_90") -> None:
    verify.verify(graph, after="x", hardware_of=lambda _: hardware.from_target(target))


E4M3UZ, E5M2UZ = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz


def graph_of(target: Any, *args: Any, **kwargs: Any) -> fx.Graph:
    """One node, its value not computed by torch: the mistakes are the point."""
    graph = fx.Graph()
    node_args = graph_inputs_for(graph, args)
    node = graph.call_function(target, tuple(node_args), kwargs)
    node.meta |= {PASS_KEY: "test", "val": FakeTensorMode().from_tensor(torch.empty(1))}
    graph.output([node])
    return graph


def fp8(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.zeros(shape).to(dtype)


ONE = torch.ones(())
BAD = [
    pytest.param((fp8(16, 32), fp8(16, 48), ONE, ONE, None), "do not contract", id="k"),
    pytest.param((torch.zeros(16, 32), fp8(16, 32), ONE, ONE, None), "operand a is torch.float32", id="dtype"),
    pytest.param((fp8(32, 16).t(), fp8(16, 32), ONE, ONE, None), "operand a is not contiguous", id="a strides"),
    pytest.param((fp8(16, 32), fp8(32, 16).t(), ONE, ONE, None), "operand b is not contiguous", id="b strides"),
    pytest.param((fp8(16, 32, dtype=E5M2), fp8(16, 32, dtype=E5M2), ONE, ONE, None), "E5M2 x E5M2", id="e5m2"),
    pytest.param((fp8(16, 32, dtype=E5M2UZ), fp8(16, 32, dtype=E5M2UZ), ONE, ONE, None), "E5M2 x E5M2", id="e5m2fnuz"),
    pytest.param((fp8(16, 32), fp8(16, 32, dtype=E4M3UZ), ONE, ONE, None), "two families of FP8", id="fnuz x OCP"),
    pytest.param((fp8(16, 32, dtype=E5M2UZ), fp8(16, 32), ONE, ONE, None), "two families of FP8", id="OCP x fnuz"),
    pytest.param((fp8(16, 24), fp8(16, 24), ONE, ONE, None), "k = 24 is not a multiple of 16", id="k alignment"),
    pytest.param((fp8(16, 32), fp8(24, 32), ONE, ONE, None), "n = 24 is not a multiple of 16", id="n alignment"),
    pytest.param((fp8(16, 32), fp8(16, 32), ONE.double(), ONE, None), "a has scales torch.float64", id="scale dtype"),
    pytest.param((fp8(16, 32), fp8(16, 32), ONE, torch.ones(2), None), "b has scales torch.float32", id="scale shape"),
    pytest.param((fp8(16, 32), fp8(16, 32), ONE, ONE, torch.zeros(16)), "cannot add a torch.float32", id="bias"),
]  # fmt: skip


@in_one_test(("args", "problem"), BAD)
def test_a_bad_gemm(args: tuple[Any, ...], problem: str) -> None:
    graph = graph_of(ops.scaled_mm, *args, torch.bfloat16, True)
    with pytest.raises(fp8graph.Fp8GraphError, match=f"after pass 'x'.*{problem}"):
        check(graph)
    a, b, *rest = args[:4]
    lowered = graph_of(aten._scaled_mm.default, a, b.t(), *rest, args[4], None, torch.bfloat16, True)
    with pytest.raises(fp8graph.Fp8GraphError, match=problem):
        verify.verify(lowered, after="lower", lowered=True)


def strided(*shape: int, stride: tuple[int, int]) -> Tensor:
    return torch.empty_strided(shape, stride)


ROWS = strided(256, 1, stride=(1, 1))
SQUARE = strided(2, 4, stride=(4, 1))
# scales of a [256, 512] and of b [256, 512] by tiles or rows, as torch._scaled_mm takes them
BLOCKS = [
    pytest.param(strided(256, 4, stride=(1, 256)), SQUARE, None, id="1x128, 128x128"),
    pytest.param(SQUARE, strided(256, 4, stride=(1, 256)), None, id="128x128, 1x128"),
    pytest.param(ROWS, ROWS, None, id="rows"),
    pytest.param(torch.ones(256, 4), SQUARE, r"operand a has .* reads them with \(1, 256\)", id="k-major"),
    pytest.param(SQUARE, strided(2, 4, stride=(8, 1)), r"operand b has .* reads them with \(4, 1\)", id="far apart"),
    pytest.param(torch.ones(260, 1)[4:], ROWS, None, id="part of the rows"),
    pytest.param(torch.ones(258, 1)[2:], ROWS, "operand a has .* from element 2 on", id="8-byte address"),
    pytest.param(SQUARE, torch.ones(3, 4), r"operand b has scales \(3, 4\) .* for \(256, 512\)", id="shape"),
]  # fmt: skip


@in_one_test(("scale_a", "scale_b", "problem"), BLOCKS)
def test_scales_of_tiles(scale_a: Tensor, scale_b: Tensor, problem: str | None) -> None:
    operands = fp8(256, 512), fp8(256, 512).t(), scale_a, scale_b.t()
    graph = graph_of(aten._scaled_mm.default, *operands, None, None, torch.bfloat16, False)
    if problem is None:
        verify.verify(graph, after="lower", lowered=True)
        return
    with pytest.raises(fp8graph.Fp8GraphError, match=problem):
        verify.verify(graph, after="lower", lowered=True)


def test_square_tiles_are_a_multiple_of_four_along_k() -> None:
    """Three are refused before they are lowered, and after, where torch would take them and cuBLASLt read others."""
    a, b, scale_a, scale_b = fp8(256, 384), fp8(256, 384), strided(256, 3, stride=(1, 256)), torch.ones(2, 3)
    lowered = graph_of(aten._scaled_mm.default, a, b.t(), scale_a, scale_b.t(), None, None, torch.bfloat16, False)
    with pytest.raises(fp8graph.Fp8GraphError, match="operand b .* cuBLASLt reads rows that are a multiple of 4 apart"):
        verify.verify(lowered, after="lower", lowered=True)
    settings: Any = {"scaling": "block", "block_a": [1, 128], "block_b": [128, 128]}
    graph = graph_of(ops.scaled_mm, a, b, scale_a, scale_b, None, torch.bfloat16, False, **settings)
    with pytest.raises(fp8graph.Fp8GraphError, match="k = 384 is not a multiple of 512"):
        check(graph)
    settings["block_b"] = [1, 128]  # 1x128 on both sides need whole tiles only
    check(graph_of(ops.scaled_mm, a, b, scale_a, scale_a, None, torch.bfloat16, False, **settings))


def test_a_good_gemm() -> None:
    for bias in (None, torch.zeros(16, dtype=torch.bfloat16)):
        for a, b in ((E5M2, E4M3), (E5M2UZ, E4M3UZ)):
            operands = fp8(5, 32, dtype=a), fp8(16, 32, dtype=b)
            check(graph_of(ops.scaled_mm, *operands, ONE, ONE, bias, torch.bfloat16, True))


@in_one_test(
    ("x", "args", "problem"),
    [
        (torch.zeros(2, 2).int(), (E4M3, False, 0.0, [1, 1], []), "quantizes torch.int32"),
        (torch.zeros(2, 2), (torch.bfloat16, False, 0.0, [1, 1], []), "not an FP8 type"),
        (torch.zeros(2, 2), (E4M3, False, -1.0, [1, 1], []), "negative epsilon"),
        (torch.zeros(2, 2), (E4M3, False, 0.0, [], []), "no layout"),
    ],
)
def test_a_bad_quantize(x: Tensor, args: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(fp8graph.Fp8GraphError, match=problem):
        check(graph_of(ops.quantize, x, *args))


@in_one_test(
    ("second", "dim", "problem"),
    [
        (torch.zeros(2, 4, dtype=torch.float16), -1, r"joins torch.float16 \(2, 4\) to torch.float32 \(2, 4\)"),
        (torch.zeros(3, 4), -1, r"joins torch.float32 \(3, 4\) to torch.float32 \(2, 4\) along dim -1"),
        (torch.zeros(2, 6), -2, r"joins torch.float32 \(2, 6\) to torch.float32 \(2, 4\) along dim -2"),
        (torch.zeros(2, 4), 0, "joins along dim 0"),
    ],
)
def test_tensors_that_cannot_be_joined(second: Tensor, dim: int, problem: str) -> None:
    graph = fx.Graph()
    x, y = graph_inputs_for(graph, [torch.zeros(2, 4), second])
    node = graph.call_function(ops.quantize, (x, E4M3, False, 0.0, [1, 1], []), {"more": [y], "dim": dim})
    node.meta |= {PASS_KEY: "test", "val": FakeTensorMode().from_tensor(torch.empty(1))}
    graph.output([node])
    with pytest.raises(fp8graph.Fp8GraphError, match=problem):
        check(graph)


@in_one_test("decoded", [False, True])
@in_one_test("mixed", [False, True])
def test_a_global_scale_of_another_tensor(mixed: bool, decoded: bool) -> None:
    def multiply(x: Tensor, w: Tensor) -> Tensor:
        made = [ops.quantize(t, torch.uint8, False, 0.0, [1, 32], [], scaling="nvfp4", block=[1, 16]) for t in (x, w)]
        (a, scale_a, global_a), (b, scale_b, global_b) = made
        tiles = {"scaling": "nvfp4", "block_a": [1, 16], "block_b": [1, 16]}
        given = {"global_scale_inv_a": global_a, "global_scale_inv_b": global_a if mixed else global_b}
        if decoded:
            made_for_b = {"scaling": "nvfp4", "block": [1, 16], "global_scale_inv": given["global_scale_inv_b"]}
            return ops.dequantize(b[:32], scale_b[:32], torch.bfloat16, **made_for_b)
        return ops.scaled_mm(a, b[:32], scale_a, scale_b[:32], None, torch.bfloat16, False, **tiles, **given)

    graph = make_fx(multiply, tracing_mode="fake")(torch.ones(32, 32), torch.ones(64, 32)).graph
    for node in graph.find_nodes(op="call_function", target=ops.dequantize if decoded else ops.scaled_mm):
        node.meta[PASS_KEY] = "test"
    refusal = pytest.raises(fp8graph.Fp8GraphError, match="scales of quantize_1 and the global scale of quantize")
    with refusal if mixed else contextlib.nullcontext():
        verify.verify(graph, after="x")


def test_a_scale_that_outlives_a_call_is_connected() -> None:
    x, asked = torch.zeros(2, 4), (E4M3, False, 0.0, [1, 1], [])
    verify.check_connected(graph_of(ops.quantize, x, *asked, scaling="tensor"))
    verify.check_connected(graph_of(ops.quantize, x, *asked, scaling="delayed", scales=torch.ones(1, 2)))
    with pytest.raises(fp8graph.UnsupportedRecipeError, match="the recipe delayed keeps its scales between calls"):
        verify.check_connected(graph_of(ops.quantize, x, *asked, scaling="delayed"))


def test_a_dialect_node_that_was_not_lowered() -> None:
    graph = graph_of(ops.dequantize, fp8(2, 2), ONE, torch.float32)
    check(graph)
    with pytest.raises(fp8graph.Fp8GraphError, match="not lowered"):
        verify.verify(graph, after="lower", lowered=True)


def test_forward_does_not_read_from_backward() -> None:
    graph = graph_of(ops.dequantize, fp8(2, 2), ONE, torch.float32)
    placeholder, _, node, _ = graph.nodes
    placeholder.meta["partitioner_tag"], node.meta["partitioner_tag"] = BACKWARD, "is_forward"
    check(graph)  # the tag of an input says nothing: in the body of a higher-order op all have it
    placeholder.target = "tangents_1"
    with pytest.raises(fp8graph.Fp8GraphError, match="forward node that reads from backward"):
        check(graph)
    verify.verify(graph, after="cast_in_tiles", partitioned=True)  # of backward alone, some of whose nodes came tagged


def test_an_inserted_node_has_a_value() -> None:
    graph = graph_of(ops.dequantize, fp8(2, 2), ONE, torch.float32)
    for node in graph.nodes:
        if PASS_KEY in node.meta:
            del node.meta["val"]
    with pytest.raises(fp8graph.Fp8GraphError, match="without a fake value"):
        check(graph)


def square(*, kind: str = "tensor", flipped: bool = False) -> Any:
    """A linear whose weight arrives quantized, or for ``kind`` "" in bf16; all sizes are equal."""
    known = stored(kind or "tensor", 256, 256)

    class Square(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.known = known if kind else torch.nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            weight: Any = known.high_precision(x.dtype) if kind else self.known.weight
            return torch.mm(x, weight) if flipped else torch.nn.functional.linear(x, weight)

    return Square()


@first_fast(
    ("kind", "last", "which", "flipped"),
    [
        ("tensor", "fold", "b", True),
        ("tensor", "fold", "b", False),
        *(("", "quantize", "b", flipped) for flipped in (False, True)),
        *(("tensor", "quantize", "b", flipped) for flipped in (False, True)),
        *(("block", "fold", "scale_inv_b", flipped) for flipped in (False, True)),
    ],
)
def test_a_square_weight_that_is_transposed(kind: str, last: str, which: str, flipped: bool) -> None:
    x = torch.ones(256, 256, dtype=torch.bfloat16, requires_grad=True)
    policy, hopper = fp8graph.Policy(default="tensorwise", min_speedup=0), Settings(target="sm_90")
    graph, found = passed(square(kind=kind, flipped=flipped), x, last=last, policy=policy, settings=hopper)
    settings: Any = {"after": last, "hardware_of": found.hardware_of, "sites": found.sites}
    checked = []
    for node in list(nodes(graph, (ops.scaled_mm,))):
        verify.verify(graph, **settings)
        _, gemm = node.meta[GEMM_KEY]
        operand = named_arguments(node)[which]
        with graph.inserting_before(node):
            turned = insert(graph, ops.columnwise, (operand, [*value(operand).shape]), like=node)
        node.replace_input_with(operand, turned)
        if gemm != "wgrad":
            checked.append(gemm)
            with pytest.raises(fp8graph.Fp8GraphError, match=f"operand b is the weight of {gemm}"):
                verify.verify(graph, **settings)
        node.replace_input_with(turned, operand)
    assert checked == ["fprop", "dgrad"]


@pytest.mark.slow
def test_a_square_weight_that_is_decoded_and_transposed() -> None:
    x = torch.ones(256, 256, dtype=torch.bfloat16, requires_grad=True)
    graph, found = passed(square(kind="mxfp8"), x, last="fold", policy=fp8graph.Policy(default="tensorwise"))
    verify.verify(graph, after="fold", sites=found.sites)
    node = found.sites[0].gemms[1].node  # dgrad, in high precision
    _, weight = matmul_arguments(node)
    with graph.inserting_before(node):
        node.replace_input_with(weight, insert(graph, aten.permute.default, (weight, [1, 0]), like=node))
    with pytest.raises(fp8graph.Fp8GraphError, match="operand b is the weight of dgrad transposed"):
        verify.verify(graph, after="fold", sites=found.sites)
