"""Run the kernels of ``numerics/row_kernels.py`` on the CPU, in Triton's interpreter, and compare them with the CPU's.

    TRITON_INTERPRET=1 python -m interpreted_rows [all]      one JSON line a case

``error``: the largest distance from what ``numerics.invariant`` computes on a CPU, by the largest number of that.
``same``: whether rows have the same bits in another batch: fewer of them, in another order, behind padding, packed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import interpreted  # before anything imports triton  # isort: skip
import torch
from torch import Tensor

from fp8graph.numerics import invariant, quantization, row_kernels
from fp8graph.recipes import resolve_recipe

ROWS, COLUMNS, DEPTH = 70, 150, 200
BF16 = torch.bfloat16


def by_kernels(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mock.patch.object(invariant, "kernels_for", return_value=row_kernels):
        return function(*args, **kwargs)


def tell(case: str, got: list[Tensor], expected: list[Tensor], *, same: bool) -> None:
    errors: list[float] = []
    for x, y in zip(got, expected, strict=True):
        assert x.shape == y.shape, (case, x.shape, y.shape)
        assert x.dtype == y.dtype, (case, x.dtype, y.dtype)
        finite = y > -torch.inf
        assert torch.equal(finite, x > -torch.inf), case
        x, y = x[finite].double(), y[finite].double()
        errors.append(((x - y).abs().max() / y.abs().max()).item())
    print(json.dumps({"case": case, "error": max(errors), "same": same}), flush=True)


def products(dtypes: Sequence[torch.dtype]) -> None:
    order = [69, 3, 64, 5]
    for dtype in dtypes:
        a, b, bias = torch.randn(ROWS, DEPTH), torch.randn(DEPTH, COLUMNS), torch.randn(COLUMNS)
        operands = [x.to(dtype) for x in (a, b, bias)]
        got = by_kernels(invariant.mm, *operands)
        fewer = by_kernels(invariant.mm, operands[0][order], *operands[1:])
        tell(f"{dtype}", [got], [invariant.mm(*operands)], same=torch.equal(fewer, got[order]))
        ends, experts = torch.tensor([10, 10, 66], dtype=torch.int32), torch.randn(3, DEPTH, COLUMNS).to(dtype)
        got = by_kernels(invariant.grouped_mm, operands[0], experts, ends)
        alone = by_kernels(invariant.grouped_mm, operands[0][10:66], experts, torch.tensor([0, 0, 56]).int())
        expected = invariant.grouped_mm(operands[0], experts, ends)
        tell(f"{dtype}, groups", [got], [expected], same=torch.equal(alone, got[10:66]))


def scaled_products() -> None:
    order = [69, 3, 64, 5]
    for name in ("rowwise", "blockwise", "mxfp8"):
        recipe = resolve_recipe(name)
        assert recipe is not None
        quantizers = recipe.quantizer("input"), recipe.quantizer("weight")
        x = torch.randn(ROWS, DEPTH, dtype=BF16) * torch.logspace(-3, 3, ROWS).unsqueeze(1)
        weights = torch.randn(3, COLUMNS, DEPTH, dtype=BF16) * torch.logspace(-2, 2, DEPTH)
        blocks = {f"block_{side}": q.block for side, q in zip("ab", quantizers, strict=True)}
        settings: dict[str, Any] = {"scaling": quantizers[0].scaling, **blocks}

        def quantized(
            x: Tensor, which: int, quantizers: Any = quantizers, order: str = "", **more: Any
        ) -> tuple[Tensor, Tensor]:
            given = quantization.quantizer_kwargs(quantizers[which]) | more
            args = quantization.quantizer_args(quantizers[which])
            data, scale = quantization.quantize_layouts(x, *args, [1, 1], [], rowwise_order=order, **given)
            return data, scale

        for orders in [("", "")] if name == "rowwise" else [("", ""), ("transposed", ""), ("128x4", "128x4")]:
            if name == "blockwise" and orders[0] == "128x4":
                continue
            (a, of_a), (b, of_b) = quantized(x, 0, order=orders[0]), quantized(weights[0], 1, order=orders[1])
            args = a, b, of_a, of_b, torch.randn(COLUMNS, dtype=BF16), BF16, False
            ordered: dict[str, Any] = settings | {"order_a": orders[0], "order_b": orders[1]}
            got = by_kernels(invariant.scaled_mm, *args, **ordered)
            fewer = quantized(x[order], 0, order=orders[0])
            others = by_kernels(invariant.scaled_mm, fewer[0], b, fewer[1], *args[3:], **ordered)
            expected = invariant.scaled_mm(*args, **ordered)
            tell(f"{name} {orders[0]}", [got], [expected], same=torch.equal(others, got[order]))
        ends = torch.tensor([10, 10, 66], dtype=torch.int32)
        (a, of_a), (b, of_b) = quantized(x, 0, offs=ends), quantized(weights, 1, per_matrix=True)
        args = a, b, of_a, of_b, ends, BF16, False, False
        got = by_kernels(invariant.scaled_grouped_mm, *args, **settings)
        later = torch.tensor([0, 0, 56], dtype=torch.int32)
        (a, of_a) = quantized(x[10:66], 0, offs=later)
        alone = by_kernels(invariant.scaled_grouped_mm, a, b, of_a, of_b, later, *args[5:], **settings)
        expected = invariant.scaled_grouped_mm(*args, **settings)
        tell(f"{name}, groups", [got], [expected], same=torch.equal(alone, got[10:66]))


def sums() -> None:
    x = torch.randn(3, 5, 2500, dtype=BF16)
    for dims, keepdim in (([-1], True), ([1], False), ([1, 2], True)):
        for mean in (False, True):
            args = dims, keepdim, torch.float32, mean
            part = x[..., :20] if dims == [1] else x  # a program for each number of the result
            got, alone = (by_kernels(invariant.add_up, each, *args) for each in (part, part[1:2]))
            tell(f"sum {dims}", [got], [invariant.add_up(part, *args)], same=torch.equal(alone, got[1:2]))
    got = by_kernels(invariant.spread, x.float(), [-1], 1, True)
    tell("var_mean", [*got], [*torch.var_mean(x.float(), [-1], correction=1, keepdim=True)], same=True)


def attention(dtype: torch.dtype, *, causal: bool, masked: str) -> None:
    tokens, left = 70, 3
    q, k, v, grad = (torch.randn(2, n, tokens, size).to(dtype) for n, size in ((4, 16), (2, 16), (2, 8), (4, 8)))
    mask: Any = None
    if masked != "no":
        mask = (torch.rand(2, 1, tokens, tokens) > 0.3) | torch.eye(tokens, dtype=torch.bool)
        mask[0, 0, :5] = False
    if masked == "numbers":
        mask = torch.randn(2, 4, tokens, tokens).masked_fill(~mask, -torch.inf).to(dtype)

    def both(run: Callable[..., Any], mask: Any, *tensors: Tensor) -> list[Tensor]:
        q, k, v, grad = tensors
        out, logsumexp = run(invariant.attend, q, k, v, mask, causal, None)
        return [out, logsumexp, *run(invariant.attend_backward, grad, q, k, v, out, logsumexp, mask, causal, None)]

    got = both(by_kernels, mask, q, k, v, grad)
    expected = both(lambda run, *args: run(*args), mask, q, k, v, grad)
    assert [x.stride() for x in got] == [x.stride() for x in expected]
    second = both(by_kernels, None if mask is None else mask[1:], *(x[1:] for x in (q, k, v, grad)))
    same = all(torch.equal(x, y[1:]) for x, y in zip(second, got, strict=True))
    if causal and mask is None:  # behind padding, and both sequences packed into one
        numbers = torch.tensor([0] * left + [1] * tokens + [2] * tokens)
        packed = (numbers.unsqueeze(1) == numbers) & (numbers > 0).unsqueeze(1)
        joined = (torch.cat([torch.ones_like(x[:1, :, :left]), x[:1], x[1:]], 2) for x in (q, k, v, grad))
        parts = both(by_kernels, packed.expand(1, 1, -1, -1), *joined)
        for sequence in range(2):
            place = slice(left + sequence * tokens, left + (sequence + 1) * tokens)
            same = same and all(torch.equal(x[0, :, place], y[sequence]) for x, y in zip(parts, got, strict=True))
        part = both(by_kernels, None, *(x[:, :, :30] for x in (q, k, v, grad)))
        same = same and torch.equal(part[0], got[0][:, :, :30])
    tell(f"attention, {dtype}, {causal=}, {masked} mask", got, expected, same=same)


def main(*, every: bool) -> None:
    interpreted.prepare()
    torch.manual_seed(0)
    if not every:
        products([BF16])
        attention(BF16, causal=True, masked="no")
        return
    products([torch.float32, BF16])
    scaled_products()
    sums()
    for dtype in (torch.float32, BF16):
        for causal in (True, False):
            for masked in ("no", "bool", "numbers"):
                attention(dtype, causal=causal, masked=masked)


if __name__ == "__main__":
    main(every="all" in sys.argv)
