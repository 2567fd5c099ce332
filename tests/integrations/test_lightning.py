"""Lightning: FP8 by its plugin for precision, scaling state in its checkpoints, and Fabric with FSDP2 on two ranks."""

from __future__ import annotations

import logging
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8graph
from fp8graph.errors import ConfigError, StateError
from helpers import MLP, distance, same_bits
from ranks import run_each, run_ranks
from tiny_models import causal_lm
from trainers_page import run_commands, wrong_set_ups

DELAYED = fp8graph.Policy(default=fp8graph.DelayedScaling(amax_history_len=4), min_speedup=0)
DATA = torch.randn(8, 16, 32, generator=torch.Generator().manual_seed(1))


def backend(**settings: Any) -> fp8graph.Backend:
    return fp8graph.Backend(DELAYED, compiler="eager", **settings)


def fresh_model() -> MLP:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return MLP()


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    return [*model.state_dict().values(), *fp8graph.backend_of(model).state_dict().values()]


@pytest.fixture
def pl() -> Any:
    return pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")


def fitted(
    pl: Any, folder: Path, steps: int, *, ckpt_path: Any = None, callback: bool = True, by: Any = None, **chosen: Any
) -> Any:
    from fp8graph.integrations.lightning import ScalingStateCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = fresh_model()
            self.losses: list[float] = []

        def training_step(self, _batch: Any, _: int) -> torch.Tensor:
            x = DATA[self.global_step]  # a loader starts over in the middle of an epoch
            loss = (self.inner(x) - x).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module: Any = Module()
    if by != "nothing":
        module.inner.compile(backend=by or backend())
    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ScalingStateCallback()] if callback else [], default_root_dir=folder, enable_checkpointing=False,
        **chosen,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(list(DATA)), ckpt_path=ckpt_path)  # pyright: ignore
    trainer.save_checkpoint(folder / f"{steps}.ckpt")
    return module


@pytest.mark.filterwarnings("ignore")  # Lightning's advice: workers, logging steps
def test_lightning_resumes_bit_identically(pl: Any, tmp_path: Path) -> None:
    whole = fitted(pl, tmp_path, 4)
    first = fitted(pl, tmp_path, 2)
    resumed = fitted(pl, tmp_path, 4, ckpt_path=tmp_path / "2.ckpt")
    assert len(whole.losses) == 4
    assert first.losses + resumed.losses == whole.losses
    assert same_bits(tensors_of(resumed.inner), tensors_of(whole.inner))


def by_precision(pl: Any, folder: Path, steps: int, ckpt_path: Any = None, **arguments: Any) -> Any:
    """The same by the plugin."""
    from fp8graph.integrations.lightning import FP8Precision

    plugins = [FP8Precision(**{"compiler": "eager", **arguments})]
    return fitted(pl, folder, steps, ckpt_path=ckpt_path, callback=False, by="nothing", plugins=plugins)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_precision_trains_in_fp8_and_resumes_bit_identically(pl: Any, tmp_path: Path) -> None:
    rule = fp8graph.Rule("inner.up", recipe="high_precision")
    policy = fp8graph.Policy([rule], default=fp8graph.DelayedScaling(amax_history_len=4), min_speedup=0)
    whole = by_precision(pl, tmp_path, 4, policy=policy)
    by_precision(pl, tmp_path, 2, policy=policy)
    resumed = by_precision(pl, tmp_path, 4, tmp_path / "2.ckpt", policy=policy)
    assert resumed.losses == whole.losses[2:]
    assert same_bits(tensors_of(resumed), tensors_of(whole))
    gemms = {(gemm.fqn, gemm.dtypes[2] if gemm.recipe else None) for gemm in fp8graph.backend_of(whole).report.gemms}
    assert gemms == {("inner.gate", "bf16"), ("inner.up", None), ("inner.down", "bf16")}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_losses_of_generated_code_are_close_to_those_of_inductor(pl: Any, tmp_path: Path) -> None:
    own = fitted(pl, tmp_path, 4, callback=False, by="inductor", precision="bf16-mixed").losses
    found = by_precision(pl, tmp_path, 4, recipe="tensorwise", compiler="inductor").losses
    assert distance(found, own) < 0.003  # 0.0022 measured


def test_wrong_set_ups_have_the_messages_of_the_page(pl: Any) -> None:
    from fp8graph.integrations.lightning import FP8Precision

    named, typed, empty = map(re.escape, wrong_set_ups("Lightning"))
    with pytest.raises(ValueError, match=named):
        pl.Trainer(accelerator="cpu", precision="fp8graph-tensorwise", logger=False)
    with pytest.raises(ConfigError, match=typed):
        FP8Precision(recipe="rowise")
    with pytest.raises(ConfigError, match=empty):
        FP8Precision().convert_module(pl.LightningModule())


@pytest.mark.slow
@pytest.mark.usefixtures("pl")
def test_the_page_shows_the_output_of_its_command() -> None:
    run_commands("Lightning")


