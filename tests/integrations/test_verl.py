"""verl's own FSDP2 engine on two ranks of a CPU: it trains in FP8, and hands the bytes to a rollout."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8graph
from helpers import distance, same_bits
from ranks import run_each, run_ranks
from tiny_models import causal_lm
from trainers_page import wrong_set_ups
from verl_on_ranks import TILES, refused, trained

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # verl's, of engines that are not installed
    pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed: it brings Ray and many packages"),
]
POLICY = {"rules": [{"pattern": "*layers.1.*", "recipe": "high_precision"}], "default": "delayed"}
DELAYED = {"policy": POLICY, "compiler": "eager"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(0)
    causal_lm("Llama")(2).save_pretrained(folder / "model")
    asked = {
        "own": (None, [0, 1, 2], False),
        "tiles": (TILES, [0, 1, 2], False),
        "delayed": (DELAYED, [0, 1, 2], False),
    }
    calls = {name: (trained, (fp8, str(folder / name), *run)) for name, (fp8, *run) in asked.items()}
    calls |= {
        f"{name}, offloaded": (trained, (fp8, str(folder / f"{name}, offloaded"), [0, 1, 2], False, True))
        for name, fp8 in (("tiles", TILES), ("delayed", DELAYED))
    }
    calls["resumed"] = (trained, (DELAYED, str(folder / "delayed"), [2], True))
    return run_ranks(run_each, 2, folder, calls, seconds=900, collective_seconds=300)[0]


def test_losses_are_close_to_those_of_verls_own_engine(runs: dict[str, Any]) -> None:
    assert {recipe for name, recipe in runs["tiles"]["recipes"].items() if name != "lm_head"} == {"blockwise"}
    assert distance(runs["tiles"]["losses"], runs["own"]["losses"]) < 0.005


def test_the_rollout_gets_the_bytes_that_the_trainer_multiplies(runs: dict[str, Any]) -> None:
    sent, multiplied = runs["tiles"]["sent"], runs["tiles"]["multiplied"]
    assert sent.keys() == multiplied.keys()
    assert same_bits(sent.values(), multiplied.values())
    in_fp8 = {name for name, tensor in sent.items() if tensor.dtype == torch.float8_e4m3fn}
    assert len(in_fp8) == 14
    assert {f"{name}_scale_inv" for name in in_fp8} <= sent.keys()


def test_a_policy_by_layer_and_a_resumed_run_that_is_bit_identical(runs: dict[str, Any]) -> None:
    whole, resumed = runs["delayed"], runs["resumed"]
    recipes = {name: recipe for name, recipe in whole["recipes"].items() if ".layers." in name}
    assert all(recipe == ("delayed" if ".layers.0." in name else None) for name, recipe in recipes.items())
    assert resumed["losses"] == whole["losses"][-len(resumed["losses"]) :]
    for part in ("sent", "state"):
        assert same_bits(resumed[part].values(), whole[part].values())


@pytest.mark.parametrize("name", ["tiles", "delayed"])
def test_offloaded_weights_are_trained_and_sent_the_same(name: str, runs: dict[str, Any]) -> None:
    found, expected = runs[f"{name}, offloaded"], runs[name]
    assert found["losses"] == expected["losses"]
    for part in ("sent", "state"):
        assert found[part].keys() == expected[part].keys()
        assert same_bits(found[part].values(), expected[part].values())


def test_wrong_set_ups_have_the_messages_of_the_page(tmp_path: Path) -> None:
    from fp8graph.integrations.verl import register

    typed, *shown = wrong_set_ups("verl")
    with pytest.raises(fp8graph.ConfigError, match=re.escape(typed)):
        register(recipe="rowise")
    torch.manual_seed(0)
    causal_lm("Llama")(2).save_pretrained(tmp_path / "model")
    for message, found in zip(shown, run_ranks(refused, 2, tmp_path, str(tmp_path / "saved"))[0], strict=True):
        assert message in found


def test_its_trainer_asks_for_gpus_and_its_rollouts_are_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.single_controller.ray import base  # pyright: ignore
    from verl.workers.rollout.base import get_rollout_class  # pyright: ignore

    node = {"node": {"CPU": 2.0}}
    monkeypatch.setattr(base.ray._private.state, "available_resources_per_node", lambda: node)
    with pytest.raises(ValueError, match="Total available GPUs 0 is less than total desired GPUs 2"):
        base.ResourcePoolManager(resource_pool_spec={"global_pool": [2]}, mapping={}).create_resource_pool()
    with pytest.raises(AssertionError, match="Rollout hf with mode async not found"):
        get_rollout_class("hf")
