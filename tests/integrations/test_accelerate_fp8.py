"""accelerate's ``mixed_precision="fp8"`` by fp8graph: its own functions, Trainer's, and the change upstream."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs, DistributedType, TorchDynamoPlugin
from torch import nn
from torchao.float8 import CastConfig, Float8LinearConfig

import fp8graph
from accelerate_on_ranks import Run, forget_accelerators, trained
from fp8graph import ConfigError
from fp8graph.integrations.accelerate import FP8GraphRecipeKwargs, _connect, install
from helpers import MLP, same_bits
from ranks import run_each, run_ranks
from samples import ROOT
from trainers_page import section, wrong_set_ups

PATCH = ROOT / "docs" / "patches" / "accelerate-1.15.0-fp8-backends.patch"
SECTION = section('`mixed_precision="fp8"`: accelerate, Trainer, axolotl, LlamaFactory')
EAGER = {"compiler": "eager"}
DATA = torch.randn(6, 16, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_FP8_BACKEND", "FP8_BACKEND", "ACCELERATE_FP8_RECIPE"):
        monkeypatch.delenv(name, raising=False)
    forget_accelerators()
    torch._dynamo.reset()
    yield
    _connect().default = None
    forget_accelerators()


def handler(recipe: Any = "tensorwise") -> FP8GraphRecipeKwargs:
    return FP8GraphRecipeKwargs(recipe=recipe, options=EAGER)


def run(host: Accelerator, steps: range = range(3), *, load: Path | None = None, save: Path | None = None) -> Any:
    """Train an MLP by accelerate's own functions: the model, and the losses."""
    torch.manual_seed(0)
    model: nn.Module = MLP()
    model, optimizer = host.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    if load is not None:
        host.load_state(str(load))
    losses: list[float] = []
    for step in steps:
        loss = (model(DATA[step]) - DATA[step]).square().mean()
        host.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if save is not None:
        host.save_state(str(save))
    return model, losses


def test_the_handler_compiles_as_by_hand() -> None:
    host = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler()])
    model, losses = run(host)
    assert (host.fp8_backend, host.fp8_enabled, host.mixed_precision) == ("FP8GRAPH", True, "bf16")
    report = fp8graph.backend_of(model).report
    assert {gemm.recipe for gemm in report.gemms} == {"tensorwise"}

    forget_accelerators()
    torch._dynamo.reset()
    torch.manual_seed(0)
    by_hand = fp8graph.compile(MLP(), recipe="tensorwise", regions="auto", compiler="eager")
    assert run_compiled(by_hand) == losses


def run_compiled(model: nn.Module) -> list[float]:
    host = Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer = host.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses: list[float] = []
    for step in range(3):
        loss = (model(DATA[step]) - DATA[step]).square().mean()
        host.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_scaling_state_is_saved_and_resumed(tmp_path: Path) -> None:
    delayed = fp8graph.DelayedScaling(amax_history_len=4)

    def host() -> Accelerator:
        forget_accelerators()
        torch._dynamo.reset()
        return Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler(delayed)])

    whole, losses = run(host(), range(4))
    _, first = run(host(), range(2), save=tmp_path)
    resumed, second = run(host(), range(2, 4), load=tmp_path)
    assert first + second == losses
    states = [fp8graph.backend_of(model).state_dict() for model in (whole, resumed)]
    assert same_bits(states[0].values(), states[1].values())


def test_each_accelerator_saves_the_state_of_a_model_that_was_compiled_before() -> None:
    delayed = fp8graph.DelayedScaling(amax_history_len=4)
    model = fp8graph.compile(MLP(), recipe=delayed, compiler="eager")
    hosts = [Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler(delayed)]) for _ in range(2)]
    for host in hosts:
        host.prepare(host.prepare(model))
        assert host._custom_objects == [fp8graph.backend_of(model)]


