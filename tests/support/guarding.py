"""A model with one tensor that quantization spoils, and training under a guard that FSDP2 shards and DCP saves."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fp8graph import Backend, Policy
from fp8graph.passes.gather_weights.sent_weights import SentWeights

WIDTH, ROWS = 64, 64
BAD = "layers.1.middle"  # in a stack


class Block(nn.Module):
    """Three linears, none of which shares its input."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        x = nn.functional.silu(self.first(x))
        # most rows of the gradient of `middle` are tiny, and it is passed on in full size beside it
        return self.last(nn.functional.silu(self.middle(x) * scale + x))


def scales(rows: int = ROWS) -> Tensor:
    """[rows, 1]: three of four rows scale the gradient of `middle` by 2^-40, beyond E5M2's 2^33."""
    return torch.where(torch.arange(rows) % 4 == 0, 1.0, 2.0**-40)[:, None]


class Stack(nn.Module):
    """Two blocks, of which the second is the bad one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.layers[1](x + self.layers[0](x, torch.ones_like(scale)), scale)


class Run:
    """A stack that FSDP2 shards, its layers compiled one by one. Only the rows of rank 1 are bad."""

    def __init__(self, policy: Policy, compiler: Any = "eager") -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model: Any = Stack()
        self.backend = Backend(policy, compiler=compiler)
        self.backend.bind(self.model)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        for layer in self.model.layers:
            layer.compile(backend=self.backend)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def steps(self, steps: range) -> list[float]:
        """The losses of this rank."""
        scale = scales() if dist.get_rank() == 1 else torch.ones(ROWS, 1)
        losses: list[float] = []
        for step in steps:
            generator = torch.Generator().manual_seed(dist.get_world_size() * step + dist.get_rank())
            loss = self.model(torch.randn(ROWS, WIDTH, generator=generator), scale).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def weights(self) -> dict[str, Tensor]:
        """The whole weights."""
        return {name: p.full_tensor().detach().clone() for name, p in self.model.named_parameters()}

    def recipes(self) -> dict[str, str | None]:
        """Of the GEMMs of the bad layer, as last compiled."""
        return {g.gemm: g.recipe for g in self.backend.report.gemms if g.fqn == BAD}

    def save(self, folder: str) -> None:
        dcp.save({"model": get_model_state_dict(self.model), "fp8graph": self.backend}, checkpoint_id=folder)

    def load(self, folder: str) -> None:
        parts: dict[str, Any] = {"model": get_model_state_dict(self.model), "fp8graph": self.backend}
        dcp.load(parts, checkpoint_id=folder)
        set_model_state_dict(self.model, parts["model"])


def sharded(_rank: int, policies: dict[str, Policy], folder: str, compiler: str = "eager") -> dict[str, Any]:
    """Per policy: train under a guard, save, go on; the same under a policy that is set; resumed from the file."""
    found: dict[str, Any] = {}
    for name, policy in policies.items():
        run = Run(policy, compiler)
        guard = run.backend.guard(every=5, start=2, apply=True, reduce=True)
        losses = run.steps(range(2))
        store = run.backend.store(SentWeights)  # of weights gathered in FP8, from the second step on
        sent = [store.quantized]
        losses += run.steps(range(2, 5))
        run.save(f"{folder}/{name}")
        saved = dict(run.backend.state_dict())
        losses += run.steps(range(5, 7))
        sent.append(store.quantized)
        losses += run.steps(range(7, 9))
        own: dict[str, Any] = {"losses": losses, "weights": run.weights(), "recipes": run.recipes(), "saved": saved}
        own |= {"findings": [str(f) for f in guard.findings], "policy": run.backend.policy.to_dict()}
        own |= {"sent": sent, "report": run.backend.report.guard}
        told = Run(policy, compiler)
        told_losses = told.steps(range(3))
        told.backend.set_policy(guard.policy)
        own["told"] = {"losses": told_losses + told.steps(range(3, 9)), "weights": told.weights()}
        again = Run(policy, compiler)
        other = again.backend.guard(every=5, start=2, apply=True, reduce=True)
        again.load(f"{folder}/{name}")
        loaded = dict(again.backend.state_dict())
        own["resumed"] = resumed = dict[str, Any]()
        resumed |= {"losses": again.steps(range(5, 9)), "weights": again.weights(), "loaded": loaded}
        resumed |= {"findings": len(other.findings), "policy": again.backend.policy.to_dict()}
        resumed["report"] = again.backend.report.guard
        found[name] = own
    return found
