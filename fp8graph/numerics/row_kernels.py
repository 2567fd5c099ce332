"""Triton kernels of one configuration, whose result for a row does not depend on the rows beside it.

``invariant`` runs them on GPUs, whose libraries choose a kernel, and with it the order of the sums, by the number of
rows. Here tiles have one size for all shapes, one program walks k from its beginning, and nothing is tuned, split or
added by atomics: which rows share a tile with a row changes none of its bits. Needs triton.

cuBLASLt's heuristics, and with them ``torch._scaled_mm`` and ``torch.mm``, take another kernel, or split k, by m.
vLLM's batch-invariant mode has a persistent Triton GEMM for bf16, CUTLASS of one tile for FP8 (vllm-project/vllm#40408)
and DeepGEMM without its form for few rows, which swaps a and b (#37718): there sums of FP8 are promoted to FP32 each
128 elements, as here. Its GEMM took 6.5 times as long as cuBLAS for one row on an A100 (#49131), and multiplied FP32 in
TF32 (#55131): hence "ieee" here. The page on reinforcement learning says what ours cost in launches.
"""

# Triton gives types to the parameters.
# pyright: reportMissingParameterType=false, reportAssignmentType=false, reportMissingImports=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS: Final = 64  # of a tile of results
COLUMNS: Final = 128
BYTES: Final = 128  # of each row that a step along k reads: 128 numbers in FP8, 64 in bf16, 32 in FP32
KEYS: Final = 64  # of a block of attention, and its rows
ELEMENTS: Final = 1024  # of a step of a sum
_EXACT: Final = {"enable_fp_fusion": False}  # a product is rounded before it is added, in all code of a kernel
GEMM: Final = {"height": ROWS, "width": COLUMNS, "num_warps": 4, "num_stages": 3, **_EXACT}
SUM: Final = {"step": ELEMENTS, "num_warps": 4, **_EXACT}


