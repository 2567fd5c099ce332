"""Lightning's checkpoints: a resumed run is bit-identical."""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8graph
from fp8graph.errors import ConfigError, StateError
from helpers import MLP, same_bits

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


def fitted(pl: Any, folder: Path, steps: int, *, ckpt_path: Any = None, callback: bool = True, by: Any = None) -> Any:
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
