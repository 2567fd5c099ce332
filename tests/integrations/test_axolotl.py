"""axolotl's ``fp8: true`` by fp8graph: its own program, from the config to the checkpoints, on a CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from helpers import same_bits
from samples import ROOT
from trainers_page import section, wrong_set_ups

SECTION = section('`mixed_precision="fp8"`: accelerate, Trainer, axolotl, LlamaFactory')
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        find_spec("axolotl") is None, reason="axolotl is not installed: it pins accelerate, transformers and torchao"
    ),
]


def command(module: str) -> list[str]:
    """The command of the page, with another module in place of axolotl's, and without the file of the config."""
    (arguments,) = re.findall(r"`python (-m fp8graph\S+ --in-place-of torchao -m axolotl\S+) config\.yaml`", SECTION)
    *before, its = arguments.split()
    return [*before, module or its]


def run(folder: Path, *before: str, module: str = "axolotl_on_cpu", recipe: str = "", **config: Any) -> Any:
    """Train in a process of its own, in ``folder / "out"``: axolotl sets variables and changes Trainer."""
    from axolotl_on_cpu import CONFIG, files

    folder.mkdir(exist_ok=True)
    file, out = folder / "config.yaml", folder / "out"
    settings = {**CONFIG, **files(folder), "output_dir": str(out), **config}
    file.write_text(json.dumps(settings), encoding="utf-8")  # which is YAML
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "support")))
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *before, *command(module), str(file)],
        env=os.environ | variables | {"ACCELERATE_FP8_RECIPE": recipe},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )


def trained(folder: Path, *before: str, recipe: str = "", **config: Any) -> dict[str, Any]:
    from axolotl_on_cpu import trained

    done = run(folder, *before, recipe=recipe, **config)
    assert done.returncode == 0, done.stderr[-5000:]
    return trained(folder / "out")


def test_its_config_trains_in_fp8_beside_bf16(tmp_path: Path) -> None:
    plain = trained(tmp_path / "bf16")
    fp8 = trained(tmp_path / "fp8", fp8=True)
    assert fp8["losses"] == pytest.approx(plain["losses"], rel=0.01)
    assert fp8["losses"] != plain["losses"]
    assert Counter(fp8["recipes"].values()) == {"tensorwise": 2 * 7 * 3, "None": 3}  # its default; the head
    assert fp8["recipes"]["model.layers.0.self_attn.q_proj fprop"] == "tensorwise"


def test_a_resumed_run_is_bit_identical(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", recipe="delayed", fp8=True)
    checkpoint = str(tmp_path / "whole" / "out" / "checkpoint-2")
    resumed = trained(tmp_path / "resumed", recipe="delayed", fp8=True, resume_from_checkpoint=checkpoint)
    assert resumed["losses"] == whole["losses"]
    assert same_bits(resumed["state"].values(), whole["state"].values())


def test_two_ranks_train_by_the_configs_recipe_beside_bf16(tmp_path: Path) -> None:
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    plain = trained(tmp_path / "bf16", *ranks)
    fp8 = trained(tmp_path / "fp8", *ranks, fp8=True, fp8_config={"recipe": "rowwise"})
    assert fp8["losses"] == pytest.approx(plain["losses"], rel=0.01)
    assert Counter(fp8["recipes"].values()) == {"rowwise": 2 * 7 * 3, "None": 3}


def test_wrong_set_ups_have_the_messages_of_the_page(tmp_path: Path) -> None:
    again, no_gpu = wrong_set_ups("axolotl")
    assert again in run(tmp_path / "again", fp8=True, torch_compile=True).stderr
    assert no_gpu in run(tmp_path / "gpu", module="", fp8=True, plugins=[]).stderr