def test_options_are_those_of_compile() -> None:
    options = {"fullgraph": True, "dynamic": False, "strict": True, **EAGER}
    host = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[FP8GraphRecipeKwargs(options=options)])
    assert fp8graph.backend_of(run(host)[0]).report.gemms
    with pytest.raises(TypeError, match="stric"):
        FP8GraphRecipeKwargs(options={"stric": True})


def test_without_a_state_a_checkpoint_in_bf16_goes_on_in_fp8(tmp_path: Path) -> None:
    run(Accelerator(cpu=True, mixed_precision="bf16"), save=tmp_path)
    forget_accelerators()
    run(Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler()]), load=tmp_path)


def test_install_takes_accelerators_that_get_no_handler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install("rowwise", **EAGER)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")  # as accelerate launch --mixed_precision fp8
    host = Accelerator(cpu=True)
    assert host.fp8_backend == "FP8GRAPH"
    assert {gemm.recipe for gemm in fp8graph.backend_of(run(host)[0]).report.gemms} == {"rowwise"}
    assert "does not use it" not in caplog.text
    forget_accelerators()
    assert Accelerator(cpu=True, mixed_precision="bf16").fp8_backend == "NO"
    assert "does not use it (mixed_precision='bf16'): nothing of it compiles" in caplog.text
    forget_accelerators()
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    assert Accelerator(cpu=True, mixed_precision="fp8").fp8_backend == "AO"
    assert "does not use it (AO)" in caplog.text


def test_another_librarys_handler_keeps_its_backend_unless_it_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    install(**EAGER)
    assert Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()]).fp8_backend == "AO"
    assert "does not use it (AORecipeKwargs)" in caplog.text
    forget_accelerators()
    install(in_place_of="torchao", **EAGER)
    host = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    assert (host.fp8_backend, host.ao_recipe_handler) == ("FP8GRAPH", None)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_replaced_handlers_recipe_is_taken_unless_another_is_named(name: str) -> None:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(name), pad_inner_dim=True)
    for ours, expected in ((None, name), ("blockwise", "blockwise")):
        install(ours, in_place_of="torchao", **EAGER)
        host = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config=config)])
        assert vars(host)["fp8_backend_recipe_handler"].recipe == expected
        forget_accelerators()


def test_a_replaced_handler_without_a_recipes_casts_asks_for_one() -> None:
    mixed = Float8LinearConfig(cast_config_grad_output=CastConfig(target_dtype=torch.float8_e4m3fn))
    install(in_place_of="torchao", **EAGER)
    with pytest.raises(ConfigError, match="casts of no recipe of torchao's: name one by install"):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config=mixed)])
    install(policy={"default": "blockwise"}, in_place_of="torchao", **EAGER)
    assert Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config=mixed)]).fp8_enabled


