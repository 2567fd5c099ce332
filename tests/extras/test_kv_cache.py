"""generate() with keys and values in FP8: the tokens and logits of an emulated cache, and how near to bf16."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig
from transformers.cache_utils import StaticLayer

import fp8graph
from fp8graph.errors import ConfigError
from fp8graph.extras.kv_cache import Fp8DynamicCache, Fp8StaticCache, compare_logits
from fp8graph.extras.kv_layer import Fp8Layer
from fp8graph.numerics import sqnr_db
from helpers import NONE, in_one_test
from kv_caches import IDS, EmulatedDynamic, EmulatedStatic, generate, model_of
from tiny_models import TINY, causal_lm

SLIDING: dict[str, Any] = {"sliding_window": 8}


def gemma() -> Any:
    return model_of("Gemma3", config="Gemma3TextConfig", head_dim=16, sliding_window_pattern=2, **SLIDING)


MODELS = {
    "llama": lambda: model_of("llama"),  # two heads share a key head
    "mistral": lambda: model_of("Mistral", **SLIDING),
    "gemma3": gemma,
    "deepseek_v3": lambda: model_of("deepseek_v3"),  # caches the latent of all heads, and rotated keys
    "bloom": lambda: model_of("bloom"),
}


@in_one_test("exact_prefill", [False, True], ids=["stored", "exact"])
@in_one_test("static", [False, True], ids=["dynamic", "static"])
@in_one_test("name", MODELS)
def test_cache_equals_the_emulated_cache(name: str, static: bool, exact_prefill: bool) -> None:
    model = MODELS[name]()
    settings: dict[str, Any] = {"exact_prefill": exact_prefill}
    caches: Any = (
        (Fp8StaticCache(model.config, 24, **settings), EmulatedStatic(model.config, 24))
        if static
        else (Fp8DynamicCache(model.config, **settings), EmulatedDynamic(config=model.config))
    )
    caches[1].exact_prefill = exact_prefill
    found, expected = (generate(model, cache) for cache in caches)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(map(torch.equal, found.logits, expected.logits))
    layers: Any = zip(*(cache.layers for cache in caches), strict=True)
    for mine, other in layers:
        assert repr(mine) == f"Fp8Layer({other})"
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)


# dB of the logits, at least, in any step, against a cache in bf16: what was measured, less 2
NEAR = {
    "bloom": 48, "deepseek_v3": 36, "falcon": 38, "gemma2": 25, "gemma3": 27, "glm4": 28, "gpt2": 39, "gpt_neox": 36,
    "gpt_oss": 33, "granite": 33, "llama": 34, "mistral": 34, "mixtral": 33, "olmo2": 29, "opt": 36, "phi3": 31,
    "qwen2": 34, "qwen3": 30, "qwen3_moe": 27, "starcoder2": 34,
}  # fmt: skip


FAST = {"llama", "gpt_oss"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.release) for name in NEAR]
)
def test_logits_are_near_those_of_bf16(name: str) -> None:
    model = model_of(name)
    ids = TINY[name].inputs()["input_ids"]
    dynamic = compare_logits(model, ids, Fp8DynamicCache(model.config), prompt=8)
    static = compare_logits(model, ids, Fp8StaticCache(model.config, 64), prompt=8)
    stored = compare_logits(model, ids, Fp8DynamicCache(model.config, exact_prefill=False), prompt=8)
    assert len(dynamic.sqnr_db) == len(static.sqnr_db) == 9
    assert dynamic.sqnr_db[0] == static.sqnr_db[0] == math.inf  # of the prompt
    assert NEAR[name] <= min(stored.sqnr_db + dynamic.sqnr_db + static.sqnr_db) < math.inf
    assert min(dynamic.same_token, static.same_token) >= 0.8
    assert dynamic.nbytes < static.nbytes  # of 64 tokens, which are allocated


def test_every_family_that_generates_is_known() -> None:
    """Those with an encoder have a test of their own; some have no generate()."""
    names = {name for name, family in TINY.items() if family.library == "transformers"}
    assert names - NEAR.keys() == {"bert", "clip", "roberta", "t5", "vit", "whisper"}


@pytest.mark.parametrize("size", [16, 32])
def test_bytes_are_half_and_the_scales(size: Any) -> None:
    """Per token, layer and key head: keys and values of one byte per number, and two scales of four bytes."""
    model = model_of("Llama", head_dim=size)
    cache = Fp8DynamicCache(model.config)
    assert (cache.nbytes, cache.nbytes_unquantized) == (0, 0)
    generate(model, cache)
    tokens = 2 * (12 + 8 - 1)  # the last one is not fed
    assert cache.nbytes == tokens * 2 * 2 * (2 * size + 2 * 4)
    assert cache.nbytes_unquantized == tokens * 2 * 2 * 2 * size * 2
    bf16: Any = DynamicCache(config=model.config)
    generate(model, bf16)
    assert cache.nbytes_unquantized == sum(layer.keys.nbytes + layer.values.nbytes for layer in bf16.layers)
    static = Fp8StaticCache(model.config, 64)
    generate(model, static)
    assert static.nbytes == 2 * 64 * 2 * 2 * (2 * size + 2 * 4)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_a_window_is_all_that_is_kept(static: bool) -> None:
    model = model_of("Mistral", **SLIDING)
    cache: Any = Fp8StaticCache(model.config, 64) if static else Fp8DynamicCache(model.config)
    generate(model, cache)
    assert cache.get_seq_length() == 19
    assert {tensor.shape[2] for layer in cache.layers for tensor in layer.tensors} == {8 if static else 7}


def test_prefill_and_steps_store_the_same() -> None:
    """One prefill of all tokens, in parts, and one token at a time. Other sizes of a GEMM sum up in another order:
    in FP32, a code in a thousand may be the next one."""
    model = model_of("llama", torch.float32)
    stored: list[list[Tensor]] = []
    for size in (12, 5, 1):
        cache = Fp8DynamicCache(model.config, exact_prefill=False)
        with torch.no_grad():
            for part in IDS.split(size, 1):
                model(part, past_key_values=cache)
        stored.append([tensor for layer in cache.layers for tensor in layer.tensors])
    for whole, *parts in zip(*stored, strict=True):
        for part in parts:
            if whole.dtype == torch.uint8:
                steps = (whole.int() - part.int()).abs()
                assert steps.max() <= 1
                assert (steps != 0).double().mean() <= 1e-3
            else:
                assert torch.allclose(whole, part, rtol=1e-5, atol=0)


def test_beams() -> None:
    model = model_of("llama")
    beams: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "output_scores": True}
    for cache, emulated in (
        (Fp8DynamicCache(model.config), EmulatedDynamic(config=model.config)),
        (Fp8StaticCache(model.config, 24), EmulatedStatic(model.config, 24)),
    ):
        found, expected = (generate(model, each, **beams) for each in (cache, emulated))
        assert torch.equal(found.sequences, expected.sequences)
        assert torch.equal(found.sequences_scores, expected.sequences_scores)
        assert cache.layers[0].tensors[0].shape[0] == 6
    assert len({tuple(row) for row in found.sequences.tolist()}) == 6


ASSISTED: dict[str, dict[str, Any]] = {"prompt lookup": {"prompt_lookup_num_tokens": 3}, "assistant model": {}}


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("how", ASSISTED)
def test_assisted_generation(how: str, sliding: bool) -> None:
    """The tokens are those without an assistant: what it guessed wrong is cropped. In FP32, for sizes of GEMMs."""
    settings = dict(ASSISTED[how])
    model = model_of("Mistral", torch.float32, **SLIDING) if sliding else model_of("llama", torch.float32)
    if how == "assistant model":
        torch.manual_seed(1)
        settings["assistant_model"] = causal_lm("Llama")(1).eval()
    ids = IDS[:1].repeat(1, 2)
    plain = generate(model, Fp8DynamicCache(model.config), ids, 12)
    cache = Fp8DynamicCache(model.config)
    assisted = generate(model, cache, ids, 12, **settings)
    assert torch.equal(assisted.sequences, plain.sequences)
    assert cache.get_seq_length() == 24 + 12 - 1
    static = Fp8StaticCache(model.config, 64)
    if hasattr(StaticLayer, "crop") and not sliding:  # from transformers 5.24 on
        assert torch.equal(generate(model, static, ids, 12, **settings).sequences, plain.sequences)
    else:
        with pytest.raises(ValueError, match=r"use Fp8DynamicCache for assisted|requires a cache that can be"):
            generate(model, static, ids, 12, **settings)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_padding_on_the_left_changes_no_other_token(static: bool) -> None:
    """A scale belongs to one token: what stands at the padding does not matter."""
    model = model_of("llama", torch.float32)

    def cache() -> Any:
        return Fp8StaticCache(model.config, 32) if static else Fp8DynamicCache(model.config)

    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), IDS], 1)
    mask = (torch.arange(16) >= 4).long().expand(2, -1)
    found = generate(model, cache(), padded, attention_mask=mask)
    plain = generate(model, cache())
    assert torch.equal(found.sequences[:, 4:], plain.sequences)
    assert all(sqnr_db(a, b) > 60 for a, b in zip(plain.logits, found.logits, strict=True))


def test_prefill_in_chunks_and_a_second_call() -> None:
    """A conversation goes on with the cache of the turn before."""
    model = model_of("llama", torch.float32)
    cache = Fp8DynamicCache(model.config, exact_prefill=False)
    first = generate(model, cache, prefill_chunk_size=5).sequences
    assert torch.equal(first, generate(model, Fp8DynamicCache(model.config, exact_prefill=False)).sequences)
    longer = torch.cat([first, IDS[:, :5]], 1)
    found = generate(model, cache, longer).sequences
    assert torch.equal(found, generate(model, Fp8DynamicCache(model.config, exact_prefill=False), longer).sequences)


def test_a_cache_is_used_again_after_reset() -> None:
    model = model_of("llama")
    for cache in (Fp8DynamicCache(model.config), Fp8StaticCache(model.config, 32)):
        first = generate(model, cache).sequences
        cache.reset()
        assert torch.equal(generate(model, cache).sequences, first)


def test_power_2_scale() -> None:
    model = model_of("llama")
    cache = Fp8DynamicCache(model.config, power_2_scale=True)
    generate(model, cache)
    for scale in cache.layers[1].tensors[2:]:
        assert torch.equal(scale, 2.0 ** scale.log2().round())
    assert min(compare_logits(model, IDS, Fp8DynamicCache(model.config, power_2_scale=True), prompt=4).sqnr_db) > 30


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_encoder_and_decoder(name: str) -> None:
    """Two caches; cross-attention reads its own without an update."""
    model = model_of(name)
    inputs = {key: value for key, value in TINY[name].inputs().items() if key != "labels"}
    inputs = {key: value.bfloat16() if value.is_floating_point() else value for key, value in inputs.items()}
    asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    asked |= {"output_logits": True, "return_dict_in_generate": True}
    kinds = (Fp8DynamicCache, lambda config: EmulatedDynamic(config=config))
    caches: list[Any] = [EncoderDecoderCache(kind(model.config), kind(model.config)) for kind in kinds]
    results = [model.generate(**inputs, past_key_values=cache, **asked) for cache in caches]
    plain = model.generate(**inputs, **asked)
    assert torch.equal(results[0].sequences, results[1].sequences)
    assert sqnr_db(plain.logits[0], results[0].logits[0]) > 25
    for part in (caches[0].self_attention_cache, caches[0].cross_attention_cache):
        assert 0 < part.nbytes < part.nbytes_unquantized


def test_recurrent_layers_keep_their_states() -> None:
    """Of a hybrid model: attention's keys are in FP8, and the states of the others as they were."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 256, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"],
    }  # fmt: skip
    model: Any = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**sizes)).bfloat16().eval()
    cache = Fp8DynamicCache(model.config)
    generate(model, cache)
    states = [state for state in cache.layers[0].conv_states.values() if state is not None]
    assert isinstance(cache.layers[1], Fp8Layer)
    kept = sum(state.nbytes for state in states)
    assert states[0].dtype == torch.bfloat16
    assert cache.nbytes == kept + cache.layers[1].get_seq_length() * 2 * 2 * (2 * 16 + 2 * 4)
    assert cache.nbytes_unquantized == kept + cache.layers[1].get_seq_length() * 2 * 2 * 2 * 16 * 2


