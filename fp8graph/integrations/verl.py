"""verl: its FSDP2 engine in FP8, which hands a rollout the bytes that the trainer multiplies.

A module that ``actor_rollout_ref.model.external_lib`` names registers the engine::

    from fp8graph.integrations.verl import register

    register(recipe="blockwise")

verl takes it where the environment of its workers has ``VERL_ENGINE_VENDOR=fp8graph``, and the strategy is "fsdp2".
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from fp8graph.backend.backend import Backend
from fp8graph.backend.entry import backend_of, compile
from fp8graph.compat import distributed
from fp8graph.errors import ConfigError
from fp8graph.integrations import loading, read_state, state_to_save, write_state
from fp8graph.tools.export import AUTO, quantized_state

__all__ = ["register"]

_VENDOR: Final = "fp8graph"
_FILE: Final = "fp8graph.pt"  # beside verl's own files of a checkpoint


def register(*, format: str = AUTO, **arguments: Any) -> type[Any]:  # noqa: A002
    """Register verl's engine for language models under FSDP2 with layers that fp8graph compiles.

    The model is compiled layer by layer after it is sharded, the reference policy as well as the actor, so that both
    compute in FP8. Weights for the rollout are those of :func:`fp8graph.quantized_state`: load them as an FP8
    checkpoint, without verl's own quantization. The scaling state goes into verl's checkpoints (``fp8graph.pt``),
    unless each rank has its own (``reduce_amax=False``): saving is then refused.

    Args:
        format: of the weights, as :func:`fp8graph.export` takes it.
        arguments: of :func:`fp8graph.compile`.

    Returns:
        The class of the engine.

    Raises:
        ConfigError: (a ``ValueError``) for arguments that cannot be used; when the engine is built, for a config with
            LoRA, whose weights verl merges into numbers in high precision.
    """
    Backend(**{name: value for name, value in arguments.items() if name != "regions"})  # raises early
    engines: Any = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")

    class FP8Engine(engines.FSDPEngineWithLMHead):
        def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
            if self._is_lora:
                raise ConfigError(
                    "verl's LoRA with the engine of fp8graph: its weights are merged in high precision, and would not "
                    "be those that the trainer multiplied. Set lora_rank to 0, or leave VERL_ENGINE_VENDOR out."
                )
            chosen: dict[str, Any] = {"regions": "auto", **arguments}
            return compile(super()._build_fsdp_module(module), **chosen)

        def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
            return self._weights(), None

        def _weights(self) -> Iterator[tuple[str, Tensor]]:
            """They are quantized where the model computes."""
            if self._is_offload_param:
                engines.load_fsdp_model_to_gpu(self.module)
            try:
                yield from quantized_state(self.module, format)
            finally:
                if self._is_offload_param:
                    engines.offload_fsdp_model_to_cpu(self.module)

        def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
            state = state_to_save(self.module, "verl's checkpoint")  # refused on all ranks, before anything is written
            super().save_checkpoint(local_path, *args, **kwargs)
            if distributed.rank() == 0:
                write_state(state, Path(local_path, _FILE))

        def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
            state = read_state(Path(local_path, _FILE))
            with loading(backend_of(self.module), state, str(local_path), "the engine of fp8graph"):
                super().load_checkpoint(local_path, *args, **kwargs)

    registry: Any = importlib.import_module("verl.workers.engine.base").EngineRegistry
    kind = {"model_type": "language_model", "backend": "fsdp2", "device": ["cuda", "cpu"], "vendor": _VENDOR}
    return registry.register(**kind)(FP8Engine)
