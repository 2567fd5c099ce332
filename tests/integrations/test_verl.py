"""verl's own FSDP2 engine on two ranks of a CPU: it trains in FP8, and hands the bytes to a rollout."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8graph
from helpers import same_bits
from ranks import run_each, run_ranks
from tiny_models import causal_lm
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
    calls["resumed"] = (trained, (DELAYED, str(folder / "delayed"), [2], True))
    return run_ranks(run_each, 2, folder, calls, seconds=900, collective_seconds=300)[0]


def test_losses_are_close_to_those_of_verls_own_engine(runs: dict[str, Any]) -> None:
    assert {recipe for name, recipe in runs["tiles"]["recipes"].items() if name != "lm_head"} == {"blockwise"}
    for loss, expected in zip(runs["tiles"]["losses"], runs["own"]["losses"], strict=True):
        assert abs(loss / expected - 1) < 0.005


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


def test_wrong_set_ups_are_refused(tmp_path: Path) -> None:
    from fp8graph.integrations.verl import register

    with pytest.raises(fp8graph.ConfigError, match="unknown recipe 'rowise'. Did you mean 'rowwise'?"):
        register(recipe="rowise")
    torch.manual_seed(0)
    causal_lm("Llama")(2).save_pretrained(tmp_path / "model")
    lora, offloaded = run_ranks(refused, 2, tmp_path, str(tmp_path / "saved"))[0]
    assert "verl's LoRA with the engine of fp8graph: its weights are merged in high precision" in lora
    assert "Set offload_policy=True" in offloaded