@pytest.mark.slow
def test_a_static_cache_is_decoded_by_one_graph() -> None:
    """Prefill and decoding are a graph each, whole; the tokens are those of eager. A second call compiles nothing."""
    torch._dynamo.reset()
    model = model_of("llama", layers=1)
    expected = generate(model, Fp8StaticCache(model.config, 20), tokens=4).sequences
    fp8graph.compile(model, policy=NONE, compiler="eager", dynamic=False, fullgraph=True)
    for _ in range(2):
        found = generate(model, Fp8StaticCache(model.config, 20), tokens=4, disable_compile=True)
        assert torch.equal(found.sequences, expected)
        assert len(fp8graph.backend_of(model).report.graphs) == 2


@pytest.mark.slow
def test_windows_compile() -> None:
    """Of a static cache that fills, and then slides."""
    torch._dynamo.reset()
    model = gemma()
    expected = generate(model, Fp8StaticCache(model.config, 40), IDS[:, :4]).sequences
    fp8graph.compile(model, policy=NONE, compiler="eager", fullgraph=True)
    found = generate(model, Fp8StaticCache(model.config, 40), IDS[:, :4], disable_compile=True).sequences
    assert torch.equal(found, expected)


@pytest.mark.slow
def test_weights_and_cache_in_fp8() -> None:
    torch._dynamo.reset()
    model = model_of("llama", layers=1)
    cache = Fp8StaticCache(model.config, 20)
    plain = generate(model, cache, tokens=2)
    cache.reset()
    fp8graph.compile(model, recipe="rowwise", compiler="eager", dynamic=False, fullgraph=True)
    found = generate(model, cache, tokens=2, disable_compile=True)
    assert all(20 < sqnr_db(a, b) < 60 for a, b in zip(plain.logits, found.logits, strict=True))
    assert {gemm.recipe for gemm in fp8graph.backend_of(model).report.gemms if "proj" in gemm.fqn} == {"rowwise"}


