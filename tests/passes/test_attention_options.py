"""quantize_attention: the fields of a recipe that only attention knows."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import fp8graph
from attentions import (
    FORMS_IN_TRAINING,
    OPS,
    Attention,
    asking,
    exact,
    exact_rounding_all,
    qkv,
    results,
    rounded,
    sdpa,
    written_out,
)
from fp8graph import Float8CurrentScaling, Float8RowwiseScaling, Policy, Rule
from fp8graph.numerics import sqnr_db
from helpers import NONE, first_fast, view_of

# Sylvester's matrix of 16 as a product of four of 2, with the rows of Transformer Engine's vector negated
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
MATRIX = np.diag(SIGNS) @ functools.reduce(np.kron, [np.array([[1, 1], [1, -1]])] * 4) / 4
PER_TENSOR = Float8CurrentScaling(hadamard_qk=True)
PER_HEAD = Float8RowwiseScaling(hadamard_qk=True)


def turned(x: Tensor, matrix: np.ndarray[Any, Any] = MATRIX) -> Tensor:
    """Groups of 16 along the last dim, times ``matrix``: in float64, rounded once."""
    groups = x.detach().double().numpy().reshape(-1, 16) @ matrix
    return torch.from_numpy(groups.reshape(x.shape)).to(x.dtype)


def few_bits(*tensors: Tensor) -> list[Tensor]:
    """Tensors whose sums of 16 are exact in FP32, so that no code depends on the order of a sum."""
    return [(x.detach() * 16).round() / 16 for x in tensors]


MODULES: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "causal": (sdpa(is_causal=True), {}),
    "grouped queries": (sdpa(enable_gqa=True), {"kv_heads": 2, "keys": 32}),
    "written out": (written_out(), {"keys": 32}),
    "written out from the other side": (
        Attention(lambda q, k, v: (v.mT @ torch.softmax(k @ q.mT / 8, dim=-2)).mT),
        {"keys": 32},
    ),
    "tokens before heads": (
        Attention(lambda q, k, v: sdpa()(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)))),
        {},
    ),
    "one tensor": (Attention(lambda q, k, v: sdpa()(q, q, q)), {}),
}


@first_fast("name", MODULES)
@first_fast("recipe", [PER_TENSOR, PER_HEAD])
def test_q_and_k_are_transformed_and_their_gradients_back(name: str, recipe: Any) -> None:
    """The program on rounded transformed q and k, and its gradients for the program's own q and k."""
    module, sizes = MODULES[name]
    torch.manual_seed(1)
    q, k, v = few_bits(*qkv(**sizes))
    q, k, v = (q, q, q) if name == "one tensor" else (q, k, v)
    how: dict[str, Any] = {"heads": k.shape[1], "power_2": True, "epsilon": 1e-12} if recipe is PER_HEAD else {}
    tensors = [rounded(turned(q), **how), rounded(turned(k), **how), rounded(v, **how)]
    plain = Attention(lambda q, k, v: sdpa()(q, k, v)) if name == "one tensor" else module
    out, dq, dk, dv = results(plain, *tensors, policy=NONE)
    expected = [out, turned(dq, MATRIX.T), turned(dk, MATRIX.T), dv]
    got = results(module, q, k, v, policy=asking(recipe))
    if name == "one tensor":
        expected = [out, expected[1] + expected[2] + dv]
    for one, other in zip(expected, got, strict=True):
        assert sqnr_db(one, other) > 110


@pytest.mark.parametrize(("size", "causal"), [(64, False), (96, True), (128, True), (256, False)])
def test_the_oracle(size: int, causal: bool) -> None:
    torch.manual_seed(2)
    q, k, v = few_bits(*qkv(kv_heads=2, size=size))
    tensors = [rounded(turned(q)), rounded(turned(k)), rounded(v)]
    out, dq, dk, dv = exact(*tensors, causal=causal)
    got = results(sdpa(is_causal=causal, enable_gqa=True), q, k, v, policy=asking(PER_TENSOR))
    for one, other in zip([out, turned(dq, MATRIX.T), turned(dk, MATRIX.T), dv], got, strict=True):
        assert sqnr_db(one, other.double()) > 110


@pytest.mark.parametrize(
    ("scales", "gain"),
    [((1.0, 1.0), (-1, 1)), ((10.0, 10.0), (5, 15)), ((0.1, 10.0), (-10, -1))],
    ids=["no outliers", "the same channel of both", "a channel of k alone"],
)
def test_where_it_helps(scales: tuple[float, float], gain: tuple[float, float]) -> None:
    """docs/attention.md says so: FP8 numbers keep small channels beside large ones anyway."""
    torch.manual_seed(3)
    q, k, v = (x.detach() for x in qkv(queries=128))
    q[..., 5] *= scales[0]
    k[..., 5] *= scales[1]
    wanted = sdpa()(q.double(), k.double(), v.double())
    plain, transformed = (
        sqnr_db(wanted, results(sdpa(), q, k, v, policy=asking(recipe))[0].double())
        for recipe in ("tensorwise", PER_TENSOR)
    )
    assert gain[0] < transformed - plain < gain[1]


