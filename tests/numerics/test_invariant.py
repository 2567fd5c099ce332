"""Products and attention that give a token the same bits in any batch, against torch's own and against themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fp8graph.numerics import invariant, quantization
from fp8graph.numerics.experts import grouped_mm
from helpers import in_one_test, same_bits

TOKENS, KEYS = 100, 150


@in_one_test("dtype", [torch.float32, torch.bfloat16])
@in_one_test(("k", "n"), [(16, 16), (48, 64), (1000, 24), (2048, 160)])
def test_a_row_has_the_same_bits_at_any_place_of_any_batch(dtype: torch.dtype, k: int, n: int) -> None:
    a, b, bias = (torch.randn(shape).to(dtype) for shape in ((TOKENS, k), (k, n), (n,)))
    whole = invariant.mm(a, b, bias)
    torch.testing.assert_close(whole, torch.addmm(bias, a, b), rtol=2e-2, atol=1e-3 * k**0.5)
    for rows in (1, 2, 7, 31, 32, 33, 99):
        chosen = torch.randperm(TOKENS)[:rows]
        assert torch.equal(invariant.mm(a[chosen], b, bias), whole[chosen])
    assert invariant.mm(a[:0], b, None).shape == (0, n)
    summed = invariant.mm(a, b, bias.expand(TOKENS, n))  # as a residual that addmm adds: rounded twice
    assert torch.equal(summed, invariant.mm(a, b, None) + bias)


def test_a_product_of_numbers_that_add_up_exactly_is_torchs() -> None:
    a, b = (torch.randint(-8, 9, shape).float() for shape in ((TOKENS, 64), (64, 48)))
    assert torch.equal(invariant.mm(a, b, None), a @ b)
    offs = torch.tensor([0, 13, 14, 77], dtype=torch.int32)
    experts = torch.randint(-8, 9, (4, 64, 48)).float()
    assert torch.equal(invariant.grouped_mm(a, experts, offs), grouped_mm(a, experts, offs))


@pytest.mark.parametrize(("scaling", "block"), [("row", ()), ("block", (1, 128)), ("mxfp8", (1, 32))])
def test_a_group_of_rows_has_the_bits_of_the_rows_alone(scaling: str, block: tuple[int, ...]) -> None:
    x, weights = torch.randn(TOKENS, 256), torch.randn(3, 48, 256)
    how: dict[str, Any] = {"scaling": scaling, "block": block}
    args = torch.float8_e4m3fn, False, 0.0, [1, 1], list[int]()
    offs = torch.tensor([20, 20, 90], dtype=torch.int32)
    a, scale_a = quantization.quantize_layouts(x, *args, offs=offs, **how)
    b, scale_b = quantization.quantize_layouts(weights, *args, per_matrix=True, **how)
    blocks: dict[str, Any] = {"scaling": scaling, "block_a": block, "block_b": block}
    y = invariant.scaled_grouped_mm(a, b, scale_a, scale_b, offs, torch.bfloat16, False, False, **blocks)
    for group, rows in ((0, slice(0, 20)), (2, slice(20, 90))):
        alone = (quantization.quantize_layouts(each, *args, **how) for each in (x[rows], weights[group]))
        (data_a, of_a), (data_b, of_b) = alone
        expected = invariant.scaled_mm(data_a, data_b, of_a, of_b, None, torch.bfloat16, False, **blocks)
        assert torch.equal(y[rows], expected)
    assert not y[90:].any()


class Sequence:
    """q, k, v and the gradient of the result of one sequence, and what it has alone, with causal attention."""

    def __init__(self, tokens: int, heads: int = 4, kv_heads: int = 2) -> None:
        sizes = (heads, 16), (kv_heads, 16), (kv_heads, 8), (heads, 8)
        self.q, self.k, self.v, self.grad = (torch.randn(1, n, tokens, size) for n, size in sizes)
        self.out, self.logsumexp = invariant.attend(self.q, self.k, self.v, None, True, None)
        self.gradients = backward(self.grad, self.q, self.k, self.v, None, causal=True)


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> list[Tensor]:
    out, logsumexp = invariant.attend(q, k, v, mask, causal, None)
    return invariant.attend_backward(grad, q, k, v, out, logsumexp, mask, causal, None)


@in_one_test("causal", [True, False])
@in_one_test("masked", ["no mask", "bool", "numbers"])
def test_attention_and_its_gradients_are_torchs(causal: bool, masked: str) -> None:
    q, k, v, grad = (torch.randn(2, n, 70, size, dtype=torch.float64) for n, size in ((4, 16), (2, 16), (2, 8), (4, 8)))
    mask: Any = None
    if masked != "no mask":
        mask = (torch.rand(2, 1, 70, 70) > 0.3) | torch.eye(70, dtype=torch.bool)
        mask = mask if masked == "bool" else torch.randn(2, 4, 70, 70).masked_fill(~mask, -torch.inf)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    of_heads = leaves[0], *(x.repeat_interleave(2, 1) for x in leaves[1:])
    shown = torch.ones(70, 70, dtype=torch.bool).tril(0 if causal else 70)
    added = torch.zeros(2, 1, 70, 70).double()
    if mask is not None:
        added = added.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask.double()
    added = added.masked_fill(~shown, -torch.inf)
    expected = functional.scaled_dot_product_attention(*of_heads, attn_mask=added)
    expected.backward(grad)
    single = q.float(), k.float(), v.float()
    out, _ = invariant.attend(*single, mask, causal, None)
    torch.testing.assert_close(out.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    for got, leaf in zip(backward(grad.float(), *single, mask, causal=causal), leaves, strict=True):
        torch.testing.assert_close(got.double(), leaf.grad, rtol=1e-4, atol=1e-4)


@given(
    lengths=st.lists(st.integers(1, KEYS), min_size=1, max_size=4),
    left=st.integers(0, 40),
    right=st.integers(0, 40),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=15, deadline=None)
def test_packed_and_padded_sequences_have_the_bits_of_each_alone(
    lengths: list[int], left: int, right: int, seed: int
) -> None:
    torch.manual_seed(seed)
    sequences = [Sequence(length) for length in lengths]
    total = left + sum(lengths) + right

    def joined(name: str) -> Tensor:
        parts = [getattr(sequence, name) for sequence in sequences]
        around = [torch.randn(1, parts[0].shape[1], n, parts[0].shape[3]) for n in (left, right)]
        return torch.cat([around[0], *parts, around[1]], 2)

    mask, start, places = torch.zeros(total, total, dtype=torch.bool), left, list[slice]()
    for length in lengths:
        places.append(slice(start, start := start + length))
        mask[places[-1], places[-1]] = torch.ones(length, length, dtype=torch.bool).tril()
    q, k, v, grad = map(joined, ("q", "k", "v", "grad"))
    out, logsumexp = invariant.attend(q, k, v, mask, False, None)
    gradients = backward(grad, q, k, v, mask, causal=False)
    for place, sequence in zip(places, sequences, strict=True):
        assert torch.equal(out[:, :, place], sequence.out)
        assert torch.equal(logsumexp[:, :, place], sequence.logsumexp)
        assert same_bits([x[:, :, place] for x in gradients], sequence.gradients)
    assert not out[:, :, :left].any()


@pytest.mark.parametrize("room", [0, 60])
def test_decoding_has_the_bits_of_prefill(room: int) -> None:
    """From a cache that grows, and from one that was allocated with ``room`` to spare."""
    whole = Sequence(KEYS)
    for token in (0, 1, 31, 32, 63, 64, 65, 127, 128, KEYS - 1):
        keys, values = (x[:, :, : token + 1] for x in (whole.k, whole.v))
        keys, values = (functional.pad(x, [0, 0, 0, room]) for x in (keys, values))
        mask = torch.arange(token + 1 + room)[None] <= token if room else None
        out, _ = invariant.attend(whole.q[:, :, token : token + 1], keys, values, mask, False, None)
        assert torch.equal(out, whole.out[:, :, token : token + 1]), token


def test_a_window_of_keys_begins_where_its_first_key_is() -> None:
    """Each query sees its last 20 keys: the bits do not depend on the tokens before them."""
    whole, cut = Sequence(KEYS), slice(40, KEYS)
    q, k, v = whole.q, whole.k, whole.v
    near = torch.ones(KEYS, KEYS, dtype=torch.bool).tril().triu(-19)
    out, _ = invariant.attend(q, k, v, near, False, None)
    q, k, v = (x[:, :, cut] for x in (q, k, v))
    later, _ = invariant.attend(q, k, v, near[cut, cut], False, None)
    assert torch.equal(later[:, :, 19:], out[:, :, 59:])


def test_a_query_that_sees_nothing_is_zero() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool).tril(-1)  # the first one sees no key
    out, logsumexp = invariant.attend(q, k, v, mask, False, None)
    assert not out[:, :, 0].any()
    assert logsumexp[0, :, 0].eq(-torch.inf).all()
    gradients = invariant.attend_backward(torch.ones_like(out), q, k, v, out, logsumexp, mask, False, None)
    assert all(x.isfinite().all() for x in gradients)
    assert not gradients[0][:, :, 0].any()


class Products(TorchDispatchMode):
    """The shapes of all products that torch multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[Any] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := op.overloadpacket.__name__) in ("mm", "bmm", "addmm", "baddbmm"):
            self.shapes.add((name, *(tuple(x.shape) for x in args[-2:])))
        return op(*args, **(kwargs or {}))


def test_every_product_has_one_shape_whatever_the_batch() -> None:
    """The order of sums is then that of one kernel: the reason why all the other tests hold on other CPUs, too."""
    of_batches: list[set[Any]] = []
    weight, experts = torch.randn(16, 24), torch.randn(3, 16, 24)
    for batch, tokens in ((1, 3), (3, 64), (2, 130)):
        with Products() as products:
            x = torch.randn(batch * tokens, 16)
            invariant.mm(x, weight, None)
            invariant.mm(x, weight, torch.randn(24))
            invariant.grouped_mm(x, experts, torch.tensor([1, 1, batch * tokens], dtype=torch.int32))
            q, k, v, grad = (torch.randn(batch, n, tokens, size) for n, size in ((4, 16), (2, 16), (2, 8), (4, 8)))
            backward(grad, q, k, v, None, causal=True)
        of_batches.append(products.shapes)
    assert of_batches[0] == of_batches[1] == of_batches[2]
    assert {shape[-2] for _, shape, _ in of_batches[0]} == {invariant.ROWS, invariant.KEYS}
