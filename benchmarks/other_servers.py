"""Measure how far the log-probabilities of other servers are from a trainer's, for the same checkpoint.

A small Llama is trained for some steps, with ``batch_invariant=True``, and exported. Then the folder is served by the
code of its format's owners, on a CPU, and by the arithmetic of vLLM's batch-invariant mode, rebuilt: DeepGEMM's, which
sums each 128 products and adds the sums, times both scales, in FP32 (vllm-project/vllm, pull requests 37718 and 40408;
DeepGEMM's README). The layers around the linears are transformers' own, in eager mode: with fp8graph's products among
them, the distance is that of norms, attention and activation functions.

    python -m benchmarks.other_servers
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import fp8graph
from benchmarks.one_program import FOLDER, RECIPES, VOCABULARY, conditions, make, scores
from fp8graph.checkpoints import Checkpoint
from fp8graph.numerics import invariant

BATCH, TOKENS, STEPS, BLOCK = 16, 32, 20, 128
IDS: Final = torch.randint(1, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
FORMS: Final = {"blockwise": "fp8", "rowwise": "compressed-tensors"}


def scored(model: Any) -> Tensor:
    """[batch, tokens - 1]: the log-probabilities of the tokens."""
    with torch.no_grad():
        return scores(model(IDS, use_cache=False).logits[:, :-1], IDS[:, 1:])


def trained(recipe: str, folder: Path) -> Tensor:
    """Train, export into ``folder``, and return the trainer's log-probabilities."""
    model = make("llama", torch.bfloat16)
    fp8graph.compile(model, recipe=RECIPES[recipe], compiler="eager", batch_invariant=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    result = scored(model)
    fp8graph.export(model, folder, FORMS[recipe])
    return result


class Linear(nn.Module):
    """A linear in E4M3 with one scale for 128 numbers of a token, and for 128x128 of the weight.

    ``blocks``: DeepGEMM's order of sums.
    """

    def __init__(self, data: Tensor, scales: Tensor, *, blocks: bool) -> None:
        super().__init__()
        self.data, self.scales, self.blocks = data, scales, blocks

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.to(torch.float32).flatten(0, -2).unflatten(1, (-1, BLOCK))  # [tokens, blocks, BLOCK]
        scale = tokens.abs().amax(2, keepdim=True).clamp_min(1e-10) / 448.0
        quantized = (tokens / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32)
        weight = self.data.to(torch.float32).unflatten(1, (-1, BLOCK))
        rows = self.scales.repeat_interleave(BLOCK, 0)[: weight.shape[0]]
        if self.blocks:
            out = torch.zeros(len(tokens), len(weight))
            for block in range(tokens.shape[1]):
                out += quantized[:, block] @ weight[:, block].t() * scale[:, block] * rows[:, block]
        else:  # as fp8graph decodes and multiplies on a CPU
            out = invariant.mm((quantized * scale).flatten(1), (weight * rows.unsqueeze(2)).flatten(1).t(), None)
        return out.to(x.dtype).unflatten(0, x.shape[:-1])


def in_transformers(folder: Path, *, blocks: bool) -> Any:
    """The checkpoint in transformers' layers, with linears as vLLM multiplies them, or fp8graph."""
    model, checkpoint = make("llama", torch.bfloat16), Checkpoint(folder)
    model.load_state_dict(LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict())
    for layer in checkpoint.layers:
        weight = checkpoint.weight(layer)
        model.set_submodule(layer, Linear(weight.data, weight.scales().to(torch.float32), blocks=blocks))
    return model


def distance(theirs: Tensor, ours: Tensor) -> dict[str, float]:
    r = theirs - ours
    return {"kl": float((r.exp() - 1 - r).mean()), "largest": float(r.abs().max())}


def row(server: str, far: dict[str, float]) -> str:
    """Return the line of docs/reinforcement_learning.md for a server."""
    who, _, recipe = server.rpartition(", ")
    kl = f"{far['kl']:.0e}" if far["kl"] else "0.0"
    return f"| {who} | `{recipe}` | {kl} | {far['largest']:.2g} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    distances: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        for recipe, form in FORMS.items():
            folder = Path(name) / recipe
            ours = trained(recipe, folder)
            server = fp8graph.load_checkpoint(make("llama", torch.bfloat16).eval(), folder)
            fp8graph.compile(server, compiler="eager", batch_invariant=True)
            distances[f"fp8graph, {recipe}"] = distance(scored(server), ours)
            theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
            distances[f"{form} in transformers, {recipe}"] = distance(scored(theirs), ours)
            if recipe == "blockwise":
                for who, blocks in (("vLLM's", True), ("fp8graph's", False)):
                    model = in_transformers(folder, blocks=blocks)
                    distances[f"transformers' layers with {who} products, {recipe}"] = distance(scored(model), ours)
    text = json.dumps({**conditions(), "distances": distances})
    out.mkdir(parents=True, exist_ok=True)
    (out / "servers.json").write_text(text + "\n", encoding="utf-8")
    Console().print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