@pytest.mark.release
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_compiled_by_inductor(static: bool) -> None:
    torch._dynamo.reset()
    model = model_of("llama", layers=1)

    def cache() -> Any:
        return Fp8StaticCache(model.config, 40) if static else Fp8DynamicCache(model.config)

    ids = IDS[:, :9]
    with torch.no_grad():
        stored, logits = cache(), list[Tensor]()
        for compiled in (False, True):
            if compiled:
                fp8graph.compile(model, policy=NONE, dynamic=not static)
                stored = cache()
            model(ids, past_key_values=stored)
            logits.append(model(IDS[:, 9:10], past_key_values=stored).logits)
    assert sqnr_db(*logits) > 34  # Inductor keeps FP32 where eager rounds to bf16: FP8 codes differ
    assert stored.nbytes == stored.nbytes_unquantized * 20 / 32


def indexed() -> LlamaConfig:
    config = LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["full_attention", "indexed_attention"]
    return config


# the class, its arguments, the message
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no config": (Fp8DynamicCache, {"config": None}, r"must be the model's config \(model.config\), not NoneType"),
    "a model": (Fp8StaticCache, {"config": torch.nn.Linear(1, 1), "max_cache_len": 4}, r"must be the .*, not Linear"),
    "no room": (Fp8StaticCache, {"max_cache_len": 0}, r"max_cache_len must be a whole number >= 1, .*, not 0"),
    "no number": (Fp8StaticCache, {"max_cache_len": 4.0}, r"max_cache_len must be a whole number >= 1"),
    "scale": (Fp8DynamicCache, {"power_2_scale": 2}, r"power_2_scale must be True or False, not 2"),
    "more than keys": (
        Fp8DynamicCache,
        {"config": indexed()},
        r"layer 1 of llama keeps a DynamicIndexedLayer, whi",
    ),
    "static": (Fp8StaticCache, {"config": indexed(), "max_cache_len": 4}, r"StaticIndexedLayer, .*: Fp8StaticCache ca"),
}