def test_the_name_of_llamafactorys_option_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where Trainer has read its arguments, in bf16, before LlamaFactory sets its variables."""
    install(**EAGER)
    monkeypatch.setenv("FP8_BACKEND", "fp8graph")
    assert Accelerator(cpu=True, mixed_precision="bf16").fp8_backend == "FP8GRAPH"
    assert "does not use it" not in caplog.text
    forget_accelerators()
    Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AORecipeKwargs()])
    assert "this Accelerator got AORecipeKwargs, too, whose settings are left out" in caplog.text


def test_a_policy_file_is_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('default = "blockwise"\n', encoding="utf-8")
    monkeypatch.setenv("ACCELERATE_FP8_POLICY", str(file))
    assert FP8GraphRecipeKwargs().policy == str(file)
    monkeypatch.setenv("ACCELERATE_FP8_RECIPE", "rowise")
    monkeypatch.delenv("ACCELERATE_FP8_POLICY")
    with pytest.raises(ValueError, match="rowise"):
        FP8GraphRecipeKwargs()


def test_wrong_set_ups_have_the_messages_of_the_page() -> None:
    other, two, again, elsewhere = map(re.escape, wrong_set_ups("accelerate")[2:])
    with pytest.raises(ConfigError, match=other):
        Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[handler()])
    with pytest.raises(ConfigError, match=two):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler(), AORecipeKwargs()])
    with pytest.raises(ConfigError, match="in_place_of"):
        install(in_place_of="te")
    forget_accelerators()
    Accelerator(cpu=True, mixed_precision="no")
    with pytest.raises(ConfigError, match="keeps the first one's. Make the one with mixed_precision='fp8' first"):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler()])
    forget_accelerators()
    plugin = TorchDynamoPlugin(backend="eager")  # pyright: ignore[reportArgumentType]
    host = Accelerator(cpu=True, mixed_precision="fp8", dynamo_plugin=plugin, kwargs_handlers=[handler()])
    with pytest.raises(ConfigError, match=again):
        host.prepare(MLP())
    forget_accelerators()
    host = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler()])
    host.state.distributed_type = DistributedType.DEEPSPEED
    with pytest.raises(ConfigError, match=elsewhere):
        host.prepare_model(MLP())


def test_a_model_that_was_compiled_before_stays_as_it_is() -> None:
    host = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler("rowwise")])
    model = fp8graph.compile(MLP(), recipe="tensorwise", compiler="eager")
    before = fp8graph.backend_of(model)
    assert fp8graph.backend_of(host.prepare(model)) is before


def test_accelerate_takes_the_command_of_the_page() -> None:
    from accelerate.commands.launch import launch_command_parser

    (command,) = re.findall(r"`accelerate launch ([^`]*)`", SECTION)
    parsed = launch_command_parser().parse_args(command.split())
    assert (parsed.mixed_precision, parsed.module) == ("fp8", True)
    assert (parsed.training_script, parsed.training_script_args) == ("fp8graph.integrations.accelerate", ["<script>"])


class Lines(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def trainer(folder: Path, **arguments: Any) -> Any:
    """Trainer as a program of its own makes it."""
    from transformers import Trainer, TrainingArguments

    from tiny_models import causal_lm

    forget_accelerators()
    torch._dynamo.reset()
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "max_steps": 4, "per_device_train_batch_size": 4, "save_steps": 2, "logging_steps": 1, "report_to": "none",
        "use_cpu": True, "seed": 0, "learning_rate": 1e-2, **arguments,
    }  # fmt: skip
    return Trainer(model=causal_lm("Llama")(1), args=TrainingArguments(str(folder), **settings), train_dataset=Lines())


def losses_of(trained: Any) -> list[float]:
    return [row["loss"] for row in trained.state.log_history if "loss" in row]


@pytest.mark.slow
def test_trainer_trains_and_resumes_by_one_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trainer(tmp_path / "bf16", bf16=True)
    plain.train()
    install(fp8graph.Policy(default=fp8graph.DelayedScaling(amax_history_len=4), min_speedup=0).default, **EAGER)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    whole = trainer(tmp_path / "whole")
    whole.train()
    assert whole.accelerator.fp8_backend == "FP8GRAPH"
    assert {gemm.recipe for gemm in fp8graph.backend_of(whole.model).report.gemms} >= {"delayed"}
    assert losses_of(whole) == pytest.approx(losses_of(plain), rel=0.01)
    assert losses_of(whole) != losses_of(plain)

    resumed = trainer(tmp_path / "resumed")
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    resumed.train(resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-2"))
    assert losses_of(resumed)[-2:] == losses_of(whole)[-2:]
    states = [fp8graph.backend_of(each.model).state_dict() for each in (whole, resumed)]
    assert same_bits(states[0].values(), states[1].values())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fsdp2_on_two_ranks_equals_compiling_before_prepare(tmp_path: Path) -> None:
    delayed = {"policy": {"default": "delayed"}, **EAGER}
    runs = {
        "before": Run(fp8=delayed),
        "whole": Run(fp8=delayed, by_precision=True, save_after=1),
        "resumed": Run(fp8=delayed, by_precision=True, steps=[2], load=True),
    }
    calls = {name: (trained, (each, str(tmp_path / "saved"))) for name, each in runs.items()}
    ranks = run_ranks(run_each, 2, tmp_path, calls, seconds=900, collective_seconds=300)[0]
    before, whole, resumed = (ranks[name] for name in runs)
    assert whole["losses"] == before["losses"]
    assert resumed["losses"] == before["losses"][4:]
    for part in ("weights", "state"):
        assert same_bits(whole[part].values(), before[part].values())
        assert same_bits(resumed[part].values(), before[part].values())


PROGRAM = """
import sys

