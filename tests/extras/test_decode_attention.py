"""Attention of one token that reads the cache where it multiplies: SDPA's numbers, and fewer bytes in GPU code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import fp8graph
from fp8graph import offline
from fp8graph.errors import ConfigError
from fp8graph.extras.decode_attention import NAME, decode_attention, use_decode_attention
from fp8graph.extras.kv_cache import Fp8StaticCache
from fp8graph.numerics import sqnr_db
from fp8graph.tools.explain import Generating
from helpers import NONE, in_one_test
from kv_caches import IDS, generate, model_of
from tiny_models import TINY, causal_lm

MIB = 2**20
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """transformers' tables are the process's."""
    torch._dynamo.reset()
    yield
    for table in (AttentionInterface, AttentionMaskInterface):
        table._global_mapping.pop(NAME, None)


def compiled(*args: Any, **kwargs: Any) -> Tensor:
    """The result of the function when it is traced; in eager that is SDPA's."""
    return torch.compile(lambda: decode_attention(*args, **kwargs)[0], backend="eager", fullgraph=True)()


def heads(groups: int = 1, tokens: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Any, Tensor, Tensor, Tensor]:
    """A module, and a query, keys and values of ten tokens; values have heads of another size."""
    generator = torch.Generator().manual_seed(0)
    module: Any = nn.Module()
    module.num_key_value_groups = groups
    sizes = ((2, 2 * groups, tokens, 16), (2, 2, 10, 16), (2, 2, 10, 8))
    query, key, value = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return module, query, key, value


def seen(*shape: int) -> Tensor:
    """A mask; every row sees its last token."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[..., -1] = True
    return mask


MASKS: dict[str, Callable[[int], Tensor | None]] = {
    "none": lambda _: None,
    "of all heads": lambda _: seen(2, 1, 1, 10),
    "of all rows": lambda _: seen(1, 1, 1, 10),
    "per head": lambda count: seen(2, count, 1, 10),
    "per head of all rows": lambda count: seen(1, count, 1, 10),
    "added": lambda _: torch.where(seen(2, 1, 1, 10), 0.0, torch.finfo(torch.float32).min),
    "added per head": lambda count: torch.randn(2, count, 1, 10, generator=torch.Generator().manual_seed(2)),
}


@in_one_test("groups", [1, 3])
@in_one_test("mask", MASKS)
@in_one_test("scaling", [None, 0.5])
def test_the_numbers_are_those_of_the_formula(groups: int, mask: str, scaling: float | None) -> None:
    """In float64, head by head; and SDPA's."""
    module, query, key, value = heads(groups)
    masked = MASKS[mask](2 * groups)
    found = compiled(module, query, key, value, masked, scaling=scaling)
    assert found.shape == (2, 1, 2 * groups, 8)
    assert found.is_contiguous()
    for batch in range(2):
        for head in range(2 * groups):
            q, k, v = query[batch, head, 0], key[batch, head // groups], value[batch, head // groups]
            scores = (k.double() @ q.double()) * (0.25 if scaling is None else scaling)
            if masked is not None:
                row = masked[batch if len(masked) > 1 else 0, head if masked.shape[1] > 1 else 0, 0]
                scores = torch.where(row, scores, -torch.inf) if row.dtype == torch.bool else scores + row.double()
            weights = (scores - scores.max()).exp()
            assert torch.allclose(found[batch, 0, head].double(), (weights / weights.sum()) @ v.double(), atol=1e-6)
    sdpa, _ = sdpa_attention_forward(module, query, key, value, masked, scaling=scaling)
    assert torch.allclose(found, sdpa, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 4])
def test_half_precision(tokens: int) -> None:
    """The products and the sum are in FP32; several tokens are SDPA's."""
    module, query, key, value = heads(3, tokens, torch.bfloat16)
    found = compiled(module, query, key, value, None, is_causal=False)
    sdpa, _ = sdpa_attention_forward(module, query, key, value, None, is_causal=False)
    exact, _ = sdpa_attention_forward(module, query.double(), key.double(), value.double(), None, is_causal=False)
    assert found.dtype == torch.bfloat16
    if tokens == 1:
        assert torch.equal(found, exact.bfloat16())
    else:
        assert torch.equal(found, sdpa)


