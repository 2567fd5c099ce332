"""torchtitan's models, trained on several ranks by its own functions, in a loop of ours.

Its ``Trainer`` reads the memory of a CUDA device (``components/metrics.py: DeviceMemoryMonitor``), and so does not
start on a CPU. Taken from torchtitan are the config of a debug model, overrides, the model, its ``parallelize``
function (which compiles the blocks and shards), optimizer, schedule and checkpoint manager. Three things differ from
its defaults: ``spmd_backend="partial_dtensor"``, since "spmd_types" needs a newer FSDP2 than that of torch 2.13; SDPA
in place of FlexAttention, whose backward has no code for CPUs; and sums of gradients, as gloo has no ``PREMUL_SUM``.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from helpers import findings


@dataclass
class Steps:
    """The step, in place of the Trainer and of its data loader, which a checkpoint holds, too."""

    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training."""

    model: str = "llama3"
    backend: str = "inductor"
    fp8: dict[str, Any] | None = None  # arguments of the override; None: without it
    layers: int = 2
    steps: int = 3
    checkpointed: bool = True  # activations, torchtitan's default
    tensor_parallel: int = 1  # ranks
    pipeline: int = 1  # ranks
    schedule: str = "1F1B"  # of the pipeline; "Interleaved1F1B" has two stages on each rank
    saved: bool = True  # a checkpoint is written after two steps
    exclude: list[str] = field(default_factory=list[str])  # from loading


def titan(name: str) -> Any:
    """A module of torchtitan, which takes a machine without any device for one with CUDA."""
    setattr(importlib.import_module("torch._utils"), "_get_available_device_type", lambda: "cpu")  # noqa: B010
    return importlib.import_module(f"torchtitan.{name}")


def configured(run: Run) -> Any:
    """The ``Trainer.Config`` of a debug model."""
    config = getattr(titan(f"models.{run.model}.config_registry"), f"{run.model}_debugmodel")()
    model = config.model_spec.model
    model.layers = model.layers[: run.layers]
    for layer in model.layers:
        layer.attention.inner_attention = titan("models.common.attention").ScaledDotProductAttention.Config()
    config.training.seq_len, config.training.disable_cuda_graphs = 64, True
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.tensor_parallel_degree = run.tensor_parallel
    config.parallelism.pipeline_parallel_degree = run.pipeline
    config.parallelism.pipeline_parallel_schedule = run.schedule
    config.parallelism.pipeline_parallel_microbatch_size, config.training.local_batch_size = 1, 2
    config.compile = titan("config").CompileConfig(enable=True, backend=run.backend, components=["model"])
    config.checkpoint.enable, config.checkpoint.interval = run.saved, 2
    config.checkpoint.exclude_from_loading = run.exclude
    if not run.checkpointed:
        config.activation_checkpoint = None
    if run.fp8 is not None:
        config.override.imports = [("fp8graph.integrations.torchtitan.fp8", run.fp8)]
    model.update_from_config(config=config)
    titan("config.override").apply_overrides(config.override, config)
    return config


def _loss(results: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if isinstance(results, DTensor):  # of tensor parallelism
        results = results.full_tensor()
    return torch.nn.functional.cross_entropy(results.float().flatten(0, 1), labels.flatten())


def _pair(results: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, None]:
    """As torchtitan's pipelines take a loss: with what is logged beside it."""
    return _loss(results, labels), None


def _step(model: torch.nn.Module, pipeline: Any, ids: torch.Tensor) -> float:
    """Forward and backward; the loss, which of a pipeline the last rank has and tells the others."""
    if pipeline is None:
        loss = _loss(model(ids[:, :-1]), ids[:, 1:])
        loss.backward()
        return loss.item()
    last = dist.get_world_size() - 1
    losses: list[torch.Tensor] = []
    given: dict[str, Any] = {"target": ids[:, 1:], "losses": losses} if dist.get_rank() == last else {}
    pipeline.step(*([ids[:, :-1]] if dist.get_rank() == 0 else []), **given)
    mean = torch.stack(losses).mean().detach() if losses else torch.zeros(())
    dist.broadcast(mean, last)
    return mean.item()


def trained(rank: int, run: Run, folder: str) -> dict[str, Any]:
    """Train; from the checkpoint in ``folder``, if there is one. One is written after two steps."""
    torch._dynamo.reset()
    config = configured(run)
    dims = titan("distributed").ParallelDims.from_config(config.parallelism, dist.get_world_size())
    with torch.device("meta"):
        model = config.model_spec.model.build()
    arguments: dict[str, Any] = {
        "parallel_dims": dims,
        "training": config.training,
        "parallelism": config.parallelism,
        "compile_config": config.compile,
        "ac_config": config.activation_checkpoint,
        "dump_folder": folder,
    }
    pipeline = None
    if run.pipeline > 1:
        pipeline, parts, *_ = config.model_spec.pipelining_fn(
            model,
            **arguments,
            device=torch.device("cpu"),
            model_config=config.model_spec.model,
            parallelize_fn=config.model_spec.parallelize_fn,
            loss_fn=_pair,
        )
    else:
        parts = [config.model_spec.parallelize_fn(model, **arguments)]
    for place, part in enumerate(parts):
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        part.to_empty(device="cpu")
        torch.manual_seed(place if pipeline is None else 10 * rank + place)  # the stages are parts of one model
        with torch.no_grad():
            part.init_weights(buffer_device=None)
    optimizers = config.optimizer.build(model_parts=parts)
    schedule = config.lr_scheduler.build(optimizers=optimizers, training_steps=10)
    state, losses = Steps(), list[float]()
    manager = config.checkpoint.build(
        dataloader=Steps(),
        model_parts=parts,
        optimizers=optimizers,
        lr_schedulers=schedule,
        states={"train_state": state},
        sd_adapter=None,
        base_folder=folder,
    )
    manager.load()
    while state.step < run.steps:
        same = run.tensor_parallel * run.pipeline > 1  # data on all ranks
        generator = torch.Generator().manual_seed(10 * state.step + (0 if same else rank))
        loss = _step(parts[0], pipeline, torch.randint(0, 64, (2, 65), generator=generator))
        optimizers.step()
        schedule.step()
        optimizers.zero_grad()
        state.step += 1
        losses.append(loss)
        manager.save(state.step)
    manager.close()
    found: dict[str, Any] = {"losses": losses}
    if run.fp8 is not None:
        found |= findings(parts[0])
    return found
