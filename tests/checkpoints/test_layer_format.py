"""Which tensors a layer needs, what is wrong with them, and that what is written is what was read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8graph.checkpoints.compressed_tensors import layer_format
from fp8graph.checkpoints.hugging_face_fp8 import HuggingFaceFP8
from fp8graph.checkpoints.layer_format import LayerFormat, QuantizedWeight
from fp8graph.checkpoints.modelopt import ALGORITHMS
from fp8graph.checkpoints.shards import Shards
from fp8graph.checkpoints.writing import write_shards
from fp8graph.errors import CheckpointError
from helpers import in_one_test

E4M3 = torch.float8_e4m3fn


def fp8(*shape: int) -> Tensor:
    return torch.ones(shape).to(E4M3)


TILES = HuggingFaceFP8().linear()
NVFP4 = ALGORITHMS["NVFP4"]
WHOLE = {"a.weight": fp8(256, 384), "a.weight_scale_inv": torch.rand(2, 3)}
PACKED = {
    "a.weight": torch.ones(8, 16, dtype=torch.uint8),
    "a.weight_scale": fp8(8, 2),
    "a.weight_scale_2": torch.tensor(0.5),
    "a.input_scale": torch.tensor([0.25]),
}


def shards(folder: Path, tensors: dict[str, Tensor]) -> Shards:
    write_shards(folder, tensors.items())
    return Shards(folder)


def test_a_layer_that_is_whole(tmp_path: Path) -> None:
    found = shards(tmp_path, WHOLE)
    weight = TILES.read("a", found.tensors, found.tensor)
    assert weight.block == (128, 128)
    assert torch.equal(weight.data.float(), WHOLE["a.weight"].float())
    assert torch.equal(weight.scale_inv, WHOLE["a.weight_scale_inv"])
    assert weight.input_scale_inv is None


def test_a_packed_layer(tmp_path: Path) -> None:
    found = shards(tmp_path, PACKED)
    weight = NVFP4.read("a", found.tensors, found.tensor)
    assert (weight.shape, weight.block, weight.global_scale_inv, weight.input_scale_inv) == (
        (8, 32),
        (1, 16),
        0.5,
        0.25,
    )
    assert (weight.global_scale, weight.input_scale) == (None, None)


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {other: tensor for other, tensor in tensors.items() if other != name}


@pytest.mark.parametrize(
    ("stored", "tensors", "message"),
    [
        (
            TILES,
            without(WHOLE, "a.weight_scale_inv"),
            "the scale of layer 'a' is missing: there is no tensor 'a.weight_s",
        ),
        (TILES, without(WHOLE, "a.weight"), "the weight of layer 'a' is missing"),
        (
            NVFP4,
            without(PACKED, "a.weight_scale_2"),
            "the global scale of layer 'a' is missing: there is no tensor 'a.w",
        ),
        (NVFP4, without(PACKED, "a.input_scale"), "the input scale of layer 'a' is missing"),
        (
            TILES,
            WHOLE | {"a.weight_scale_inv": torch.rand(2, 2)},
            r"model.safetensors: tensor 'a.weight_scale_inv' has shape \[2, 2\], and 'a.weight' of shape \[256, 384\] "
            r"needs \[2, 3\] .dynamic 128x128",
        ),
        (TILES, WHOLE | {"a.weight_scale_inv": torch.rand(3, 2)}, r"has shape \[3, 2\]"),
        (TILES, WHOLE | {"a.weight_scale_inv": torch.rand(2, 3).double()}, "is F64, which no scale of dynamic 128x128"),
        (TILES, WHOLE | {"a.weight": torch.rand(256, 384)}, "tensor 'a.weight' is F32, not float8_e4m3fn"),
        (
            TILES,
            {"a.weight": fp8(3), "a.weight_scale_inv": torch.rand(1, 1)},
            r"has shape \[3\], and a weight has 2 dims",
        ),
        (NVFP4, PACKED | {"a.weight_scale": fp8(8, 1)}, r"has shape \[8, 1\], .*needs \[8, 2\]"),
        (
            NVFP4,
            PACKED | {"a.weight_scale_2": torch.rand(8)},
            r"'a.weight_scale_2' has shape \[8\], .*needs one number",
        ),
        (NVFP4, PACKED | {"a.weight_scale": torch.rand(8, 2)}, "'a.weight_scale' is F32, which no scale of NVFP4 is"),
        (NVFP4, PACKED | {"a.weight": fp8(8, 16)}, "tensor 'a.weight' is F8_E4M3, not uint8 or int8"),
    ],
)
def test_read_refuses_tensors_that_do_not_fit(
    tmp_path: Path, stored: LayerFormat, tensors: dict[str, Tensor], message: str
) -> None:
    found = shards(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=message):
        stored.read("a", found.tensors, found.tensor)


def given(stored: LayerFormat, **more: Any) -> QuantizedWeight:
    shape = n, k = 256, 256
    data = torch.zeros(n, k // 2, dtype=torch.uint8) if stored.packed else fp8(n, k)
    scale = torch.ones(stored.grid(shape)).to(stored.scale_dtypes[0])
    return QuantizedWeight(data=data, scale_inv=scale, block=stored.tile(shape), **more)


def test_shapes_as_each_library_writes_them() -> None:
    static = {"input_scale_inv": torch.tensor(0.5)}
    cases: list[tuple[LayerFormat, dict[str, Any], dict[str, tuple[int, ...]]]] = [
        (TILES, {}, {"a.weight_scale_inv": (2, 2)}),
        (
            HuggingFaceFP8(block=None, static=True).linear(),
            static,
            {"a.weight_scale_inv": (), "a.activation_scale": ()},
        ),
        (layer_format("FP8"), static, {"a.weight_scale": (1,), "a.input_scale": (1,)}),
        (layer_format("FP8_DYNAMIC"), {}, {"a.weight_scale": (256, 1)}),
        (layer_format("MXFP8"), {}, {"a.weight_scale": (256, 8)}),
        (ALGORITHMS["FP8"], static, {"a.weight_scale": (), "a.input_scale": ()}),
        (ALGORITHMS["FP8_PER_CHANNEL_PER_TOKEN"], {}, {"a.weight_scale": (256,)}),
        (ALGORITHMS["FP8_PB_WO"], {}, {"a.weight_scale": (2, 1, 2, 1)}),
    ]
    for stored, more, shapes in cases:
        written = {name: tuple(tensor.shape) for name, tensor in stored.write("a", given(stored, **more))}
        assert written == {"a.weight": (256, 256), **shapes}


def test_factors_become_divisors() -> None:
    """A scale that one library stores as a factor and another as a divisor is inverted, with one division."""
    stored = layer_format("NVFP4")
    factors = {"global_scale_inv": torch.tensor(0.125), "input_scale_inv": torch.tensor(3.0)}
    written = dict(stored.write("a", given(stored, **factors)))
    assert torch.equal(written["a.weight_global_scale"], torch.tensor([8.0]))
    assert torch.equal(written["a.input_global_scale"], torch.tensor([3.0]).reciprocal())
    divisors = {"global_scale": torch.tensor(8.0), "input_scale": torch.tensor(3.0)}
    assert torch.equal(dict(stored.write("a", given(stored, **divisors)))["a.input_global_scale"], torch.tensor([3.0]))
    assert dict(NVFP4.write("a", given(NVFP4, **divisors)))["a.weight_scale_2"] == 0.125


@in_one_test(
    ("stored", "weight", "message"),
    [
        (TILES, given(ALGORITHMS["NVFP4"]), "its numbers are torch.uint8"),
        (TILES, given(layer_format("FP8_DYNAMIC")), r"its tiles are \(1, 256\), not \(128, 128\)"),
        (TILES, replace(given(TILES), scale_inv=torch.ones(2, 1)), r"its scales have shape \[2, 1\], not \[2, 2\]"),
        (TILES, replace(given(TILES), scale_inv=torch.ones(2, 2).to(torch.uint8)), "its scales are torch.uint8"),
        (ALGORITHMS["FP8"], given(ALGORITHMS["FP8"]), "it has no input scale"),
        (TILES, given(TILES, input_scale_inv=torch.ones(())), "there is no tensor for its input scale"),
        (layer_format("NVFP4A16"), given(layer_format("NVFP4A16")), "it has no global scale"),
    ],
)
def test_write_refuses_weights_of_another_format(stored: LayerFormat, weight: QuantizedWeight, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"layer 'a' cannot be written as {stored.scheme}: {message}"):
        list(stored.write("a", weight))


def test_the_ragged_edge(tmp_path: Path) -> None:
    tensors = {"a.weight": fp8(130, 200), "a.weight_scale_inv": torch.rand(2, 2)}
    found = shards(tmp_path, tensors)
    assert TILES.read("a", found.tensors, found.tensor).shape == (130, 200)


def test_fused_experts(tmp_path: Path) -> None:
    """The halves of a small gate_up_proj have a scale each, as transformers' FP8Experts keeps room for both."""
    tensors = {"a.experts.gate_up_proj": fp8(4, 64, 256), "a.experts.gate_up_proj_scale_inv": torch.rand(4, 2, 2)}
    found = shards(tmp_path, tensors)
    first, *_ = HuggingFaceFP8().layer_formats("a.experts.gate_up_proj")
    weight = first.read("a.experts.gate_up_proj", found.tensors, found.tensor)
    assert (weight.shape, weight.block) == ((4, 64, 256), (32, 128))
    assert dict(first.write("a.experts.gate_up_proj", weight)).keys() == tensors.keys()


