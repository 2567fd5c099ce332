"""Run every family of tests/support/tiny_models.py on a CPU: ``make coverage`` writes docs/coverage.md, in minutes.

The page lists the counts of each training graph, whether the model generates, and how far FP8 is from the same model in
bf16 (SQNR in dB of logits, of all gradients, and of the deepest layer's gradients).
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import fp8graph
from fp8graph.numerics import sqnr_db
from tiny_models import TINY, model_and_inputs

RECIPES: Final = ("tensorwise", "rowwise")
PAGE: Final = Path(__file__).parent.parent / "docs" / "coverage.md"


def result_and_loss(out: Any) -> tuple[Tensor, Tensor]:
    """The result of a model, and the loss; where it computes none, the distance from zero."""
    if (loss := getattr(out, "loss", None)) is not None:
        return next(value for name, value in out.items() if name.startswith("logits")), loss
    result = out if isinstance(out, Tensor) else out[0]
    return result, result.float().square().mean()


def step(model: Any, run: Any, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits and the gradients of one step."""
    model.zero_grad(set_to_none=True)
    out = run(**inputs)
    logits, loss = result_and_loss(out)
    loss.backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def flat(gradients: dict[str, Tensor], part: str = "") -> Tensor:
    return torch.cat([g.float().reshape(-1) for name, g in gradients.items() if part in name])


def agreement(model: Any, compiled: Any, inputs: dict[str, Any]) -> dict[str, float]:
    """SQNR in dB of a step against the same model in bf16: logits, all gradients, those of the deepest layer."""
    expected, gradients = step(model, model, inputs)
    got, found = step(model, compiled, inputs)
    assert gradients.keys() == found.keys()
    deepest = next(
        p
        for p in ("layers.0.", "layer.0.", "h.0.", "block.0.", "blocks.0.", "layer_0.")
        if any(p in name for name in gradients)
    )
    return {
        "logits": sqnr_db(expected, got),
        "gradients": sqnr_db(flat(gradients), flat(found)),
        "deepest": sqnr_db(flat(gradients, deepest), flat(found, deepest)),
    }


def generates(name: str) -> bool:
    model, inputs = model_and_inputs(name)
    inputs.pop("labels")
    model.eval().compile(backend=fp8graph.Backend(compiler="eager"))
    out = model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    return bool(out.shape[-1] >= 4)


def row(name: str) -> str:
    counts = TINY[name].counts(2)
    cells = [name, f"{counts.fp8_gemms} as {counts.multiplied}"]
    for recipe in RECIPES:
        model, inputs = model_and_inputs(name)
        compiled = torch.compile(model, backend=fp8graph.Backend(recipe=recipe, compiler="eager"))
        found = agreement(model, compiled, inputs)
        cells.append("/".join(f"{value:.0f}" for value in found.values()))
    cells.append(("yes" if generates(name) else "no") if TINY[name].generates else "")
    return f"| {' | '.join(cells)} |"


def main() -> int:
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    titles = ["family", "GEMMs in FP8", *(f"{recipe}: dB" for recipe in RECIPES), "generates"]
    several = ", ".join(f"{name} ({tiny.graphs})" for name, tiny in sorted(TINY.items()) if tiny.graphs > 1)
    lines = [
        "# What was run",
        "",
        f"Written by `make coverage`: torch {torch.__version__}, transformers {transformers.__version__}, CPU.",
        "Each family is a two-layer model with random weights, which runs one training step. The GEMMs (matrix",
        "products) are fprop, dgrad and wgrad of every linear in FP8; `as` counts them when fused (q/k/v and gate/up",
        "are one). The dB are the SQNR (signal over rounding error) against the same model in bf16: of logits, of all",
        "gradients, and of those of the first layer, where backward ends. Each family is one graph, but where Dynamo",
        f"breaks it: {several}. `tests/scenarios/test_recipes_run.py` covers further recipes.",
        "",
        f"| {' | '.join(titles)} |",
        "|" + "---|" * len(titles),
    ]
    for name in sorted(TINY):
        lines.append(row(name))
        print(lines[-1], flush=True)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {PAGE.relative_to(PAGE.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
