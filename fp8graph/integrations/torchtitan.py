"""torchtitan: its models in FP8 by one override, with full names, and scaling state in its checkpoints.

    --compile.enable --override.imports 'fp8graph.integrations.torchtitan.fp8={"recipe": "blockwise"}'

torchtitan compiles block by block, with the backend that ``--compile.backend`` names, before it shards the model. So
names are relative to the block, and policies cannot tell layers apart. It passes the finished model to the checkpoint
manager, before the first step: that is where the override binds the names and compiles the blocks with one
:class:`~fp8graph.Backend`. Models with FlexAttention, for which torchtitan refuses other names than "inductor" and
"aot_eager", are compiled in this way, too.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from fp8graph.backend import NAMED
from fp8graph.backend.backend import Backend
from fp8graph.compat import wrappers
from fp8graph.errors import ConfigError
from fp8graph.integrations import load_state, state_by_layer
from fp8graph.runtime.state_dict import BackendState

__all__ = ["fp8"]

_KEY: Final = "fp8graph"  # of the state in a checkpoint
_NAME: Final = "--override.imports fp8graph.integrations.torchtitan.fp8"


def fp8(config: Any, **arguments: Any) -> Any:
    """Return the override: ``--override.imports 'fp8graph.integrations.torchtitan.fp8={"policy": "policy.toml"}'``.

    The blocks that torchtitan compiles (``--compile.enable``) are compiled with fp8graph. ``--compile.backend`` stays
    "inductor", or is a name of fp8graph; the recipe of such a name counts. Other modules (the head) run as before.

    Args:
        config: of torchtitan's checkpoint manager, which gets the finished model.
        arguments: of :class:`~fp8graph.Backend`.

    Returns:
        The same config, for a manager whose checkpoints have the scaling state under "fp8graph", block by block.

    Raises:
        ConfigError: (a ``ValueError``) for arguments that cannot be used; or, when the manager is built, if no block
            was compiled, or one with a backend that is neither "inductor" nor one of fp8graph's.
    """
    Backend(**arguments)  # raises before the model is built
    kind: type[Any] = type(config)

    class Config(kind):
        __slots__ = ()

        def build(self, **given: Any) -> Any:
            if not self.create_seed_checkpoint:  # of weights; torchtitan compiles nothing then
                given["states"][_KEY] = _compile(given["model_parts"], arguments)
            return super().build(**given)

    Config.__qualname__ = f"{kind.__qualname__} with fp8graph"
    return importlib.import_module("torchtitan.config.override").derive(config, Config)


@dataclass(frozen=True, eq=False)
class _State:
    """A backend in checkpoints: a value per block under its full name, as a stage of a pipeline has some of them."""

    backend: Backend
    blocks: Sequence[str]

    def state_dict(self) -> dict[str, BackendState]:
        return state_by_layer(self.backend, self.blocks)

    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, Any]]) -> None:
        state = {name: x for part in state_dict.values() for name, x in part.items()}
        load_state(self.backend, state, "torchtitan's checkpoint")


def _compile(parts: Sequence[nn.Module], arguments: dict[str, Any]) -> _State:
    """Compile again, with one backend, the blocks of the model's ``parts`` (one, or several stages of a pipeline)."""
    modules = {module: name for part in parts for name, module in part.named_modules()}
    backends = {block: backend for block in modules if (backend := wrappers.orig_backend(block))}
    names = sorted({str(getattr(backend, "compiler_name", backend)) for backend in backends.values()})
    if not names:
        raise ConfigError(
            f"{_NAME}: torchtitan compiled no block of {type(parts[0]).__name__}, which would train in high precision. "
            'Pass --compile.enable, with "model" among --compile.components.'
        )
    entry = NAMED.get(names[0]) if len(names) == 1 else None
    if entry is None and names != ["inductor"]:
        raise ConfigError(
            f"{_NAME}: --compile.backend is {', '.join(names)}, in whose place fp8graph does not compile. Leave it at "
            f'"inductor", or name one of {", ".join(NAMED)}.'
        )
    backend = (entry or NAMED[_KEY]).backend(arguments)
    for part in parts:
        backend.bind(part)
    for block in backends:
        block.compile(backend=backend, fullgraph=True)
    return _State(backend, [wrappers.name_in_original(modules[block]) for block in backends])


if importlib.util.find_spec("torchtitan") is not None:
    _manager: Any = importlib.import_module("torchtitan.components.checkpointer").BaseCheckpointManager
    importlib.import_module("torchtitan.config.override").override(
        target=_manager.Config, description="FP8 by fp8graph, and its scaling state in checkpoints"
    )(fp8)
