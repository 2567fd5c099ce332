"""Models that are sharded over ranks, handed over in FP8, and what one process would hand over: what the ranks run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fp8graph
from fp8graph.backend.sharded import whole as gathered
from fp8graph.checkpoints import Checkpoint
from fp8graph.compat.distributed import local
from helpers import bits, mixtral
from parallelism import whole
from sent import PeakMemory

WORDS = 64


class Block(nn.Module):
    """Three linears that are fused, and two with biases."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.q, self.k, self.v = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(self.up(self.q(h) * self.k(h).sigmoid() + self.v(h)).relu())


class Net(nn.Module):
    """Blocks between an embedding and a head that has its weight."""

    def __init__(self, hidden: int, inner: int, checkpointed: bool, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, hidden)
        self.layers = nn.ModuleList(Block(hidden, inner) for _ in range(layers))
        self.lm_head = nn.Linear(hidden, WORDS, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("steps", torch.ones(3))
        self.checkpointed = checkpointed

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.lm_head(x)


def net(sizes: tuple[int, int], dtype: torch.dtype, checkpointed: bool = False, layers: int = 2) -> Net:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(*sizes, checkpointed, layers)
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):  # the amaxes of ranks, and of fused linears, differ
            p.mul_(1 + number % 5)
            p[len(p) // 3] *= 3
    return model.to(dtype)


def shard(model: Net, how: str, *, bf16: bool) -> None:
    """``how``: "fsdp", "tp", or "fsdp and tp": two ranks share the rows of a batch."""
    ranks = dist.get_world_size()
    both = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp")) if "and" in how else None
    mesh = init_device_mesh("cpu", (ranks,)) if both is None else None
    if "tp" in how:
        plan: dict[str, Any] = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("q", "k", "v")}
        plan |= {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in model.layers:
            parallelize_module(layer, mesh or both["tp"], plan)  # pyright: ignore[reportOptionalSubscript]
    if "fsdp" in how:
        settings: dict[str, Any] = {"mesh": mesh or both["dp"]}  # pyright: ignore[reportOptionalSubscript]
        if bf16:
            settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in model.layers:
            fully_shard(layer, **settings)
        fully_shard(model, **settings)


def compiled(model: Net, recipe: Any, how: str, compiler: Any = "eager") -> fp8graph.Backend:
    fuses = "tp" not in how  # each of q, k and v reads an input that DTensor has handed to it
    backend = fp8graph.Backend(fp8graph.Policy(default=recipe), compiler=compiler, fuse_linears=fuses)
    backend.bind(model)
    for layer in model.layers:
        layer.compile(backend=backend)
    return backend


def train(model: Net, steps: int, *, bf16: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        words = torch.randint(0, WORDS, (4, 8), generator=generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(words).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Sent(PeakMemory):
    """Counts the bytes that this rank gives to collectives, by kind, and the memory of what is new."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([*model.state_dict().values()])
        self.before, self.bytes = self.peak, {"all_gather": 0, "all_reduce": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).replace("allgather", "all_gather").replace("allreduce", "all_reduce")
        kind = next((kind for kind in self.bytes if kind in name), None)
        if kind is not None:
            self.bytes[kind] += [x for x in tree_leaves(args) if isinstance(x, Tensor)][-1].nbytes
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _count(self, tensors: Any) -> None:
        there = [local(x) for x in tree_leaves(tensors) if isinstance(x, Tensor)]
        super()._count([x for x in there if not x.is_meta])


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The names of tensors that are not there twice, or differ in a bit."""
    names = found.keys() ^ expected.keys()
    both = [(name, found[name], expected[name]) for name in found.keys() & expected.keys()]
    wrong = [n for n, x, y in both if (x.dtype, x.shape) != (y.dtype, y.shape) or not torch.equal(bits(x), bits(y))]
    return sorted([*names, *wrong])


def in_shards(model: nn.Module, expected: dict[str, Tensor]) -> dict[str, Any]:
    """The comparison of ``quantized_shards`` with whole tensors: names of those that differ, and the bytes sent.

    "missing": tensors of which no rank has some number. "bytes": of all shards of this rank.
    """
    with Sent(model) as sent:
        shards = [*fp8graph.quantized_shards(model)]
    wrong = [
        shard.name
        for shard in shards
        if shard.shape != expected[shard.name].shape
        or differences({"": shard.tensor}, {"": expected[shard.name][shard.index]})
    ]
    spread = {shard.name: gathered(shard.dtensor) for shard in shards if shard.dtensor is not None}
    wrong += differences(spread, {name: expected[name] for name in spread})
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, [(shard.name, shard.index) for shard in shards])
    left = {name: torch.ones(x.shape, dtype=torch.bool) for name, x in expected.items()}
    for name, index in (place for of_rank in places for place in of_rank):
        left[name][index] = False
    return {
        "wrong": wrong,
        "missing": [name for name, x in left.items() if x.any()],
        "spread": len(spread),
        "sent": sent.bytes,
        "bytes": sum(shard.tensor.nbytes for shard in shards),
    }


def _written(model: nn.Module) -> dict[str, Any]:
    """The tensors of a folder that all ranks export, and what each says if it is there already."""
    place = [tempfile.mkdtemp()]
    dist.broadcast_object_list(place)
    shards = Checkpoint(fp8graph.export(model, Path(place[0]) / "out")).shards
    tensors = {name: shards.tensor(name) for name in shards}
    try:
        fp8graph.export(model, Path(place[0]) / "out")
    except fp8graph.ConfigError as error:
        return {"tensors": tensors, "again": str(error), "files": sorted(x.name for x in (Path(place[0])).iterdir())}
    raise AssertionError("the folder was replaced")


def run(rank: int, how: str, recipe: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The hand-over of a sharded model beside that of one process with the same weights; see :func:`_run`."""
    return _run(how, recipe, **settings)


def _run(
    how: str,
    recipe: Any,
    *,
    sizes: tuple[int, int] = (256, 384),
    bf16: bool = False,
    checkpointed: bool = False,
    compiler: Any = "eager",
    layers: int = 2,
    steps: int = 2,
    exports: bool = False,
) -> dict[str, Any]:
    dtype = torch.float32 if bf16 else torch.bfloat16
    model = net(sizes, dtype, checkpointed, layers)
    shard(model, how, bf16=bf16)
    backend = compiled(model, recipe, how, compiler)
    train(model, steps)
    found = dict(fp8graph.quantized_state(model))
    with Sent(model) as sent:
        for _ in fp8graph.quantized_state(model):
            pass
    shards = in_shards(model, found)
    folder = _written(model) if exports else {}
    weights, state = {name: whole(x) for name, x in model.state_dict().items()}, backend.state_dict()
    one = net(sizes, dtype, checkpointed, layers)
    alone = compiled(one, recipe, how)
    train(one, 1, bf16=bf16)  # compiles it, and makes its scaling state
    one.load_state_dict(weights)
    alone.load_state_dict(state)
    expected = dict(fp8graph.quantized_state(one))
    linears = [name for name, x in expected.items() if x.dtype == torch.float8_e4m3fn]
    return {
        "differences": differences(found, expected),
        "differences of the folder": differences(folder.pop("tensors"), expected) if exports else [],
        **folder,
        "shards": shards,
        "layers": layers,
        "linears": len(linears),
        "numbers": sum(expected[name].numel() for name in linears),
        "others": sum(x.nbytes for name, x in expected.items() if name not in linears),
        "largest": max(expected[name].numel() for name in linears),
        "sent": sent.bytes,
        "memory": sent.peak - sent.before,
    }


def of_experts(rank: int, recipe: Any) -> dict[str, Any]:
    """The hand-over of a Mixtral with stacked experts, whole ones on each rank, beside that of one process."""
    found: list[dict[str, Tensor]] = []
    shards: dict[str, Any] = {}
    for spread in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, ids = mixtral().bfloat16(), torch.arange(32).reshape(2, 16)
        if spread:
            fully_shard(model.model.layers[0])
            fully_shard(model)
        fp8graph.compile(model, recipe=recipe, compiler="eager")
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append(dict(fp8graph.quantized_state(model)))
        if spread:
            shards = in_shards(model, found[0])
    return {"differences": differences(*found), "shards": shards, "tensors": sorted(found[0])}


def refusals(rank: int) -> dict[str, str]:
    """Errors of this rank where one of two cannot hand over, or both differ, and a hand-over after each of them."""
    said: dict[str, str] = {}
    recipes: dict[str, Any] = {
        "": "rowwise",
        "scales": fp8graph.DelayedScaling(reduce_amax=False),
        "pairs": "nvfp4",
    }
    for name, recipe in recipes.items():
        model = net((64, 144), torch.bfloat16)
        shard(model, "tp", bf16=False)
        compiled(model, recipe, "tp")
        train(model, 2)
        first = torch.zeros(2, 8, dtype=torch.int64)
        cases: dict[str, tuple[str, Any]] = {name: ("auto", None)}
        if not name:
            cases = {
                "format": ("modelopt" if rank else "compressed-tensors", None),
                "calibration on one rank": ("auto", [first] if rank else None),
                "calibration": ("auto", first if rank else [first]),
                "batches": ("auto", ["words"] if rank else [first]),
                "number of batches": ("auto", [first] * (1 + rank)),
                "state_dict": ("auto", None),
            }
        for case, (given, calibration) in cases.items():
            hook = model.register_state_dict_pre_hook(_fails) if case == "state_dict" and rank else None
            for hand_over in (fp8graph.quantized_state, fp8graph.quantized_shards):
                try:
                    found = [next(hand_over(model, given, calibration=calibration))]
                except fp8graph.Fp8GraphError as error:
                    found = [str(error)]
                said[f"{case}, {hand_over.__name__}"] = str(found[0])
            if hook is not None:
                hook.remove()
            if not name:
                assert len(dict(fp8graph.quantized_state(model))) == len({*model.state_dict()}) - 1 + 10
    return said


def _fails(*_: Any) -> None:
    raise fp8graph.ConfigError("the disk of this rank is full.")
