"""torch's compile cache: a warm process runs no pass, and a changed policy never runs stale code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

# Training steps of a small MLP, one for each set of settings; prints what the process saw of each as JSON.
SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from torch._dynamo.utils import counters
import fp8graph
from helpers import MLP, step
from fp8graph.backend import inductor_passes

passes = []
original = inductor_passes.JointPass.__call__
def counted(self, graph):
    passes.append(1)
    original(self, graph)

inductor_passes.JointPass.__call__ = counted
torch.set_num_threads(1)
reports = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "fp8graph"
artifacts = Path(sys.argv[1])
if artifacts.is_file():
    assert torch.compiler.load_cache_artifacts(artifacts.read_bytes()) is not None
for settings in json.load(sys.stdin):
    for name, text in settings.pop("stored", {}).items():  # before the step: reports that are changed, or removed
        (reports / name).unlink() if text is None else (reports / name).write_text(text)
    before = {file.name for file in reports.glob("*.json")}
    torch._dynamo.reset()
    counters.clear()
    passes.clear()
    torch.manual_seed(0)
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
        "hits": counters["aot_autograd"]["autograd_cache_hit"],
        "misses": counters["aot_autograd"]["autograd_cache_miss"],
        "stored": sorted({file.name for file in reports.glob("*.json")} - before),
    }))
artifacts.write_bytes(torch.compiler.save_cache_artifacts()[0])
"""

PLAIN: dict[str, Any] = {}
DELAYED: dict[str, Any] = {"policy": {"default": {"type": "DelayedScaling", "amax_history_len": 4}}}
STRICT: dict[str, Any] = {"policy": {"rules": [{"pattern": "*", "recipe": "tensorwise"}]}, "strict": True}
CHANGES: dict[str, dict[str, Any]] = {
    "a rule": {"policy": {"rules": [{"pattern": "up", "recipe": "high_precision"}]}},
    "powers of two": {"recipe_fields": {"power_2_scale": True}},
    "another format": {"recipe_fields": {"fp8_format": "E4M3"}},
}
LONGER = {"policy": {"default": {"type": "DelayedScaling", "amax_history_len": 8}}}


def run(cache: Path, steps: dict[str, dict[str, Any]], artifacts: str = os.devnull) -> dict[str, dict[str, Any]]:
    """One new process that runs all of ``steps``: what it saw of each. It loads ``artifacts``, and saves them."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, artifacts],
        input=json.dumps(list(steps.values())),  # a stored report is longer than an argument may be
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[-len(steps) :]
    return dict(zip(steps, map(json.loads, lines), strict=True))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def cold(cache: Path) -> dict[str, dict[str, Any]]:
    """A process without a cache; what it changes later must not find what it compiled before."""
    return run(cache, {"plain": PLAIN, "delayed": DELAYED, "strict": STRICT, **CHANGES, "longer history": LONGER})


@pytest.fixture(scope="module")
def warm(cache: Path, cold: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A new process with the cache of the cold one."""
    (plain,), (strict,) = cold["plain"]["stored"], cold["strict"]["stored"]
    changed = json.loads((cache / "fp8graph" / strict).read_text())
    changed["gemms"][0] |= {"recipe": None, "execution": "high precision", "reason": "test"}
    return run(cache, {
        "plain": PLAIN,
        "delayed": DELAYED,
        "strict": STRICT,
        "no stored report": PLAIN | {"stored": {plain: None}},
        "changed report": STRICT | {"stored": {strict: json.dumps(changed)}},
        "damaged report": STRICT | {"stored": {strict: "{"}},
    })  # fmt: skip


def test_a_warm_start(cold: dict[str, Any], warm: dict[str, Any]) -> None:
    first, again = cold["plain"], warm["plain"]
    assert (first["hits"], first["passes"]) == (0, 1)
    assert {g["recipe"] for g in first["report"]["graphs"][0]["gemms"]} == {"tensorwise"}
    assert (again["hits"], again["misses"], again["passes"]) == (1, 0, 0)
    assert again["values"] == first["values"]
    assert again["report"] == first["report"]


def test_without_the_stored_report_the_passes_run_once_more_for_the_report_only(
    cold: dict[str, Any], warm: dict[str, Any]
) -> None:
    retraced = warm["no stored report"]
    assert (retraced["hits"], retraced["passes"]) == (1, 1)
    assert retraced["report"] == cold["plain"]["report"]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_policy_is_compiled_anew(change: str, cold: dict[str, Any]) -> None:
    changed = cold[change]
    assert changed["hits"] == 0
    assert changed["values"] != cold["plain"]["values"]
    assert changed["report"] != cold["plain"]["report"]


def test_strict_mode_on_a_warm_cache(cold: dict[str, Any], warm: dict[str, Any]) -> None:
    """A report that came from the cache is checked like one that was made."""
    assert cold["strict"]["error"] is None
    assert (warm["strict"]["hits"], warm["strict"]["error"]) == (1, None)
    # The stored report is what strict mode reads: with a GEMM left alone in it, it must raise.
    assert warm["changed report"]["error"] == "strict mode: 1 GEMMs that a rule asks for cannot run in FP8:"
    # A damaged file is no file.
    assert warm["damaged report"]["error"] is None


def test_a_warm_start_with_scaling_state(cold: dict[str, Any], warm: dict[str, Any]) -> None:
    """Code, report and what the code takes (pages, copies of weights) come from the cache: nothing is traced."""
    first, again = cold["delayed"], warm["delayed"]
    assert (first["passes"], again["passes"]) == (1, 0)
    assert (first["hits"], again["hits"]) == (0, 1)
    assert again["values"] == first["values"]
    assert again["report"] == first["report"]
    assert cold["longer history"]["hits"] == 0


@pytest.mark.slow
def test_artifacts_carry_code_and_reports_to_another_machine(tmp_path: Path) -> None:
    artifacts = str(tmp_path / "artifacts")
    steps = {"plain": PLAIN, "delayed": DELAYED}
    first = run(tmp_path / "first", steps, artifacts)
    second = run(tmp_path / "second", steps, artifacts)
    third = run(tmp_path / "third", steps, artifacts)  # what was loaded is saved again
    for name in steps:
        assert (first[name]["hits"], first[name]["misses"], first[name]["passes"]) == (0, 1, 1)
        for again in (second[name], third[name]):
            assert (again["hits"], again["misses"], again["passes"]) == (1, 0, 0)
            assert again["report"] == first[name]["report"]
            assert again["values"] == first[name]["values"]
