"""forms: the form in which a format stores a recipe's weights, and the reasons where it has none."""

from __future__ import annotations

import pytest
import torch

from fp8graph.backend.multiplied import Multiplied
from fp8graph.checkpoints import compressed_tensors, dequantize
from fp8graph.errors import CheckpointError, ConfigError
from fp8graph.numerics import api
from fp8graph.recipes import NVFP4BlockScaling
from fp8graph.tools.forms import Kind, as_stored, chosen, kind_of

BLOCK, ROW, TENSOR, NVFP4 = ("block", (128, 128)), ("row", (0, 0)), ("tensor", (0, 0)), ("nvfp4", (1, 16))


@pytest.mark.parametrize(
    ("kinds", "inputs", "method"),
    [
        ({"a": BLOCK, "b": BLOCK}, (), "fp8"),
        ({"a": ROW}, (), "compressed-tensors"),
        ({"a": BLOCK, "b": ROW}, (), "compressed-tensors"),
        ({"a": TENSOR}, (), "fp8"),
        ({"a": TENSOR, "b": ROW}, ("a",), "compressed-tensors"),
    ],
)
def test_the_first_format_with_a_form_for_all(kinds: dict[str, Kind], inputs: tuple[str, ...], method: str) -> None:
    quantization, forms = chosen("auto", kinds, inputs)
    assert quantization.method == method
    assert forms.keys() == set(kinds.values())


def test_reasons() -> None:
    with pytest.raises(
        CheckpointError, match=r"fp8: .*several; compressed-tensors: it stores a static scale .*calibration"
    ):
        chosen("auto", {"a": TENSOR, "b": BLOCK}, ())
    with pytest.raises(
        CheckpointError, match="modelopt: a is quantized as 'block' with 128x128 tiles, for which it has"
    ):
        chosen("modelopt", {"a": BLOCK}, ())
    with pytest.raises(ConfigError, match="format must be one of auto, fp8, compressed-tensors, modelopt, not 'fp9'"):
        chosen("fp9", {"a": BLOCK}, ())


def test_square_tiles_of_fp4_are_written_row_by_row() -> None:
    weight = torch.randn(32, 64)
    made = api.quantize(weight, NVFP4BlockScaling(), "weight", "rowwise")
    own = Multiplied(parameter="a.weight", data=made.data, scale_inv=made.scale_inv, quantizer=made.quantizer,
                     global_scale_inv=made.global_scale_inv)  # fmt: skip
    assert kind_of(own) == NVFP4
    stored = as_stored(own, compressed_tensors.layer_format("NVFP4"), torch.tensor(3.0))
    assert stored.scale_inv.shape == (32, 4)
    assert stored.input_scale_inv == torch.tensor(3.0) / (6 * 448)
    torch.testing.assert_close(dequantize(stored), api.dequantize(made), rtol=1e-6, atol=0)
