"""What the tests of the families share: a training step in bf16 and compiled, and how far they are apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fp8graph
from fp8graph.models import Family
from fp8graph.numerics import sqnr_db


def model_and_inputs(family: Family, layers: int = 2) -> tuple[Any, dict[str, Any]]:
    """A tiny model in bf16, and the arguments of a step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = family.tiny(layers).bfloat16()
    inputs = family.inputs(model)
    return model, {k: v.bfloat16() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def step(model: Any, run: Any, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits and the gradients of one step."""
    model.zero_grad(set_to_none=True)
    out = run(**inputs)
    out.loss.backward()
    logits = next(value for name, value in out.items() if name.startswith("logits"))
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def flat(gradients: dict[str, Tensor], prefix: str = "") -> Tensor:
    return torch.cat([g.float().reshape(-1) for name, g in gradients.items() if prefix in name])


def agreement(family: Family, backend: fp8graph.Backend) -> dict[str, float]:
    """SQNR in dB against the same model in bf16: logits, all gradients, those of the deepest layer."""
    model, inputs = model_and_inputs(family)
    expected, gradients = step(model, model, inputs)
    got, found = step(model, torch.compile(model, backend=backend), inputs)
    assert gradients.keys() == found.keys()
    deepest = next(p for p in ("layers.0.", "layer.0.", "h.0.", "block.0.") if any(p in name for name in gradients))
    return {
        "logits": sqnr_db(expected, got),
        "gradients": sqnr_db(flat(gradients), flat(found)),
        "deepest": sqnr_db(flat(gradients, deepest), flat(found, deepest)),
    }
