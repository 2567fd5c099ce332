"""torchao's weights of nn.Linear, multiplied as they are stored, forward and backward."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8graph
from fp8_checkpoints import FORMATS, load
from fp8graph.numerics import sqnr_db
from helpers import first_fast

pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("torchao-rowwise", "rowwise"),
        ("torchao-tensorwise", "tensorwise"),
        ("torchao-weight-only", None),
        ("torchao-mxfp8", "mxfp8"),
        ("torchao-nvfp4-weight-only", None),
    ],
)
def test_a_linear_of_a_checkpoint(name: str, recipe: str | None, tmp_path: Path) -> None:
    FORMATS[name].write(tmp_path)
    linear = load(tmp_path).model.layers[0].mlp.down_proj
    weight = linear.weight.dequantize().double()  # of torchao
    fp8graph.compile(linear, compiler="eager", fullgraph=True)
    x = torch.randn(64, 512, dtype=torch.bfloat16, requires_grad=True)
    y = linear(x)
    y.backward(dy := torch.randn_like(y))
    (fprop, dgrad) = fp8graph.backend_of(linear).report.gemms
    assert (fprop.recipe, dgrad.recipe) == (recipe, None if recipe == "mxfp8" else recipe)
    assert sqnr_db(x.detach().double() @ weight.t(), y) > 27
    assert x.grad is not None
    assert sqnr_db(dy.double() @ weight, x.grad) > 25


@pytest.mark.slow
def test_the_tensors_that_a_weight_wraps_are_parameters(tmp_path: Path) -> None:
    FORMATS["torchao-tensorwise"].write(tmp_path)
    model: Any = fp8graph.compile(load(tmp_path), compiler="eager", cache_weights="update", fullgraph=True)
    for _ in range(2):
        model(inputs_embeds=torch.randn(1, 16, 256, dtype=torch.bfloat16, requires_grad=True)).logits.sum().backward()
    backend = fp8graph.backend_of(model)
    assert backend.report.in_no_graph == []
    stored = [module for name, module in model.named_modules() if name.endswith("_proj")]
    assert backend.weights.bytes == sum(module.weight.qdata.numel() for module in stored)  # transposed once, for dgrad


@first_fast("how", ["compile", "torch.compile"])
def test_a_model_that_torchao_converted_for_training(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """The model quantizes its operands itself: one warning, however many layers and graphs there are."""
    from torchao.float8 import convert_to_float8_training  # pyright: ignore

    torch._dynamo.reset()
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name != "0")

    def compiled(**kwargs: Any) -> Any:
        if how == "compile":
            return fp8graph.compile(model, compiler="eager", **kwargs)
        return torch.compile(model, backend=fp8graph.Backend(compiler="eager", **kwargs))

    run = compiled()
    run(torch.randn(16, 32)).sum().backward()
    with torch.no_grad():
        run(torch.randn(16, 32))
    (message,) = [r.getMessage() for r in caplog.records if "quantizes" in r.getMessage()]
    assert message.startswith("1 (torchao.float8.float8_linear.Float8Linear) quantizes its operands itself, ")
    torch._dynamo.reset()
    with pytest.raises(fp8graph.Fp8CoverageError, match=r"^strict mode: 1 \(torchao\.float8.* quantizes"):
        compiled(strict=True)(torch.randn(16, 32))


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_weights_in_int8_are_said_to_be_quantized_a_second_time(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """The rule leaves one of them alone; the other layers have usual weights."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch._dynamo.reset()
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64).bfloat16() for _ in range(4)))
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda _, name: name in ("0", "1", "2"))
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point() and type(parameter) is torch.nn.Parameter)
    backend = fp8graph.Backend(fp8graph.Policy([fp8graph.Rule("1", None)], default="tensorwise"), compiler="eager")
    call = fp8graph.compile(model, backend=backend) if how == "in place" else torch.compile(model, backend=backend)
    with caplog.at_level(logging.WARNING, "fp8graph"):
        for _ in range(3):
            call(torch.randn(32, 64).bfloat16())
    (text,) = [record.getMessage() for record in caplog.records if record.name == "fp8graph"]
    assert text.startswith("The weight of 0 arrives quantized (Int8Tensor, torch.int8)")
    assert "and so it is with 1 more" in text


def test_weights_in_int8_that_no_rule_quantizes_again_are_not_said(caplog: pytest.LogCaptureFixture) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64).bfloat16(), torch.nn.Linear(64, 64).bfloat16())
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda _, name: name == "0")
    policy = fp8graph.Policy([fp8graph.Rule("0", None)], default="tensorwise", min_speedup=0)
    fp8graph.compile(model, policy, compiler="eager", strict=True)
    for _ in range(3):
        model(torch.randn(32, 64).bfloat16())
    assert not [record for record in caplog.records if record.name == "fp8graph"]
