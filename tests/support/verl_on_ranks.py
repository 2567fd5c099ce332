"""verl's own FSDP2 engine on several ranks of a CPU. A module of its own, as verl installs a package named tests."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fp8graph

TILES = {"recipe": "blockwise", "compiler": "eager"}


def on_a_cpu() -> None:
    """verl has platforms for accelerators only; this one is the CPU."""
    from verl.plugin.platform.platform_cuda import PlatformCUDA  # pyright: ignore
    from verl.plugin.platform.platform_manager import set_platform  # pyright: ignore

    class CPU(PlatformCUDA):  # pyright: ignore
        device_name, vendor_name, device_module = "cpu", "none", torch.cpu

        def is_available(self) -> bool:
            return True

        def current_device(self) -> str:
            return "cpu"

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None:
            """Nothing to choose."""

        def synchronize(self, device_index: int | None = None) -> None:
            """Nothing runs beside the program."""

        def empty_cache(self) -> None:
            """Nothing is kept."""

        def communication_backend_name(self) -> str:
            return "gloo"

    as_others: dict[str, Any] = {"set_rng_state": torch.set_rng_state, "empty_cache": lambda: None}
    for name, function in as_others.items():
        setattr(torch.cpu, name, function)
    set_platform(CPU())


def batch(rank: int, step: int) -> Any:
    from verl.utils import tensordict_utils as tu  # pyright: ignore

    random = torch.Generator().manual_seed(10 * step + rank)
    rows = [torch.randint(0, 64, (16,), generator=random) for _ in range(2)]
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    tensors = {
        "input_ids": nested(rows),
        "position_ids": nested([torch.arange(16) for _ in rows]),
        "loss_mask": nested([torch.ones(16) for _ in rows]),
    }
    others = {"use_remove_padding": False, "temperature": 1.0, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
    return tu.get_tensordict(tensors, non_tensor_dict={**others, "global_batch_size": 4})


def trained(
    rank: int,
    fp8: dict[str, Any] | None,
    folder: str,
    steps: list[int],
    load: bool,
    offload: bool = False,
    **chosen: Any,
) -> dict[str, Any]:
    """Train by ``engine.train_batch``. A checkpoint is written after two steps."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ |= {name: str(value) for name, value in ranks.items()} | {"VERL_ENGINE_VENDOR": "fp8graph"}
    on_a_cpu()
    from verl.trainer.config import CheckpointConfig  # pyright: ignore
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # pyright: ignore
    from verl.workers.engine import EngineRegistry  # pyright: ignore
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # pyright: ignore
    from verl.workers.utils.losses import sft_loss  # pyright: ignore

    from fp8graph.integrations.verl import register

    torch._dynamo.reset()
    known = EngineRegistry._engines["language_model"]["fsdp2"]
    for device in ("cpu", "cuda"):
        known.pop((device, "fp8graph"), None)  # of an earlier run
    known["cpu"] = FSDPEngineWithLMHead
    if fp8 is not None:
        register(**fp8)
    attention = {"attn_implementation": "sdpa"}
    model_config: dict[str, Any] = {"use_remove_padding": False, "override_config": attention, **chosen}
    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=HFModelConfig(path=str(Path(folder).parent / "model"), load_tokenizer=False, **model_config),
        engine_config=FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, param_offload=offload),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
        checkpoint_config=CheckpointConfig(save_contents=["model", "optimizer", "extra"]),
    )
    engine.initialize()
    if load:
        engine.load_checkpoint(folder)
    losses: list[float] = []
    for step in steps:
        with engine.train_mode():
            losses += engine.train_batch(batch(rank, step), loss_function=partial(sft_loss, None))["loss"]
        if step == 1 and not load:
            engine.save_checkpoint(folder)
    sent = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    found: dict[str, Any] = {"losses": losses, "sent": sent}
    if fp8 is not None:
        backend = fp8graph.backend_of(engine.module)
        found["recipes"] = {gemm.fqn: gemm.recipe for gemm in backend.report.gemms}
        found["state"] = dict(backend.state_dict())
        found["multiplied"] = dict(fp8graph.quantized_state(engine.module))
    return found


def refused(rank: int, folder: str) -> list[str]:
    """The message for a set-up that cannot be used."""
    try:
        trained(rank, TILES, folder, [0], False, lora_rank=4)
    except fp8graph.ConfigError as error:
        return [str(error)]
    return []
