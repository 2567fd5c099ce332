"""accelerate: its checkpoints, its FSDP2 on two ranks, and the patch with which it takes the names of backends."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8graph
from accelerate_on_ranks import Run, forget_accelerators, trained
from fp8graph.errors import StateError
from helpers import MLP, distance, same_bits
from ranks import run_each, run_ranks
from samples import ROOT
from trainers_page import run_commands, section, wrong_set_ups

PATCH = ROOT / "docs" / "patches" / "accelerate-1.15.0.patch"
LINEARS = 7  # of one Llama layer

DELAYED = fp8graph.Policy(default=fp8graph.DelayedScaling(amax_history_len=4), min_speedup=0)
DATA = torch.randn(8, 16, 32, generator=torch.Generator().manual_seed(1))


def backend() -> fp8graph.Backend:
    return fp8graph.Backend(DELAYED, compiler="eager")


def fresh_model() -> MLP:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return MLP()


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    return [*model.state_dict().values(), *fp8graph.backend_of(model).state_dict().values()]


def accelerated(folder: Path, steps: range, *, load: bool, save: bool) -> tuple[nn.Module, list[float]]:
    from accelerate import Accelerator

    forget_accelerators()
    accelerator, model = Accelerator(cpu=True), fresh_model()
    model.compile(backend=backend())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(fp8graph.backend_of(model))
    if load:
        accelerator.load_state(str(folder))
    losses: list[float] = []
    for step in steps:
        loss = (model(DATA[step]) - DATA[step]).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if save:
        accelerator.save_state(str(folder))
    return model, losses


def test_accelerate_resumes_bit_identically(tmp_path: Path) -> None:
    whole, losses = accelerated(tmp_path, range(4), load=False, save=False)
    _, first = accelerated(tmp_path, range(2), load=False, save=True)
    resumed, second = accelerated(tmp_path, range(2, 4), load=True, save=False)
    assert first + second == losses
    assert same_bits(tensors_of(resumed), tensors_of(whole))


def test_wrong_set_ups_have_the_messages_of_the_page(tmp_path: Path) -> None:
    from accelerate.utils import TorchDynamoPlugin

    named, damaged, *_ = map(re.escape, wrong_set_ups("accelerate"))
    with pytest.raises(ValueError, match=named):
        TorchDynamoPlugin(backend="fp8graph")  # pyright: ignore[reportArgumentType]
    accelerated(tmp_path, range(1), load=False, save=True)
    saved = torch.load(tmp_path / "custom_checkpoint_0.pkl", weights_only=True)
    saved.popitem()
    torch.save(saved, tmp_path / "custom_checkpoint_0.pkl")
    with pytest.raises(StateError, match=damaged):
        accelerated(tmp_path, range(0), load=True, save=False)


@pytest.mark.slow
def test_the_page_shows_the_output_of_its_command() -> None:
    run_commands("accelerate, Trainer")


BY_LAYER = {
    "rules": [
        {"pattern": "lm_head", "recipe": "high_precision"},
        {"pattern": "*layers.1.*", "recipe": "high_precision"},
    ],
    "default": "delayed",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The findings of rank 0, by name; two continue one run."""
    folder = tmp_path_factory.mktemp("ranks")
    delayed, tensorwise = (
        {"compiler": "eager", **chosen} for chosen in ({"policy": BY_LAYER}, {"recipe": "tensorwise"})
    )
    asked = {
        "own": Run(own="inductor"),
        "generated": Run(fp8={"recipe": "tensorwise"}),
        "delayed": Run(fp8=delayed, save_after=1),
        "resumed": Run(fp8=delayed, steps=[2], load=True),
        "by hand": Run(fp8=delayed, by_hand=True),
        "tensorwise": Run(fp8=tensorwise),
        "checkpointed": Run(fp8=tensorwise, checkpointed=True),
    }
    calls = {name: (trained, (run, str(folder / "saved"))) for name, run in asked.items()}
    return run_ranks(run_each, 2, folder, calls, seconds=900, collective_seconds=300)[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fsdp2_through_prepare_equals_fsdp2_by_hand(runs: dict[str, Any]) -> None:
    found, expected = runs["delayed"], runs["by hand"]
    assert found["losses"] == expected["losses"]
    for part in ("weights", "state"):
        assert found[part].keys() == expected[part].keys()
        assert same_bits(found[part].values(), expected[part].values())
    recipes = {fqn: recipe for fqn, recipe in found["gemms"]}
    assert len(recipes) == 2 * LINEARS
    assert all(recipe == ("delayed" if ".layers.0." in fqn else None) for fqn, recipe in recipes.items())
    assert "in no graph (not called yet, or run in eager): lm_head" in found["report"]  # as the page says


@pytest.mark.slow
def test_fsdp2_through_prepare_gathers_in_fp8_and_stays_close_to_accelerates_own_backend(runs: dict[str, Any]) -> None:
    own, found = runs["own"], runs["tensorwise"]
    assert 0.5 < found["sent"] / own["sent"] < 0.55  # one byte per number of a linear, and the norms
    assert distance(runs["generated"]["losses"], own["losses"]) < 0.0015  # 0.0008 measured
    assert found["losses"] == runs["checkpointed"]["losses"]
    assert same_bits(found["weights"].values(), runs["checkpointed"]["weights"].values())


@pytest.mark.slow
def test_fsdp2_through_prepare_resumes_bit_identically(runs: dict[str, Any]) -> None:
    whole, resumed = runs["delayed"], runs["resumed"]
    assert resumed["losses"] == whole["losses"][4:]
    for part in ("weights", "state"):
        assert same_bits(resumed[part].values(), whole[part].values())


NAMED = """
import torch
from accelerate import Accelerator
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import TorchDynamoPlugin
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

import fp8graph
from helpers import MLP

name = "fp8graph:rowwise"
plugin = TorchDynamoPlugin(backend=name, mode=None, options={"compiler": "eager"})
model = Accelerator(cpu=True, dynamo_plugin=plugin).prepare(MLP())
model(torch.randn(16, 32, requires_grad=True)).sum().backward()
assert {gemm.recipe for gemm in fp8graph.backend_of(model).report.gemms} == {"rowwise"}

command = f"--cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend {name} train.py"
environment = prepare_simple_launcher_cmd_env(launch_command_parser().parse_args(command.split()))[1]
assert TorchDynamoPlugin(backend=environment["ACCELERATE_DYNAMO_BACKEND"]).to_kwargs()["backend"] == name
TorchDynamoPlugin(backend="fp8grph")
"""


def test_accelerate_takes_the_command_of_the_page() -> None:
    from accelerate.commands.launch import launch_command_parser

    (command,) = re.findall(r"`accelerate launch ([^`]*)`", section("accelerate, Trainer"))
    found = launch_command_parser().parse_args(command.split())
    assert (found.use_fsdp, found.fsdp_version, found.dynamo_backend) == (True, "2", None)


@pytest.mark.slow
def test_accelerate_takes_the_name_of_any_backend_once_patched(tmp_path: Path) -> None:
    import accelerate

    shutil.copytree(Path(accelerate.__file__).parent, tmp_path / "accelerate")
    subprocess.run(["git", "apply", str(PATCH)], cwd=tmp_path, check=True)
    folders = map(str, (tmp_path, ROOT, ROOT / "tests" / "support"))
    done = subprocess.run(
        [sys.executable, "-c", NAMED],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stderr.splitlines()[-1] == "ValueError: 'FP8GRPH' is not a valid DynamoBackend"
