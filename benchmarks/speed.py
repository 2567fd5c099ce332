"""Speed and memory on a GPU, beside bf16 + torch.compile and torchao: ``make bench``.

    linears    the four linears of a layer: hidden 4096, ffn 16384, 15872 tokens (Transformer Engine's benchmark)
    layers     two Llama-3-8B decoder layers, sequence 8192, forward and backward; peak memory of each
    sweep      one linear, forward and backward, 256 ... 16384 rows, the shapes of 1B, 3B, 8B and 70B models
    inference  prefill (2048 tokens) and decode (64 sequences, one token) through four layers

Every contender of a comparison runs in one process, round by round; what counts is the ratio. Without a GPU nothing is
measured, and the skipped parts are named. ``--tiny`` runs every part in small on any machine: to test this file, and it
writes nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fp8graph
from benchmarks.common import compare, console, plot, show, write

BF16 = torch.bfloat16
RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise")
# model -> (hidden, inner, keys and values)
SHAPES = {"1B": (2048, 8192, 512), "3B": (3072, 8192, 1024), "8B": (4096, 14336, 1024), "70B": (8192, 28672, 1024)}


def fp8(recipe: str, **settings: Any) -> fp8graph.Backend:
    return fp8graph.Backend(fp8graph.Policy(default=recipe), **settings)


def torchao_model(make: Callable[[], nn.Module], recipe: str) -> Any:
    """The model with torchao's float8 linears, compiled; None where torchao is not installed."""
    try:
        from torchao.float8 import (  # pyright: ignore[reportMissingImports]
            Float8LinearConfig,
            convert_to_float8_training,
        )
    except ImportError:
        return None
    config: Any = Float8LinearConfig.from_recipe_name(recipe)
    return torch.compile(convert_to_float8_training(make(), config=config))


def training_step(model: Any, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        out = model(x)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(torch.ones_like(out))
        model.zero_grad(set_to_none=True)
        x.grad = None

    return run


def contenders(make: Callable[[], nn.Module], x: Tensor, recipes: tuple[str, ...]) -> dict[str, Callable[[], Any]]:
    """bf16 first, then fp8graph's recipes, then torchao's where it is installed."""
    found: dict[str, Any] = {"bf16": torch.compile(make())}
    found |= {f"fp8graph {recipe}": torch.compile(make(), backend=fp8(recipe)) for recipe in recipes}
    for recipe in ("tensorwise", "rowwise"):
        if (model := torchao_model(make, recipe)) is not None:
            found[f"torchao {recipe}"] = model
    return {name: training_step(model, x) for name, model in found.items()}


def linears(device: str, tiny: bool) -> dict[str, Any]:
    hidden, inner, tokens = (128, 256, 64) if tiny else (4096, 16384, 15872)

    class Linears(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = [(hidden, 3 * hidden), (hidden, hidden), (hidden, inner), (inner, hidden)]
            self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in sizes)

        def forward(self, x: Tensor) -> Tensor:
            qkv, out, up, down = self.layers
            h = out(qkv(x)[..., :hidden])
            return down(up(h))

    x = torch.randn(tokens, hidden, device=device, dtype=BF16, requires_grad=True)
    results = compare(contenders(lambda: Linears().to(device, BF16), x, RECIPES))
    show(f"linears of one layer, {tokens} tokens", results)
    return results


def llama(device: str, layers: int, tiny: bool) -> Any:
    """The decoder layers of Llama-3-8B."""
    from transformers import LlamaConfig, LlamaModel

    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    if not tiny:
        sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    config = LlamaConfig(
        num_hidden_layers=layers, num_key_value_heads=sizes["num_attention_heads"] // 4, vocab_size=256,
        max_position_embeddings=8192, use_cache=False, **sizes,
    )  # fmt: skip
    model: Any = LlamaModel(config)
    return model.to(device, BF16)


class Embedded(nn.Module):
    """A Llama that takes its inputs as embeddings and returns its hidden states."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x).last_hidden_state


def layers(device: str, tiny: bool) -> dict[str, Any]:
    tokens, hidden = (64, 128) if tiny else (8192, 4096)
    x = torch.randn(1, tokens, hidden, device=device, dtype=BF16, requires_grad=True)
    runs = contenders(lambda: Embedded(llama(device, 2, tiny)), x, RECIPES)
    for save in ({"save": "memory"}, {"save": "memory", "save_activations_in_fp8": True}):
        model = torch.compile(Embedded(llama(device, 2, tiny)), backend=fp8("tensorwise", **save))
        runs[f"fp8graph tensorwise {' '.join(map(str, save.values()))}"] = training_step(model, x)
    results = compare(runs)
    for name, run in runs.items():
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            results[name]["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    show(f"two Llama-3-8B layers, {tokens} tokens, forward and backward", results)
    return results


def sweep(device: str, tiny: bool) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for model, (hidden, inner, keys) in SHAPES.items():
        for inputs, outputs in {(hidden, hidden), (hidden, keys), (hidden, inner), (inner, hidden)}:
            for rows in (16,) if tiny else (256, 512, 1024, 2048, 4096, 8192, 16384):
                if tiny:
                    inputs, outputs = 64, 128
                x = torch.randn(rows, inputs, device=device, dtype=BF16, requires_grad=True)

                def make(inputs: int = inputs, outputs: int = outputs) -> nn.Module:
                    return nn.Sequential(nn.Linear(inputs, outputs, bias=False)).to(device, BF16)

                torch._dynamo.reset()
                found = compare(contenders(make, x, ("tensorwise", "delayed", "rowwise")), rounds=3)
                results[f"{model} {rows} x {inputs} -> {outputs}"] = found
            if tiny:
                break
        if tiny:
            break
    ours = [(v["speedup"], f"{case}: {k}") for case, r in results.items() for k, v in r.items() if "fp8graph" in k]
    worst = sorted(ours)[:5]
    console.print("slowest against bf16: " + "; ".join(f"{speedup:.3f} {case}" for speedup, case in worst))
    return results


def inference(device: str, tiny: bool) -> dict[str, Any]:
    hidden = 128 if tiny else 4096
    results: dict[str, Any] = {}
    for name, shape in {"prefill": (1, 32 if tiny else 2048, hidden), "decode": (64, 1, hidden)}.items():
        torch._dynamo.reset()
        x = torch.randn(shape, device=device, dtype=BF16)
        models: dict[str, Any] = {"bf16": torch.compile(Embedded(llama(device, 4, tiny)))}
        for recipe in ("tensorwise", "rowwise"):
            models[f"fp8graph {recipe}"] = torch.compile(Embedded(llama(device, 4, tiny)), backend=fp8(recipe))

        def forward(model: Any, x: Tensor = x) -> Callable[[], Any]:
            return torch.no_grad()(lambda: model(x))

        results[name] = compare({key: forward(model) for key, model in models.items()})
        show(f"{name}: {shape[0]} x {shape[1]} tokens", results[name])
    return results


PARTS: dict[str, Callable[[str, bool], dict[str, Any]]] = {
    "linears": linears, "layers": layers, "sweep": sweep, "inference": inference,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="small sizes, any machine, writes nothing")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    if not on_gpu and not arguments.tiny:
        console.print(f"skipped, no GPU with FP8 here: {', '.join(arguments.parts)}")
        return 0
    for part in arguments.parts:
        torch._dynamo.reset()
        results = PARTS[part]("cuda" if on_gpu else "cpu", arguments.tiny)
        if not arguments.tiny:
            write(f"speed_{part}", results)
            plot(f"speed_{part}", f"{part}, {torch.cuda.get_device_name()}", results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
