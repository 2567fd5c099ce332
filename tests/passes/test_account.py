"""account: each product that is no GEMM of a site and no attention has a row, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8graph
from fp8graph.records import OPAQUE, ProductRecord
from helpers import ALL, MLP, around, eager_backend, view_of

E4M3 = torch.float8_e4m3fn


@torch.library.custom_op("test_account::gemm", mutates_args=())
def gemm(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


gemm.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[0]))
gemm.register_autograd(
    lambda ctx, dy: (gemm(dy, ctx.saved_tensors[1].t()), dy.t() @ ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Scaled(nn.Module):
    """Somebody's linear in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        one = x.new_ones((), dtype=torch.float32)
        return torch._scaled_mm(
            x.to(E4M3), self.weight.to(E4M3).t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        )


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return gemm(x, self.weight)


class By(nn.Module):
    """A function of the input and one weight."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(64, 64).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def beside(module: nn.Module) -> nn.Module:
    """Before one linear."""
    return nn.Sequential(module, nn.Linear(64, 64).bfloat16())


def rows(module: nn.Module, **settings: Any) -> list[ProductRecord]:
    backend = eager_backend(ALL, **settings)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    compiled(torch.randn(32, 64).bfloat16())
    return [row for row in backend.report.others if isinstance(row, ProductRecord)]


CASES: dict[str, tuple[Any, str, str]] = {
    "aten._scaled_mm": (Scaled(), "low precision", "e4m3"),
    "aten.convolution": (By(lambda x, w: F.conv1d(x.t()[None], w[..., None])[0].t()), "high precision", ""),
    "test_account.gemm": (Custom(), OPAQUE, ""),
    "aten._trilinear": (By(lambda x, w: F.bilinear(x[:, :8], x[:, 8:16], w.view(64, 8, 8))), "high precision", ""),
    "aten.addbmm": (By(lambda x, w: torch.addbmm(x, x[None], w[None])), "high precision", ""),
    "aten.mv": (By(lambda x, w: torch.mv(w, x[0])[None]), "high precision", ""),
    "aten._int_mm": (
        By(lambda x, w: torch._int_mm(x.to(torch.int8), w.to(torch.int8)).bfloat16()), "low precision", "int8",
    ),
    "aten._weight_int8pack_mm": (
        By(lambda x, w: torch.ops.aten._weight_int8pack_mm(x, w.to(torch.int8), w[0])), "low precision", "int8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", CASES)
@torch.no_grad()
def test_a_product_beside_a_linear_has_a_row(op: str) -> None:
    module, execution, low = CASES[op]
    (row,) = rows(beside(module))
    assert (row.op, row.fqn, row.direction, row.execution, row.low) == (op, "0", "forward", execution, low)
    assert (row.recipe, row.rule, row.required, row.missing) == (None, None, False, False)
    assert bool(row.flops) == (execution != OPAQUE)


@pytest.mark.parametrize(
    "function",
    [lambda x, w: torch.einsum("bi,oi->bo", x, w), lambda x, w: torch.baddbmm(x[None], x[None], w[None])[0]],
    ids=["einsum", "baddbmm"],
)
def test_a_matmul_is_a_gemm_and_has_no_other_row(function: Any) -> None:
    assert rows(beside(By(function))) == []


@torch.no_grad()
def test_a_product_that_torch_takes_apart_says_so() -> None:
    (row,) = rows(beside(By(lambda x, w: torch.einsum("bi,ij,bj->b", x, w, x)[:, None].expand(-1, 64))))
    assert (row.kind, row.reason) == ("matmul", "torch takes it apart into products of elements and their sum")


def test_backward_has_the_name_of_forward() -> None:
    net = nn.Sequential(nn.Unflatten(1, (1, 64)), nn.Conv1d(1, 1, 1), nn.Conv1d(1, 4, 3), nn.Flatten()).bfloat16()
    assert [(row.fqn, row.index, row.direction) for row in rows(net)] == [
        ("1", 0, "forward"), ("2", 0, "forward"), ("2", 0, "backward"), ("1", 0, "backward"),
    ]  # fmt: skip


def test_the_second_product_of_a_module_has_an_index() -> None:
    def twice(x: Tensor, w: Tensor) -> Tensor:
        return gemm(gemm(x, w), w)

    assert [row.name for row in rows(By(twice)) if row.direction == "forward"] == ["weight", "weight[1]"]


def test_backward_of_a_custom_op_is_listed() -> None:
    *_, forward, backward = rows(nn.Sequential(Custom(), Custom()))
    assert [(row.fqn, row.direction) for row in (forward, backward)] == [("1", "forward"), ("1", "backward")]
    assert backward.reason == "an op of another library; nobody can count its FLOPs: register_flop_formula would"


def test_the_graph_is_not_changed() -> None:
    x = torch.randn(32, 64).bfloat16()
    view = view_of(beside(Custom()), x)
    before, after = around(view, "account")
    assert before == after
    assert "account" in view.stages
    assert "account" not in view_of(MLP(64, 64).bfloat16(), x).stages


@torch.library.custom_op("test_account::gemm_of_codes", mutates_args=())
def gemm_of_codes(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    return x @ (codes.to(x.dtype) * scale).t()


@torch.library.custom_op("test_account::decode", mutates_args=())
def decode(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.to(scale.dtype) * scale


gemm_of_codes.register_fake(lambda x, codes, scale: x.new_empty(x.shape[0], codes.shape[0]))
decode.register_fake(lambda codes, scale: scale.new_empty(codes.shape))
gemm_of_codes.register_autograd(
    lambda ctx, dy: (dy @ decode(*ctx.saved_tensors), None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:]),
)


class Base(nn.Module):
    """A base layer of QLoRA, whose codes are multiplied inside of one op, or decoded by one in front of the linear."""

    def __init__(self, *, visible: bool) -> None:
        super().__init__()
        self.visible = visible
        self.codes = nn.Parameter(torch.randint(-8, 8, (64, 64), dtype=torch.int8), requires_grad=False)
        self.register_buffer("scale", torch.full((64, 1), 0.05).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        scale = self.get_buffer("scale")
        return F.linear(x, decode(self.codes, scale)) if self.visible else gemm_of_codes(x, self.codes, scale)


@pytest.mark.parametrize("visible", [True, False])
def test_the_base_of_qlora_has_rows_in_both_directions(*, visible: bool) -> None:
    """As bitsandbytes, with one op for both, and as others, whose dequantization is in the graph."""
    base = Base(visible=visible)
    before, backend = base.codes.clone(), eager_backend(ALL)
    model = torch.compile(nn.Sequential(nn.Linear(64, 64).bfloat16(), base), backend=backend, fullgraph=True)
    model(torch.randn(32, 64).bfloat16()).sum().backward()
    gemms = {row.gemm: row for row in backend.report.gemms if row.fqn == "1"}
    products = [row for row in backend.report.others if isinstance(row, ProductRecord)]
    others = [(row.op, row.direction, row.execution) for row in products]
    if visible:
        assert (gemms["fprop"].recipe, gemms["dgrad"].recipe, others) == ("tensorwise", "tensorwise", [])
    else:
        assert others == [("test_account.gemm_of_codes", "forward", OPAQUE)]
        assert gemms["dgrad"].reason.startswith("test_account.decode decodes its weight for backward alone: forward")
    assert torch.equal(base.codes, before)


def test_attention_has_its_own_row() -> None:
    q = torch.randn(1, 2, 16, 32).bfloat16()
    report = fp8graph.explain(By(lambda x, w: F.scaled_dot_product_attention(x @ w[:32, :32], x, x)), q, training=True)
    assert [type(row).__name__ for row in report.others] == ["AttentionRecord", "AttentionRecord"]


def test_torchs_encoder_layer_for_inference_has_a_row() -> None:
    encoder = nn.TransformerEncoderLayer(64, 2, 32, batch_first=True).eval()
    report = fp8graph.explain(beside(encoder.bfloat16()), torch.randn(2, 4, 64).bfloat16(), training=False)
    (row,) = [row for row in report.others if isinstance(row, ProductRecord)]
    assert (row.op, row.execution) == ("aten._transformer_encoder_layer_fwd", OPAQUE)
    assert report.summary().startswith("1 of 1 GEMMs in FP8, 100 % of the FLOPs of all products but 1 of unknown FLOPs")


def test_no_rule_names_it_and_strict_mode_asks_for_nothing() -> None:
    policy = fp8graph.Policy([fp8graph.Rule("*", "tensorwise", op="*")])
    with torch.no_grad():
        (row,) = rows(beside(Scaled()), strict=True)
    assert not row.missing
    backend = eager_backend(policy, strict=True)
    torch.compile(beside(Custom()), backend=backend)(torch.randn(32, 64).bfloat16())
    backend.report.check()


def test_a_rule_that_names_it_matched_nothing() -> None:
    policy = fp8graph.Policy([fp8graph.Rule("0", "tensorwise")])
    backend = eager_backend(policy)
    torch.compile(beside(Custom()), backend=backend)(torch.randn(32, 64).bfloat16())
    with pytest.raises(fp8graph.Fp8CoverageError, match="matched nothing. 0 is a custom op, which no rule names"):
        backend.report.check()


def test_layers_that_share_code_have_their_own_names() -> None:
    model = nn.Sequential(Custom(), Custom())
    backend = eager_backend(ALL)
    backend.bind(model)
    for layer in model:
        layer.compile(backend=backend)
    model(torch.randn(32, 64).bfloat16())
    others = [row for row in backend.report.others if row.direction == "forward"]
    assert [row.fqn for row in others] == ["0", "1"]
