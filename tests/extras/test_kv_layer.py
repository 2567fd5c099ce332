"""One layer of an FP8 cache: its bytes, and that it moves tokens as transformers' own layers do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

import fp8graph
from fp8graph.errors import ConfigError
from fp8graph.extras.kv_layer import Fp8Layer
from helpers import in_one_test
from kv_caches import quantized, rounded

KINDS: dict[str, Callable[[], CacheLayerMixin]] = {
    "dynamic": DynamicLayer,
    "dynamic sliding": lambda: DynamicSlidingWindowLayer(sliding_window=6),
    "static": lambda: StaticLayer(max_cache_len=16),
    "static sliding": lambda: StaticSlidingWindowLayer(max_cache_len=16, sliding_window=6),
}


def layers(kind: str, **settings: Any) -> tuple[Any, Any]:
    """An FP8 layer, and transformers' own of the same kind."""
    return Fp8Layer(KINDS[kind](), KINDS[kind](), **settings), KINDS[kind]()


def states(tokens: int, seed: int = 0, size: int = 8, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[2, 3, tokens, size], of sizes from 1e-3 to 1e3, not contiguous: as attention layers view them."""
    x = torch.randn(2, tokens, 3, size, generator=torch.Generator().manual_seed(seed))
    return (x * torch.logspace(-3, 3, tokens).view(1, -1, 1, 1)).to(dtype).transpose(1, 2)


@in_one_test("dtype", [torch.bfloat16, torch.float16, torch.float32])
@in_one_test("power_2_scale", [False, True])
def test_bytes_and_scales_are_the_oracles(dtype: torch.dtype, power_2_scale: bool) -> None:
    layer, _ = layers("dynamic", power_2_scale=power_2_scale)
    keys, values = states(9, dtype=dtype), states(9, 1, size=4, dtype=dtype)  # heads of two sizes
    found = layer.update(keys, values)
    data, scales = layer.tensors[:2], layer.tensors[2:]
    for x, codes, scale_inv, decoded in zip((keys, values), data, scales, found, strict=True):
        expected = quantized(x, power_2_scale)
        assert codes.dtype == torch.uint8
        assert np.array_equal(codes.numpy(), expected[0])
        assert scale_inv.shape == (2, 3, 9, 1)
        assert np.array_equal(scale_inv.double().numpy(), expected[1])
        assert decoded.dtype == dtype
        assert torch.equal(decoded, rounded(x, power_2_scale))


def test_they_are_those_of_the_recipe() -> None:
    """The arithmetic is that of every rowwise quantization."""
    layer, _ = layers("dynamic")
    x = states(5)
    layer.update(x, x)
    recipe = fp8graph.Float8RowwiseScaling(power_2_scale=False, amax_epsilon=0.0)
    q = fp8graph.numerics.quantize(x, recipe, "input", "rowwise")
    assert torch.equal(layer.tensors[0], q.data.view(torch.uint8))
    assert torch.equal(layer.tensors[2], q.scale_inv)


def test_numbers_at_the_edges() -> None:
    """Zeros stay, inf and NaN are NaN in their places; other tokens do not notice."""
    x = states(4)
    x[:, :, 1], x[0, 0, 2, 3], x[0, 0, 3, 1] = 0.0, math.inf, math.nan
    layer, _ = layers("static")
    found, _ = layer.update(x, x)
    assert torch.equal(found[:, :, :2], rounded(x[:, :, :2]))
    assert (found[:, :, 1] == 0).all()
    assert found.isnan().nonzero().tolist() == [[0, 0, 2, 3], [0, 0, 3, 1]]
    assert torch.equal(found[1], torch.nn.functional.pad(rounded(x[1]), (0, 0, 0, 12)))


CALLS = ((5, 1, 1, 1, 1), (3, 2, 4, 1), (1,) * 9, (9,), (7, 1, 3))


@in_one_test("kind", KINDS)
@in_one_test("calls", CALLS, ids=str)
def test_tokens_move_as_in_transformers(kind: str, calls: tuple[int, ...]) -> None:
    """The keys and values that attention reads, and the sizes that masks are made of, call by call."""
    layer, reference = layers(kind)
    for i, tokens in enumerate(calls):
        assert layer.get_mask_sizes(tokens) == reference.get_mask_sizes(tokens)
        keys, values = states(tokens, 2 * i), states(tokens, 2 * i + 1)
        found, expected = layer.update(keys, values), reference.update(rounded(keys), rounded(values))
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        assert layer.get_seq_length() == reference.get_seq_length()
        assert torch.equal(layer.keys, reference.keys)
        assert torch.equal(layer.values, reference.values)
    for name in ("is_compileable", "is_croppable", "is_sliding", "is_initialized"):
        assert getattr(layer, name) == getattr(reference, name)
    assert layer.get_max_length() == reference.get_max_length()
    assert getattr(layer, "batch_size", None) == getattr(reference, "batch_size", None)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_the_bytes_do_not_depend_on_the_calls(kind: str) -> None:
    x = states(9)
    whole, _ = layers(kind)
    whole.update(x, x)
    parts, _ = layers(kind)
    for part in x.split((4, 1, 1, 3), 2):
        parts.update(part, part)
    assert all(map(torch.equal, whole.tensors, parts.tensors))


@in_one_test("kind", KINDS)
@in_one_test("tokens", [4, 9])
def test_the_first_call_may_be_exact(kind: str, tokens: int) -> None:
    """Returned tensors, not stored ones; a static layer returns as many tokens as its mask has. Again after reset."""
    layer, reference = layers(kind, exact_prefill=True)
    for _ in range(2):
        keys, values = states(tokens), states(tokens, 1)
        length, _ = layer.get_mask_sizes(tokens)
        found, (expected, _) = layer.update(keys, values), reference.update(rounded(keys), rounded(values))
        for x, exact in zip(found, (keys, values), strict=True):
            assert x.shape[2] == expected.shape[2] == length
            assert torch.equal(x[:, :, :tokens], exact)
            assert not x[:, :, tokens:].any()
        assert torch.equal(layer.keys, reference.keys)
        new = states(1, 2)
        assert torch.equal(layer.update(new, new)[0], reference.update(rounded(new), rounded(new))[0])
        layer.reset()
        reference.reset()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "reorder_cache": lambda layer: layer.reorder_cache(torch.tensor([1, 1])),
    "crop": lambda layer: layer.crop(-2),
    "batch_repeat_interleave": lambda layer: layer.batch_repeat_interleave(2),
    "batch_select_indices": lambda layer: layer.batch_select_indices(torch.tensor([1])),
    "reset": lambda layer: layer.reset(),
    "offload": lambda layer: (layer.offload(), layer.prefetch()),
}


@in_one_test("kind", KINDS)
@in_one_test("change", CHANGES)
def test_changes_are_those_of_transformers(kind: str, change: str) -> None:
    """And an update after them."""
    layer, reference = layers(kind)
    static = kind.startswith("static")
    refused = ("crop", "batch_repeat_interleave", "batch_select_indices")
    if static and change in refused and not hasattr(reference, change):  # 5.24 crops static layers
        layer.update(states(9), states(9))
        with pytest.raises(ConfigError, match=rf"Layer, of which this FP8 cache is made, has no {change}\(\): use Fp8"):
            CHANGES[change](layer)
        return
    if not static:
        for each in (layer, reference):
            if hasattr(each, "activate_past_recording") and kind.endswith("sliding"):
                each.activate_past_recording()
    layer.update(states(9), states(9, 1))
    reference.update(rounded(states(9)), rounded(states(9, 1)))
    for each in (layer, reference):
        CHANGES[change](each)
    assert layer.is_initialized == reference.is_initialized
    assert layer.get_seq_length() == reference.get_seq_length()
    if reference.keys is not None:
        assert torch.equal(layer.keys, reference.keys)
        assert torch.equal(layer.values, reference.values)
    batch = 1 if change == "batch_select_indices" else 2
    new = states(1, 5)[:batch].repeat_interleave(2 if change == "batch_repeat_interleave" else 1, 0)
    assert torch.equal(layer.update(new, new)[0], reference.update(rounded(new), rounded(new))[0])


def test_before_the_first_update() -> None:
    layer, reference = layers("dynamic")
    assert (layer.keys, layer.values, layer.tensors, layer.get_seq_length()) == (None, None, [], 0)
    assert layer.get_mask_sizes(4) == reference.get_mask_sizes(4)
    layer.crop(-1)
    layer.reset()
    layer.activate_past_recording()  # it keeps all
    assert repr(layer) == "Fp8Layer(DynamicLayer)"


def test_gradients_are_refused() -> None:
    layer, _ = layers("dynamic")
    x = states(2).requires_grad_()
    with pytest.raises(ConfigError, match=r"keys and values in FP8 carry no gradient: call the model under torch.no_g"):
        layer.update(x, x)
    with torch.no_grad():
        layer.update(x, x)


def test_other_dtypes_are_refused() -> None:
    layer, _ = layers("dynamic")
    with pytest.raises(ConfigError, match=r"an FP8 cache takes keys in bf16, fp16 or FP32, not in torch.float64"):
        layer.update(states(2).double(), states(2).double())
