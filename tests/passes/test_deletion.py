"""An optional feature is one entry of ``passes/``: without it and its lines in the list, everything else works."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fp8graph.passes import JOINT_PIPELINE, METHODS, STORES, BackendMethods
from fp8graph.recipes.policy import WATCH
from fp8graph.runtime.stores import Starter

ROOT = Path(__file__).parents[2]
LIST = "passes/__init__.py"

FEATURES = (
    "account.py",
    "accumulate_wgrad.py",
    "attention",
    "batch_invariance",
    "connect_scales",
    "dequantize_backward.py",
    "fold.py",
    "fuse_linears.py",
    "fuse_stored_linears.py",
    "gather_in_fp8.py",
    "gather_weights",
    "hoist_weights",
    "observe",
    "observe/guard.py",
    "order_groups.py",
    "order_scales.py",
    "prepare_fp4.py",
    "recognize.py",
    "route_in_fp8.py",
    "save_for_backward.py",
    "split_decoding.py",
    "unpack.py",
    "use_small_tiles.py",
)

# The compiler itself.
IMPORTED = {"assign", "match", "quantize", "share"}

FORKS = """
import os, sys, traceback
from pathlib import Path
import torch, torch._inductor.compile_fx, transformers

works, *folders = sys.argv[1:]
for folder in folders:
    if os.fork() == 0:
        error = ""
        try:
            os.chdir(folder)
            sys.path.insert(0, folder)
            sys.argv[1:] = [folder]
            exec(works, {"__name__": "__main__"})
        except BaseException:
            error = traceback.format_exc()[-3000:]
        Path(folder, "error").write_text(error, encoding="utf-8")
        os._exit(0)
    os.wait()
"""

WORKS = """
import importlib, importlib.util, inspect, pkgutil, sys
from pathlib import Path
import torch
from torch import Tensor, nn
import fp8graph

assert fp8graph.__file__.startswith(sys.argv[1])
for module in pkgutil.walk_packages(fp8graph.__path__, "fp8graph."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:  # an optional library
            if (error.name or "").startswith("fp8graph"):
                raise

class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            setattr(self, name, nn.Linear(64, 64, bias=False))
        self.norm = nn.RMSNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (4, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))

torch.manual_seed(0)
layer, x = Layer(), torch.randn(2, 16, 64)
policy = fp8graph.Policy(default="tensorwise", min_speedup=0)
backend = fp8graph.Backend(policy, compiler="eager")
compiled, optimizer = torch.compile(layer, backend=backend), torch.optim.SGD(layer.parameters(), lr=0.01)
for _ in range(2):
    optimizer.zero_grad()
    loss = compiled(x).square().mean()
    loss.backward()
    optimizer.step()
assert loss.isfinite()
assert [gemm.recipe for gemm in backend.report.gemms] == ["tensorwise"] * 21
print(backend.report)

fp8graph.compile(nn.Linear(64, 64), policy=policy, compiler="eager")(torch.randn(16, 64)).sum().backward()
folder = Path(fp8graph.__file__).parent / "passes" / "observe"
for method, results, file in (("observe", "statistics", "statistics.py"), ("guard", "guards", "guard.py")):
    if (folder / file).exists():
        assert not getattr(backend, results)
        getattr(fp8graph.Backend(**{method: {}}, compiler="eager"), method)(every=1)
        continue
    assert not hasattr(backend, method) and not hasattr(backend, results)
    assert method not in inspect.signature(fp8graph.Backend).parameters
    for error, text, arguments in (
        (TypeError, f"Backend has no argument '{method}'", {method: {}}),
        (fp8graph.ConfigError, f"[{method}]: this build of fp8graph has no pass for it", {"policy": {method: {}}}),
    ):
        try:
            fp8graph.Backend(**arguments)
        except error as raised:
            assert str(raised).startswith(text), raised
        else:
            raise AssertionError(f"Backend(**{arguments}) was made without {file}")