def test_strides_and_what_backward_keeps() -> None:
    view = view_of(MODULES["tokens before heads"][0], *qkv(), policy=asking(PER_TENSOR))
    lines = [line.split(": ")[1] for line in view.after.splitlines() if "= fp8graph.rotate(" in line]
    assert [line.split(" = ")[0] for line in lines] == ["f32[2, 16, 4, 64]"] * 4  # as they lie in memory
    assert {"query_data", "key_data", "value_data"} <= set(view.saved)
    assert not any(name.startswith(("dequantize", "rotate", "hadamard")) for name in view.saved)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)

    def body(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + i - j)  # pyright: ignore[reportDeprecated]

    q, k, v = few_bits(*qkv(queries=128))
    out, dq, dk, dv = results(Attention(body), rounded(turned(q)), rounded(turned(k)), rounded(v), policy=NONE)
    got = results(Attention(body), q, k, v, policy=asking(PER_TENSOR))
    for one, other in zip([out, turned(dq, MATRIX.T), turned(dk, MATRIX.T), dv], got, strict=True):
        assert sqnr_db(one, other) > 110


@pytest.mark.parametrize("form", FORMS_IN_TRAINING)
def test_each_op(form: str) -> None:
    view = fp8graph.explain(
        Attention(OPS[form][0]), *qkv(), policy=asking(PER_TENSOR), training=True
    ).graphs[0]  # fmt: skip
    assert view.after.count("= fp8graph.rotate(") == 4
    assert "q and k are transformed" in view.attention[0].reason


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HYBRID = Float8CurrentScaling(attention_backward=True)
OF_HEADS = Float8RowwiseScaling(attention_backward=True)
ALL = torch.ones(2, 4, 16, 16, dtype=torch.bool)
MASK = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.5
MASK[:, :, 3] = False  # a query that sees nothing


@first_fast(
    ("module", "sizes", "seen", "bound"),
    [
        pytest.param(sdpa(), {}, ALL, 55, id="op"),
        pytest.param(sdpa(is_causal=True), {"size": 96}, ALL.tril(), 55, id="causal"),
        pytest.param(sdpa(attn_mask=MASK), {}, MASK.expand(ALL.shape), 55, id="mask"),
        pytest.param(sdpa(enable_gqa=True), {"kv_heads": 2}, ALL, 55, id="grouped queries"),
        pytest.param(written_out(), {}, ALL, 55, id="written out"),
        pytest.param(sdpa(is_causal=True), {"dtype": torch.bfloat16}, ALL.tril(), 40, id="bf16"),
    ],
)
@first_fast("recipe", [HYBRID, OF_HEADS])
def test_backward_in_fp8(module: nn.Module, sizes: dict[str, Any], seen: Tensor, bound: float, recipe: Any) -> None:
    """q, k, v and probabilities in E4M3, gradients in the recipe's type: each product reads rounded numbers.

    A probability near the middle of two numbers may be rounded to either: one is 63 dB; all of them, below 50.
    """
    torch.manual_seed(4)
    q, k, v = (x.detach() for x in qkv(**sizes))
    how: dict[str, Any] = {} if recipe is HYBRID else {"heads": k.shape[1], "power_2": True, "epsilon": 1e-12}
    dtypes = (E4M3, E5M2 if recipe is HYBRID else E4M3)
    expected = exact_rounding_all([rounded(x, **how) for x in (q, k, v)], seen, dtypes, **how)
    got = results(module, q, k, v, policy=asking(recipe))
    for one, other in zip(expected, got, strict=True):
        assert sqnr_db(one, other.double()) > bound
    less = results(module, q, k, v, policy=asking("tensorwise" if recipe is HYBRID else "rowwise"))
    assert all(sqnr_db(one, other.double()) < 50 for one, other in zip(expected, less, strict=True))


def test_both_options_at_once() -> None:
    torch.manual_seed(5)
    q, k, v = few_bits(*qkv())
    tensors = [rounded(turned(q)), rounded(turned(k)), rounded(v)]
    out, dq, dk, dv = exact_rounding_all(tensors, ALL, (E4M3, E5M2))
    expected = [out, turned(dq, MATRIX.T), turned(dk, MATRIX.T), dv]
    both = Float8CurrentScaling(hadamard_qk=True, attention_backward=True)
    for module in (sdpa(), written_out()):
        for one, other in zip(expected, results(module, q, k, v, policy=asking(both)), strict=True):
            assert sqnr_db(one, other.double()) > 55