def test_eager_bias_and_dropout_use_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """In eager, where a product of all pairs would be stored; a bias; dropout."""
    module, query, key, value = heads()
    calls: list[Any] = []

    def sdpa(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        calls.append(kwargs)
        return query, None

    monkeypatch.setattr("fp8graph.extras.decode_attention.sdpa_attention_forward", sdpa)
    decode_attention(module, query, key, value, None)
    for kwargs in ({"position_bias": torch.zeros(1)}, {"dropout": 0.5}, {"softcap": 30.0}):
        compiled(module, query, key, value, None, **kwargs)
    assert len(calls) == 4
    compiled(module, query, key, value, None)
    assert len(calls) == 4


@pytest.mark.slow
def test_generation() -> None:
    """Prefill with SDPA, then decoding: the tokens of a model that uses SDPA for both."""
    model = model_of("llama", torch.float32, layers=1)
    plain = generate(model, Fp8StaticCache(model.config, 20), tokens=5)
    use_decode_attention(model)
    fp8graph.compile(model, policy=NONE, compiler="eager", dynamic=False, fullgraph=True)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0  # a mask per sequence
    found = generate(model, Fp8StaticCache(model.config, 20), tokens=5, disable_compile=True)
    assert torch.equal(found.sequences, plain.sequences)
    assert all(sqnr_db(a, b) > 60 for a, b in zip(plain.logits, found.logits, strict=True))
    graphs = fp8graph.backend_of(model).report.graphs
    assert ["scaled_dot_product" in graph.before for graph in graphs] == [True, False]


def bytes_of_a_step(fp8: bool, fused: bool) -> float:
    """MiB that generated kernels move to make SDPA's inputs, or (``fused``) to compute attention, in one step.

    There are 8192 tokens in the cache of 2 sequences, 2 key heads of 64 numbers: keys are 4 MiB in bf16, and so are
    values. 2 heads share a key head. Kernels that write a new token in place are left out: Inductor counts all tokens.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = causal_lm("Llama", hidden_size=256, head_dim=64)(1).bfloat16().eval()
    if fused:
        use_decode_attention(model)
    cache = Fp8StaticCache(model.config, 8192) if fp8 else StaticCache(config=model.config, max_cache_len=8192)
    backend = Generating(NONE, target="sm_90")
    with torch.no_grad():
        model(IDS, past_key_values=cache)
        step = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
        step(IDS[:, :1], past_key_values=cache)
    kernels = [kernel for kernel in backend.generator.kernels if kernel.bytes > MIB / 8]
    assert any("scaled_dot_product" in kernel.name for kernel in backend.generator.kernels) != fused
    reading = ("sum", "softmax") if fused else ("scaled_dot_product",)
    return sum(kernel.bytes for kernel in kernels if any(name in kernel.name for name in reading)) / MIB


@pytest.mark.release
@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
def test_bytes_of_a_step_on_a_gpu() -> None:
    """SDPA's keys and values are copied for all four heads (2 x 8 MiB, which it reads again); fused, nothing is."""
    sdpa = 16  # MiB that its kernel reads
    bf16, fp8 = (bytes_of_a_step(each, False) + sdpa for each in (False, True))
    bf16_fused, fp8_fused = (bytes_of_a_step(each, True) for each in (False, True))
    assert bf16 == pytest.approx(2 * (4 + 8) + sdpa, abs=0.1)
    assert fp8 == pytest.approx(2 * (2 + 0.125 + 8) + sdpa, abs=0.1)  # bytes and scales; the copy is made of them
    assert bf16_fused == pytest.approx(2 * 4 + 0.25 * 3, abs=0.5)  # and the scores in FP32
    assert fp8_fused == pytest.approx(2 * (2 + 0.125) + 0.25 * 3, abs=0.5)


@pytest.mark.slow
@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="triton 3.6's interpreter fails with numpy 2.4")
def test_the_gpu_code_computes_it() -> None:
    """Executed by Triton's interpreter: a token is written into the cache bit for bit, and attention of what is stored,
    which stays in FP32 on its way to the product, is as exact as bf16 can say."""
    path = os.pathsep.join(map(str, (ROOT / "tests" / "support", ROOT / "tests", ROOT)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "interpreted_cache"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same"]
    assert found["sqnr_db"] > found["best"] - 0.5


def sparse() -> Any:
    """A model whose attention chooses the keys that it attends to."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    return DeepseekV32ForCausalLM(DeepseekV32Config(**sizes))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(1, 1), "takes a model of transformers, not Linear"),
        (lambda: TINY["gpt_oss"].build(1), r"GptOssForCausalLM has attention that SDPA does not compute \(sinks,"),
        (lambda: TINY["falcon"].build(1), "FalconForCausalLM does not take its attention from transformers'"),
        (sparse, r"DeepseekV32ForCausalLM has attention that chooses its keys \(its cache keeps a \w+\)"),
    ],
)
def test_other_models_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        use_decode_attention(make())