if importlib.util.find_spec("fp8graph.passes.hoist_weights") is None:
    # nothing keeps copies, and no prediction may count on them
    wide, rows = nn.Linear(1024, 1024, bias=False).bfloat16(), torch.randn(64, 1024).bfloat16()
    reports = [
        fp8graph.explain(wide, rows, policy=policy, target="sm_90", training=False, cache_weights=keeps)
        for keeps in (True, False)
    ]
    (kept,), (made,) = ([gemm.speedup for gemm in report.gemms] for report in reports)
    assert kept == made is not None, (kept, made)

if importlib.util.find_spec("fp8graph.passes.connect_scales") is None:
    try:
        torch.compile(layer, backend=fp8graph.Backend(recipe="delayed", compiler="eager"), dynamic=False)(x)
    except Exception as error:
        assert "delayed keeps its scales between calls" in str(error), error
    else:
        raise AssertionError("delayed scaling was compiled without a pass that connects its scales")
"""


def without(feature: str, folder: Path) -> None:
    """A copy of the product in ``folder`` that has no such entry, and no name of it in the list of passes."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(
        ROOT / "fp8graph", folder / "fp8graph", ignore=shutil.ignore_patterns("__pycache__", "passes", "models")
    )
    for room in ("passes", "models"):
        shutil.copytree(ROOT / room, folder / "fp8graph" / room, ignore=ignored)
    entry = folder / "fp8graph" / "passes" / feature
    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    module = f"fp8graph.passes.{name_of(feature)}"
    path = folder / "fp8graph" / LIST
    text = path.read_text(encoding="utf-8")
    imported = re.compile(rf"^from {re.escape(module)}(?:\.\w+)* import (.+)\n", re.MULTILINE)
    names = {name for found in imported.findall(text) for name in found.split(", ")}
    assert names, f"the list does not name {module}"
    listed = re.compile(rf"^    (?:Pass\(.*)?\b(?:{'|'.join(names)})\b.*\n", re.MULTILINE)
    path.write_text(listed.sub("", imported.sub("", text)), encoding="utf-8")


def name_of(feature: str) -> str:
    """The module of an entry, or of a part of one that can be deleted alone, in the room."""
    return feature.removesuffix(".py").replace("/", ".")


def test_every_entry_is_deleted_or_imported() -> None:
    modules = {module.__module__ for module in (*STORES, *(entry.run for entry in JOINT_PIPELINE))}
    entries = {module.split(".")[2] for module in modules}
    assert entries == {name_of(feature).split(".")[0] for feature in FEATURES} | IMPORTED


def test_a_backend_does_not_name_what_entries_add() -> None:
    """Their methods, and the arguments and tables of a policy file that call these: the list of passes has them all."""
    added = {name for kind in BackendMethods.__bases__ if kind is not Starter for name in vars(kind) if name[0] != "_"}
    assert added == {"observe", "statistics", "guard", "guards"} > {*METHODS} == {*WATCH}
    fields = ("name", "id", "attr", "arg", "value")  # of definitions, names, attributes, arguments and texts
    file = ROOT / "fp8graph" / "backend" / "backend.py"
    nodes = [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    named = [getattr(node, field, None) for node in nodes for field in fields]
    assert [name for name in named if isinstance(name, str) and name in added] == []


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error without each feature, "" if there is none. One process imports torch; each copy gets a fork of it."""
    folders = {feature: tmp_path_factory.mktemp(name_of(feature)) for feature in FEATURES}
    for feature, folder in folders.items():
        without(feature, folder)
    command = [sys.executable, "-c", FORKS, WORKS, *map(str, folders.values())]
    done = subprocess.run(command, cwd=folders[FEATURES[0]].parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {feature: (folder / "error").read_text(encoding="utf-8") for feature, folder in folders.items()}


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_can_be_deleted(feature: str, errors: dict[str, str]) -> None:
    assert errors[feature] == ""
