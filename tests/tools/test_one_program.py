"""The figures of docs/reinforcement_learning.md are those of the raw files, and the program that makes them works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import one_program, other_servers
from helpers import in_one_test
from samples import ROOT

PAGE = (ROOT / "docs" / "reinforcement_learning.md").read_text(encoding="utf-8")
RUNS: list[dict[str, Any]] = [
    json.loads(file.read_text(encoding="utf-8")) for file in one_program.FOLDER.glob("*_*.json")
]


def test_the_pages_rows_are_those_of_the_runs() -> None:
    assert all(row in PAGE.splitlines() for row in map(one_program.row, RUNS))
    rows = [line for line in PAGE.split("| largest KL |\n")[1].splitlines() if line.startswith("| ")]
    header, *_ = PAGE.split("| largest KL |\n")[1].splitlines()
    assert set(header) == {"|", "-"}
    end = next(i for i, line in enumerate(PAGE.split("| largest KL |\n")[1].splitlines()) if not line)
    assert len(rows[: end - 1]) == len(RUNS)


def test_the_distances_to_servers_of_others_are_those_of_the_run() -> None:
    run = json.loads((one_program.FOLDER / "servers.json").read_text(encoding="utf-8"))
    assert run["clean"]
    for server, far in run["distances"].items():
        assert other_servers.row(server, far) in PAGE.splitlines()
        assert (far["kl"] == 0.0) == server.startswith("fp8graph, ")


def test_the_cost_is_that_of_the_run() -> None:
    run = json.loads((one_program.FOLDER / "cost.json").read_text(encoding="utf-8"))
    assert run["clean"]
    text = ", ".join(f"{ratio:.1f} times as long in {name}" for name, ratio in run["ratios"].items())
    assert f"{text} (`python -m benchmarks.one_program --cost`" in " ".join(PAGE.split())


@in_one_test("recipe", one_program.RECIPES)
@in_one_test("model", ["llama", "mixture"])
def test_each_update_of_200_was_equal(model: str, recipe: str) -> None:
    (run,) = (
        run
        for run in RUNS
        if (run["model"], run["recipe"], run["trainer"], run["kv"], run["without"])
        == (model, recipe, "bf16", "bf16", False)
    )
    assert (run["compiler"], run["clean"], len(run["updates"])) == ("inductor", True, 200)
    assert all(update["equal"] and update["kl"] == 0.0 for update in run["updates"])
    assert {size for update in run["updates"] for size in update["batches"]} == set(range(1, 9))
    assert run["gemms_in_fp8"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trainer_and_server_agree_in_a_short_run(tmp_path: Path) -> None:
    """In two processes, with an FP8 cache, which the trainer scores with, too."""
    options = ["--updates", "2", "--compiler", "eager", "--kv", "fp8", "--out", str(tmp_path)]
    assert one_program.main(options) == 0
    (file,) = tmp_path.glob("*.json")
    run = json.loads(file.read_text(encoding="utf-8"))
    assert [update["equal"] for update in run["updates"]] == [True, True]
    assert all(update["kl_of_gradient"] > 0 for update in run["updates"])