def by_fabric(rank: int, folder: str, steps: range, load: bool) -> dict[str, Any]:
    """A Llama under Fabric's strategy for FSDP2. Its checkpoint is written after two steps."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    torch._dynamo.reset()

    def parallelized(model: Any, mesh: Any) -> Any:
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh["data_parallel"])
        return model

    strategy = ModelParallelStrategy(parallelized, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    torch.manual_seed(0)
    model = causal_lm("Llama")(2).bfloat16()
    rules = [fp8graph.Rule("*layers.1.*", recipe="high_precision")]
    policy = fp8graph.Policy(rules, default=fp8graph.DelayedScaling(amax_history_len=4))
    fp8graph.compile(model, policy=policy, regions="auto", compiler="eager")
    wrapped = fabric.setup_module(model)
    optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(wrapped.parameters(), lr=1e-2))
    backend = fp8graph.backend_of(model)
    state: dict[str, Any] = {"model": wrapped, "optimizer": optimizer, "fp8graph": backend.state_dict()}
    if load:
        fabric.load(folder, state)  # which loads sharded models and optimizers, and replaces all else in the dict
        backend.load_state_dict(state["fp8graph"])
    losses: list[float] = []
    for step in steps:
        ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = wrapped(ids, labels=ids, use_cache=False).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:
            fabric.save(folder, state | {"fp8graph": backend.state_dict()})
    local = [value.to_local() for value in model.state_dict().values()]
    layers = {gemm.fqn.partition(".layers.")[2].partition(".")[0] for gemm in backend.report.gemms if gemm.recipe}
    return {"losses": losses, "tensors": [*local, *backend.state_dict().values()], "layers": layers}


@pytest.mark.slow
@pytest.mark.usefixtures("pl")
def test_fabric_shards_a_compiled_model_and_resumes_bit_identically(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    calls = {
        "whole": (by_fabric, (folder, range(3), False)),
        "resumed": (by_fabric, (folder, range(2, 3), True)),
    }
    found = run_ranks(run_each, 2, tmp_path, calls, seconds=600, collective_seconds=200)[0]
    assert found["resumed"]["losses"] == found["whole"]["losses"][2:]
    assert same_bits(found["resumed"]["tensors"], found["whole"]["tensors"])
    assert found["whole"]["layers"] == {"0", ""}  # "": the head


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning_says_what_is_wrong(pl: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fitted(pl, tmp_path, 2, callback=False)
    with caplog.at_level(logging.WARNING, logger="fp8graph"):
        fitted(pl, tmp_path, 3, ckpt_path=tmp_path / "2.ckpt")
    assert "the checkpoint has no scaling state of fp8graph" in caplog.text
    with pytest.raises(StateError, match="strict mode: the checkpoint has no scaling state"):
        fitted(pl, tmp_path, 4, ckpt_path=tmp_path / "2.ckpt", by=backend(strict=True))
    damaged = torch.load(tmp_path / "3.ckpt", weights_only=True)
    damaged["fp8graph"].popitem()
    torch.save(damaged, tmp_path / "damaged.ckpt")
    with pytest.raises(StateError, match="it is truncated"):
        fitted(pl, tmp_path, 4, ckpt_path=tmp_path / "damaged.ckpt")
    with pytest.raises(ConfigError, match="was not compiled with the fp8graph backend"):
        fitted(pl, tmp_path, 1, by="nothing")


def test_nothing_is_imported_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("lightning.pytorch", "pytorch_lightning", "fp8graph.integrations.lightning"):
        monkeypatch.delitem(sys.modules, library, raising=False)
    import fp8graph.integrations.lightning as module

    assert not {"lightning.pytorch", "pytorch_lightning"} & sys.modules.keys()
    with pytest.raises(AttributeError, match="has no attribute 'ScalingState'"):
        _ = module.ScalingState  # pyright: ignore


@pytest.mark.parametrize("library", ["lightning.pytorch", "pytorch_lightning"])
def test_the_library_in_use(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base class is that of whichever Lightning the program imported."""
    import fp8graph.integrations.lightning as module

    made = types.ModuleType(library)
    made.Callback = type("Callback", (), {})  # pyright: ignore
    for other in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, other, raising=False)
    monkeypatch.setitem(sys.modules, library.partition(".")[0], made)
    monkeypatch.setitem(sys.modules, library, made)
    module._made_for.cache_clear()
    callback: Any = module.ScalingStateCallback()
    assert type(callback).__mro__[1] is made.Callback
    model = fresh_model()
    model.compile(backend=backend())
    model(DATA[0]).sum().backward()
    checkpoint: dict[str, Any] = {}
    callback.on_save_checkpoint(None, model, checkpoint)
    again = fresh_model()
    again.compile(backend=backend())
    callback.on_load_checkpoint(None, again, checkpoint)
    again(DATA[0])
    saved, loaded = checkpoint["fp8graph"], fp8graph.backend_of(again).state_dict()
    assert type(saved) is dict
    assert saved.keys() == loaded.keys()
    module._made_for.cache_clear()
