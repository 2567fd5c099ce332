"""Ray Train's own TorchTrainer with two workers on a CPU: a backend by name, and checkpoints."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),  # Ray's, of its own settings
    pytest.mark.skipif(
        find_spec("ray") is None, reason="Ray is not installed: it brings many packages, and starts servers"
    ),
]


def train(config: dict[str, Any]) -> None:
    """The loop of each worker; it imports all it needs, as Ray sends it to other processes."""
    import tempfile

    import ray.train  # pyright: ignore[reportMissingImports]
    import torch
    from ray.train.torch import prepare_model  # pyright: ignore[reportMissingImports]
    from torch import nn

    from fp8graph import backend_of

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(nn.functional.gelu(self.up(x)))

    torch.manual_seed(0)
    model: Any = torch.compile(prepare_model(Net()), backend=config["backend"], options=config["options"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, start, losses = ray.train.get_context().get_world_rank(), 0, list[float]()
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"))
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        backend_of(model).load_state_dict(saved["fp8graph"])
        start = saved["step"]
    for step in range(start, config["steps"]):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(x) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        state: dict[str, Any] = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        found: dict[str, Any] = {"losses": losses}
        if config["backend"].startswith("fp8graph"):
            state["fp8graph"] = backend_of(model).state_dict()
            found["gemms"] = {gemm.fqn: gemm.recipe for gemm in backend_of(model).report.gemms}
        with tempfile.TemporaryDirectory() as folder:
            torch.save(state, Path(folder, "state.pt"))
            ray.train.report(found, checkpoint=ray.train.Checkpoint.from_directory(folder) if rank == 0 else None)


def test_workers_find_the_backend_by_name_and_resume_bit_identically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    import ray  # pyright: ignore[reportMissingImports]
    from ray.train import RunConfig, ScalingConfig  # pyright: ignore[reportMissingImports]
    from ray.train.torch import TorchTrainer  # pyright: ignore[reportMissingImports]

    folders = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": variables})

    def fitted(steps: int, name: str, backend: str = "fp8graph:delayed") -> dict[str, Any]:
        options = {"compiler": "eager"} if backend.startswith("fp8graph") else None
        return (
            TorchTrainer(
                train,
                train_loop_config={"steps": steps, "backend": backend, "options": options},
                scaling_config=ScalingConfig(num_workers=2),
                run_config=RunConfig(storage_path=str(tmp_path), name=name),
            )
            .fit()
            .metrics
        )

    try:
        whole, own = fitted(3, "whole"), fitted(3, "own", "aot_eager")
        first, second = fitted(2, "halves"), fitted(3, "halves")  # a run of the same name continues
    finally:
        ray.shutdown()
    assert whole["gemms"] == {"up": "delayed", "down": "delayed"}
    assert first["losses"] + second["losses"] == whole["losses"]
    for loss, expected in zip(whole["losses"], own["losses"], strict=True):
        assert abs(loss / expected - 1) < 0.02