def wrong(folder: Path, stored: LayerFormat, tensors: dict[str, Tensor]) -> list[str]:
    found = shards(folder, tensors)
    return [text.partition(": ")[2] for text in stored.wrong_scales("a", found.tensors, found.tensor)]


def test_a_scale_of_zero_is_right_for_zeros(tmp_path: Path) -> None:
    scales = torch.ones(2, 3)
    scales[1, 2] = 0
    data = torch.ones(256, 384)
    data[128:, 256:] = 0
    held = {"a.weight": data.to(E4M3), "a.weight_scale_inv": scales}
    assert wrong(tmp_path, TILES, held) == []
    data[255, 383] = 1
    held = {"a.weight": data.to(E4M3), "a.weight_scale_inv": scales}
    assert wrong(tmp_path, TILES, held) == ["tensor 'a.weight_scale_inv' has 1 of 6 scales that are zero"]


def test_small_scales_that_were_rounded_to_zero(tmp_path: Path) -> None:
    assert wrong(tmp_path, NVFP4, {**PACKED, "a.weight_scale": torch.zeros(8, 2).to(E4M3)}) == []
    for name in ("a.weight_scale_2", "a.input_scale"):
        assert wrong(tmp_path, NVFP4, {**PACKED, name: torch.zeros_like(PACKED[name])}) == [
            f"tensor {name!r} has 1 of 1 scales that are zero"
        ]


@pytest.mark.parametrize("stored", [TILES, replace(TILES, least_rows=2), layer_format("FP8")])
@pytest.mark.parametrize("shape", [(0, 256), (1, 256), (256, 0)])
def test_weights_without_rows_or_columns(stored: LayerFormat, shape: tuple[int, int], tmp_path: Path) -> None:
    names = stored.names("a")
    given = {names["weight"]: fp8(*shape), names["scale"]: torch.ones(9, 9)}
    found = shards(tmp_path, given)
    assert any("has shape [9, 9]" in text for text in stored.problems("a", found.tensors))
