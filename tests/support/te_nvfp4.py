"""Digests of Transformer Engine's reference results for tensors under NVFP4. Needs its source, not its package.

    python tests/support/te_nvfp4.py <a checkout of Transformer Engine>  # writes tests/data/te_nvfp4.json

``custom_recipes/reference_nvfp4.py`` runs on a CPU. Of the rest of the package it needs two base classes, for which
this file has stand-ins. numerics/test_nvfp4.py holds our bytes and scales against the digests.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FILE = Path(__file__).parents[1] / "data" / "te_nvfp4.json"
SHAPES = [(128, 256), (304, 304), (16, 16), (48, 128)]
SOURCES = [torch.bfloat16, torch.float32, torch.float16]
# our recipe's fields, the operand, and the same in the words of Transformer Engine's reference quantizer
OPTIONS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "input": ({"disable_rht": True}, "input", {}),
    "weight": ({}, "weight", {"quant_tile_shape": (16, 16)}),
    "1x16 weight": ({"disable_2d_quantization": True}, "weight", {}),
    "transformed": ({}, "input", {"with_rht": True}),
    "no signs": ({"hadamard_signs": 0}, "input", {"with_rht": True, "with_random_sign_mask": False}),
}
_rows = {"disable_rht": True, "row_scaled_activation": True}
OPTIONS["row scaled"] = (_rows, "input", {"row_scaled_nvfp4": True})
for _mode in ("MAE", "MSE"):
    for _largest, _scope in ((256, "all"), (448, "none")):
        _fields = {
            "disable_rht": True,
            "nvfp4_4over6": "all",
            "nvfp4_4over6_err_mode": _mode,
            "nvfp4_4over6_e4m3_use_256": _scope,
        }
        _theirs = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": _largest, "nvfp4_4over6_err_mode": _mode}
        OPTIONS[f"4 over 6, {_mode}, {_largest}, input"] = (_fields, "input", _theirs)
        _square = {**_theirs, "quant_tile_shape": (16, 16)}
        OPTIONS[f"4 over 6, {_mode}, {_largest}, weight"] = (_fields, "weight", _square)
        _both = ({**_fields, **_rows}, "input", {**_theirs, "row_scaled_nvfp4": True})
        OPTIONS[f"4 over 6, {_mode}, {_largest}, row scaled"] = _both


def tensors() -> Iterator[tuple[str, Tensor]]:
    """Normal numbers, alone and with columns from 1e-3 to 1e3, with names. numpy keeps these streams for good."""
    for source in SOURCES:
        for rows, columns in SHAPES:
            x = torch.from_numpy(np.random.RandomState(rows + columns).standard_normal((rows, columns))).float()
            name = f"{str(source).removeprefix('torch.')} {rows}x{columns}"
            yield name, x.to(source)
            yield f"{name}, wide", (x * torch.logspace(-3, 3, columns)).to(source)


def digest(parts: Sequence[Tensor]) -> str:
    """Of the bytes of data and scales, rowwise and columnwise."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def main(checkout: str) -> None:
    recipes = "transformer_engine.pytorch.custom_recipes"
    folder = Path(checkout, *recipes.split("."))
    for name in ("transformer_engine", "transformer_engine.pytorch", recipes, "transformer_engine.pytorch.tensor"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(folder)] if name == recipes else []
    stand_ins: Any = types.ModuleType("transformer_engine.pytorch.quantized_tensor")
    stand_ins.QuantizedTensorStorage = type("QuantizedTensorStorage", (), {})
    stand_ins.Quantizer = type("Quantizer", (), {"__init__": _keep_usage})
    utils: Any = types.ModuleType("transformer_engine.pytorch.tensor.utils")
    utils.is_custom = bool
    sys.modules |= {stand_ins.__name__: stand_ins, utils.__name__: utils}
    module = __import__(f"{recipes}.reference_nvfp4", fromlist=["NVFP4QuantizerRef"])
    found: dict[str, dict[str, str]] = {}
    for option, (_, _, settings) in OPTIONS.items():
        quantizer = module.NVFP4QuantizerRef(dtype=module.reference_utils.Fp4Formats.E2M1, **settings)
        rows = settings.get("quant_tile_shape", (1, 16))[0]  # it repeats the scale of a tile for each of its rows
        found[option] = {}
        for name, x in tensors():
            made = quantizer.quantize(x)
            found[option][name] = digest([made.data, made.data_t, made.scale[::rows], made.scale_t[::rows]])
    commit = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    FILE.write_text(json.dumps({"commit": commit.stdout.strip(), "digests": found}, indent=1) + "\n")


def _keep_usage(self: Any, rowwise: bool = True, columnwise: bool = True) -> None:
    self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


if __name__ == "__main__":
    main(sys.argv[1])
