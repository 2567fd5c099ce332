"""One scale per head for all tokens of an FP8 cache: calibrated, or from a checkpoint; nothing clips silently."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import oracle
from fp8graph.errors import ConfigError
from fp8graph.extras.kv_cache import (
    Fp8DynamicCache,
    Fp8StaticCache,
    HeadScales,
    calibrate_head_scales,
    compare_logits,
)
from fp8graph.extras.kv_layer import FixedScales, cache_argument
from helpers import in_one_test
from kv_caches import E4M3, IDS, generate, model_of

SCALES = torch.tensor([0.02, 0.01]), torch.tensor([0.005, 0.5])


def rounded(x: Tensor, scale_inv: Tensor) -> Tensor:
    """``x / scale`` rounded to E4M3, by table search in float64."""
    inverse: Any = scale_inv.reshape(1, -1, 1, 1).numpy()
    scaled = (x.float().numpy() / inverse).astype(np.float64)
    codes = oracle.cast(scaled, E4M3)
    return torch.from_numpy(oracle.dequantize(codes, inverse.astype(np.float64), E4M3, x.dtype)).to(x.dtype)


CACHES: dict[str, Callable[..., Any]] = {
    "dynamic": Fp8DynamicCache,
    "static": lambda config, **settings: Fp8StaticCache(config, 24, **settings),
}


@pytest.mark.parametrize("kind", CACHES)
def test_stored_keys_and_values_equal_the_oracle(kind: str) -> None:
    """Also after more tokens: nothing that is stored changes."""
    model = model_of("llama")
    cache = CACHES[kind](model.config, head_scales=HeadScales({0: SCALES, 1: SCALES}))
    states: list[list[Tensor]] = []
    for tokens in (5, 1, 3):
        states.append([torch.randn(2, 2, tokens, 16).bfloat16() for _ in "kv"])
        cache.update(*states[-1], 1)
    layer = cache.layers[1]
    for found, parts, scale in zip((layer.keys, layer.values), zip(*states, strict=True), SCALES, strict=True):
        assert torch.equal(found[:, :, :9], rounded(torch.cat(list(parts), 2), scale))
    assert [tensor.dtype for tensor in layer.tensors] == [torch.uint8] * 2 + [torch.float32] * 2
    beyond = torch.cat([torch.cat(list(parts), 2) for parts in zip(*states, strict=True)], 3).float().abs()
    limits = torch.stack([*(scale.reshape(1, 2, 1, 1).expand(2, 2, 9, 16) for scale in SCALES)], 3).flatten(3, 4)
    assert cache.clipped == int((beyond > 464 * limits).sum()) > 0


def test_each_head_has_its_own_and_numbers_that_are_larger_are_counted() -> None:
    one = torch.ones(2)
    cache = Fp8DynamicCache(model_of("llama").config, head_scales=HeadScales({0: (one, one), 1: (one, one)}))
    keys = (
        torch.tensor([448.0, 463.0, 465.0, -1e9, math.inf, math.nan, 0.0, 1.0]).reshape(1, 1, 1, 8).expand(1, 2, 1, 8)
    )
    cache.update(keys, torch.zeros(1, 2, 1, 8), 0)
    assert cache.layers[0].keys[0, 1, 0].tolist()[:4] == [448.0, 448.0, 448.0, -448.0]
    assert cache.layers[0].keys[0, 1, 0, 4:6].isnan().all()
    assert cache.clipped == 2 * 3
    cache.reset()
    assert cache.clipped == 0


@pytest.mark.parametrize("kind", CACHES)
def test_calibrated_scales_hold_these_texts(kind: str) -> None:
    model = model_of("llama")
    scales = calibrate_head_scales(model, [IDS[:1], {"input_ids": IDS[1:]}])
    plain: Any = DynamicCache(config=model.config)
    model(IDS, past_key_values=plain)
    for index, layer in enumerate(plain.layers):
        for scale, states in zip(scales.layers[index], (layer.keys, layer.values), strict=True):
            assert torch.equal(scale, states.float().abs().amax((0, 2, 3)) * (1 / 448))
    found = compare_logits(model, IDS, CACHES[kind](model.config, head_scales=scales), prompt=4)
    per_token = compare_logits(model, IDS, CACHES[kind](model.config), prompt=4)
    assert found.clipped == per_token.clipped == 0
    assert min(found.sqnr_db) > min(per_token.sqnr_db) - 6  # FP8 numbers are floating: one scale per head is enough
    assert found.nbytes < per_token.nbytes  # two scales per head in place of two per token and head
    tight = HeadScales({index: (k / 16, v / 16) for index, (k, v) in scales.layers.items()})
    clipped = compare_logits(model, IDS, CACHES[kind](model.config, head_scales=tight), prompt=4)
    assert clipped.clipped > 0
    assert min(clipped.sqnr_db) < min(found.sqnr_db) - 6
    wide = calibrate_head_scales(model, [IDS], margin=4)
    assert torch.equal(wide.layers[0][0], (scales.layers[0][0] * 448 * (4 / 448)))


@pytest.mark.slow
def test_head_scales_with_beams_and_compiled() -> None:
    model = model_of("llama")
    scales = calibrate_head_scales(model, [IDS], margin=2)
    expected = generate(model, Fp8DynamicCache(model.config, head_scales=scales), num_beams=2)
    again = generate(model, Fp8DynamicCache(model.config, head_scales=copy.deepcopy(scales)), num_beams=2)
    assert torch.equal(expected.sequences, again.sequences)
    cache = Fp8StaticCache(model.config, 24, head_scales=scales)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
        step = torch.compile(model, backend="eager", fullgraph=True)
        large = step(IDS[:, :1], past_key_values=cache).logits
        assert large.isfinite().all()
        before = cache.clipped
        for layer in cache.layers:
            layer.scales.keys.mul_(2.0**-20)
        step(IDS[:, :1], past_key_values=cache)
    assert cache.clipped > before


def test_scales_of_checkpoints() -> None:
    """Their names in compressed-tensors and in ModelOpt; one per tensor is that of all heads."""
    tensors = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.5),
        "model.layers.0.self_attn.v_scale": torch.tensor([0.25]).bfloat16(),
        "model.layers.11.self_attn.k_proj.k_scale": torch.tensor([0.5, 1.0]),
        "model.layers.11.self_attn.v_proj.v_scale": torch.tensor([2.0, 4.0]),
        "model.layers.0.self_attn.k_proj.weight_scale": torch.tensor(9.0),
        "model.layers.0.mlp.k_scaled": torch.tensor(9.0),
    }
    found = HeadScales.from_tensors(tensors)
    assert {index: [x.tolist() for x in both] for index, both in found.layers.items()} == {
        0: [[0.5], [0.25]],
        11: [[0.5, 1.0], [2.0, 4.0]],
    }
    again = HeadScales.from_tensors(found.to_tensors())
    assert all(torch.equal(a, b) for i in (0, 11) for a, b in zip(found.layers[i], again.layers[i], strict=True))
    whole = HeadScales({index: (torch.tensor([0.5]), torch.tensor([0.5])) for index in (0, 1)})
    cache = Fp8DynamicCache(model_of("llama").config, head_scales=whole)
    keys = torch.randn(1, 2, 3, 16)
    assert torch.equal(cache.update(keys, keys, 0)[0], keys)  # exact prefill
    assert torch.equal(cache.layers[0].keys, rounded(keys, torch.tensor([0.5])))


@in_one_test(
    "names",
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.attn._k_scale", "self_attn.attn._v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
        ("mixer.k_proj.k_scale", "mixer.v_proj.v_scale"),  # Nemotron-H
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
        ("self_attn.k_cache.scale", "self_attn.v_cache.scale"),  # Hunyuan
        ("self_attn.kv_scale",),  # vLLM's former name: one scale for both
    ],
    ids=lambda names: names[0],
)
def test_every_name_that_vllm_takes_is_read(names: tuple[str, ...]) -> None:
    tensors = {f"model.layers.3.{name}": torch.tensor(0.25 * (i + 1)) for i, name in enumerate(names)}
    others = ("q_scale", "attn.q_scale", "q_proj.output_scale", "q.scale", "prob_output_scale", "k_proj.input_scale")
    tensors |= {f"model.layers.3.self_attn.{name}": torch.tensor(9.0) for name in others}
    keys, values = HeadScales.from_tensors(tensors).layers[3]
    assert (keys.tolist(), values.tolist()) == ([0.25], [0.25 * len(names)])


ONE = torch.ones(2)
NOT_SCALES: Any = {}


@in_one_test(
    ("make", "message"),
    [
        (
            lambda c: HeadScales.from_tensors(cast(Any, {"layers.3.k_scale": "1"})),
            "'layers.3.k_scale' is '1', not a tensor",
        ),
        (lambda c: HeadScales.from_tensors({"x.k_scale": ONE}), "there are no scales of a cache"),
        (lambda c: HeadScales.from_tensors({"layers.3.k_scale": ONE}), "layer 3 has a k_scale alone"),
        (
            lambda c: HeadScales.from_tensors({"model.layers.0.k_scale": ONE, "visual.layers.0.v_scale": ONE}),
            "layer 0 has scales of keys in 'model.' and of values in 'visual.'",
        ),
        (
            lambda c: HeadScales.from_tensors(
                {f"layers.0.{kind}.{x}_scale": ONE for kind in ("self_attn", "encoder_attn") for x in "kv"}
            ),
            "'layers.0.self_attn.k_scale' and 'layers.0.encoder_attn.k_scale' are both k_scale of layer 0",
        ),
        *(
            (
                lambda c, name=name: HeadScales.from_tensors({"layers.0.k_scale": ONE, f"layers.0.attn.{name}": ONE}),
                f"unknown scale name 'layers.0.attn.{name}': it may multiply or divide",
            )
            for name in ("kv_cache_scale", "kv_cache_scaling_factor", "k_scale_inv", "v_zero_point", "k_scales")
        ),
        (
            lambda c: HeadScales.from_tensors({"layers.0.kv_scale": ONE, "layers.0.k_scale": ONE}),
            "'layers.0.kv_scale' and 'layers.0.k_scale' are both k_scale of layer 0",
        ),
        (lambda c: HeadScales({0: (ONE, ONE * 0)}), "layer 0: scales of values must be positive and finite"),
        (lambda c: HeadScales({0: (ONE / 0, ONE)}), "layer 0: scales of keys must be positive and finite"),
        (lambda c: HeadScales({0: (ONE.double(), ONE)}), r"are FP32 \[heads\]"),
        (lambda c: Fp8DynamicCache(c, head_scales=NOT_SCALES), "head_scales must be HeadScales or None, not dict"),
        (lambda c: Fp8DynamicCache(c, head_scales=HeadScales({0: (ONE, ONE)})), "none for layer 1, which keeps keys"),
        (
            lambda c: Fp8StaticCache(c, 8, power_2_scale=True, head_scales=HeadScales({})),
            "power_2_scale=True is for scales per token",
        ),
        (lambda c: calibrate_head_scales(model_of("llama"), []), "needs a batch at least"),
        (lambda c: calibrate_head_scales(model_of("llama"), [IDS], margin=0.5), "margin must be a number >= 1"),
    ],
)
def test_invalid_head_scales_are_refused(make: Any, message: str) -> None:
    config = model_of("llama").config
    with pytest.raises(ConfigError, match=message):
        make(config)


def test_another_number_of_heads_is_refused() -> None:
    three = torch.ones(3)
    cache = Fp8DynamicCache(model_of("llama").config, head_scales=HeadScales({0: (three, three), 1: (three, three)}))
    states = torch.randn(1, 2, 3, 16)
    with pytest.raises(ConfigError, match="layer 1 has 2 heads of keys, and head_scales has scales for 3"):
        cache.update(states, states, 1)


def test_texts_that_are_not_finite_are_refused() -> None:
    model = model_of("llama")
    model.model.embed_tokens.weight.data[5] = math.nan
    with pytest.raises(ConfigError, match="layer 0: a key or a value is not finite in these texts"):
        calibrate_head_scales(model, [torch.tensor([[4, 5]])])


def test_fixed_scales_do_not_move() -> None:
    scales = FixedScales(0, *SCALES)
    scales.lazy_initialization(torch.empty(1, 2, 0, 16), torch.empty(1, 2, 0, 16))
    for method in ("crop", "reorder_cache", "batch_select_indices", "batch_repeat_interleave"):
        getattr(scales, method)(1)
    keys, values = scales.update()
    assert torch.equal(keys.flatten(), SCALES[0])
    assert torch.equal(values.flatten(), SCALES[1])


def test_a_model_takes_its_cache_by_the_name_of_its_transformers() -> None:
    """5.24 renamed the argument, and warns of the old name, which is the only one before."""

    class Former(torch.nn.Module):
        def forward(self, input_ids: Tensor, past_key_values: object = None) -> None: ...

    class Present(torch.nn.Module):
        def forward(self, input_ids: Tensor, cache: object = None) -> None: ...

    assert [cache_argument(model) for model in (Former(), Present())] == ["past_key_values", "cache"]
    assert cache_argument(model_of("llama")) in inspect.signature(model_of("llama").forward).parameters
