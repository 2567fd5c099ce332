"""Tensors, options and digests to compare our bytes under NVFP4 with those of Transformer Engine's reference.

tools/record_te_nvfp4.py writes tests/data/te_nvfp4.json, and numerics/test_nvfp4.py holds our bytes and scales to it.
"""

from __future__ import annotations

import hashlib
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
