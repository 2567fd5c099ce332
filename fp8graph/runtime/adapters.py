"""Notice PEFT's merges: it writes adapters into weights through ``.data``, which no tensor shows.

The layers of all its methods list what is merged into them in ``merged_adapters``: lists that only they change, in
place. Whether those are as they were is cheap to ask in each call. (Dynamo guards on them too, but compiles nothing
when it finds code that it made before the last merge.)
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from torch import nn

_log = logging.getLogger("fp8graph")


def adapted_modules(model: nn.Module) -> list[str]:
    """The names of the modules that PEFT has put into ``model``, merged or not."""
    named = model.named_modules()
    return [name or type(module).__name__ for name, module in named if _is_adapter(module)]


def _is_adapter(module: nn.Module) -> bool:
    layer = isinstance(getattr(module, "merged_adapters", None), list)
    return layer or type(module).__module__.partition(".")[0] == "peft"


class Adapters:
    """The adapter layers of some models. Holds no layer alive."""

    def __init__(self) -> None:
        self._merged: dict[int, list[str]] = {}  # by the layer's id: its own list
        self._seen: dict[int, tuple[str, ...]] = {}
        self._layers: list[weakref.ref[nn.Module]] = []
        self._warned = False

    def watch(self, model: nn.Module, *, compiled: bool = False) -> None:
        """Look at the adapter layers of ``model`` from now on.

        Args:
            compiled: calls of ``model`` itself are compiled, not those of a function around it or of modules in it.
        """
        # PeftModel has it, and what it wraps has not: that is what it returns
        unloads = compiled and hasattr(model, "merge_and_unload")
        for parent in model.modules():
            for name, layer in parent.named_children():
                merged = getattr(layer, "merged_adapters", None)
                if isinstance(merged, list):
                    self._watch(layer, merged, parent, name, unloads)

    def _watch(self, layer: nn.Module, merged: list[str], parent: nn.Module, name: str, unloads: bool) -> None:
        key, base = id(layer), getattr(layer, "base_layer", None)
        if key in self._merged and not unloads:
            return
        if key not in self._merged:
            self._merged[key], self._seen[key] = merged, tuple(merged)
        this, around = weakref.ref(self), weakref.ref(parent)
        inner = weakref.ref(base) if isinstance(base, nn.Module) else None

        def gone(reference: weakref.ref[nn.Module]) -> None:
            if (adapters := this()) is None:
                return
            adapters._layers.remove(reference)
            adapters._merged.pop(key, None)
            adapters._seen.pop(key, None)
            # its place was given to what it wrapped: the model lives on, without adapters
            place, wrapped = around(), inner() if inner is not None else None
            if unloads and place is not None and wrapped is not None and place._modules.get(name) is wrapped:
                adapters._warn()

        self._layers.append(weakref.ref(layer, gone))

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "PEFT has unloaded the adapters of a compiled model. The model that merge_and_unload() or unload() "
                "returns is not compiled, it runs without FP8: give it to fp8graph.compile()."
            )

    def changed(self) -> bool:
        """Whether anything was merged or taken out since the last time that this was asked."""
        if not self._merged:
            return False
        now: list[Any] = [*map(tuple, list(self._merged.values()))]
        if now == list(self._seen.values()):
            return False
        self._seen = {key: tuple(merged) for key, merged in list(self._merged.items())}
        return True
