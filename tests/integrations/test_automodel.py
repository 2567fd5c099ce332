"""NeMo-Automodel compiles with the backend that its config names, and returns the eager model if that fails."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import fp8graph
from fp8graph import ConfigError
from tiny_models import causal_lm
from trainers_page import wrong_set_ups

utils: Any = pytest.importorskip("nemo_automodel.components.utils.compile_utils")
IDS = torch.arange(32).view(2, 16)


@pytest.fixture(autouse=True)
def _start() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def config(backend: str, **options: Any) -> Any:
    """Build its config from the section ``compile`` of a recipe."""
    return utils.build_compile_config({"enabled": True, "backend": backend, "options": options})


def trained(model: Any) -> float:
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.item()


def test_a_recipe_names_the_backend() -> None:
    expected = trained(causal_lm("Llama")(2).bfloat16())
    torch.manual_seed(0)
    model = utils.compile_model(causal_lm("Llama")(2).bfloat16(), config("fp8graph:tensorwise", compiler="eager"))
    assert trained(model) == pytest.approx(expected, rel=0.01)
    gemms = fp8graph.backend_of(model).report.gemms
    assert sum(gemm.recipe == "tensorwise" for gemm in gemms) >= 2 * 7 * 3
    assert next(iter(gemms)).fqn.startswith("model.layers.0.")


def test_a_model_is_compiled_in_place() -> None:
    model = causal_lm("Llama")(1).bfloat16()
    utils.compile_module_inplace(model, config("fp8graph:tensorwise", compiler="eager"))
    trained(model)
    assert {gemm.recipe for gemm in fp8graph.backend_of(model).report.gemms} >= {"tensorwise"}


def test_a_wrong_name_is_in_its_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = wrong_set_ups("Automodel")[:1]
    with caplog.at_level(logging.ERROR):
        model = utils.compile_model(causal_lm("Llama")(1), config("fp8graph:rowise"))
    assert message in caplog.text
    with pytest.raises(ConfigError):
        fp8graph.backend_of(model)


def test_a_wrong_option_stops_the_first_call() -> None:
    (_, message) = wrong_set_ups("Automodel")
    model = utils.compile_model(causal_lm("Llama")(1), config("fp8graph", recipe="rowise"))
    with pytest.raises(Exception, match=message):
        trained(model)
