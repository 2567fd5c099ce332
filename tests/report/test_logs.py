"""Where users look for what was compiled: logs, tlparse."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8graph
from fp8graph.report import Report
from helpers import MLP, eager_backend

KEEPS_DOWN = fp8graph.Policy([fp8graph.Rule(re.compile("down|<b>&amp;"), None)], default="tensorwise")


def compiled_report() -> Report:
    backend = eager_backend(KEEPS_DOWN)
    torch.compile(MLP(), backend=backend)(torch.randn(16, 32, requires_grad=True))
    return backend.report


def test_a_line_for_a_graph_and_one_for_what_was_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fp8graph"):
        compiled_report()
    first, *rest = [record.getMessage() for record in caplog.records if record.name == "fp8graph.report"]
    assert first == "Linear training: 6 of 9 GEMMs in FP8, 66 % of the FLOPs of all products"
    assert [line.partition(" -> high")[0] for line in rest] == [
        f"Linear training: left alone: down {gemm} (1): rule /down|<b>&amp;/" for gemm in ("fprop", "dgrad", "wgrad")
    ]


def test_nothing_is_logged_unasked(caplog: pytest.LogCaptureFixture) -> None:
    compiled_report()
    assert not [record for record in caplog.records if record.name.startswith("fp8graph")]


SCRIPT = """
import torch, fp8graph
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32))
backend = fp8graph.Backend(fp8graph.Policy(default="tensorwise"), compiler="eager")
torch.compile(model, backend=backend)(torch.randn(16, 32)).sum().backward()
(view,) = backend.report.graphs
import json, sys
json.dump(view.to_dict(), open(sys.argv[1], "w"))
"""


def run_script(folder: Path, **environment: str) -> tuple[str, dict[str, Any]]:
    """The text that the script above prints to stderr, and its graph."""
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore", **environment}
    command = [sys.executable, "-c", SCRIPT, str(folder / "view.json")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stderr, json.loads((folder / "view.json").read_text())


@pytest.fixture(scope="module")
def verbose(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """Everything that torch writes about the script: its log, its graph, the folder of its trace."""
    folder = tmp_path_factory.mktemp("verbose")
    return *run_script(folder, TORCH_LOGS="+fp8graph", TORCH_TRACE=str(folder / "trace")), folder / "trace"


@pytest.mark.slow
def test_torch_logs(tmp_path: Path, verbose: tuple[str, dict[str, Any], Path]) -> None:
    text, _ = run_script(tmp_path, TORCH_LOGS="fp8graph")
    assert "Sequential training: 5 of 5 GEMMs in FP8" in text
    assert "graph after" not in text
    text, view, _ = verbose
    assert all(f"graph after {stage}:" in text for stage in ("before", *view["stages"]))


@pytest.mark.slow
def test_tlparse_shows_the_graphs_and_the_report(tmp_path: Path, verbose: tuple[str, dict[str, Any], Path]) -> None:
    tlparse = Path(sys.executable).with_name("tlparse")
    if not tlparse.exists():
        pytest.skip("tlparse is not installed")
    page = tmp_path / "page"
    _, view, trace = verbose
    (log,) = trace.iterdir()
    subprocess.run([tlparse, log, "-o", page, "--no-browser"], check=True, capture_output=True)
    found = {re.sub(r"fp8graph_\d\d_|_\d+$", "", f.stem): f for f in page.rglob("fp8graph_*.txt")}
    assert found.keys() == {"before", "report", *view["stages"]}
    for stage, text in view["stages"].items():
        assert found[stage].read_text().strip() == text.strip()
    assert json.loads(found["report"].read_text()) == view["gemms"]
    assert all(f.name in (page / "index.html").read_text() for f in found.values())
