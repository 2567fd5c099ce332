"""Hold the policies of ``fp8graph.tune`` against simple ones, on four families.

The tuned policy beside "tensorwise everywhere" and "first and last layer in bf16" at the same predicted time: the
relative errors of all gradients, and the mean square of the change of the loss. Whether the order of the scores is
right is measured by ``benchmarks/tune_order.py``.

Predicted times are those of an H100's arithmetic alone, as for large matrices: these models are so small that launches
and memory would decide.
Runs on a CPU; ``python -m benchmarks.tune_validation`` writes ``results/tune_cpu.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, OPTConfig, Qwen3Config

import fp8graph
from benchmarks.train_recipes import RESULTS, SEQUENCE, batches, loss_of, pretrained, split, take_gradients
from fp8graph import Float8CurrentScaling, Policy, Rule, hardware, tune
from fp8graph.extras.planning.tune import Score
from fp8graph.tools.demo import quiet

RECIPES: Final[list[Any]] = ["tensorwise", Float8CurrentScaling(fp8_format="E4M3"), "rowwise", "blockwise"]  # pyright: ignore[reportArgumentType]
BF16: Final = Policy(default=None)  # compiled in the same way, so that FP8 is all that differs
_SMALL: Final[dict[str, Any]] = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None, "use_cache": False}


def llama(layers: int, hidden: int = 256) -> Any:
    heads = hidden // 64
    return LlamaConfig(
        **_SMALL,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=SEQUENCE,
    )


FAMILIES: Final[dict[str, Callable[[], Any]]] = {
    "llama": lambda: llama(4, 512),
    "qwen3": lambda: Qwen3Config(
        **_SMALL,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=SEQUENCE,
    ),
    "gpt2": lambda: GPT2Config(
        **_SMALL, n_embd=512, n_layer=4, n_head=8, n_positions=SEQUENCE, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
    "opt": lambda: OPTConfig(
        **_SMALL,
        pad_token_id=0,
        hidden_size=512,
        word_embed_proj_dim=512,
        ffn_dim=2048,
        num_hidden_layers=4,
        num_attention_heads=8,
        max_position_embeddings=SEQUENCE,
        dropout=0.0,
    ),
}


def arithmetic_alone(folder: Path) -> Path:
    """A calibration file: an H100 on which only arithmetic takes time."""
    speed = hardware.from_target("sm_90").speed
    assert speed is not None
    free = replace(speed, launch=1e-12, host_launch=0.0, bandwidth=1e16)
    values = {name: value for name, value in asdict(free).items() if name != "rates"} | {"rates": dict(free.rates)}
    path = folder / "arithmetic_alone.json"
    path.write_text(json.dumps({"target": "sm_90", "speed": values}))
    return path


Gradients = list[dict[str, Tensor]]


def gradients(model: Any, policy: Policy, data: Sequence[Tensor]) -> tuple[list[float], Gradients]:
    """The loss of each batch, and the gradients of all matrices for each, under a policy."""
    torch._dynamo.reset()
    run = torch.compile(model, backend=fp8graph.Backend(policy, compiler="eager"))
    losses: list[float] = []
    found: Gradients = []
    for tokens in data:
        loss = loss_of(run, tokens)
        loss.backward()
        losses.append(loss.item())
        found.append(take_gradients(model))
    return losses, found


def measured_errors(model: Any, policy: Policy, data: Sequence[Tensor], exact: Any) -> tuple[float, float]:
    """The mean square of the change of the loss, and of the relative error of a parameter's gradient.

    Of each parameter alone, and then the mean: optimizers such as Adam scale the gradient of each.
    """
    losses, found = gradients(model, policy, data)
    change = sum((a - b) ** 2 for a, b in zip(losses, exact[0], strict=True)) / len(losses)
    wrong = [
        sum(float((a[name] - b[name]).square().sum()) for a, b in zip(found, exact[1], strict=True))
        / sum(float(b[name].square().sum()) for b in exact[1])
        for name in exact[1][0]
    ]
    return change, sum(wrong) / len(wrong)


def as_batches(data: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    return [{"input_ids": tokens, "labels": tokens} for tokens in data]


def seconds_of(scores: Sequence[Score], recipe: str, kept: Callable[[str], bool]) -> float:
    """The predicted time if all sites run in ``recipe`` but those that are ``kept`` in bf16."""
    own = [score for score in scores if score.recipe == recipe]
    return sum(s.high_precision_seconds if kept(s.site) or s.seconds is None else s.seconds for s in own)


def family(name: str, text: Tensor, held_out: Sequence[Tensor], steps: int, target: Path, console: Console) -> Any:
    """Two simple policies, and what tune() finds at their predicted times."""
    config = FAMILIES[name]()
    torch.manual_seed(0)
    model = pretrained(AutoModelForCausalLM.from_config(config).bfloat16(), batches(text, steps, 0))
    last = config.num_hidden_layers - 1
    data = [torch.cat(list(some)) for some in (held_out[i : i + 8] for i in range(0, len(held_out), 8))]
    joined = [torch.cat(batches(text, 8, seed)) for seed in (1, 2)]  # [32, SEQUENCE]
    exact = gradients(model, BF16, data)
    first_and_last = ("*.0.*", f"*.{last}.*")
    rules = [Rule(pattern, None) for pattern in first_and_last]
    simple: Mapping[str, Policy] = {
        "tensorwise everywhere": Policy(extends="default", default="tensorwise", min_speedup=0),
        "first and last layer in bf16": Policy(rules, extends="default", default="tensorwise", min_speedup=0),
    }
    with tempfile.TemporaryDirectory() as folder:
        resume = Path(folder) / "measured.json"
        start = tune(model, as_batches(joined), recipes=RECIPES, target=target, resume=resume)
        plain = seconds_of(start.scores, start.scores[0].recipe, lambda _: True)
        result: dict[str, Any] = {"curve": [asdict(point) for point in start.curve], "policies": {}}
        for label, policy in simple.items():
            ends = () if "everywhere" in label else (".0.", f".{last}.")
            seconds = seconds_of(start.scores, "tensorwise", lambda site, e=ends: any(part in site for part in e))
            speedup = plain / seconds
            again = tune(model, as_batches(joined), recipes=RECIPES, target=target, resume=resume, min_speedup=speedup)
            tuned_policy = again.policy
            for what, one in ((label, policy), (f"tuned, as fast as {label}", tuned_policy)):
                change, wrong = measured_errors(model, one, data, exact)
                is_tuned = one is tuned_policy
                predicted = again.chosen.speedup if is_tuned else speedup
                result["policies"][what] = {
                    "predicted_speedup": predicted,
                    "score": again.chosen.error if is_tuned else None,
                    "gradient_error": math.sqrt(wrong),
                    "loss_change": math.sqrt(change),
                    "policy": one.to_dict(),
                }
                console.print(
                    f"{name}: {what}: predicted {predicted:.3f} x bf16, relative error of gradients "
                    f"{math.sqrt(wrong):.4f}, change of the loss {math.sqrt(change):.5f}",
                    highlight=False,
                )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="of training in bf16, before anything is measured")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    console = Console()
    text, held_out = split()
    found: dict[str, Any] = {"torch": torch.__version__, "fp8graph": fp8graph.__version__, "steps": arguments.steps}
    with tempfile.TemporaryDirectory() as folder, quiet():
        target = arithmetic_alone(Path(folder))
        for name in arguments.families:
            found.setdefault("families", {})[name] = family(name, text, held_out, arguments.steps, target, console)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "tune_cpu.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
