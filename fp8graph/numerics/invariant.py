"""Products and attention whose result for a token does not depend on the tokens beside it, bit for bit.

A library chooses a GEMM's kernel by its shape, and with it the order of the sums. Here every product of rows is a loop
over GEMMs of one shape, ``ROWS`` rows each, the last of them padded with zeros: a row is multiplied alike in any batch,
at any place of it. Attention adds up its keys in blocks of ``KEYS``, counted from the first key that a query sees: a
token's result is the same in a longer batch, behind padding, in packed sequences, in prefill and in decoding. Blocks
that a query does not see add zeros, which changes no number.

The idea of kernels of one configuration is that of "Defeating Nondeterminism in LLM Inference" (Thinking Machines,
2025); that of blocks that are counted from the first key is FlashAttention's for sequences of different lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fp8graph.numerics import matmul
from fp8graph.numerics.experts import spans

ROWS: Final = 32  # of a GEMM
KEYS: Final = 64  # of a block of attention


def in_blocks(multiply: Callable[[Tensor], Tensor], a: Tensor) -> Tensor:
    """``multiply`` the rows of ``a`` [m, k]: [m, n], from GEMMs of ``ROWS`` rows."""
    rows = a.shape[0]
    padded = torch.nn.functional.pad(a, [0, 0, 0, -rows % ROWS] if rows else [0, 0, 0, ROWS]).contiguous()
    return torch.cat([multiply(block) for block in padded.split(ROWS)])[:rows]


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T``: a [m, k], b [n, k]."""
    return in_blocks(lambda rows: rows @ b.t(), a)


def mm(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """``a @ b + bias``: a [m, k], b [k, n], bias [n] or [1 or m, n]."""
    if bias is not None and bias.ndim == 2 and bias.shape[0] != 1:
        return mm(a, b, None) + bias
    return in_blocks(lambda rows: rows @ b if bias is None else torch.addmm(bias, rows, b), a)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    _use_fast_accum: bool,
    *,
    scaling: str = "tensor",
    block_a: Sequence[int] = (),
    block_b: Sequence[int] = (),
    global_scale_inv_a: Tensor | None = None,
    global_scale_inv_b: Tensor | None = None,
    addend: Tensor | None = None,
    order_a: str = "",
    order_b: str = "",
) -> Tensor:
    """``hardware.scaled_mm`` of operands decoded to FP32, in blocks of rows."""
    blocks, scalars = (block_a, block_b), (global_scale_inv_a, global_scale_inv_b)
    orders = order_a, order_b
    scales = scale_inv_a, scale_inv_b
    result = matmul.scaled_mm(a, b, *scales, bias, out_dtype, scaling, blocks, scalars, orders, product)
    return result if addend is None else addend + result


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """``experts.grouped_mm`` of a [t, k] and b [experts, k, n], each group in blocks of rows."""
    out = a.new_zeros((a.shape[0], b.shape[2]))
    for span in spans(offs):
        out[span.rows] = in_blocks(lambda rows, matrix=b[span.group]: rows @ matrix, a[span.rows])
    return out


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    _use_fast_accum: bool,
    _native: bool,
    *,
    scaling: str = "tensor",
    block_a: Sequence[int] = (),
    block_b: Sequence[int] = (),
    global_scale_inv_a: Tensor | None = None,
    global_scale_inv_b: Tensor | None = None,
    multiple: int = 1,
    order_a: str = "",
    order_b: str = "",
) -> Tensor:
    """:func:`scaled_mm` of a [t, k] and b [experts, n, k] for each group."""
    blocks, scalars = (block_a, block_b), (global_scale_inv_a, global_scale_inv_b)
    orders = order_a, order_b
    scales = scale_inv_a, scale_inv_b
    return matmul.scaled_grouped_mm(a, b, *scales, offs, out_dtype, scaling, blocks, scalars, multiple, orders, product)


class _Block(NamedTuple):
    """``ROWS`` queries of one sequence that see their first key at one place, or fewer at the end of the sequence."""

    sequence: int  # in the batch
    queries: slice
    keys: tuple[slice, ...]  # blocks of ``KEYS``, from the first key to the last one that some of these queries see