def test_an_overflow_of_the_gradient_is_seen() -> None:
    """Saturated, it would look like any gradient to a GradScaler."""
    for module in (sdpa(), written_out()):
        torch._dynamo.reset()
        inputs = [x.detach().requires_grad_() for x in qkv()]
        out = torch.compile(module, backend=fp8graph.Backend(asking(HYBRID), compiler="eager"))(*inputs)
        (out * torch.ones(64).index_fill(0, torch.tensor([7]), torch.inf)).sum().backward()
        assert not any(x.grad is None or x.grad.isfinite().all() for x in inputs)


@pytest.mark.parametrize("form", FORMS_IN_TRAINING)
def test_each_op_and_its_backward_are_replaced(form: str) -> None:
    if OPS[form][3]:  # dropout
        return
    view = fp8graph.explain(Attention(OPS[form][0]), *qkv(), policy=asking(HYBRID), training=True).graphs[0]
    assert view.after.count("fp8graph.rounded_attention(") == view.after.count("rounded_attention_backward(") == 1
    assert "_scaled_dot_product" not in view.after
    assert "logsumexp" not in view.saved
    assert {"query_data", "key_data", "value_data"} <= set(view.saved)


@first_fast("recipe", [HYBRID, OF_HEADS, Float8RowwiseScaling(attention_backward=True, hadamard_qk=True)])
def test_backward_in_fp8_of_heads_as_models_have_them(recipe: Any) -> None:
    """[batch, tokens, heads, size] in memory: the result and the gradients are viewed as [batch, tokens, ...]."""

    def body(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(2, 16, -1, 64).transpose(1, 2) for x in (q, k, v))
        return sdpa(is_causal=True, enable_gqa=True)(q, k, v).transpose(1, 2).reshape(2, 16, 256)

    torch.manual_seed(7)
    given = few_bits(*(torch.randn(2, 16, heads * 64) for heads in (4, 2, 2)))
    slope = torch.linspace(-1, 1, 2 * 16 * 256).reshape(2, 16, 256)
    apart = [x.view(2, 16, -1, 64).transpose(1, 2).contiguous().requires_grad_() for x in given]
    plain = torch.compile(
        sdpa(is_causal=True, enable_gqa=True), backend=fp8graph.Backend(asking(recipe), compiler="eager")
    )
    out = plain(*apart).transpose(1, 2).reshape(2, 16, 256)
    (out * slope).sum().backward()
    expected = [out, *(x.grad.transpose(1, 2).reshape(2, 16, -1) for x in apart if x.grad is not None)]
    got = results(Attention(body), *given, policy=asking(recipe))
    assert all(sqnr_db(one.detach(), other) > 55 for one, other in zip(expected, got, strict=True))


def test_backward_keeps_probabilities_in_fp8() -> None:
    view = view_of(written_out(), *qkv(), policy=asking(HYBRID))
    assert {"probabilities_data", "probabilities_scale_inv", "query_data"} <= set(view.saved)
    line = next(line for line in view.after.splitlines() if "quantize_grad_scores" in line)
    assert "dtype=e5m2" in line


def test_report_row_of_fp8_backward() -> None:
    report = fp8graph.explain(sdpa(), *qkv(), policy=asking(HYBRID), training=True)
    forward, backward = report.attention
    assert "; the probabilities are quantized, too; emulated: " in forward.reason
    assert (backward.recipe, backward.execution, backward.dtypes) == ("tensorwise", "emulated", ("e5m2", "fp32"))
    assert "emulated: torch has no FP8 backward" in backward.reason
    assert "; 1 in FP8 (1 emulated), 1 of them in backward, too" in str(report)
    report.check()


def logsumexp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, extra = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return out + extra.detach().unsqueeze(-1)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s / 2)  # pyright: ignore[reportDeprecated]


def gradient_of_mask(q: Tensor, k: Tensor, v: Tensor) -> Any:
    mask = q.mean((0, 1)) @ k.mean((0, 1)).T
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, mask.expand(2, 4, 16, 16), True, 0.0, False
    )[0]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("body", "sizes", "why"),
    [
        pytest.param(OPS["flash"][0], {}, "the dropped elements are not known outside of the op", id="dropout"),
        pytest.param(logsumexp, {}, "its logsumexp or its random state is read", id="logsumexp"),
        pytest.param(flex, {"queries": 128, "gradients": False}, "are inside of flex_attention", id="flex"),
        pytest.param(gradient_of_mask, {}, "its mask has a gradient", id="mask"),
        pytest.param(sdpa(is_causal=True), {"keys": 32}, "16 queries and 32 keys", id="corner"),
    ],
)
def test_refusals_of_backward(body: Any, sizes: dict[str, Any], why: str) -> None:
    given = qkv(**sizes)
    training = given[0].requires_grad
    report = fp8graph.explain(Attention(body), *given, policy=asking(HYBRID), training=training)
    assert {row.recipe for row in report.attention} == {None}
    assert why in report.attention[0].reason
    assert "fp8graph.dequantize(query" not in report.graphs[0].after
    with pytest.raises(fp8graph.Fp8CoverageError, match="attention: not in FP8"):
        report.check()


