"""products: every node that multiplies matrices, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from fp8graph.analysis.products import CUSTOM, Product, products_of
from helpers import in_one_test, joint

E4M3 = torch.float8_e4m3fn


def scaled(x: Tensor, w: Tensor) -> Tensor:
    """Somebody's linear in FP8, with scales of 1."""
    one = x.new_ones(())
    return torch._scaled_mm(x.to(E4M3), w.to(E4M3).t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


@torch.library.custom_op("test_products::gemm", mutates_args=())
def gemm(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


@torch.library.custom_op("test_products::wgrad", mutates_args=())
def wgrad(dy: Tensor, x: Tensor) -> Tensor:
    return dy.t() @ x


@torch.library.custom_op("test_products::decode", mutates_args=())
def decode(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.float() * scale


@torch.library.custom_op("test_products::store", mutates_args=("cache",))
def store(cache: Tensor, x: Tensor) -> None:
    cache.copy_(x)


gemm.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[0]))
wgrad.register_fake(lambda dy, x: x.new_empty(dy.shape[1], x.shape[1]))
decode.register_fake(lambda codes, scale: codes.new_empty(codes.shape, dtype=torch.float32))
store.register_fake(lambda cache, x: None)
gemm.register_autograd(
    lambda ctx, dy: (torch.ops.test_products.gemm(dy, ctx.saved_tensors[1].t()), wgrad(dy, ctx.saved_tensors[0])),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def products(function: Callable[..., Any], *args: Tensor, stored: int = 0) -> list[Product]:
    """Those of ``function(*args)``, of which the last ``stored`` are weights."""
    graph = make_fx(function, tracing_mode="fake")(*args).graph
    inputs = graph.find_nodes(op="placeholder")
    return products_of(graph, inputs[len(inputs) - stored :])


def facts(product: Product) -> tuple[str, str, int | None]:
    return product.op, product.kind, product.flops


X, W = torch.empty(32, 64), torch.empty(48, 64)


@in_one_test(
    ("function", "expected"),
    [
        (lambda x, w: x @ w.t(), ("aten.mm", "matmul", 2 * 32 * 64 * 48)),
        (lambda x, w: torch.addmm(w[:, 0], x, w.t()), ("aten.addmm", "matmul", 2 * 32 * 64 * 48)),
        (lambda x, w: torch.addbmm(x[:, :48], x[None], w.t()[None]), ("aten.addbmm", "matmul", 2 * 32 * 64 * 48)),
        (
            lambda x, w: torch.baddbmm(x[None, :, :48], x[None], w.t()[None]),
            ("aten.baddbmm", "matmul", 2 * 32 * 64 * 48),
        ),
        (lambda x, w: torch.einsum("bi,oi->bo", x, w), ("aten.bmm", "matmul", 2 * 32 * 64 * 48)),
        (scaled, ("aten._scaled_mm", "scaled matmul", 2 * 32 * 64 * 48)),
        (
            lambda x, w: torch._int_mm(x.to(torch.int8), w.to(torch.int8).t()),
            ("aten._int_mm", "integer matmul", 2 * 32 * 64 * 48),
        ),
        (
            lambda x, w: torch.ops.aten._weight_int8pack_mm(x, w.to(torch.int8), w[:, 0]),
            ("aten._weight_int8pack_mm", "matmul of packed weights", 2 * 32 * 64 * 48),
        ),
        (
            lambda x, w: F.conv1d(x.t()[None], w[..., None]),
            ("aten.convolution", "convolution", 2 * 32 * 64 * 48),
        ),
        (
            lambda x, w: F.bilinear(x[:, :8], x[:, 8:16], w.view(48, 8, 8)),
            ("aten._trilinear", "bilinear", 2 * 32 * 48 * 8 * 8),
        ),
        (lambda x, w: torch.linalg.matrix_exp(w @ w.t()), ("aten.linalg_matrix_exp", "matrix exponential", None)),
        (lambda x, w: gemm(x, w), ("test_products.gemm", CUSTOM, None)),
    ],
)
def test_each_op_is_a_product(function: Callable[..., Any], expected: tuple[str, str, int | None]) -> None:
    assert facts(products(function, X, W, stored=1)[-1]) == expected


def test_grouped_products_count_each_token_once() -> None:
    ends = torch.tensor([8, 32], dtype=torch.int32)
    x, w = torch.empty(32, 64, dtype=torch.bfloat16), torch.empty(2, 64, 48, dtype=torch.bfloat16)
    dy = torch.empty(32, 48, dtype=torch.bfloat16)
    forward = products(lambda x, w, e: torch._grouped_mm(x, w, e), x, w, ends)
    of_weights = products(lambda x, dy, e: torch._grouped_mm(x.t(), dy, e), x, dy, ends)
    assert [facts(p) for p in (*forward, *of_weights)] == [("aten._grouped_mm", "grouped matmul", 2 * 32 * 64 * 48)] * 2


@torch.library.custom_op("test_products::gemm_into", mutates_args=("out",))
def gemm_into(x: Tensor, w: Tensor, out: Tensor) -> None:
    out.copy_(x @ w.t())


gemm_into.register_fake(lambda x, w, out: None)


class Into(nn.Module):
    """A library's op that writes its result."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(48, 64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        gemm_into(x, self.w, out := x.new_empty(x.shape[0], 48))
        return out * x.sum()


def test_an_op_that_writes_its_result_is_a_product() -> None:
    graph = joint(Into(), torch.randn(32, 64, requires_grad=True)).graph
    weight, *_ = graph.find_nodes(op="placeholder")
    (product,) = products_of(graph, [weight])
    assert facts(product) == ("test_products.gemm_into", CUSTOM, None)
    assert [tuple(x.meta["val"].shape) for x in product.operands] == [(32, 64), (48, 64)]


def test_a_buffer_for_the_result_is_no_operand() -> None:
    def copy(x: Tensor, w: Tensor) -> Tensor:
        store(out := torch.empty(48, 64), w)
        return x @ out.t()

    assert [product.op for product in products(copy, X, W, stored=1)] == ["aten.mm"]


def test_bitsandbytes_ops_are_counted() -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    codes, absmax = torch.zeros(48 * 32, 1, dtype=torch.uint8), torch.ones(48)
    op = torch.ops.bitsandbytes.gemm_4bit
    (product,) = products(lambda x, w, s: op(x, w, [48, 64], s, 64, "nf4"), X, codes, absmax, stored=2)
    assert facts(product) == ("bitsandbytes.gemm_4bit", "matmul of 4-bit weights", 2 * 32 * 64 * 48)
    assert product.low == torch.uint8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(4, 8, 3, stride=2), nn.ConvTranspose2d(8, 4, 3)
        self.q, self.out = nn.Linear(4, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(torch.relu(self.conv(x))).flatten(2).mT
        q = self.q(x).unflatten(-1, (4, 16)).mT.transpose(1, 2)[:, :, :16, :]
        return self.out(torch.softmax(q @ q.mT, -1) @ q)[..., :1] if q.shape[-1] == 64 else q @ q.mT


def test_a_step_has_the_flops_that_torch_counts() -> None:
    net, x = Net(), torch.randn(2, 4, 16, 16)
    graph = joint(net, x).graph
    with FlopCounterMode(display=False) as counter:
        net(x).sum().backward()
    of_graph = products_of(graph, graph.find_nodes(op="placeholder"))
    assert sum(product.flops or 0 for product in of_graph) == counter.get_total_flops()
    assert {product.kind for product in of_graph if product.backward} == {"convolution", "matmul"}


def test_attention_counts_both_products() -> None:
    q = torch.empty(2, 4, 32, 16, requires_grad=True)
    (forward,) = products(F.scaled_dot_product_attention, q, q, q)
    assert (forward.kind, forward.flops) == ("attention", 2 * (2 * 2 * 4 * 32 * 32 * 16))


def test_precision_is_that_of_the_operands() -> None:
    (low,) = products(scaled, X, W)
    (high,) = products(lambda x, w: x.bfloat16() @ w.bfloat16().t(), X, W)
    packed = products(lambda x, w: torch.ops.aten._weight_int8pack_mm(x, w, x[:1, :48].view(-1)), X, W.to(torch.int8))
    assert [low.dtypes, high.dtypes] == [(E4M3, E4M3), (torch.bfloat16, torch.bfloat16)]
    assert [low.low, high.low, packed[0].low] == [E4M3, None, torch.int8]


def test_decoding_a_weight_is_no_product() -> None:
    codes, scale = torch.empty(48, 64, dtype=torch.uint8), torch.empty(48, 1)
    (product,) = products(lambda x, codes, scale: x @ decode(codes, scale).t(), X, codes, scale, stored=2)
    assert facts(product) == ("aten.mm", "matmul", 2 * 32 * 64 * 48)


def test_decoding_activations_is_no_product() -> None:
    assert products(lambda x, scale: decode(x, scale), X.to(E4M3), torch.empty(32, 1)) == []


def test_a_custom_op_of_fp8_activations_is_opaque() -> None:
    (product,) = products(lambda x, w: gemm(x, w), X.to(E4M3), W.to(E4M3))
    assert (product.kind, product.flops, product.low) == (CUSTOM, None, E4M3)


def test_a_custom_op_of_activations_is_no_product() -> None:
    assert products(lambda x, w: gemm(x, w), X, W) == []


def test_a_tensor_that_an_op_writes_is_no_operand() -> None:
    assert products(lambda x, cache: store(cache, x), X, X.to(E4M3)) == []


@torch.library.custom_op("test_products::rotate", mutates_args=())
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x.clone()


rotate.register_fake(lambda x, cos, sin: torch.empty_like(x))


@pytest.mark.parametrize("size", [32, 16])
def test_an_op_that_rotates_by_a_table_is_no_product(size: int) -> None:
    q, table = torch.empty(2, 4, 128, 32), torch.empty(128, size)
    assert products(rotate, q, table, table, stored=2) == []
    square = torch.empty(32, 32)  # as many tokens as elements: it may be a product
    assert len(products(rotate, q[:, :, :32], square, square, stored=2)) == 1


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(48, 64))

    def forward(self, x: Tensor) -> Tensor:
        return gemm(x, self.w)


def test_backward_of_a_custom_op_is_opaque_too() -> None:
    graph = joint(Custom(), torch.randn(32, 64, requires_grad=True)).graph
    weight, *_ = graph.find_nodes(op="placeholder")
    of_graph = products_of(graph, [weight])
    assert [(p.op, p.backward) for p in of_graph] == [
        ("test_products.gemm", False), ("test_products.gemm", True), ("test_products.wgrad", True),
    ]  # fmt: skip
    assert all(product.flops is None for product in of_graph)


@pytest.fixture
def registered() -> Iterator[None]:
    packet: Any = torch.ops.test_products.gemm

    def formula(x: Any, w: Any, out_shape: Any = None, **_more: Any) -> int:
        return 2 * x[0] * x[1] * w[0]

    register_flop_formula(packet)(formula)
    yield
    del flop_registry[packet]


@pytest.mark.usefixtures("registered")
def test_a_registered_formula_counts_a_custom_op() -> None:
    (product,) = products(lambda x, w: gemm(x, w), X, W, stored=1)
    assert facts(product) == ("test_products.gemm", CUSTOM, 2 * 32 * 64 * 48)


@pytest.mark.parametrize(
    ("convolution", "x", "w"),
    [
        (lambda x, w: F.conv2d(x, w, groups=32), (2, 32, 8, 8), (64, 1, 3, 3)),
        (F.conv1d, (2, 16, 20), (32, 16, 3)),
        (lambda x, w: F.conv_transpose2d(x, w, stride=2, groups=4), (2, 16, 5, 5), (16, 8, 3, 3)),
    ],
    ids=["depthwise", "plain", "transposed"],
)
def test_backward_of_a_convolution_is_two_of_forward(convolution: Any, x: Any, w: Any) -> None:
    """Also in groups, of which torch's count of backward knows nothing."""

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad([convolution(x, w).sum()], [x, w])

    forward, backward = products(step, torch.randn(x, requires_grad=True), torch.randn(w, requires_grad=True))
    assert backward.flops == 2 * cast(int, forward.flops)