import torch
from accelerate import Accelerator

import fp8graph
from helpers import MLP

host = Accelerator(cpu=True, mixed_precision="fp8")
model = host.prepare(MLP())
model(torch.randn(16, 32)).sum().backward()
print(sys.argv[1:], host.fp8_backend, sorted({str(gemm.recipe) for gemm in fp8graph.backend_of(model).report.gemms}))
"""


def run_program(*command: str, folders: tuple[Path, ...] = (), errors: bool = False, **variables: str) -> str:
    path = os.pathsep.join(map(str, (*folders, ROOT, ROOT / "tests" / "support")))
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr if errors else done.stdout


@pytest.mark.slow
def test_a_program_of_somebody_else_runs_under_the_module(tmp_path: Path) -> None:
    file = tmp_path / "train_it.py"
    file.write_text(PROGRAM, encoding="utf-8")
    variables: dict[str, Any] = {"ACCELERATE_FP8_RECIPE": "tensorwise"}
    module = "fp8graph.integrations.accelerate"
    expected = "['--lr', '1'] FP8GRAPH ['None', 'tensorwise']\n"
    run_ = [["-m", module, str(file), "--lr", "1"], ["-m", module, "-m", "train_it", "--lr", "1"]]
    for command in run_:
        found = run_program(*command, folders=(tmp_path,), **variables)
        assert re.sub("'None', ", "", found) == re.sub("'None', ", "", expected)
    file.write_text("print('no Accelerator')\n", encoding="utf-8")
    assert "none of its Accelerators compiled with fp8graph" in run_program("-m", module, str(file), errors=True)


@pytest.mark.slow
def test_a_patched_accelerate_needs_no_connection(tmp_path: Path) -> None:
    """If this fails to apply since accelerate has the class by itself: drop ``_connect`` and the patch."""
    changed = re.findall(r"^[+-](?![+-])", PATCH.read_text(encoding="utf-8"), re.MULTILINE)
    assert f"these {len(changed)} lines" in " ".join(SECTION.split())  # wherever the page breaks its lines
    shutil.copytree(Path(accelerate.__file__).parent, tmp_path / "accelerate")
    subprocess.run(["git", "apply", str(PATCH)], cwd=tmp_path, check=True)
    handlers = """
from accelerate import Accelerator
from fp8graph.integrations import accelerate as ours

assert ours._BASE.__name__ == "FP8BackendKwargs"
before = Accelerator.prepare
handler = ours.FP8GraphRecipeKwargs(recipe="tensorwise", options={"compiler": "eager"})
assert Accelerator.prepare is before
"""
    with_handler = 'mixed_precision="fp8", kwargs_handlers=[handler])'
    text = handlers + PROGRAM.replace('mixed_precision="fp8")', with_handler)
    assert "FP8GRAPH ['tensorwise']" in run_program("-c", text, folders=(tmp_path,)).replace("'None', ", "")
    alone = text.replace("host.prepare(", "host.prepare_model(")
    assert "FP8GRAPH ['tensorwise']" in run_program("-c", alone, folders=(tmp_path,)).replace("'None', ", "")
    installed = handlers + "ours.install('tensorwise', compiler='eager')\n" + PROGRAM
    assert "FP8GRAPH ['tensorwise']" in run_program("-c", installed, folders=(tmp_path,)).replace("'None', ", "")
