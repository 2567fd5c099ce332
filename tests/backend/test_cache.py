"""torch's compile cache: a warm process runs no pass, and a changed policy never runs stale code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cache_state import STATES

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

# Training steps of a small MLP, one for each set of settings; prints what the process saw of each as JSON.
SCRIPT = """
import json, sys
from pathlib import Path
import torch
artifacts = Path(sys.argv[1])
if artifacts.is_file():  # before fp8graph is there
    assert torch.compiler.load_cache_artifacts(artifacts.read_bytes()) is not None
from torch._dynamo.utils import counters
import fp8graph
from helpers import MLP, step
from fp8graph.backend import inductor_passes, stored
from fp8graph.compat import aot

passes = []
original = inductor_passes.JointPass.__call__
def counted(self, graph):
    passes.append(1)
    original(self, graph)

def without_fp8(content):
    view, findings = stored.loaded(content)
    object.__setattr__(view.gemms[0], "recipe", None)
    object.__setattr__(view.gemms[0], "execution", "high precision")
    object.__setattr__(view.gemms[0], "reason", "test")
    return stored.dumped(view, findings)

CHANGES = {
    "": lambda content: content,
    "gone": lambda content: None,
    "flipped": lambda content: content[:-9] + bytes([content[-9] ^ 4]) + content[-8:],
    "without FP8": without_fp8,
}
inductor_passes.JointPass.__call__ = counted
carried = aot.carried
torch.set_num_threads(1)
for settings in json.load(sys.stdin):
    change = CHANGES[settings.pop("carried", "")]
    aot.carried = lambda compiled: change(carried(compiled))
    torch._dynamo.reset()
    counters.clear()
    passes.clear()
    torch.manual_seed(0)
    model = MLP().bfloat16()
    x = torch.randn(16, 32).bfloat16().requires_grad_()
    policy = fp8graph.Policy.from_dict(settings.pop("policy", {}))
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
    }))
artifacts.write_bytes(torch.compiler.save_cache_artifacts()[0])
"""

PLAIN: dict[str, Any] = {}
DELAYED: dict[str, Any] = {"policy": {"default": {"type": "DelayedScaling", "amax_history_len": 4}}}
STRICT: dict[str, Any] = {"policy": {"rules": [{"pattern": "*", "recipe": "tensorwise"}]}, "strict": True}
CHANGED: dict[str, Any] = {"policy": {"rules": [{"pattern": "up", "recipe": "high_precision"}]}}
LONGER = {"policy": {"default": {"type": "DelayedScaling", "amax_history_len": 8}}}


# One training step of a linear in each of the states; prints a hash of all results and the number of hits as JSON.
IN_STATES = """
import contextlib, hashlib, json, sys
import torch
from torch._dynamo.utils import counters
import fp8graph
from cache_state import STATES

