"""Record Transformer Engine's reference results for tensors under NVFP4. Needs its source, not its package.

    PYTHONPATH=tests/support python tools/record_te_nvfp4.py <a checkout of Transformer Engine>

``custom_recipes/reference_nvfp4.py`` runs on a CPU. Of the rest of the package it needs two base classes, for which
this file has stand-ins.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

from te_nvfp4 import FILE, OPTIONS, digest, tensors


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
