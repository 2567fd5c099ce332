"""The report on a checkpoint with known numbers; one layer is read at a time."""

from __future__ import annotations

import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8graph.checkpoints import Checkpoint, QuantizedWeight, write_checkpoint
from fp8graph.checkpoints.compressed_tensors import CompressedTensors, layer_format
from fp8graph.checkpoints.hugging_face_fp8 import HuggingFaceFP8
from fp8graph.checkpoints.layer_format import LayerFormat
from fp8graph.checkpoints.shards import Shards
from fp8graph.tools.inspect_checkpoint import inspect

OTHERS = {"model.embed.weight": torch.ones(100, 4, dtype=torch.bfloat16), "norm.weight": torch.ones(112)}


def tiles(numbers: list[float], scales: list[float]) -> tuple[LayerFormat, QuantizedWeight]:
    """A weight [128, 128 * scales]; ``numbers`` come first in it, and ones after them."""
    data = torch.ones(128 * 128 * len(scales))
    data[: len(numbers)] = torch.tensor(numbers)
    scale_inv = torch.tensor([scales])
    data = data.reshape(128, -1).to(torch.float8_e4m3fn)
    return HuggingFaceFP8().linear(), QuantizedWeight(data=data, scale_inv=scale_inv, block=(128, 128))


def written(folder: Path, **more: Any) -> Path:
    layers = {
        "model.calm": tiles([0.0] * 64, [1.0, 1.0]),
        "model.loud": tiles([448.0] * 32 + [-448.0] * 32, [0.5, 1.0]),
        "model.wide": tiles([], [0.125, 1.0]),
    }
    return write_checkpoint(
        folder / "model",
        layers=((name, *layer) for name, layer in layers.items()),
        others=OTHERS.items(),
        quantization=HuggingFaceFP8,
        ignore=["lm_head"],
        **more,
    )


def test_all_that_is_said(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    folder = written(tmp_path, max_shard_bytes=50_000)
    found = inspect(Checkpoint(folder), progress=lambda done, total: told.append((done, total)))
    size = 128 * 256 + 2 * 4
    assert told == [(size, 3 * size), (2 * size, 3 * size), (3 * size, 3 * size)]
    assert (found.format, found.files, found.bytes) == ("Hugging Face FP8", 3, 3 * size + 800 + 448)
    assert found.dtypes == {"F8_E4M3": (3, 3 * 128 * 256), "BF16": (1, 800), "F32": (4, 24 + 448)}
    (scheme,) = found.schemes
    assert (scheme.layers, scheme.tile, scheme.scales, scheme.input) == (3, "128x128", "F32", "dynamic, 1x128")
    assert found.quantized_share == 3 * 128 * 256 / (3 * 128 * 256 + 512)
    assert (found.high_precision, found.ignore, found.problems) == (["model.embed"], ["lm_head"], [])
    calm, loud, wide = found.layers
    assert (calm.zero, calm.saturated, calm.scale_ratio) == (64 / 32768, 0, 1)
    assert (loud.zero, loud.saturated, loud.scale_ratio, loud.largest_scale) == (0, 64 / 32768, 2, 1)
    assert (wide.scale_ratio, wide.nan, wide.shape, wide.bytes) == (8, 0, (128, 256), size)
    assert [one.layer for one in found.outliers(1)] == ["model.wide", "model.loud"]
    json.dumps(found.to_dict(), allow_nan=False)


def test_scales_that_are_not_finite(tmp_path: Path) -> None:
    stored, weight = tiles([math.nan], [math.nan, 1.0])
    folder = write_checkpoint(
        tmp_path / "model", layers=[("a", stored, weight)], others=[], quantization=HuggingFaceFP8
    )
    found = inspect(Checkpoint(folder))
    assert found.layers[0].nan == 2
    assert found.problems == [
        f"{folder / 'model.safetensors'}: tensor 'a.weight_scale_inv' has 1 of 2 scales that are NaN"
    ]
    assert found.outliers(0) == found.layers
    assert found.to_dict()["layers"][0]["scale_ratio"] is None
    json.dumps(found.to_dict(), allow_nan=False)


def test_several_schemes(tmp_path: Path) -> None:
    fp8, fp4 = layer_format("FP8_DYNAMIC"), layer_format("NVFP4")
    row = QuantizedWeight(data=torch.ones(4, 32).to(torch.float8_e4m3fn), scale_inv=torch.ones(4, 1), block=(1, 32))
    packed = QuantizedWeight(
        data=torch.full((4, 16), 0x17, dtype=torch.uint8),
        scale_inv=torch.ones(4, 2).to(torch.float8_e4m3fn),
        block=(1, 16),
        global_scale=torch.tensor(2.0),
        input_scale=torch.tensor(2.0),
    )
    layers = [("a", fp8, row), ("b", fp8, row), ("c", fp4, packed)]
    folder = write_checkpoint(tmp_path / "model", layers=layers, others=[], quantization=CompressedTensors)
    found = inspect(Checkpoint(folder))
    assert [(one.name, one.layers, one.tile, one.scales, one.input) for one in found.schemes] == [
        ("FP8_DYNAMIC", 2, "row", "F32", "dynamic, row"),
        ("NVFP4", 1, "1x16", "F8_E4M3", "static and dynamic, 1x16"),
    ]
    assert found.quantized_share == 1.0
    last = found.layers[-1]
    assert (last.shape, last.saturated, last.largest_scale) == ((4, 32), 0.5, 0.5)


@pytest.mark.parametrize(
    ("changed", "message", "left"),
    [
        ({"model.loud.weight_scale_inv": None}, "the scale of layer 'model.loud' is missing", 2),
        ({"model.loud.weight_scale_inv": torch.ones(3)}, "'model.loud.weight_scale_inv' has shape [3]", 2),
        ({"x.weight_scale_inv": torch.ones(1)}, "'x.weight_scale_inv' is a scale without a quantized layer", 3),
    ],
)
def test_problems_are_listed_beside_the_layers(
    tmp_path: Path, changed: dict[str, Tensor | None], message: str, left: int
) -> None:
    file = written(tmp_path) / "model.safetensors"
    held = {**load_file(file), **changed}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, file)
    found = inspect(Checkpoint(file.parent))
    (problem,) = found.problems
    assert message in problem
    assert len(found.layers) == left


def test_one_layer_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 layers of 16 KiB: the bytes of two are alive at most."""
    layers = ((f"model.{i}", *tiles([], [1.0])) for i in range(40))
    folder = write_checkpoint(tmp_path / "model", layers=layers, others=[], quantization=HuggingFaceFP8)
    alive = largest = 0
    read = Shards.tensor

    def gone(size: int) -> None:
        nonlocal alive
        alive -= size

    def counted(self: Shards, name: str) -> Tensor:
        nonlocal alive, largest
        tensor = read(self, name)
        alive += tensor.nbytes
        largest = max(largest, alive)
        weakref.finalize(tensor.untyped_storage(), gone, tensor.nbytes)
        return tensor

    monkeypatch.setattr(Shards, "tensor", counted)
    assert len(inspect(Checkpoint(folder)).layers) == 40
    assert 0 < largest <= 2 * (128 * 128 + 4)
    assert alive == 0
