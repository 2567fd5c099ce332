"""torchtitan's models, trained on several ranks by its own functions, in a loop of ours.

Its ``Trainer`` reads the memory of a CUDA device (``components/metrics.py: DeviceMemoryMonitor``), and so does not
start on a CPU. Taken from torchtitan are the config of a debug model, overrides, the model, its ``parallelize``
function (which compiles the blocks and shards), optimizer, schedule and checkpoint manager. Three things differ from
its defaults: ``spmd_backend="partial_dtensor"``, since "spmd_types" needs a newer FSDP2 than that of torch 2.13; SDPA
in place of FlexAttention, whose backward has no code for CPUs; and sums of gradients, as gloo has no ``PREMUL_SUM``.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fp8graph.compat.wrappers import name_in_original
from fp8graph.errors import ConfigError
from fp8graph.numerics import sqnr_db
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
    compiled: bool = True  # --compile.enable
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
    config.parallelism.pipeline_parallel_first_stage_less_layers = 0  # for embeddings and head: as many in each stage
    config.parallelism.pipeline_parallel_last_stage_less_layers = 0
    config.parallelism.pipeline_parallel_microbatch_size, config.training.local_batch_size = 1, 2
    config.compile = titan("config").CompileConfig(enable=run.compiled, backend=run.backend, components=["model"])
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
        print(f"step {state.step}  loss {loss:.3f}")
        manager.save(state.step)
    manager.close()
    found: dict[str, Any] = {"losses": losses}
    if run.fp8 is not None:
        found |= findings(parts[0]) | {"gathered_in_fp8": gathered_in_fp8(parts[0])}
    return found


def gathered_in_fp8(model: torch.nn.Module) -> list[str]:
    """The parameters that FSDP2 gathers by a hook of fp8graph."""
    shards = {name: getattr(parameter, "_local_tensor", parameter) for name, parameter in model.named_parameters()}
    return [name_in_original(name) for name, shard in shards.items() if hasattr(shard, "fsdp_pre_all_gather")]


def refused(rank: int, run: Run, folder: str) -> str:
    """The message with which a training ends before its first step."""
    try:
        trained(rank, run, folder)
    except ConfigError as error:
        return str(error)
    return ""


def graph_trained(rank: int, page: str, policy: dict[str, Any], folder: str, generated: bool = False) -> dict[str, Any]:
    """Three calls of the step that the graph trainer's tracer makes of a Llama 3, after the passes of ``page``.

    On several ranks ``simple_fsdp`` shards the model. The trainer's other passes need a GPU, as does its own step.

    Args:
        policy: for the file that ``page`` names.
        generated: call it once more, with code by Inductor.
    """
    trainer, tracing, passes, registry, normalizing, generating, sharding, common = (
        titan(f"experiments.graph_trainer.{name}")
        for name in (
            "trainer", "make_fx_tracer", "passes", "registry", "remove_noop_passes", "inductor_passes", "simple_fsdp",
            "common_utils",
        )
    )  # fmt: skip
    os.makedirs(path := os.path.join(folder, f"graph {rank}"))
    file = os.path.join(path, "policy.json")
    Path(file).write_text(json.dumps(policy), encoding="utf-8")
    exec(page.replace("policy.toml", file), {})
    normal = [normalizing.eliminate_dead_code_pass, normalizing.canonicalize_graph_pass]
    passes.construct_default_graph_passes = lambda *_, **__: normal
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = configured(Run()).model_spec.model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    common.annotate_module_fqns(model)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        types = sharding.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = sharding.data_parallel(model, mesh, mode="fully_shard", mp_policy=types)
    step = trainer.make_fwd_bwd_step(model, lambda pred, labels, **_: _loss(pred, labels))
    ids = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(rank))
    batch = ids[:, :-1], ids[:, 1:], torch.tensor(32), {}
    traced = tracing.minimal_fx_tracer(step, module=model)(*batch)
    wanted = tracing.run_traced(traced, module=model)(*batch)
    pipeline = registry.PASS_PIPELINE_REGISTRY["fp8graph"](traced, None)
    traced.gm = passes.apply_graph_passes(traced.gm, traced.example_inputs, pipeline)
    report = traced.gm.meta["fp8graph_report"]
    found = [tracing.run_traced(traced, module=model)(*batch) for _ in range(3)]
    if generated:
        traced.gm = generating.full_inductor_compilation_pass(traced.gm, traced.example_inputs)
        found.append(tracing.run_traced(traced, module=model)(*batch))
    pairs = [(high, x) for results in found for high, x in zip(wanted[1:], results[1:], strict=True)]
    return {
        "wanted": wanted[0].item(),
        "losses": [results[0].item() for results in found],
        "decibels": min(sqnr_db(*(getattr(x, "_local_tensor", x) for x in pair)) for pair in pairs),
        "gemms": {(gemm.fqn, gemm.recipe) for gemm in report.gemms},
        "sent": {(row.tensor, row.dtype) for row in report.collectives if row.dtype == "uint8"},
        "state": [x for name, x in traced.gm.named_buffers() if name.startswith("fp8graph_state")],
    }
