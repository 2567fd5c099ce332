"""The largest inputs of linears over a few batches, for formats that store a static scale of a layer's input."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8graph.errors import expect_batch, expect_batches


def input_amaxes(model: nn.Module, layers: Mapping[str, nn.Module], batches: Iterable[Any]) -> dict[str, Tensor]:
    """FP32 []: the amax of the input of each of ``layers`` over ``batches``. The model runs in eager, in eval mode.

    Args:
        batches: each a tensor, a tuple of arguments, or a dict of keyword arguments of the model.
    """
    found: dict[str, Tensor] = {}
    expect_batches("export", "calibration", batches)

    def watch(layer: str) -> Any:
        def before(_module: nn.Module, args: tuple[Any, ...]) -> None:
            amax = cast(Tensor, args[0]).detach().abs().amax().to(torch.float32)
            found[layer] = torch.maximum(found[layer], amax) if layer in found else amax

        return layers[layer].register_forward_pre_hook(before)

    training = model.training
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.callback(watch(layer).remove)
        stack.callback(model.train, training)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.no_grad())
        model.eval()
        for batch in batches:
            expect_batch("export", "calibration", batch)
            if isinstance(batch, Mapping):
                model(**batch)
            else:
                model(*(batch if isinstance(batch, tuple) else (batch,)))
    return found
