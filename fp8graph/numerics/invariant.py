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
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fp8graph.numerics import matmul
from fp8graph.numerics.experts import spans
from fp8graph.numerics.scalings import SCALINGS

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
    if (kernels := kernels_for(a)) is not None:
        return kernels.multiply(a, b.t(), None if bias is None else bias.reshape(-1), a.dtype)
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
    addend: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """``hardware.scaled_mm``: of operands decoded to FP32, in blocks of rows; on a GPU of FP8, as they are."""
    operands = a, b, scale_inv_a, scale_inv_b
    if (kernels := kernels_for(a)) is not None:
        result = kernels.multiply(a, b, bias, out_dtype, **_scales_of(*operands, **settings))
    else:
        result = matmul.scaled_mm(*operands, bias, out_dtype, product=product, **settings)
    return result if addend is None else addend + result


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """``experts.grouped_mm`` of a [t, k] and b [experts, k, n], each group in blocks of rows."""
    if (kernels := kernels_for(a)) is not None:
        return kernels.multiply(a, b.transpose(1, 2), None, a.dtype, ends=offs)
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
    **settings: Any,
) -> Tensor:
    """:func:`scaled_mm` of a [t, k] and b [experts, n, k] for each group."""
    operands = a, b, scale_inv_a, scale_inv_b
    if (kernels := kernels_for(a)) is not None:
        return kernels.multiply(a, b, None, out_dtype, ends=offs, **_scales_of(*operands, **settings))
    return matmul.scaled_grouped_mm(*operands, offs, out_dtype, product=product, **settings)


def kernels_for(x: Tensor) -> Any:
    """Return the module of Triton kernels, ``row_kernels``, on a GPU; None on a CPU."""
    if x.device.type == "cpu":
        return None
    from fp8graph.numerics import row_kernels  # needs triton

    return row_kernels


def _scales_of(
    a: Tensor,
    b: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    *,
    scaling: str,
    block_a: Sequence[int] = (),
    block_b: Sequence[int] = (),
    order_a: str = "",
    order_b: str = "",
    **_others: Any,
) -> dict[str, Any]:
    """Return the scales as ``row_kernels.multiply`` takes them."""
    kind = SCALINGS[scaling]
    scales: list[Tensor] = []
    for data, scale_inv, order, block in ((a, scale_inv_a, order_a, block_a), (b, scale_inv_b, order_b, block_b)):
        values = kind.scale_values(kind.in_rows(data, scale_inv, order, block) if order else scale_inv)
        scales.append(values if kind.tiled else values.reshape(*data.shape[:-1], 1))
    return {"scales": scales, "tiles": (block_a, block_b) if kind.tiled else None}


def add_up(x: Tensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None, mean: bool) -> Tensor:
    """``x.sum(dims, keepdim)`` in FP32, or the mean, rounded once to ``dtype``, or that of x."""
    last = sorted({dim % x.ndim for dim in dims})
    if (kernels := kernels_for(x)) is None:
        result = x.sum(last, keepdim=keepdim, dtype=torch.float32)
    else:
        first = [dim for dim in range(x.ndim) if dim not in last]
        rows = x.permute([*first, *last]).reshape(math.prod(x.shape[dim] for dim in first), -1)
        sizes = [1 if dim in last else size for dim, size in enumerate(x.shape)]
        result = kernels.add_up(rows).reshape(sizes if keepdim else [sizes[dim] for dim in first])
    if mean:
        result = result / math.prod(x.shape[dim] for dim in last)
    return result.to(dtype or x.dtype)


def spread(x: Tensor, dims: Sequence[int], correction: float, keepdim: bool) -> tuple[Tensor, Tensor]:
    """``torch.var_mean(x, dims, correction=, keepdim=)``, of two sums in FP32."""
    last = sorted({dim % x.ndim for dim in dims})
    mean = add_up(x, last, True, torch.float32, True)
    squares = add_up((x.to(torch.float32) - mean).square(), last, True, None, False)
    variance = squares / max(math.prod(x.shape[dim] for dim in last) - correction, 0.0)
    if not keepdim:
        variance, mean = variance.squeeze(last), mean.squeeze(last)
    return variance.to(x.dtype), mean.to(x.dtype)


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
        mask = q.new_zeros((1, 1, 1, 1), dtype=torch.float32) if mask is None else _added(mask)
        if is_causal:
            mask = mask.masked_fill(~_causal(q, k), -math.inf)
        self.mask = mask.expand(-1, -1, *shape)  # added to the scores

    def blocks(self) -> Iterator[_Block]:
        """Yield every block, sequence after sequence, in the order of the queries. None has a query that
        sees nothing.
        """
        firsts, ends = _windows((self.mask > -math.inf).any(1))
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


