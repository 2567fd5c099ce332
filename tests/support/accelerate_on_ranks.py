"""A Llama trained on several ranks by accelerate's own functions: FSDP2 through ``prepare``, and checkpoints.

``Accelerator`` takes FSDP for a matter of GPUs: on CPU ranks it chooses data parallelism
(``DistributedType.MULTI_CPU``), whatever its config says (``state.py: AcceleratorState.__init__``). So
:func:`accelerator` sets the two attributes that are set there on a GPU. All else is accelerate's: which modules are
sharded, dtypes, hooks, the optimizer's parameters, accumulation, clipping, checkpoints.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8graph
from helpers import findings
from sent import Counting
from tiny_models import causal_lm


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: ``steps`` of the optimizer, of two micro-batches each."""

    fp8: dict[str, Any] | None = None  # arguments of fp8graph.compile; None: without it
    own: str | None = None  # the backend that accelerate compiles with, block by block
    by_hand: bool = False  # torch's FSDP2 and autocast in place of accelerate
    by_precision: bool = False  # mixed_precision="fp8" in place of fp8graph.compile
    checkpointed: bool = False  # activations, by accelerate
    steps: list[int] = field(default_factory=lambda: [0, 1, 2])
    save_after: int | None = None
    load: bool = False


def forget_accelerators() -> None:
    """Let the next ``Accelerator`` of this process have other settings than the one before."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def accelerator(run: Run) -> Any:
    """An ``Accelerator`` with FSDP2 in bf16, on the ranks of this process group."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, DynamoBackend, TorchDynamoPlugin

    forget_accelerators()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        activation_checkpointing=run.checkpointed,
        state_dict_type="SHARDED_STATE_DICT",
    )
    plugin.set_mixed_precision("bf16")
    compiling = TorchDynamoPlugin(backend=DynamoBackend((run.own or "no").upper()), use_regional_compilation=True)
    precision: dict[str, Any] = {"mixed_precision": "bf16"}
    if run.by_precision:
        from fp8graph.integrations.accelerate import FP8GraphRecipeKwargs

        options = {name: value for name, value in (run.fp8 or {}).items() if name not in ("recipe", "policy")}
        chosen = {name: value for name, value in (run.fp8 or {}).items() if name in ("recipe", "policy")}
        precision = {"mixed_precision": "fp8", "kwargs_handlers": [FP8GraphRecipeKwargs(**chosen, options=options)]}
    made = Accelerator(cpu=True, gradient_accumulation_steps=2, dynamo_plugin=compiling, **precision)
    made.state.fsdp_plugin = plugin
    made.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    return made


def trained(rank: int, run: Run, folder: str) -> dict[str, Any]:
    """Train, and save to ``folder`` or continue from what is there."""
    ranks = dist.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ["OMP_NUM_THREADS"] = "1"
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = causal_lm("Llama")(2)
    optimizer = adam(model)
    if run.fp8 is not None and not run.by_hand and not run.by_precision:
        fp8graph.compile(model, regions="auto", **run.fp8)
    if run.by_hand:
        return _by_hand(rank, run, model)
    host = accelerator(run)
    model, optimizer = host.prepare(model, optimizer)
    gathers = Counting()
    for module in model.model.layers:
        module.set_custom_all_gather(gathers)
    if run.fp8 is not None and not run.by_precision:
        host.register_for_checkpointing(fp8graph.backend_of(model))
    if run.load:
        host.load_state(folder)
    losses: list[float] = []
    for step in run.steps:
        gathers.sent = 0
        for ids in batches(rank, step):
            with host.accumulate(model):
                loss = _loss(model, ids)
                host.backward(loss)
                host.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if step == run.save_after:
            host.save_state(folder)
    return _found(run, model, losses) | {"sent": gathers.sent}


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW whose steps follow the size of gradients.

    With a usual ``eps`` the first steps are a gradient's sign. Signs of gradients near 0 are those of rounding, which
    another CPU's GEMMs do otherwise: after three steps losses of bf16 in eager and by Inductor differ by 0.14 %, here
    by 0.004 %.
    """
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)


def batches(rank: int, step: int) -> torch.Tensor:
    """Two micro-batches of two sequences."""
    return torch.randint(0, 64, (2, 2, 16), generator=torch.Generator().manual_seed(10 * step + rank))


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """In FP32: a loss that the model returns is cast to bf16 with its other outputs, in steps of 0.8 %."""
    logits = model(ids, use_cache=False).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _by_hand(rank: int, run: Run, model: Any) -> dict[str, Any]:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    settings: dict[str, Any] = run.fp8 or {}
    fp8graph.compile(model, regions="auto", **settings)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = adam(model)
    losses: list[float] = []
    for step in run.steps:
        for last, ids in enumerate(batches(rank, step)):
            model.set_requires_gradient_sync(bool(last))
            with torch.autocast("cpu", torch.bfloat16):
                loss = _loss(model, ids)
            (loss / 2).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return _found(run, model, losses)


def _found(run: Run, model: Any, losses: list[float]) -> dict[str, Any]:
    found: dict[str, Any] = {"losses": losses}
    found["weights"] = {name: value.to_local() for name, value in model.state_dict().items()}
    if run.fp8 is not None:
        found |= findings(model)
    return found