for name in json.load(sys.stdin):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, x = torch.nn.Linear(32, 64, bias=False), torch.randn(32, 32)
    backend = fp8graph.Backend(fp8graph.Policy(default="tensorwise"))
    with STATES[name][1]() if name else contextlib.nullcontext():
        y = torch.compile(model, backend=backend)(x)
        if y.requires_grad:
            y.float().square().sum().backward()
    results = [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    values = b"".join(str(t.dtype).encode() + t.float().numpy().tobytes() for t in results)
    print(json.dumps([hashlib.sha256(values).hexdigest(), counters["aot_autograd"]["autograd_cache_hit"]]))
"""


def run(cache: Path, steps: dict[str, dict[str, Any]], artifacts: str = os.devnull) -> dict[str, dict[str, Any]]:
    """One new process that runs all of ``steps``: what it saw of each. It loads ``artifacts``, and saves them."""
    return dict(zip(steps, lines_of(cache, SCRIPT, [*steps.values()], artifacts), strict=True))


def lines_of(cache: Path, script: str, steps: list[Any], *arguments: str) -> list[Any]:
    """The lines that a new process with the folder ``cache`` printed, one for each of ``steps``."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        input=json.dumps(steps),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-len(steps) :]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def cold(cache: Path) -> dict[str, dict[str, Any]]:
    """A process without a cache; what it changes later must not find what it compiled before."""
    return run(
        cache, {"plain": PLAIN, "delayed": DELAYED, "strict": STRICT, "changed": CHANGED, "longer history": LONGER}
    )


@pytest.fixture(scope="module")
def warm(cache: Path, cold: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A new process with the cache of the cold one."""
    return run(cache, {
        "plain": PLAIN,
        "delayed": DELAYED,
        "strict": STRICT,
        "nothing carried": PLAIN | {"carried": "gone"},
        "damaged": PLAIN | {"carried": "flipped"},
        "changed report": STRICT | {"carried": "without FP8"},
        "damaged and strict": STRICT | {"carried": "flipped"},
    })  # fmt: skip


def test_a_warm_start(cold: dict[str, Any], warm: dict[str, Any]) -> None:
    first, again = cold["plain"], warm["plain"]
    assert (first["hits"], first["passes"]) == (0, 1)
    assert {g["recipe"] for g in first["report"]["graphs"][0]["gemms"]} == {"tensorwise"}
    assert (again["hits"], again["misses"], again["passes"]) == (1, 0, 0)
    assert again["values"] == first["values"]
    assert again["report"] == first["report"]


@pytest.mark.parametrize("case", ["nothing carried", "damaged"])
def test_without_findings_the_passes_run_once_more_for_them_alone(
    case: str, cold: dict[str, Any], warm: dict[str, Any]
) -> None:
    retraced = warm[case]
    assert (retraced["hits"], retraced["passes"]) == (1, 1)
    assert retraced["report"] == cold["plain"]["report"]
    assert retraced["values"] == cold["plain"]["values"]


def test_a_changed_policy_is_compiled_anew(cold: dict[str, Any]) -> None:
    """Whatever changed: test_compiling.py looks at the key."""
    changed = cold["changed"]
    assert changed["hits"] == 0
    assert changed["values"] != cold["plain"]["values"]
    assert changed["report"] != cold["plain"]["report"]


def test_strict_mode_on_a_warm_cache(cold: dict[str, Any], warm: dict[str, Any]) -> None:
    """A report that came from the cache is checked like one that was made."""
    assert cold["strict"]["error"] is None
    assert (warm["strict"]["hits"], warm["strict"]["error"]) == (1, None)
    # The report in the cache is what strict mode reads: with a GEMM left alone in it, it must raise.
    assert warm["changed report"]["error"] == "strict mode: 1 GEMMs that a rule asks for cannot run in FP8:"
    assert warm["damaged and strict"]["error"] is None  # it is traced again


def test_a_warm_start_with_scaling_state(cold: dict[str, Any], warm: dict[str, Any]) -> None:
    """Code, report and what the code takes (pages, copies of weights) come from the cache: nothing is traced."""
    first, again = cold["delayed"], warm["delayed"]
    assert (first["passes"], again["passes"]) == (1, 0)
    assert (first["hits"], again["hits"]) == (0, 1)
    assert again["values"] == first["values"]
    assert again["report"] == first["report"]
    assert cold["longer history"]["hits"] == 0


@pytest.mark.release
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


def test_no_state_changes_what_another_finds(tmp_path: Path) -> None:
    """Runs in every state share one folder, with a run in the usual state after each; then a process in reverse."""
    order = ["", *(name for state in STATES for name in (state, ""))]
    first, second = (lines_of(tmp_path, IN_STATES, names) for names in (order, order[::-1]))
    values = dict(zip(order, (value for value, _ in first), strict=True))
    assert [name for name, (value, _) in zip(order, first, strict=True) if value != values[name]] == []
    assert [hits for name, (_, hits) in zip(order, first, strict=True) if not name] == [0] + [1] * len(STATES)
    again = {name: (value, hits) for name, (value, hits) in zip(order[::-1], second, strict=True)}
    assert again == {name: (value, 1) for name, value in values.items()}


OF_ANOTHER_CPU = """
import sys
import torch
import fp8graph
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.LayerNorm(100), torch.nn.GELU(), torch.nn.Linear(100, 96))
x = torch.randn(33, 100)
options = {"policy": {"default": None}} if sys.argv[1] == "fp8graph" else None  # FP8 has more kernels, of other loops
y = torch.compile(model, backend=sys.argv[1], options=options)(x)
print(bool((y - model(x)).abs().max() < 1e-3), torch.backends.cpu.get_cpu_capability())
"""


def test_code_for_another_cpu_is_not_taken(tmp_path: Path) -> None:
    """Inductor's own backend takes it, and fails or is wrong: where it is right, our key need not have the vectors."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))
    found: dict[str, list[str]] = {}
    for backend in ("fp8graph", "inductor"):
        environ = os.environ | {"PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / backend)}
        for capability in ({}, {"ATEN_CPU_CAPABILITY": "default"}):
            done = subprocess.run(
                [sys.executable, "-c", OF_ANOTHER_CPU, backend],
                env=environ | capability, capture_output=True, text=True, check=backend == "fp8graph", timeout=600,
            )  # fmt: skip
            found.setdefault(backend, []).append(done.stdout)
    first, second = (line.split() for line in found["fp8graph"])
    assert (first[0], second) == ("True", ["True", "DEFAULT"])
    if first[1] != "DEFAULT":
        assert found["inductor"][1] != "True DEFAULT\n"