@pytest.mark.parametrize("stored", [0, 9])
def test_a_static_cache_without_room_says_so(stored: int) -> None:
    model = model_of("llama")
    cache = Fp8StaticCache(model.config, max_cache_len=10)
    message = rf"max_cache_len=10 is too small: {stored} tokens are stored, and {12 - stored} are to come"
    with torch.no_grad():
        if stored:
            model(IDS[:, :stored], past_key_values=cache)
        with pytest.raises(ConfigError, match=message):
            model(IDS[:, stored:12], past_key_values=cache)
        cache.reset()
        model(IDS[:, :10], past_key_values=cache)  # all of the room


@in_one_test("case", REFUSED)
def test_wrong_arguments(case: str) -> None:
    kind, arguments, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        kind(**{"config": LlamaConfig(), **arguments})


def test_wrong_comparisons() -> None:
    model = model_of("llama")
    used = Fp8DynamicCache(model.config)
    compare_logits(model, IDS, used, prompt=11)
    with pytest.raises(ConfigError, match="takes an empty Fp8DynamicCache or Fp8StaticCache: make a new one"):
        compare_logits(model, IDS, used, prompt=4)
    with pytest.raises(ConfigError, match="takes an empty Fp8DynamicCache"):
        compare_logits(model, IDS, DynamicCache(config=model.config), prompt=4)  # pyright: ignore
    for prompt in (0, 12, 4.0):
        with pytest.raises(ConfigError, match="prompt must be a whole number from 1 to 11, as there are 12 tokens"):
            compare_logits(model, IDS, Fp8DynamicCache(model.config), prompt=prompt)  # pyright: ignore


def test_gradients_are_refused() -> None:
    model = model_of("llama")
    with pytest.raises(ConfigError, match=r"carry no gradient: call the model under torch.no_grad\(\), as generate"):
        model(IDS, past_key_values=Fp8DynamicCache(model.config))


def test_a_cache_can_be_copied() -> None:
    """To answer several questions about one prefix."""
    model = model_of("llama")
    prefix = Fp8DynamicCache(model.config)
    with torch.no_grad():
        model(IDS, past_key_values=prefix)
    copy = pickle.loads(pickle.dumps(prefix))
    generate(model, copy, torch.cat([IDS, IDS[:, :3]], 1))
    assert prefix.get_seq_length() == 12
    assert copy.get_seq_length() == 12 + 3 + 8 - 1