def test_the_number_of_heads_must_be_known_and_that_of_tokens_not() -> None:
    backend = fp8graph.Backend(asking(HYBRID), compiler="eager")
    torch._dynamo.reset()
    compiled = torch.compile(sdpa(), backend=backend)
    for queries in (16, 24):
        given = [x.detach() for x in qkv(queries=queries)]
        for x in given:
            torch._dynamo.mark_dynamic(x, 2)
        assert 20 < sqnr_db(sdpa()(*given), compiled(*given)) < 40
    assert len(backend.report.graphs) == 1
    backend = fp8graph.Backend(asking(HYBRID), compiler="eager")
    torch.compile(sdpa(), backend=backend, dynamic=True)(*(x.detach() for x in qkv(heads=6)))
    assert "attention_backward needs to know how many heads there are" in backend.report.attention[0].reason


@pytest.mark.slow
def test_rows_of_written_out_probabilities_need_known_tokens() -> None:
    """[heads, queries, keys], of which the last two are the number of tokens."""
    recipe = fp8graph.Float8RowwiseScaling(attention_backward=True)
    backend = fp8graph.Backend(asking(recipe), compiler="eager")
    torch._dynamo.reset()
    module = written_out()
    compiled = torch.compile(module, backend=backend)
    for tokens in (16, 24):  # the second call makes tokens dynamic
        given = [torch.randn(2, 4, tokens, 64, requires_grad=True) for _ in range(3)]
        compiled(*given).sum().backward()
        assert all(x.grad is not None for x in given)
    first, second = (view.attention[0] for view in backend.report.graphs)
    assert first.execution == "emulated"
    assert second.execution == "high precision"
    assert "attention_backward: one scale per head needs to know how many there are: [8, s" in second.reason


@pytest.mark.slow
@pytest.mark.parametrize("module", [sdpa(is_causal=True), written_out()])
def test_generated_code(module: nn.Module) -> None:
    torch.manual_seed(6)
    given = qkv()
    expected = results(module, *given, policy=asking(HYBRID))
    inputs = [x.detach().clone().requires_grad_() for x in given]
    out = torch.compile(module, backend=fp8graph.Backend(asking(HYBRID)))(*inputs)
    (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum().backward()
    got = [out.detach(), *(x.grad for x in inputs if x.grad is not None)]
    assert all(sqnr_db(one, other) > 50 for one, other in zip(expected, got, strict=True))


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"size": 40}, "hadamard_qk transforms 16 elements of a head at a time, these heads have 40"),
        ({"dtype": torch.float16}, "fp16 has no room for sums of 16 elements"),
    ],
)
def test_refusals(sizes: dict[str, Any], why: str) -> None:
    (row, _) = fp8graph.explain(sdpa(), *qkv(**sizes), policy=asking(PER_TENSOR), training=True).attention
    assert (row.recipe, why in row.reason) == (None, True)


def test_only_attention_knows_these_fields() -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            with fp8graph.autocast(recipe="turned"):
                return self.linear(x)

    fp8graph.register_recipe("turned", PER_TENSOR)
    (gemm,) = fp8graph.explain(Linear(), torch.randn(16, 32), training=False).gemms
    assert (gemm.recipe, "hadamard_qk=True is for attention alone" in gemm.reason) == (None, True)


def test_policies_say_it_in_files_and_refuse_it_elsewhere() -> None:
    policy = Policy([Rule("*", PER_TENSOR, op="attention")], default=None)
    assert Policy.from_dict(policy.to_dict()) == policy
    assert 'Float8CurrentScaling(hadamard_qk=True)' in str(policy)  # fmt: skip
    for op in ("linear", "matmul", "grouped_mm", "*"):
        with pytest.raises(fp8graph.PolicyError, match="hadamard_qk=True is for attention alone: write"):
            Rule("*", PER_TENSOR, op=op)
    with pytest.raises(fp8graph.PolicyError, match="hadamard_qk=True is for attention alone"):
        Policy(default=PER_HEAD)
    for field in ("hadamard_qk", "attention_backward"):
        wrong: dict[str, Any] = {field: 1}
        with pytest.raises(fp8graph.UnsupportedRecipeError, match=f"{field} must be True or False"):
            Float8RowwiseScaling(**wrong)