def _added(mask: Tensor) -> Tensor:
    """Return a mask as FP32 that is added to the scores, of four dims: -inf where it hides a key."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -math.inf)
    hidden = mask <= torch.finfo(mask.dtype).min
    return mask.to(torch.float32).masked_fill(hidden, -math.inf).reshape([1] * (4 - mask.ndim) + [*mask.shape])


def _causal(q: Tensor, k: Tensor) -> Tensor:
    """Return whether each query sees each key: [queries, keys]."""
    return torch.ones((q.shape[2], k.shape[2]), dtype=torch.bool, device=q.device).tril()


def _windows(visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first key that each query sees, and the end of those that it sees, 0 for none: [batch, queries].

    ``visible``: [batch, queries, keys].
    """
    firsts = visible.to(torch.int8).argmax(-1)
    ends = visible.shape[-1] - visible.flip(-1).to(torch.int8).argmax(-1)
    return firsts, torch.where(visible.any(-1), ends, 0)


def _ends_of_runs(firsts: Tensor, ends: Tensor) -> Tensor:
    """Where the run of queries ends that see their first key at one place, for each query: [batch, queries]."""
    seen, count = ends > 0, firsts.shape[1]
    begins = (firsts[:, 1:] != firsts[:, :-1]) | (seen[:, 1:] != seen[:, :-1])
    next_one = torch.where(begins, torch.arange(1, count, device=firsts.device), count)
    next_one = torch.nn.functional.pad(next_one, (0, 1), value=count)
    return next_one.flip(1).cummin(1).values.flip(1)


def _on_gpu(
    kernels: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Any:
    """Return the same operands for the Triton kernels."""
    queries, keys = q.shape[2], k.shape[2]
    if mask is not None:
        mask = _added(mask)
        visible = (mask > -math.inf).any(1).expand(-1, queries, keys)
        windows = _windows(visible & _causal(q, k) if is_causal else visible)
        mask = mask.expand(-1, -1, queries, keys)
    else:
        ends = torch.arange(1, queries + 1, device=q.device).clamp_max(keys)
        ends = (ends if is_causal else ends.fill_(keys)).unsqueeze(0)
        windows = torch.zeros_like(ends), ends
    of_queries = [x.to(torch.int32).contiguous() for x in (*windows, _ends_of_runs(*windows))]
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return kernels.Attention(q, k, v, mask, is_causal, factor, of_queries)


def _rows(x: Tensor, block: _Block) -> Tensor:
    """Return the rows of x [batch, heads, queries, size] in a block: [heads, ROWS, size], padded with zeros."""
    rows = x[block.sequence, :, block.queries]
    return torch.nn.functional.pad(rows, [0, 0, 0, ROWS - rows.shape[1]]).contiguous()


def _keys(x: Tensor, block: _Block, keys: slice) -> Tensor:
    """Return those of x [batch, heads, keys, size] in a block of keys: [heads, KEYS, size], padded with zeros."""
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
    out = q.new_zeros((batch, queries, heads, v.shape[3])).transpose(1, 2)
    logsumexp = q.new_full((batch, heads, queries), -math.inf, dtype=torch.float32)
    if (kernels := kernels_for(q)) is not None:
        _on_gpu(kernels, q, k, v, mask, is_causal, scale).forward(out, logsumexp)
        return out, logsumexp
    attention = _Attention(q, k, v, mask, is_causal, scale)
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
    """Return the gradients of q, k and v of :func:`attend`, summed in FP32 in the same blocks, in their dtypes.

    They have the strides of [batch, tokens, heads, size], as torch's.

    With P the probabilities: ``dv = P.T @ grad``; ``dS = P * (grad @ v.T - sum(grad * out))``; ``dq = scale * dS @ k``;
    ``dk = scale * dS.T @ q``, as FlashAttention computes them.
    """
    if (kernels := kernels_for(q)) is not None:
        return _on_gpu(kernels, q, k, v, mask, is_causal, scale).backward(grad, out, logsumexp)
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
    grads = (x.to(like.dtype) for x, like in zip((dq, *groups), (q, k, v), strict=True))
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in grads]
