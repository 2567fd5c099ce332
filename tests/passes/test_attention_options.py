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
from attentions import OPS, Attention, asking, exact, qkv, results, rounded, sdpa, written_out
from fp8graph import Float8CurrentScaling, Float8RowwiseScaling, Policy, Rule
from fp8graph.numerics import sqnr_db
from helpers import NONE, view_of

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


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("recipe", [PER_TENSOR, PER_HEAD])
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


@pytest.mark.parametrize("form", [form for form in OPS if form != "device's own" or torch.__version__ >= "2.13"])
def test_each_op(form: str) -> None:
    view = fp8graph.explain(
        Attention(OPS[form][0]), *qkv(), policy=asking(PER_TENSOR), training=True
    ).graphs[0]  # fmt: skip
    assert view.after.count("= fp8graph.rotate(") == 4
    assert "q and k are transformed" in view.attention[0].reason


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
    with pytest.raises(fp8graph.UnsupportedRecipeError, match="hadamard_qk must be True or False"):
        Float8RowwiseScaling(hadamard_qk=1)  # pyright: ignore[reportArgumentType]
