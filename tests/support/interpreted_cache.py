"""Run the GPU code of a decoding step with an FP8 cache on the CPU, in Triton's interpreter.

    TRITON_INTERPRET=1 python -m interpreted_cache      one JSON line: SQNR in dB, and whether the cache is bit for bit

A script for the reason that ``interpreted`` gives.
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import interpreted  # before anything imports triton  # isort: skip
import torch
from torch import Tensor, nn

from fp8graph.extras.decode_attention import decode_attention
from fp8graph.numerics import sqnr_db
from fp8graph.numerics.quantization import dequantize_rows, quantize_rows
from generated import generate

E4M3 = torch.float8_e4m3fn
BATCH, KEY_HEADS, HEADS, TOKENS, SIZE, POSITION = 2, 2, 4, 300, 64, 7


def stored(x: Tensor) -> tuple[Tensor, Tensor]:
    data, scale_inv = quantize_rows(x, E4M3, power_2_scale=False)
    return data.view(torch.uint8), scale_inv


def step(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *cache: Tensor) -> list[Tensor]:
    """The step of a layer with a static cache for one new token: ``cache`` is keys, their scales, values, theirs."""
    index = [None, None, torch.full([1], POSITION)]
    written = [
        torch.ops.aten.index_put(old, index, new)
        for old, new in zip(cache, (*stored(key), *stored(value)), strict=True)
    ]
    keys, values = (dequantize_rows(written[i].view(E4M3), written[i + 1], query.dtype) for i in (0, 2))
    with mock.patch("torch.compiler.is_compiling", return_value=True):
        out, _ = decode_attention(nn.Module(), query, keys, values, mask)
    for old, new in zip(cache, written, strict=True):
        torch.ops.aten.copy_(old, new)
    return [out]


def attention(query: Tensor, mask: Tensor, *cache: Tensor) -> Tensor:
    """In float64, of numbers as they are stored."""
    keys, values = (
        (cache[i].view(E4M3).double() * cache[i + 1].double()).repeat_interleave(HEADS // KEY_HEADS, 1) for i in (0, 2)
    )
    out = nn.functional.scaled_dot_product_attention(query.double(), keys, values, attn_mask=mask)
    return out.transpose(1, 2)


def main() -> None:
    interpreted.prepare()
    torch.manual_seed(0)
    query, key, value = (torch.randn(BATCH, heads, 1, SIZE).bfloat16() for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    mask = torch.rand(BATCH, 1, 1, TOKENS) > 0.3
    mask[..., POSITION] = True
    past = [torch.randn(BATCH, KEY_HEADS, TOKENS, SIZE).bfloat16() for _ in range(2)]
    cache = [*stored(past[0]), *stored(past[1])]
    inputs: list[Any] = [query, key, value, mask, *cache]
    ((_, code),) = generate(step, inputs).code
    reference = [x.clone() for x in inputs]
    step(*reference)
    (out,) = interpreted.load(code)(list(inputs))
    same = all(map(torch.equal, cache, reference[4:]))
    exact = attention(query, mask, *reference[4:])
    print(json.dumps({"sqnr_db": sqnr_db(exact, out), "best": sqnr_db(exact, exact.bfloat16()), "same": same}))


if __name__ == "__main__":
    main()