class _Attention:
    """The operands of one attention in FP32, with as many heads each, and the blocks in which they are multiplied."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
    ) -> None:
        self.q = q.to(torch.float32)
        self.k, self.v = (x.to(torch.float32).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        self.factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        shape = q.shape[2], k.shape[2]
        if mask is None:
            mask = q.new_zeros((1, 1, 1, 1), dtype=torch.float32)
        elif mask.dtype == torch.bool:
            mask = q.new_zeros(mask.shape, dtype=torch.float32).masked_fill(~mask, -math.inf)
        hidden = mask <= torch.finfo(mask.dtype).min
        mask = mask.to(torch.float32).masked_fill(hidden, -math.inf)
        if is_causal:
            above = torch.ones(shape, dtype=torch.bool, device=q.device).triu(1)
            mask = mask.masked_fill(above, -math.inf)
        self.mask = mask.reshape([1] * (4 - mask.ndim) + [*mask.shape]).expand(-1, -1, *shape)  # added to the scores

    def blocks(self) -> Iterator[_Block]:
        """Every block, sequence after sequence, in the order of the queries. None has a query that sees nothing."""
        visible = (self.mask > -math.inf).any(1)  # [batch or 1, queries, keys]
        firsts = visible.to(torch.int8).argmax(-1)
        ends = torch.where(visible.any(-1), visible.shape[-1] - visible.flip(-1).to(torch.int8).argmax(-1), 0)
        table = list(zip(firsts.tolist(), ends.tolist(), strict=True))
        for sequence in range(self.q.shape[0]):
            first, end = table[min(sequence, len(table) - 1)]
            key = [(one, last > 0) for one, last in zip(first, end, strict=True)]
            changes = [i for i in range(len(key)) if i == 0 or key[i] != key[i - 1]]
            for start, stop in pairwise([*changes, len(key)]):
                for i in range(start, stop if end[start] else start, ROWS):
                    queries = slice(i, min(i + ROWS, stop))
                    keys = (slice(at, at + KEYS) for at in range(first[start], max(end[queries]), KEYS))
                    yield _Block(sequence, queries, tuple(keys))

    def scores(self, block: _Block, keys: slice) -> Tensor:
        """[heads, ROWS, KEYS], -inf where a key is not seen."""
        mask = self.mask[min(block.sequence, self.mask.shape[0] - 1), :, block.queries, keys]
        padding = [0, KEYS - mask.shape[-1], 0, ROWS - mask.shape[-2]]
        scores = _rows(self.q, block) @ _keys(self.k, block, keys).transpose(-2, -1) * self.factor
        return scores + torch.nn.functional.pad(mask, padding, value=-math.inf)


def _rows(x: Tensor, block: _Block) -> Tensor:
    """The rows of x [batch, heads, queries, size] in a block: [heads, ROWS, size], padded with zeros."""
    rows = x[block.sequence, :, block.queries]
    return torch.nn.functional.pad(rows, [0, 0, 0, ROWS - rows.shape[1]]).contiguous()


def _keys(x: Tensor, block: _Block, keys: slice) -> Tensor:
    """Those of x [batch, heads, keys, size] in a block of keys: [heads, KEYS, size], padded with zeros."""
    rows = x[block.sequence, :, keys]
    return torch.nn.functional.pad(rows, [0, 0, 0, KEYS - rows.shape[1]]).contiguous()


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """``softmax(scale * q @ k.T + mask) @ v`` in FP32, rounded once to the dtype of ``q``, and its logsumexp in FP32.

    Args:
        q: [batch, heads, queries, size]. k, v: [batch, kv_heads, keys, size]; heads of q that share one of k and v
            follow each other.
        mask: added to the scores, or True where a key is seen; broadcast to [batch, heads, queries, keys]. A query that
            sees no key is 0.
        is_causal: a query sees the keys up to its own position.
        scale: None: ``1 / sqrt(size)``.

    Returns:
        [batch, heads, queries, size of v], with the strides of [batch, queries, heads, size]; and FP32 [batch, heads,
        queries], -inf for a query that sees no key.
    """
    batch, heads, queries, _ = q.shape
    attention = _Attention(q, k, v, mask, is_causal, scale)
    out = q.new_zeros((batch, queries, heads, v.shape[3])).transpose(1, 2)
    logsumexp = q.new_full((batch, heads, queries), -math.inf, dtype=torch.float32)
    for block in attention.blocks():
        largest = q.new_full((heads, ROWS, 1), -math.inf, dtype=torch.float32)
        total, sums = torch.zeros_like(largest), largest.new_zeros((heads, ROWS, v.shape[3]))
        for keys in block.keys:
            scores = attention.scores(block, keys)
            top = torch.maximum(largest, scores.amax(-1, keepdim=True))
            shift = top.masked_fill(top == -math.inf, 0.0)  # rows that pad
            weights, kept = (scores - shift).exp(), (largest - shift).exp()
            sums = sums * kept + weights @ _keys(attention.v, block, keys)
            total, largest = total * kept + weights.sum(-1, keepdim=True), top
        rows = block.queries.stop - block.queries.start
        out[block.sequence, :, block.queries] = (sums / total)[:, :rows].to(q.dtype)
        logsumexp[block.sequence, :, block.queries] = (largest + total.log())[:, :rows, 0]
    return out, logsumexp


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> list[Tensor]:
    """The gradients of q, k and v of :func:`attend`, summed in FP32 in the same blocks, in their dtypes.

    With P the probabilities: ``dv = P.T @ grad``; ``dS = P * (grad @ v.T - sum(grad * out))``; ``dq = scale * dS @ k``;
    ``dk = scale * dS.T @ q``, as FlashAttention computes them.
    """
    attention = _Attention(q, k, v, mask, is_causal, scale)
    grad, out = grad.to(torch.float32), out.to(torch.float32)
    dq, dk, dv = torch.zeros_like(attention.q), torch.zeros_like(attention.k), torch.zeros_like(attention.v)
    lse, size = logsumexp.unsqueeze(-1), k.shape[2]
    for block in attention.blocks():
        rows = block.queries.stop - block.queries.start
        of_result = _rows(grad, block)
        own = (of_result * _rows(out, block)).sum(-1, keepdim=True)
        sums = torch.zeros_like(_rows(attention.q, block))
        for keys in block.keys:
            weights = (attention.scores(block, keys) - _rows(lse, block)).exp()  # 0 where nothing is seen
            of_scores = weights * (of_result @ _keys(attention.v, block, keys).transpose(-2, -1) - own)
            of_scores = of_scores * attention.factor
            sums = sums + of_scores @ _keys(attention.k, block, keys)
            seen = slice(0, min(keys.stop, size) - keys.start)
            dk[block.sequence, :, keys] += (of_scores.transpose(-2, -1) @ _rows(attention.q, block))[:, seen]
            dv[block.sequence, :, keys] += (weights.transpose(-2, -1) @ of_result)[:, seen]
        dq[block.sequence, :, block.queries] = sums[:, :rows]
    groups = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    return [x.to(like.dtype).contiguous() for x, like in zip((dq, *groups), (q, k, v), strict=True)]
