"""Modules that gather what their linears take: what ranks run with and without pass `gather_in_fp8`, and reports."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8graph
from fp8graph import Policy, passes
from fp8graph.backend import inductor_passes

_ops = torch.ops._c10d_functional


def _world() -> Any:
    return dist.group.WORLD


def gathered(x: Tensor, dim: int) -> Tensor:
    """As functional.all_gather_tensor does it; but torch 2.11 cannot trace that along another dim than the first."""
    ranks, group = dist.get_world_size(), _world().group_name
    whole = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), ranks, group))
    return whole if dim == 0 else torch.cat(whole.chunk(dist.get_world_size()), dim)


def scattered(x: Tensor, dim: int) -> Tensor:
    parts = x.contiguous() if dim == 0 else torch.cat(x.chunk(dist.get_world_size(), dim))
    ranks, group = dist.get_world_size(), _world().group_name
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(parts, "sum", ranks, group))


class _Exchange(torch.autograd.Function):
    """Gathers or scatters along ``dim``; backward does the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, gathers: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.dim, ctx.gathers = dim, gathers
        return gathered(x, dim) if gathers else scattered(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return scattered(grads[0], ctx.dim) if ctx.gathers else gathered(grads[0], ctx.dim), None, None


def gather(x: Tensor, dim: int) -> Any:
    """Shards of all ranks joined along ``dim``; backward adds up and takes this rank's part, as DTensor does."""
    return _Exchange.apply(x, dim, True)


def scatter(x: Tensor, dim: int) -> Any:
    """The reverse: partial sums in, this rank's part out; backward gathers."""
    return _Exchange.apply(x, dim, False)


class Sequence(nn.Module):
    """Sequence parallelism: rows (or the sequences of a batch) are gathered before two linears, scattered after."""

    def __init__(self, hidden: int = 128, inner: int = 128, dim: int = 0) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner, bias=False)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(x)
        # one gather each, as DTensor writes it
        up, gate = self.up(gather(x, self.dim)), self.gate(gather(x, self.dim))
        return scatter(self.down(up * gate), self.dim)


class Sharded(nn.Module):
    """A linear whose weight is gathered from the ranks' shards of its rows, as SimpleFSDP does."""

    def __init__(self, hidden: int = 128, inner: int = 256, ranks: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inner // ranks, hidden) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.sin(x), gather(self.weight, 0))


class Rows(nn.Module):
    """One linear whose input is gathered; ``also``: what else is done with what was gathered."""

    def __init__(self, hidden: int = 32, also: Any = None, dim: int = 0) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden, 48, bias=False)
        self.also, self.dim = also, dim

    def forward(self, x: Tensor) -> Tensor:
        x = gather(x, self.dim)
        y = self.proj(x)
        return y if self.also is None else y.sum() + self.also(x).sum()


class Turned(nn.Module):
    """The op between the gather and the linear is no movement of rows."""

    def __init__(self, turn: Any) -> None:
        super().__init__()
        self.proj, self.turn = nn.Linear(32, 32, bias=False), turn

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.turn(gather(x, 0)))


@contextlib.contextmanager
def two_ranks(rank: int = 0) -> Generator[None]:
    """Two ranks, of which this process is one; nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def report_of(module: nn.Module, x: Tensor, policy: Any = "tensorwise", **kwargs: Any) -> fp8graph.Report:
    policy = Policy(default=policy) if not isinstance(policy, Policy) else policy
    settings: dict[str, Any] = {"compiler": "eager", "cache_weights": "update", **kwargs}
    backend = fp8graph.Backend(policy, **settings)
    y = torch.compile(module, backend=backend)(x)
    if torch.is_grad_enabled():
        y.sum().backward()
    return backend.report


def reasons_of(report: fp8graph.Report) -> list[str]:
    """The reason of each all-gather for the dtype that it sends."""
    return [c.reason for c in report.collectives if c.kind == "all_gather"]


def run(rank: int, cases: list[tuple[str, Any, Any, tuple[int, ...]]]) -> list[dict[str, Any]]:
    """Results of two steps of each ``(module, dtype, recipe, shape)``, with the pass and without it."""
    return [_both(rank, *case) for case in cases]


def _both(rank: int, kind: str, dtype: torch.dtype, recipe: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    dynamic, kind = kind.startswith("dynamic "), kind.removeprefix("dynamic ")
    for name in ("with", "without"):
        without = tuple(each for each in passes.JOINT_PIPELINE if each.name != "gather_in_fp8")
        before, inductor_passes.JOINT_PIPELINE = (
            inductor_passes.JOINT_PIPELINE,
            passes.JOINT_PIPELINE if name == "with" else without,
        )
        torch._dynamo.reset()
        torch.manual_seed(7 if kind != "sharded" else 7 + rank)
        model = (Sharded() if kind == "sharded" else Sequence(dim=1 if kind == "sequences" else 0)).to(dtype)
        torch.manual_seed(100 + rank)
        backend = fp8graph.Backend(recipe=recipe, compiler="eager")
        compiled = torch.compile(model, backend=backend, dynamic=dynamic or None)
        tensors: list[Tensor] = []
        for step in range(2):
            x = (torch.randn(shape) * 10.0 ** (rank + step)).to(dtype).requires_grad_()  # scales differ if not shared
            y = compiled(x)
            y.backward(torch.randn(shape[:-1] + y.shape[-1:]).to(dtype))
            tensors += [y.detach(), *(p.grad.clone() for p in (x, *model.parameters()) if p.grad is not None)]
        inductor_passes.JOINT_PIPELINE = before
        state = {key: value for key, value in backend.state_dict().items() if "scale" in key}
        results[name] = tensors, [(c.dtype, c.shape, c.bytes_sent, c.reason) for c in backend.report.collectives], state
    return results
