"""Meshes and networks: what is refused, what is measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import fp8graph
from fp8graph.cli import main
from fp8graph.extras.planning import Mesh, Network
from helpers import in_one_test


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("pp=2", "unknown axis 'pp'. Axes: dp, fsdp, tp, and the switch sp."),
        ("", "unknown axis ''"),
        ("dp", "dp='' must be a whole number > 0."),
        ("dp=x", "dp='x' must be a whole number > 0."),
        ("dp=-1", "dp='-1' must be a whole number > 0."),
        ("dp=0", "mesh: dp=0 must be a whole number > 0."),
        ("dp=2,dp=2", "dp is given twice"),
        ("sp=2,tp=2", "sp='2' must be 0 or 1."),
        ("dp=8,sp", "needs tp > 1"),
        ("dp=16385", "has 16,385 GPUs; the cost model supports up to 16,384."),
        ("dp=256,fsdp=16,tp=8", "has 32,768 GPUs"),
    ],
)
def test_a_wrong_mesh(mesh: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama", "--mesh", mesh]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@in_one_test(
    ("wrong", "message"),
    [
        ({"overlap": 1.5}, r"overlap=1\.5"),
        ({"node_bandwidth": 0}, "node_bandwidth=0"),
        ({"network_bandwidth": "fast"}, "network_bandwidth='fast'"),
        ({"gpus_per_node": 0.5}, r"gpus_per_node=0\.5"),
        ({"network_latency": -1e-6}, "network_latency=-1e-06"),
        ({"node_latency": math.nan}, "node_latency=nan"),
    ],
)
def test_a_wrong_network(wrong: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"name": "n", "node_bandwidth": 1e9, "network_bandwidth": 1e9} | wrong
    with pytest.raises(fp8graph.ConfigError, match=message):
        Network(**values)


def test_a_measured_network(tmp_path: Path) -> None:
    speed: dict[str, Any] = {
        "name": "mine", "bf16_flops": 7e14, "fp32_flops": 5e13, "fp8_flops": 1.3e15, "fp4_flops": 2e15,
        "bandwidth": 3e12, "launch": 2e-6,
    }  # fmt: skip
    path = tmp_path / "mine.json"
    network: dict[str, Any] = {"name": "mine", "node_bandwidth": 3e11, "network_bandwidth": 2e10, "gpus_per_node": 4}
    path.write_text(json.dumps({"target": "sm_89", "speed": speed, "network": network}))
    assert Network.of_target(str(path)) == Network(**network)
    path.write_text(json.dumps({"target": "sm_90", "speed": speed}))
    assert Network.of_target(str(path)) == Network.of_target("sm_90")
    for wrong in ({"name": "x"}, 5, {**network, "color": "green"}):
        path.write_text(json.dumps({"target": "sm_90", "speed": speed, "network": wrong}))
        with pytest.raises(fp8graph.ConfigError, match=r"mine\.json: network: "):
            Network.of_target(str(path))


def test_neighbours_along_each_axis() -> None:
    """Those of tp are neighbours, then those of fsdp, then those of dp."""
    mesh = Mesh(dp=2, fsdp=4, tp=8)
    assert {axis: mesh.group(axis) for axis in ("tp", "fsdp", "dp", "all")} == {
        "tp": (8, 1), "fsdp": (4, 8), "dp": (2, 32), "all": (64, 1),
    }  # fmt: skip
