"""A small model under FSDP2, whose weights are gathered in FP8 or in high precision: what the ranks run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fp8graph
from fp8graph.backend.inductor_passes import run_eagerly
from fp8graph.compat import fsdp
from fp8graph.passes.gather_weights.sent_weights import SentWeights
from helpers import Counting as Generations

STEPS = 4


class Block(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Net(nn.Module):
    def __init__(self, hidden: int, inner: int, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(hidden, inner) for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


class Counting(DefaultAllGather):
    """Counts the bytes that this rank gives to all-gathers."""

    sent = 0

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.sent += input_tensor.nbytes
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


def run(*args: Any, **settings: Any) -> dict[str, Any]:
    """The findings of :func:`train`, and whether the model is freed after it, while its backend is not."""
    found, backend, layer = train(*args, **settings)
    torch._dynamo.reset()
    gc.collect()
    found["freed"] = layer() is None and bool(backend.settings)
    return found


def train(
    rank: int,
    recipe: Any,
    in_fp8: bool,
    *,
    compiler: Any = "eager",
    sizes: tuple[int, int] = (256, 512),
    param_dtype: torch.dtype | None = torch.bfloat16,
    mesh: tuple[int, ...] | None = None,
    reshard: bool | int = True,
    checkpointed: bool = False,
    accumulated: bool = False,
    offload: bool = False,
    compiled_step: bool = False,
    together: bool = False,
    regions: bool = False,
    keeps: bool = False,
    event: str = "",
) -> tuple[dict[str, Any], fp8graph.Backend, weakref.ref[nn.Module]]:
    """Some steps of training and evaluation; ``event`` happens before the third."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(*sizes, checkpointed)
    shape = mesh or (dist.get_world_size(),)
    settings: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :]),
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32),
        "reshard_after_forward": reshard,
    }
    if offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    counting = Counting()
    if together:  # the root is not resharded after forward, by default
        del settings["reshard_after_forward"]
    for layer in () if together else model.layers:
        sharded: Any = fully_shard(layer, **settings)
        sharded.set_custom_all_gather(counting)
    root: Any = fully_shard(model, **settings)
    if together:
        root.set_custom_all_gather(counting)
    backend = _compiled(
        model, regions, {"recipe": recipe, "compiler": compiler, "cache_weights": in_fp8 and (not keeps or "update")}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    take_step: Any = torch.compile(optimizer.step, backend="eager") if compiled_step else optimizer.step
    generator = torch.Generator().manual_seed(rank)
    found: dict[str, Any] = {"losses": [], "evaluated": [], "bytes": []}
    for step in range(STEPS):
        if step == 2:
            _happens(event, model, backend)
        before, x = counting.sent, torch.empty(0)
        for last in (False, True)[not accumulated :]:
            root.set_requires_gradient_sync(last)
            x = torch.randn(32, sizes[0], generator=generator)
            loss = model(x).float().square().mean()
            loss.backward()
            found["losses"].append(loss.item())
        found["bytes"].append(counting.sent - before)
        if step == STEPS - 1:
            found["gradients"] = {n: p.grad.full_tensor() for n, p in model.named_parameters()}  # pyright: ignore
        take_step()
        optimizer.zero_grad()
        with torch.no_grad():
            found["evaluated"].append(model(x).float().square().mean().item())
    found["weights"] = {name: p.full_tensor() for name, p in model.state_dict().items()}
    refusals = reversed(backend.report.refusals)  # those of training, which came first
    found["reasons"] = {r.fqn: r.reason for r in refusals if r.what == "kept weight"}
    found["dtypes"] = {str(p.to_local().dtype) for p in model.state_dict().values()}
    found["gemms"] = len(backend.report.gemms)
    found["state"] = dict(backend.state_dict())
    found["quantized"] = backend.store(SentWeights).quantized
    found["nan"] = sum(x.numel() for x in backend.store(SentWeights)._memory._nans.values())
    return found, backend, weakref.ref(model.layers[0])


def _compiled(model: Net, regions: bool, settings: dict[str, Any]) -> fp8graph.Backend:
    """Layer by layer, by hand or by one call."""
    if regions:
        return fp8graph.backend_of(fp8graph.compile(model, regions="auto", **settings))
    backend = fp8graph.Backend(**settings)
    backend.bind(model)
    for layer in model.layers:
        layer.compile(backend=backend)
    return backend


def _happens(event: str, model: nn.Module, backend: fp8graph.Backend) -> None:
    if event == "policy":
        backend.set_policy(fp8graph.Policy([fp8graph.Rule("layers.0.down", None)], default="tensorwise"))
    if event == "keep":
        for layer in model.layers:  # pyright: ignore
            layer.set_reshard_after_forward(False)
    if event == "load":
        model.load_state_dict({name: x * 0.5 for name, x in model.state_dict().items()})
    if event == "unseen":  # as averages of weights are swapped in
        for parameter in model.parameters():
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(parameter.to_local()):  # pyright: ignore
                parameter.to_local().mul_(0.5)  # pyright: ignore
    if event == "move":
        model.to("cpu")
    if event == "assign":
        model.load_state_dict({name: x * 0.5 for name, x in model.state_dict().items()}, assign=True)
    if event == "another backend":
        kept = backend.settings.cache_weights
        for layer in model.layers:  # pyright: ignore
            layer.compile(backend=fp8graph.Backend(recipe="blockwise", compiler="eager", cache_weights=kept))


def both(rank: int, recipe: Any, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gathered in high precision, and in FP8."""
    return run(rank, recipe, False, **settings), run(rank, recipe, True, **settings)


def generations(rank: int, recipe: str, layers: int) -> tuple[list[int], list[str]]:
    """The number of graphs with generated code by the end of each step, and the names in the report."""
    torch._dynamo.reset()
    model = nn.ModuleList(Block(256, 512) for _ in range(layers))
    backend = Generations(recipe=recipe)
    whole = nn.ModuleDict({"layers": model})  # alive for as long as its names are needed
    backend.bind(whole)
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        layer.compile(backend=backend)
    optimizer = torch.optim.AdamW(model.parameters())
    counts: list[int] = []
    for _ in range(3):
        x = torch.randn(32, 256, requires_grad=True)
        for layer in model:
            x = layer(x)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(len(backend.generated))
    return counts, list(dict.fromkeys(gemm.fqn for gemm in backend.report.gemms))


class PeakMemory(TorchDispatchMode):
    """The most memory that the tensors of a graph take at once: its inputs, and what it computes."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()
        self._storages: dict[StorageWeakRef, int] = {}
        self.peak = 0
        self._count(inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self._count(results)
        return results

    def _count(self, tensors: Any) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._storages[StorageWeakRef(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        self._storages = {key: size for key, size in self._storages.items() if not key.expired()}
        self.peak = max(self.peak, sum(self._storages.values()))


class Measuring(fp8graph.Backend):
    """Runs graphs as they are, and measures the peak of each run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, compiler="eager", **kwargs)
        self.peaks: list[int] = []

    @property
    def inner_compile(self) -> Callable[..., Any]:
        def compile(module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
            run: Any = run_eagerly(module, inputs)

            def measured(args: list[Any]) -> Any:
                with PeakMemory([args, [x.all_gather_outputs for x in fsdp.gathered().values()]]) as memory:
                    results = run(args)
                self.peaks.append(memory.peak)
                return results

            measured._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
            return measured

        return compile


def peaks(rank: int, recipe: str, in_fp8: bool) -> list[float]:
    """Bytes for each number of a layer's matrices: the most at once in evaluation, in forward and in backward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend = Measuring(recipe=recipe, cache_weights=in_fp8)
    model = nn.ModuleDict({"layer": (layer := Block(512, 1024))})
    backend.bind(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(
        layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), reshard_after_forward=True
    )
    layer.compile(backend=backend)
    optimizer = torch.optim.SGD(layer.parameters())
    for _ in range(3):
        backend.peaks.clear()
        x = torch.randn(8, 512, requires_grad=True)
        with torch.no_grad():
            layer(x)
        layer(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [peak / (3 * 512 * 1024) for peak in backend.peaks]
