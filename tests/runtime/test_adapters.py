"""PEFT's merges are noticed without a call, and its unloading is not silent."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from torch import nn

import fp8graph
from fp8graph.runtime.staleness import PeftMerges
from helpers import eager_backend, first_slow, same_bits
from tiny_models import causal_lm

# transformers, of the names that PEFT still types
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning")
IDS = torch.arange(16)[None]


class Layer(nn.Module):
    """As PEFT's layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(2, 2)
        self.merged_adapters: list[str] = []


def test_merge_is_noticed_once() -> None:
    adapters, model = PeftMerges(), nn.Sequential(Layer(), Layer())
    assert not adapters.changed()
    adapters.watch(model)
    adapters.watch(model)
    assert not adapters.changed()
    for change in (lambda m: m.append("a"), lambda m: m.append("b"), lambda m: m.pop(), lambda m: m.clear()):
        change(model[1].merged_adapters)
        assert adapters.changed()
        assert not adapters.changed()
    model[0].merged_adapters.append("a")  # pyright: ignore
    del model
    gc.collect()
    assert not adapters.changed()
    assert (adapters._merged, adapters._seen, adapters._layers) == ({}, {}, [])


def adapted(**settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    names = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(r=8, target_modules=names, init_lora_weights=False, **settings)
    return get_peft_model(causal_lm("Llama")(1).bfloat16(), config).eval()


@first_slow("bound", [False, True])
@first_slow("how", ["in place", "wrapper", "function"])
def test_merging_and_back(bound: bool, how: str) -> None:
    model = adapted()
    backend = eager_backend(None, cache_weights=True)
    if bound:
        backend.bind(model)
    run: Any = model
    if how == "in place":
        model.compile(backend=backend)
    elif how == "wrapper":
        run = torch.compile(model, backend=backend)
    else:
        run = torch.compile(lambda input_ids: model(input_ids=input_ids), backend=backend)
    for _ in range(2):  # the second time no code is compiled that could tell
        for change in (model.merge_adapter, model.unmerge_adapter):
            with torch.no_grad():
                run(input_ids=IDS)
                change()
                noticed = run(input_ids=IDS).logits
                quantized = backend.weights.quantized
                assert same_bits([run(input_ids=IDS).logits], [noticed])
                assert backend.weights.quantized == quantized  # and not in each call
                backend.refresh_weights()
                assert same_bits([run(input_ids=IDS).logits], [noticed])
    assert len(backend.report.graphs) == 2


def warnings_of_unloading(caplog: pytest.LogCaptureFixture) -> int:
    return caplog.text.count("merge_and_unload() or unload() returns is not compiled")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["merge_and_unload", "unload"])
def test_unloading_is_said(method: str, caplog: pytest.LogCaptureFixture) -> None:
    model = adapted()
    fp8graph.compile(model, compiler="eager")
    model(input_ids=IDS)
    with caplog.at_level(logging.WARNING, logger="fp8graph"):
        result = getattr(model, method)()
    assert warnings_of_unloading(caplog) == 1
    fp8graph.compile(result, compiler="eager")
    result(input_ids=IDS)
    assert any(g.recipe for g in fp8graph.backend_of(result).report.gemms)


@pytest.mark.slow
def test_model_stays_compiled_after_unload(caplog: pytest.LogCaptureFixture) -> None:
    from peft import LoraConfig, get_peft_model

    inner: Any = causal_lm("Llama")(1)
    fp8graph.compile(inner, compiler="eager")
    model: Any = get_peft_model(inner, LoraConfig(r=4, target_modules=["q_proj"]))
    model(input_ids=IDS)
    with caplog.at_level(logging.WARNING, logger="fp8graph"):
        result = model.merge_and_unload()
    assert warnings_of_unloading(caplog) == 0
    assert fp8graph.backend_of(result).report.gemms


@pytest.mark.slow
def test_freed_model_does_not_count_as_unloaded(caplog: pytest.LogCaptureFixture) -> None:
    model = adapted()
    fp8graph.compile(model, compiler="eager")
    model(input_ids=IDS)
    with caplog.at_level(logging.WARNING, logger="fp8graph"):
        torch._dynamo.reset()
        del model
        gc.collect()
    assert warnings_of_unloading(caplog) == 0
