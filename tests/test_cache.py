"""torch's compile cache: a warm process runs no pass, and a changed policy never runs stale code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent

# One training step of a small MLP; prints what the process saw as JSON.
SCRIPT = """
import json, sys
import torch
from torch._dynamo.utils import counters
import fp8graph
from helpers import MLP, step
from fp8graph import pipeline

settings = json.loads(sys.argv[1])
passes = []
original = pipeline.JointPass.__call__
def counted(self, graph):
    passes.append(1)
    original(self, graph)

pipeline.JointPass.__call__ = counted
torch.manual_seed(0)
torch.set_num_threads(1)
model = MLP().bfloat16()
x = torch.randn(16, 32).bfloat16().requires_grad_()
recipe = settings.pop("recipe_fields", None)
policy = fp8graph.Policy.from_dict(settings.pop("policy", {}))
if recipe is not None:
    policy = fp8graph.Policy(policy.rules, default=fp8graph.Float8CurrentScaling(**recipe))
backend = fp8graph.Backend(policy, **settings)
error = None
values = []
try:
    got = step(torch.compile(model, backend=backend), x, parameters=model.parameters())
    values = [t.float().sum().item() for t in got]
except fp8graph.Fp8CoverageError as e:
    error = str(e).splitlines()[0]
print(json.dumps({
    "values": values, "error": error, "passes": len(passes), "report": backend.report.to_dict(),
    "hits": counters["aot_autograd"]["autograd_cache_hit"], "misses": counters["aot_autograd"]["autograd_cache_miss"],
}))
"""


def run(cache: Path, **settings: Any) -> dict[str, Any]:
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(settings)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_warm_starts_and_policy_changes(tmp_path: Path) -> None:
    cold = run(tmp_path)
    assert (cold["hits"], cold["passes"]) == (0, 1)
    assert {g["recipe"] for g in cold["report"]["graphs"][0]["gemms"]} == {"tensorwise"}

    warm = run(tmp_path)
    assert (warm["hits"], warm["misses"], warm["passes"]) == (1, 0, 0)
    assert warm["values"] == cold["values"]
    assert warm["report"] == cold["report"]

    # without the stored report the passes run once more, for the report only
    for stored in (tmp_path / "fp8graph").glob("*.json"):
        stored.unlink()
    retraced = run(tmp_path)
    assert (retraced["hits"], retraced["passes"]) == (1, 1)
    assert retraced["report"] == cold["report"]

    up = [{"pattern": "up", "recipe": "high_precision"}]
    changes: list[dict[str, Any]] = [
        {"policy": {"rules": up}},
        {"recipe_fields": {"power_2_scale": True}},
        {"recipe_fields": {"fp8_format": "E4M3"}},
    ]
    for change in changes:
        changed = run(tmp_path, **change)
        assert changed["hits"] == 0, change
        assert changed["values"] != cold["values"], change
        assert changed["report"] != cold["report"], change


@pytest.mark.slow
def test_strict_mode_on_a_warm_cache(tmp_path: Path) -> None:
    """A report that came from the cache is checked like one that was made."""
    strict = {"policy": {"rules": [{"pattern": "*", "recipe": "tensorwise"}]}, "strict": True}
    assert run(tmp_path, **strict)["error"] is None
    warm = run(tmp_path, **strict)
    assert (warm["hits"], warm["error"]) == (1, None)
    # The stored report is what strict mode reads: with a GEMM left alone in it, it must raise.
    (stored,) = (tmp_path / "fp8graph").glob("*.json")
    report = json.loads(stored.read_text())
    report["gemms"][0] |= {"recipe": None, "execution": "high precision", "reason": "test"}
    stored.write_text(json.dumps(report))
    assert run(tmp_path, **strict)["error"] == "strict mode: 1 GEMMs that a rule asks for cannot run in FP8:"
    # A damaged file is no file.
    stored.write_text("{")
    assert run(tmp_path, **strict)["error"] is None


@pytest.mark.slow
def test_a_warm_start_with_scaling_state(tmp_path: Path) -> None:
    """Code, report and what the code takes (pages, copies of weights) come from the cache: nothing is traced."""
    policy = {"default": {"type": "DelayedScaling", "amax_history_len": 4}}
    cold, warm = run(tmp_path, policy=policy), run(tmp_path, policy=policy)
    assert (cold["passes"], warm["passes"]) == (1, 0)
    assert (cold["hits"], warm["hits"]) == (0, 1)
    assert warm["values"] == cold["values"]
    assert warm["report"] == cold["report"]
    other = run(tmp_path, policy={"default": {"type": "DelayedScaling", "amax_history_len": 8}})
    assert other["hits"] == 0
