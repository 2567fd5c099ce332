"""Ray Train's own TorchTrainer with two workers on a CPU: a backend by name, and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from helpers import distance
from samples import ROOT
from trainers_page import run_commands, wrong_set_ups

BY_LAYER = {"rules": [{"pattern": "layers.1", "recipe": "high_precision"}], "default": "delayed"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),  # Ray's, of its own settings
    pytest.mark.skipif(
        find_spec("ray") is None, reason="Ray is not installed: it brings many packages, and starts servers"
    ),
]


def train(config: dict[str, Any]) -> None:
    """The loop of each worker, once for each of ``runs``. It imports all it needs: Ray sends it to other processes."""
    import tempfile

    import ray.train  # pyright: ignore[reportMissingImports]
    import torch
    from ray.train.torch import prepare_model  # pyright: ignore[reportMissingImports]
    from torch import nn

    from fp8graph import backend_of

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + nn.functional.gelu(layer(x))
            return x

    rank, found = ray.train.get_context().get_world_rank(), dict[str, Any]()
    checkpoint, state = ray.train.get_checkpoint(), dict[str, Any]()
    for name, backend, options in config["runs"]:
        try:
            torch._dynamo.reset()
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(32, 32)) if name == "bare" else Net()
            model: Any = torch.compile(prepare_model(net), backend=backend, options=options)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            start, losses = 0, list[float]()
            if checkpoint:
                with checkpoint.as_directory() as folder:
                    saved = torch.load(Path(folder, "state.pt"))
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                backend_of(model).load_state_dict(saved["fp8graph"])
                start = saved["step"]
            for step in range(start, config["steps"]):
                x = torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * step + rank))
                with torch.autocast("cpu", torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(x).float(), torch.arange(16) + 16 * rank)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            found[name] = {"losses": losses}
            if backend == "inductor":
                continue
            report, scales = backend_of(model).report, dict(backend_of(model).state_dict())
            found[name] |= {"said": str(report), "gemms": {gemm.fqn: gemm.recipe for gemm in report.gemms}}
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "fp8graph": scales}
            if name == "damaged":
                backend_of(model).load_state_dict(dict([*scales.items()][:-1]))
        except Exception as error:
            found[name] = {"said": str(error)}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state | {"step": config["steps"]}, Path(folder, "state.pt"))
        ray.train.report(found, checkpoint=ray.train.Checkpoint.from_directory(folder) if rank == 0 else None)


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """A busy machine takes longer to start workers than the 60 seconds that Ray waits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "600")
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The findings of rank 0, by the name of the run; "second" continues "first"."""
    import ray  # pyright: ignore[reportMissingImports]
    from ray.train import RunConfig, ScalingConfig  # pyright: ignore[reportMissingImports]
    from ray.train.torch import TorchTrainer  # pyright: ignore[reportMissingImports]

    # workers unpickle the loop, for which they import this module
    folders = [ROOT, ROOT / "tests" / "support", Path(__file__).parent, os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}
    run = RunConfig(storage_path=str(tmp_path_factory.mktemp("ray")), name="halves")
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": variables})

    def fitted(steps: int, *runs: tuple[Any, ...], **settings: Any) -> dict[str, Any]:
        config = {"steps": steps, "runs": runs}
        workers = ScalingConfig(num_workers=2)
        return TorchTrainer(train, train_loop_config=config, scaling_config=workers, **settings).fit().metrics

    by_layer = ("fp8graph", {"compiler": "eager", "policy": BY_LAYER})
    try:
        return {
            **fitted(
                3,
                ("own", "inductor", None),
                ("generated", "fp8graph:tensorwise", None),
                ("whole", *by_layer),
                ("damaged", *by_layer),
                ("named", "fp8graph:rowise", None),
                ("bare", *by_layer),
            ),
            **fitted(2, ("first", *by_layer), run_config=run),
            **fitted(3, ("second", *by_layer), run_config=run),  # a run of the same name continues
        }
    finally:
        ray.shutdown()


def test_losses_of_generated_code_are_close_to_those_of_inductor(runs: dict[str, Any]) -> None:
    assert {*runs["generated"]["gemms"].values()} == {"tensorwise"}
    assert distance(runs["generated"]["losses"], runs["own"]["losses"]) < 0.002  # 0.0013 measured


def test_workers_honour_a_policy_by_layer_and_resume_bit_identically(runs: dict[str, Any]) -> None:
    assert runs["whole"]["gemms"] == {"layers.0": "delayed", "layers.1": None, "layers.2": "delayed"}
    assert runs["first"]["losses"] + runs["second"]["losses"] == runs["whole"]["losses"]


def test_wrong_set_ups_have_the_messages_of_the_page(runs: dict[str, Any]) -> None:
    for name, shown in zip(("named", "damaged", "bare"), wrong_set_ups("Ray Train"), strict=True):
        assert shown in runs[name]["said"]


def test_the_page_shows_the_output_of_its_command() -> None:
    run_commands("Ray Train")
