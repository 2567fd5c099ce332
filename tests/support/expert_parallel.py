"""Experts on several ranks, with an all-to-all of tokens in the graph before them and after them, and on one."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

import fp8graph

TOKENS, HIDDEN, INNER, EXPERTS, CHOSEN, STEPS = 32, 64, 96, 8, 2, 3  # tokens: of all ranks


def _world() -> Any:
    return dist.group.WORLD


class Experts(nn.Module):
    """A layer of experts. Each rank has some of them, and room for as many tokens as there are for each.

    ``weighted``: "after" the experts, as Hugging Face's models do, or "before" them (``score_before_experts``).
    """

    def __init__(self, ranks: int, weighted: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        rank = 0 if ranks == 1 else dist.get_rank()
        own = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.router.weight.data = torch.randn(EXPERTS, HIDDEN, generator=generator)
        self.up = nn.Parameter((torch.randn(EXPERTS, INNER, HIDDEN, generator=generator) / 8)[own].clone())
        self.down = nn.Parameter((torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) / 8)[own].clone())
        self.ranks, self.weighted = ranks, weighted

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[0]
        weights, chosen = torch.topk(self.router(x).softmax(-1), CHOSEN)  # [tokens, chosen]
        place = torch.zeros(tokens, EXPERTS, dtype=torch.long).scatter(1, chosen, 1).cumsum(0) - 1
        places = chosen * tokens + place.gather(1, chosen)  # in [experts * tokens]
        rows = torch.zeros(EXPERTS * tokens, dtype=torch.long)
        rows = rows.index_put((places.flatten(),), torch.arange(tokens).repeat_interleave(CHOSEN))
        if self.weighted == "before":
            scores = torch.zeros(EXPERTS * tokens).index_put((places.flatten(),), weights.flatten())
            y = self.experts(x[rows] * scores.unsqueeze(1))[places.flatten()]
            return y.view(tokens, CHOSEN, HIDDEN).sum(1)
        y = self.experts(x[rows])[places.flatten()]
        return (y.view(tokens, CHOSEN, HIDDEN) * weights.unsqueeze(-1)).sum(1)

    def experts(self, x: Tensor) -> Tensor:
        """[experts * tokens, hidden], in the order of the experts."""
        own, tokens = EXPERTS // self.ranks, x.shape[0] // EXPERTS
        x = self.exchanged(x).view(self.ranks, own, tokens, -1).transpose(0, 1).reshape(self.ranks * own * tokens, -1)
        offs = (torch.arange(own, dtype=torch.int32) + 1) * (self.ranks * tokens)
        h = torch.ops.transformers.grouped_mm_fallback(x, self.up.transpose(-2, -1), offs)
        y = torch.ops.transformers.grouped_mm_fallback(nn.functional.silu(h), self.down.transpose(-2, -1), offs)
        y = y.view(own, self.ranks, tokens, -1).transpose(0, 1).reshape(self.ranks * own * tokens, -1)
        return self.exchanged(y)

    def exchanged(self, x: Tensor) -> Tensor:
        return x if self.ranks == 1 else all_to_all_single_autograd(x.contiguous(), None, None, _world())


class Exact(Experts):
    """Sends each rank as many rows as it needs: sizes that are known when the layer runs."""

    def forward(self, x: Tensor) -> Tensor:
        own = EXPERTS // self.ranks
        weights, chosen = torch.topk(self.router(x).softmax(-1), CHOSEN)
        order = torch.argsort(chosen.flatten(), stable=True)
        mine = torch.zeros(EXPERTS, dtype=torch.long).scatter_add(0, chosen.flatten(), torch.ones_like(order))
        sent = all_to_all_single(mine, None, None, _world())  # [ranks * own]: rows of each of my experts, by rank
        gives, takes = (counts.view(self.ranks, own).sum(1).tolist() for counts in (mine, sent))
        for count in (*gives, *takes):
            torch._check(count >= 0)
        y = all_to_all_single_autograd(x[order // CHOSEN], takes, gives, _world())
        expert = torch.arange(own).repeat(self.ranks).repeat_interleave(sent, output_size=y.shape[0])
        rows = torch.argsort(expert, stable=True)
        offs = sent.view(self.ranks, own).sum(0).cumsum(0).to(torch.int32)
        h = torch.ops.transformers.grouped_mm_fallback(y[rows], self.up.transpose(-2, -1), offs)
        y = torch.ops.transformers.grouped_mm_fallback(nn.functional.silu(h), self.down.transpose(-2, -1), offs)
        y = all_to_all_single_autograd(torch.zeros_like(y).index_copy(0, rows, y), gives, takes, _world())
        y = torch.zeros(len(order), HIDDEN).index_copy(0, order, y)
        return (y.view(-1, CHOSEN, HIDDEN) * weights.unsqueeze(-1)).sum(1)


def train(
    rank: int,
    recipe: Any,
    *,
    weighted: str = "after",
    training: bool = True,
    ranks: int = 0,
    compiler: Any = "eager",
    exact: bool = False,
) -> dict[str, Any]:
    """Outputs and gradients of some steps. Each rank has its share of the tokens; ``ranks``: 1 for one process."""
    importlib.import_module("transformers.integrations.moe")  # it defines an op
    torch._dynamo.reset()
    ranks = ranks or dist.get_world_size()
    model = Exact(ranks, weighted) if exact and ranks > 1 else Experts(ranks, weighted)
    policy = fp8graph.Policy([fp8graph.Rule("router", None), fp8graph.Rule("*", recipe, op="*")], default=None)
    backend = fp8graph.Backend(policy, compiler=compiler)
    compiled = torch.compile(model, backend=backend)
    data = torch.randn(STEPS, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    share = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)
    outputs: list[Tensor] = []
    for x in data[:, share]:
        x = x.clone().requires_grad_(training)
        with torch.set_grad_enabled(training), torch._dynamo.config.patch(capture_scalar_outputs=True):
            outputs.append(y := compiled(x))
        if training:
            y.square().sum().backward()
            outputs.append(x.grad)  # pyright: ignore[reportArgumentType]
    return {
        "outputs": [y.detach() for y in outputs],
        "up": model.up.grad,
        "down": model.down.grad,
        "sent": [(c.direction, c.dtype, c.bytes_sent) for c in backend.report.collectives if c.kind == "all_to_all"],
        "refused": {r.reason for r in backend.report.refusals if r.what == "quantized before it is routed"},
    }


@contextlib.contextmanager
def without_the_pass() -> Generator[None]:
    """Quantize tokens after they were routed."""
    from fp8graph.backend import inductor_passes

    pipeline = inductor_passes.JOINT_PIPELINE
    inductor_passes.JOINT_PIPELINE = tuple(each for each in pipeline if each.name != "route_in_fp8")
    try:
        yield
    finally:
        inductor_passes.JOINT_PIPELINE = pipeline


def both(rank: int, recipe: Any, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """With tokens that are quantized after the all-to-all, and before it."""
    with without_the_pass():
        after = train(rank, recipe, **settings)
    return after, train(rank, recipe, **settings)
