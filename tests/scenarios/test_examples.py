"""Every example runs as it stands, and says what it promises."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import first_slow

ROOT = Path(__file__).parents[2]
ON_RANKS = {"ddp", "fsdp2", "pipeline", "tensor_parallel"}  # started by torchrun
# by python; the others run in this process, which has imported torch and transformers. Trainers keep their own state.
IN_A_PROCESS = ON_RANKS | {"lightning_module", "rl_loop", "trainer"}
LINES = dict.fromkeys(ON_RANKS, 80) | {"rl_loop": 135, "ray_train": 65, "trl_grpo": 60}  # at most; the others 50
# torch 2.11 first runs the stage without gradients, for its shapes: a graph of its own
OF_A_STAGE = (
    r"42 of 45 GEMMs in FP8, \d+ % of the FLOPs of all products, in 1 graph"
    if torch.__version__ >= "2.13"
    else r"56 of 60 GEMMs in FP8, \d+ % of the FLOPs of all products, in 2 graphs"
)
SAYS = {  # the end of what each prints, as a regular expression
    "rl_loop": r"KL was 0\.0 in 5 of 5 updates with our tensors",
    "ddp": r"21 scales, the same on every rank: True\n"
    r"21 of 24 GEMMs in FP8, \d+ % of the FLOPs of all products, in 1 graph",
    "encoder": r"100% right\n\d+ of \d+ GEMMs in FP8, \d+ % of the FLOPs of all products, in 3 graphs",
    "fsdp2": r"step 7: .*\nloaded scales that nothing used: \[\]\n"
    r"42 of 42 GEMMs in FP8, \d+ % of the FLOPs of all products, in 2 graphs",
    "flux_lora": r"\n20 weights quantized in 8 steps\n"
    r"31 of 73 GEMMs in FP8, \d+ % of the FLOPs of all products, in 1 graph",
    "layer_policy": r"model\.layers\.1\.mlp\.down_proj .* wgrad .* high precision",
    "lightning_module": r"step 7: .*\n8 of 8 GEMMs in FP8, 100 % of the FLOPs of all products, in 1 graph",
    "lora": r"\n7 weights quantized in 8 steps",
    "lora_fp8": r"\n655,360 bytes of base weights, 458,752 bytes of transposed copies",
    "moe": r"mlp\.gate fprop: high precision \(rule",
    "nano_gpt": r"\n24 of 27 GEMMs in FP8, \d+ % of the FLOPs of all products, in 1 graph",
    "pipeline": rf"step 7: .*\n{OF_A_STAGE}",
    "serve": r"compiled: 16 tokens in .*\ntokens: \[.*\]\n\nprefill: 7 of 8 GEMMs in FP8, .*\n(.*\n)+decode: 7 of 8",
    "timm_vit": r"\n24 of 27 GEMMs in FP8, \d+ % of the FLOPs of all products, in 1 graph",
    "tensor_parallel": r"step 7: .*\n12 of 15 GEMMs in FP8, \d+ % of the FLOPs of all products, in 1 graph",
    "trainer": r"21 of 24 GEMMs in FP8, \d+ % of the FLOPs of all products, in 1 graph",
}
# Examples of a library that the extra "test" does not bring, and why not.
NEEDS = {"timm_vit": ("timm", "timm needs torchvision, whose wheel on PyPI does not load beside a CPU build of torch")}


def test_every_example_is_run_and_named() -> None:
    files = sorted((ROOT / "examples").glob("*.py"))
    assert [file.stem for file in files] == sorted(SAYS)
    readme = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
    by_hosts = sorted((ROOT / "examples" / "trainers").glob("*.py"))  # their tests run the page's commands
    assert [file.name for file in by_hosts if f"examples/trainers/{file.name}\n```" not in page] == []
    for file in files + by_hosts:
        assert file.name in readme
        assert len(file.read_text(encoding="utf-8").splitlines()) <= LINES.get(file.stem, 50), file


@pytest.mark.filterwarnings("default")  # as for who runs it
@first_slow("name", SAYS)
def test_example(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(ROOT / "examples" / f"{name}.py")
    if name in NEEDS and importlib.util.find_spec(NEEDS[name][0]) is None:
        pytest.skip(f"{NEEDS[name][0]} is not installed: {NEEDS[name][1]}")
    if name in IN_A_PROCESS:
        printed = output_of_a_process(path)
    else:
        monkeypatch.setattr(sys, "argv", [path])
        runpy.run_path(path, run_name="__main__")
        printed = capsys.readouterr().out
    assert re.search(SAYS[name], printed), printed
    losses = [float(loss) for loss in re.findall(r"\bloss'?:? '?(\d+\.\d+)", printed)]
    assert losses == sorted(losses, reverse=True)


def output_of_a_process(path: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *(torchrun if Path(path).stem in ON_RANKS else []), path],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
