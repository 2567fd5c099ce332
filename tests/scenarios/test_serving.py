"""Serving: generate() with a static cache is two graphs; an FP8 cache is decoded where attention's inputs are made."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import fp8graph
from fp8_checkpoints import CONFIG, IDS, model
from fp8graph.tools.export import export_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("bf16")
    model().save_pretrained(source)
    return export_folder(source, source / "fp8", recipe="rowwise", format="compressed-tensors")


@pytest.mark.slow
def test_prefill_and_decode_are_a_graph_each(folder: Path) -> None:
    llama: Any = LlamaForCausalLM(copy.deepcopy(CONFIG))
    llama.to(torch.bfloat16).eval()
    fp8graph.compile(fp8graph.load_checkpoint(llama, folder), compiler="eager", fullgraph=True, dynamic=False)
    settings = {"cache_implementation": "static", "disable_compile": True, "do_sample": False}
    prompt = IDS[:1, :8]
    first = llama.generate(prompt, **settings, min_new_tokens=5, max_new_tokens=5)
    backend = fp8graph.backend_of(llama)
    sizes = [{gemm.m for gemm in graph.gemms if gemm.fqn != "lm_head"} for graph in backend.report.graphs]
    assert sizes == [{8}, {1}]
    for graph in backend.report.graphs:
        assert {gemm.recipe for gemm in graph.gemms if gemm.fqn != "lm_head"} == {"rowwise"}
    again = llama.generate(prompt, **settings, min_new_tokens=5, max_new_tokens=5)
    assert torch.equal(first, again)
    assert len(backend.report.graphs) == 2
    assert backend.weights.bytes == 0  # the bytes of the checkpoint, and no others


class Attention(nn.Module):
    """Attention of one token to a cache, as transformers' caches give it: decoded, with the new token behind."""

    def __init__(self, *, quantized: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(256, 256, bias=False, dtype=torch.bfloat16) for _ in range(3))
        self.quantized = quantized

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, scales: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 64)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.quantized:
            keys, values = (keys.float() * scales[0]).to(x.dtype), (values.float() * scales[1]).to(x.dtype)
        k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.slow
def test_an_fp8_cache_is_decoded_where_attentions_inputs_are_made() -> None:
    kernels: dict[bool, list[str]] = {}
    bytes_moved: dict[bool, int] = {}
    for quantized in (False, True):
        dtype = torch.float8_e4m3fn if quantized else torch.bfloat16
        cache = [torch.randn(2, 4, 128, 64).to(dtype) for _ in range(2)]
        x, scales = torch.randn(2, 1, 256, dtype=torch.bfloat16), torch.rand(2, 1, 4, 1, 1)
        with torch.no_grad():
            report = fp8graph.explain(Attention(quantized=quantized), x, *cache, scales, target="sm_90")
        found = [kernel for kernel in report.kernels if kernel.graph == "forward"]
        kernels[quantized] = [kernel.name for kernel in found]
        bytes_moved[quantized] = sum(kernel.bytes for kernel in found)
    assert kernels[True] == kernels[False]
    numbers = 2 * 2 * 4 * 128 * 64  # keys and values: one byte each is not read
    assert bytes_moved[False] - bytes_moved[True] == pytest.approx(numbers, rel=0.01)
