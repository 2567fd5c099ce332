"""A model as a workload."""

from __future__ import annotations

import pytest
import torch

import fp8graph
from fp8graph.extras.planning import workload
from tiny_models import llama_config
from workloads import llama, tiny_model


@pytest.mark.slow
def test_a_model_becomes_a_workload() -> None:
    """The sizes read from Hugging Face's model and its report are those that the tests make by hand."""
    config = llama_config(2)
    with torch.device("meta"):
        model = tiny_model(config)
    ids = torch.zeros(1, 32, dtype=torch.long)
    report = fp8graph.explain(model, input_ids=ids, labels=ids, target="sm_90", training=True)
    expected = llama(
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        layers=2,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        vocabulary=config.vocab_size,
        seq=32,
    )
    assert workload.of_model(model, report, 32) == expected
