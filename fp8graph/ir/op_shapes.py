"""The results of the dialect's ops, from shapes and dtypes alone: their fakes, by the names of the ops.

A fake reads only ``shape``, ``dtype``, ``ndim`` and ``new_empty`` of its arguments (``ops.fake_results``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8graph.numerics import experts, history, quantization, transforms
from fp8graph.numerics.arguments import QuantizeArguments
from fp8graph.numerics.scalings import SCALINGS


def quantize(*args: Any, **kwargs: Any) -> list[Tensor]:
    asked = QuantizeArguments[Any](*args, **kwargs)
    return [asked.x.new_empty(shape, dtype=dtype) for shape, dtype in quantization.output_shapes(asked)]


def scaled_mm(
    a: Tensor,
    b: Tensor,
    _scale_inv_a: Tensor,
    _scale_inv_b: Tensor,
    _bias: Tensor | None,
    out_dtype: torch.dtype,
    _use_fast_accum: bool,
    **_kwargs: Any,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    _scale_inv_a: Tensor,
    _scale_inv_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    _use_fast_accum: bool,
    _native: bool,
    **_kwargs: Any,
) -> Tensor:
    shape = (a.shape[0], b.shape[1]) if b.ndim == 3 else (offs.shape[0], a.shape[0], b.shape[0])
    return a.new_empty(shape, dtype=out_dtype)


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[2]) if b.ndim == 3 else (offs.shape[0], a.shape[0], b.shape[1]))


def scaled_attention(q: Tensor, *_arguments: Any) -> Tensor:
    return torch.empty_like(q, dtype=torch.bfloat16)


def rounded_attention(q: Tensor, _k: Tensor, v: Tensor, *_arguments: Any) -> Tensor:
    return q.new_empty([*q.shape[:3], v.shape[3]])


def rounded_attention_backward(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_arguments: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (q, k, v)]


def dequantize(
    data: Tensor, _scale_inv: Tensor, dtype: torch.dtype, *, scaling: str = "tensor", **_kwargs: Any
) -> Tensor:
    if (packed := SCALINGS[scaling].packed) > 1:
        return data.new_empty([*data.shape[:-1], data.shape[-1] * packed], dtype=dtype)
    return torch.empty_like(data, dtype=dtype)


def hadamard(like: Tensor, _signs: int) -> Tensor:
    return like.new_empty((transforms.SIZE, transforms.SIZE))


def rotate(x: Tensor, _matrix: Tensor, _dim: int) -> Tensor:
    return x.new_empty(x.shape)


def random_seed(device: torch.device) -> Tensor:
    return torch.empty((1,), dtype=torch.int64, device=device)


def amax(x: Tensor) -> Tensor:
    return x.new_empty((1,), dtype=torch.float32)


def smoothing(x: Tensor) -> list[Tensor]:
    return [x.new_empty((x.shape[1],)) for _ in range(2)]


def scales(amax: Tensor, *_settings: Any) -> Tensor:
    return amax.new_empty((1, 2))


def columnwise(data: Tensor, multiples: Sequence[int], *, offs: Tensor | None = None) -> Tensor:
    rows, columns = data.shape
    rows = rows if offs is None else experts.padded_rows(rows, offs.shape[0], multiples[1])
    return data.new_empty([size + -size % m for size, m in zip((columns, rows), multiples, strict=True)])


def read_scales(page: Tensor, _copy: bool) -> Tensor:
    return page.new_empty((page.shape[0], history.HEADER))


def update_page(page: Tensor, _amaxes: Sequence[Tensor], *_settings: Any) -> Tensor:
    return page.new_empty(page.shape)


def parts(names: Sequence[str]) -> Callable[..., Any]:
    def fake(x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return x.new_empty((len(names),), dtype=torch.float32)

    return fake