# Numbers that change with the batch get no code of their own.
@triton.jit(do_not_specialize=["rows", "groups"])
def _multiply(
    a, b, bias, out, scales_a, scales_b, ends,  # a [rows, depth], b [groups, columns, depth]; those not read are a
    rows, columns, depth, groups,
    row_a, depth_a, group_b, column_b, depth_b,  # strides
    row_scale_a, tile_scale_a, group_scale_b, column_scale_b, tile_scale_b,
    grouped: tl.constexpr, biased: tl.constexpr,
    scales: tl.constexpr,  # "": none; "row": one of each row; "tile": one of ``step`` elements
    lines_a: tl.constexpr, lines_b: tl.constexpr,  # rows that share a scale
    height: tl.constexpr, width: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    tile, group, first, end = tl.program_id(1), 0, 0, rows
    first = tile * height
    if grouped:  # each group begins with a tile of its own
        first, end, start, before = rows, 0, 0, 0
        for candidate in range(groups):
            stop = tl.load(ends + candidate)
            tiles = tl.cdiv(stop - start, height)
            here = (tile >= before) & (tile < before + tiles)
            first = tl.where(here, start + (tile - before) * height, first)
            end, group = tl.where(here, stop, end), tl.where(here, candidate, group)
            start, before = stop, before + tiles
    row, column = first + tl.arange(0, height), tl.program_id(0) * width + tl.arange(0, width)
    k = tl.arange(0, step)
    in_rows, in_columns = row < end, column < columns
    of_a = a + row[:, None].to(tl.int64) * row_a + k[None, :] * depth_a
    of_b = b + group.to(tl.int64) * group_b if grouped else b
    of_b = of_b + column[None, :].to(tl.int64) * column_b + k[:, None] * depth_b
    scale_a = scales_a + (row // lines_a).to(tl.int64) * row_scale_a
    scale_b = scales_b + group.to(tl.int64) * group_scale_b if grouped else scales_b
    scale_b = scale_b + (column // lines_b).to(tl.int64) * column_scale_b
    sums = tl.zeros((height, width), tl.float32)
    for at in range(tl.cdiv(depth, step)):
        in_depth = at * step + k < depth
        x = tl.load(of_a, mask=in_rows[:, None] & in_depth[None, :], other=0.0)
        y = tl.load(of_b, mask=in_depth[:, None] & in_columns[None, :], other=0.0)
        # a step is added up in the tensor cores, whose sums of FP8 products are short on sm_90, and the steps in FP32
        part = tl.dot(x, y, input_precision="ieee")
        if scales == "tile":
            part = part * tl.load(scale_a + at * tile_scale_a, mask=in_rows, other=0.0)[:, None]
            part = part * tl.load(scale_b + at * tile_scale_b, mask=in_columns, other=0.0)[None, :]
        sums += part
        of_a += step * depth_a
        of_b += step * depth_b
    if scales == "row":
        sums = sums * tl.load(scale_a, mask=in_rows, other=0.0)[:, None]
        sums = sums * tl.load(scale_b, mask=in_columns, other=0.0)[None, :]
    if biased:
        sums = sums + tl.load(bias + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    places = out + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(places, sums.to(out.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


def multiply(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    tiles: tuple[tuple[int, int], tuple[int, int]] | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """``(a * scales) @ (b * scales).T + bias``, of FP32 sums that are rounded once.

    Args:
        a: [m, k].  b: [n, k], or with ``ends`` [groups, n, k].
        bias: [n], or None.
        scales: FP32: of each row, [m, 1] and [n, 1], or of ``tiles``, [m / rows, k / columns] and the same of b.
        tiles: (rows, columns) of a and of b, with the same columns.
        ends: int32 [groups]: where each group of rows ends. Rows of no group are zero.

    Returns:
        [m, n].
    """
    (rows, depth), columns = a.shape, b.shape[-2]
    groups = 1 if ends is None else ends.shape[0]
    out = (a.new_empty if ends is None else a.new_zeros)((rows, columns), dtype=out_dtype)
    if not out.numel():
        return out
    of_a, of_b = (a, b) if scales is None else scales
    kernel: Any = _multiply
    with _on(a):
        kernel[triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS) + (0 if ends is None else groups)](
            *(a, b, a if bias is None else bias, out, of_a, of_b, a if ends is None else ends),
            *(rows, columns, depth, groups),
            *(*a.stride(), *_strides(b), *of_a.stride(), *_strides(of_b)),
            grouped=ends is not None, biased=bias is not None,
            scales="" if scales is None else "tile" if tiles else "row",
            lines_a=tiles[0][0] if tiles else 1, lines_b=tiles[1][0] if tiles else 1,
            step=tiles[0][1] if tiles else BYTES // a.element_size(), **GEMM,
        )  # fmt: skip
    return out


def _strides(x: Tensor) -> tuple[int, ...]:
    """Strides of [groups, rows, columns], of which there may be one group."""
    return (*([0] if x.ndim == 2 else []), *x.stride())


def _on(x: Tensor) -> Any:
    """Let triton launch on the device of x."""
    return contextlib.nullcontext() if x.device.type == "cpu" else torch.accelerator.device_index(x.get_device())


@triton.jit
def _sum(x, out, row_stride, size, step: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((step,), tl.float32)
    for at in range(0, size, step):
        place = at + tl.arange(0, step)
        sums += tl.load(x + row * row_stride + place, mask=place < size, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(sums, 0).to(out.dtype.element_ty))


def add_up(x: Tensor) -> Tensor:
    """Return the sum of each row of x [rows, size] in FP32: [rows]."""
    out = x.new_empty((x.shape[0],), dtype=torch.float32)
    x = x if x.stride(1) == 1 else x.contiguous()
    kernel: Any = _sum
    if out.numel():
        with _on(x):
            kernel[(out.shape[0],)](x, out, x.stride(0), x.shape[1], **SUM)
    return out


_BYTES_OF_HEAD: Final = 256  # for which blocks of ``KEYS`` fit into 100 KiB of shared memory
_OF_BATCHES: Final = ["queries", "keys", "row_mask", "head_mask", "batch_mask", "batch_first"]


@triton.jit
def _scores(
    x, y, mask, row, key, visible, row_mask, key_mask: tl.constexpr, scale, causal: tl.constexpr, masked: tl.constexpr
):
    """Return [rows, keys], -inf where a key is not seen, of x [rows, size] and y [size, keys]."""
    scores = tl.dot(x, y, input_precision="ieee") * scale
    if causal:
        visible = visible & (key[None, :] <= row[:, None])
    if masked:
        places = mask + row[:, None].to(tl.int64) * row_mask + key[None, :] * key_mask
        scores += tl.load(places, mask=visible, other=float("-inf"))
    return tl.where(visible, scores, float("-inf"))


@triton.jit(do_not_specialize=_OF_BATCHES)
def _attend(
    q, k, v, mask, out, logsumexp, firsts, ends,
    grad, dq,  # of backward; else q. ``out`` and ``logsumexp`` are inputs there
    queries, keys, heads, group, size, size_v, scale,
    batch_q, head_q, row_q, batch_k, head_k, row_k, batch_v, head_v, row_v,  # strides
    batch_out, head_out, row_out, batch_grad, head_grad, row_grad,
    batch_mask, head_mask, row_mask, batch_first,
    key_mask: tl.constexpr, causal: tl.constexpr, masked: tl.constexpr, backward: tl.constexpr,
    width: tl.constexpr, width_v: tl.constexpr, height: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    sequence, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    row = tl.program_id(1) * height + tl.arange(0, height)
    i, j = tl.arange(0, width), tl.arange(0, width_v)
    in_rows = row < queries
    end = tl.load(ends + sequence * batch_first + row, mask=in_rows, other=0)
    first = tl.load(firsts + sequence * batch_first + row, mask=in_rows, other=0)
    first = tl.where(end > 0, first, keys)  # rows that see nothing
    long_row = row[:, None].to(tl.int64)
    x_mask, out_mask = in_rows[:, None] & (i < size)[None, :], in_rows[:, None] & (j < size_v)[None, :]
    x = tl.load(q + sequence * batch_q + head * head_q + long_row * row_q + i[None, :], mask=x_mask, other=0.0)
    of_result = out + sequence * batch_out + head * head_out + long_row * row_out + j[None, :]
    of_lse = logsumexp + tl.program_id(0).to(tl.int64) * queries + row
    k += sequence * batch_k + (head // group) * head_k
    v += sequence * batch_v + (head // group) * head_v
    mask += sequence * batch_mask + head * head_mask
    largest = tl.full((height,), float("-inf"), tl.float32)
    total = tl.zeros((height,), tl.float32)
    g, own, lse = x, total, total
    if backward:
        sums = tl.zeros((height, width), tl.float32)
        places = grad + sequence * batch_grad + head * head_grad + long_row * row_grad + j[None, :]
        g = tl.load(places, mask=out_mask, other=0.0)
        own = tl.sum(g.to(tl.float32) * tl.load(of_result, mask=out_mask, other=0.0).to(tl.float32), 1)
        lse = tl.load(of_lse, mask=in_rows, other=0.0)
    else:
        sums = tl.zeros((height, width_v), tl.float32)
    start = tl.min(first, 0)
    while start < keys:  # the rows that see their first key at one place, and then those of the next one
        mine = first == start
        for at in range(start, tl.max(tl.where(mine, end, 0), 0), block):
            key = at + tl.arange(0, block)
            in_keys, long_key = key < keys, key.to(tl.int64)
            k_mask = in_keys[:, None] & (i < size)[None, :]
            y = tl.load(k + long_key[:, None] * row_k + i[None, :], mask=k_mask, other=0.0)
            v_mask = in_keys[:, None] & (j < size_v)[None, :]
            z = tl.load(v + long_key[:, None] * row_v + j[None, :], mask=v_mask, other=0.0)
            visible = (mine & in_rows)[:, None] & in_keys[None, :]
            scores = _scores(x, tl.trans(y), mask, row, key, visible, row_mask, key_mask, scale, causal, masked)
            if backward:
                weights = tl.where(scores > float("-inf"), tl.exp(scores - lse[:, None]), 0.0)
                of_scores = weights * (tl.dot(g, tl.trans(z), input_precision="ieee") - own[:, None]) * scale
                sums += tl.dot(of_scores.to(y.dtype), y, input_precision="ieee")
            else:
                top = tl.maximum(largest, tl.max(scores, 1))
                shift = tl.where(top == float("-inf"), 0.0, top)
                weights, kept = tl.exp(scores - shift[:, None]), tl.exp(largest - shift)
                sums = sums * kept[:, None] + tl.dot(weights.to(z.dtype), z, input_precision="ieee")
                total, largest = total * kept + tl.sum(weights, 1), top
        start = tl.min(tl.where(first > start, first, keys), 0)
    if backward:
        places = dq + (sequence * queries + long_row) * heads * size + head * size + i[None, :]
        tl.store(places, sums.to(dq.dtype.element_ty), mask=x_mask)
    else:
        some = total > 0.0
        result = tl.where(some[:, None], sums / tl.where(some, total, 1.0)[:, None], 0.0)
        tl.store(of_result, result.to(out.dtype.element_ty), mask=out_mask)
        tl.store(of_lse, tl.where(some, largest + tl.log(tl.where(some, total, 1.0)), float("-inf")), mask=in_rows)


@triton.jit(do_not_specialize=_OF_BATCHES)
def _attend_to_keys(
    q, k, v, mask, out, logsumexp, firsts, stops, grad, dk, dv,
    queries, keys, key_heads, group, size, size_v, scale,
    batch_q, head_q, row_q, batch_k, head_k, row_k, batch_v, head_v, row_v,  # strides
    batch_out, head_out, row_out, batch_grad, head_grad, row_grad,
    batch_mask, head_mask, row_mask, batch_first,
    key_mask: tl.constexpr, causal: tl.constexpr, masked: tl.constexpr,
    width: tl.constexpr, width_v: tl.constexpr, height: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    sequence, own_head = (tl.program_id(0) // key_heads).to(tl.int64), (tl.program_id(0) % key_heads).to(tl.int64)
    key = tl.program_id(1) * block + tl.arange(0, block)
    i, j = tl.arange(0, width), tl.arange(0, width_v)
    in_keys, long_key = key < keys, key.to(tl.int64)
    k_mask, v_mask = in_keys[:, None] & (i < size)[None, :], in_keys[:, None] & (j < size_v)[None, :]
    y = tl.load(
        k + sequence * batch_k + own_head * head_k + long_key[:, None] * row_k + i[None, :], mask=k_mask, other=0.0
    )
    z = tl.load(
        v + sequence * batch_v + own_head * head_v + long_key[:, None] * row_v + j[None, :], mask=v_mask, other=0.0
    )
    of_keys, of_values = tl.zeros((block, width), tl.float32), tl.zeros((block, width_v), tl.float32)
    for member in range(group):
        head = own_head * group + member
        one_k, one_v = tl.zeros((block, width), tl.float32), tl.zeros((block, width_v), tl.float32)
        at_mask = mask + sequence * batch_mask + head * head_mask
        at = tl.zeros((), tl.int32)
        while at < queries:  # blocks of queries that see their first key at one place, from the first of them
            stop = tl.load(stops + sequence * batch_first + at)
            first = tl.load(firsts + sequence * batch_first + at)
            for start in range(at, stop, height):
                row = start + tl.arange(0, height)
                in_rows, long_row = row < stop, row[:, None].to(tl.int64)
                x_mask, g_mask = in_rows[:, None] & (i < size)[None, :], in_rows[:, None] & (j < size_v)[None, :]
                x = tl.load(
                    q + sequence * batch_q + head * head_q + long_row * row_q + i[None, :], mask=x_mask, other=0.0
                )
                places = grad + sequence * batch_grad + head * head_grad + long_row * row_grad + j[None, :]
                g = tl.load(places, mask=g_mask, other=0.0)
                places = out + sequence * batch_out + head * head_out + long_row * row_out + j[None, :]
                own = tl.sum(g.to(tl.float32) * tl.load(places, mask=g_mask, other=0.0).to(tl.float32), 1)
                of_lse = logsumexp + (sequence * key_heads * group + head) * queries + row
                lse = tl.load(of_lse, mask=in_rows, other=0.0)
                visible = in_rows[:, None] & (in_keys & (key >= first))[None, :]
                scores = _scores(x, tl.trans(y), at_mask, row, key, visible, row_mask, key_mask, scale, causal, masked)
                weights = tl.where(scores > float("-inf"), tl.exp(scores - lse[:, None]), 0.0)
                of_scores = weights * (tl.dot(g, tl.trans(z), input_precision="ieee") - own[:, None]) * scale
                one_k += tl.dot(tl.trans(of_scores.to(x.dtype)), x, input_precision="ieee")
                one_v += tl.dot(tl.trans(weights.to(g.dtype)), g, input_precision="ieee")
            at = stop
        of_keys += one_k
        of_values += one_v
    rows = (sequence * keys + long_key[:, None]) * key_heads + own_head  # of [batch, keys, heads, size]
    tl.store(dk + rows * size + i[None, :], of_keys.to(dk.dtype.element_ty), mask=k_mask)
    tl.store(dv + rows * size_v + j[None, :], of_values.to(dv.dtype.element_ty), mask=v_mask)


def of_heads(size: int, size_v: int, element_size: int) -> dict[str, Any]:
    """Return the configuration for heads of these sizes: one for all batches, which fits the memory of each card."""
    block = KEYS if max(size, size_v) * element_size <= _BYTES_OF_HEAD else KEYS // 2
    widths = (max(16, triton.next_power_of_2(x)) for x in (size, size_v))
    blocks = dict(zip(("width", "width_v", "height", "block"), (*widths, block, block), strict=True))
    return {**blocks, "num_warps": 8, "num_stages": 1, **_EXACT}


class Attention:
    """The operands of one attention, and what all its kernels are given."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
        windows: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Take q, k, v, strided along their heads' sizes by 1; ``mask`` FP32 [batch or 1, heads or 1, queries, keys].

        ``windows``: int32 [batch or 1, queries]: the first key that each query sees, the end of those that it sees
        (0: none), and where the run of queries ends that it belongs to.
        """
        self.q, self.k, self.v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        self.mask, self.windows = mask, windows
        self.sizes = q.shape[2], k.shape[2], q.shape[1] // k.shape[1], q.shape[3], v.shape[3], scale
        self.settings = {
            **of_heads(q.shape[3], v.shape[3], q.element_size()),
            **{"causal": is_causal, "masked": mask is not None, "key_mask": 0 if mask is None else mask.stride(3)},
        }

    def strides(self, out: Tensor, grad: Tensor) -> tuple[int, ...]:
        """Return those of both results and operands, along batch, heads and tokens: 0 along what is broadcast."""
        given = self.q, self.k, self.v, out, grad, *([] if self.mask is None else [self.mask])
        steps = [0 if size == 1 else step for x in given for size, step in zip(x.shape[:3], x.stride(), strict=False)]
        firsts = self.windows[0]
        return *steps, *([0, 0, 0] if self.mask is None else []), firsts.stride(0) if firsts.shape[0] > 1 else 0

    def forward(self, out: Tensor, logsumexp: Tensor) -> None:
        """Write the result, [batch, heads, queries, size of v], and FP32 [batch, heads, queries]."""
        batch, heads, queries, _ = self.q.shape
        mask = self.q if self.mask is None else self.mask
        queries, keys, group, *sizes = self.sizes
        kernel: Any = _attend
        with _on(self.q):
            kernel[batch * heads, triton.cdiv(queries, self.settings["block"])](
                *(self.q, self.k, self.v, mask, out, logsumexp, self.windows[0], self.windows[1], self.q, self.q),
                *(queries, keys, heads, group, *sizes, *self.strides(out, out)),
                backward=False, **self.settings,
            )  # fmt: skip

    def backward(self, grad: Tensor, out: Tensor, logsumexp: Tensor) -> list[Tensor]:
        """Return the gradients of q, k and v."""
        batch, heads, queries, _ = self.q.shape
        key_heads = self.k.shape[1]
        grad, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad, out))
        like = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        dq, dk, dv = (x.new_empty(x.shape).transpose(1, 2) for x in like)  # [batch, heads, tokens, size]
        mask = self.q if self.mask is None else self.mask
        queries, keys, group, *sizes = self.sizes
        firsts, ends, stops = self.windows
        strides = self.strides(out, grad)
        inputs = self.q, self.k, self.v, mask, out, logsumexp.contiguous()
        kernel: Any = _attend
        with _on(self.q):
            kernel[batch * heads, triton.cdiv(queries, self.settings["block"])](
                *(*inputs, firsts, ends, grad, dq), *(queries, keys, heads, group, *sizes, *strides),
                backward=True, **self.settings,
            )  # fmt: skip
        kernel = _attend_to_keys
        with _on(self.q):
            kernel[batch * key_heads, triton.cdiv(keys, self.settings["block"])](
                *(*inputs, firsts, stops, grad, dk, dv), *(queries, keys, key_heads, group, *sizes, *strides),
                **self.settings,
            )  # fmt: skip
        return [dq, dk, dv]
