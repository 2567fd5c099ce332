"""A training step on many GPUs: how they share it, its linears and parameters, and its collectives.

Times are in ``step_cost.py``.

tests/extras/test_step_cost.py compares the collectives with those of real ranks under DDP, FSDP2, tensor and
sequence parallelism.
Source: Megatron-LM (arXiv 2205.05198) for tensor and sequence parallelism; torch's FSDP2 for its padding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch

from fp8graph.errors import ConfigError
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import GEMM_OPERANDS, GEMMS, GemmName, Recipe
from fp8graph.recipes.policy import MIN_SPEEDUP
from fp8graph.report import Report

MOST_GPUS: Final = 16_384
BUCKET: Final = 25 * 2**20  # bytes of gradients that DDP reduces at once (its bucket_cap_mb)
_STYLES: Final = ("embedding", "colwise", "rowwise", "replicated_with_grad_allreduce")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The number of GPUs along each axis; those of ``tp`` are neighbours, then those of ``fsdp``, then those of ``dp``.

    Raises:
        ConfigError: (a ``ValueError``) for sizes that are not whole numbers > 0, ``sp`` without ``tp``, or more than
            16,384 GPUs.
    """

    dp: int = 1  #: DDP: each has all parameters. With fsdp: replicas of the sharded model
    fsdp: int = 1  #: FSDP2 (ZeRO-3): parameters, gradients and optimizer states are sharded
    tp: int = 1  #: tensor parallel: linears are sharded
    sp: bool = False  #: sequence parallel, over the GPUs of tp: rows between the sharded linears are sharded too

    def __post_init__(self) -> None:
        for axis, value in (("dp", self.dp), ("fsdp", self.fsdp), ("tp", self.tp)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"mesh: {axis}={value!r} must be a whole number > 0.")
        if type(self.sp) is not bool or (self.sp and self.tp == 1):
            raise ConfigError("mesh: sp must be True or False, and needs tp > 1: it shards rows over the GPUs of tp.")
        if self.gpus > MOST_GPUS:
            raise ConfigError(f"mesh: {self} has {self.gpus:,} GPUs; the cost model supports up to {MOST_GPUS:,}.")

    @staticmethod
    def parse(text: str) -> Mesh:
        """Return the mesh that ``dp=4,fsdp=8,tp=8,sp`` describes: axes in any order; ``sp`` alone is ``sp=1``."""
        values: dict[str, Any] = {}
        for item in text.split(","):
            axis, _, number = item.strip().partition("=")
            if axis not in ("dp", "fsdp", "tp", "sp"):
                raise ConfigError(f"--mesh {text}: unknown axis {axis!r}. Axes: dp, fsdp, tp, and the switch sp.")
            if axis in values:
                raise ConfigError(f"--mesh {text}: {axis} is given twice.")
            number = "1" if item.strip() == "sp" else number
            if not number.isdecimal() or (axis == "sp" and number not in "01"):
                wanted = "0 or 1" if axis == "sp" else "a whole number > 0"
                raise ConfigError(f"--mesh {text}: {axis}={number!r} must be {wanted}.")
            values[axis] = number == "1" if axis == "sp" else int(number)
        return Mesh(**values)

    @property
    def gpus(self) -> int:
        return self.dp * self.fsdp * self.tp

    def group(self, axis: str) -> tuple[int, int]:
        """Return the groups along ``axis`` (one of the axes, or "all"): their ranks, and the distance between
        neighbours.
        """
        strides = {"tp": 1, "fsdp": self.tp, "dp": self.tp * self.fsdp}
        return (self.gpus, 1) if axis == "all" else (getattr(self, axis), strides[axis])

    def __str__(self) -> str:
        return f"dp={self.dp},fsdp={self.fsdp},tp={self.tp}" + ",sp" * self.sp


@dataclass(frozen=True, kw_only=True)
class Linear:
    """One linear: ``[m, k] @ [k, n]`` in forward, with the rows that one data-parallel replica has."""

    fqn: str  #: the full name of the module
    m: int  #: rows of the input: tokens of one replica
    n: int  #: columns of the result: outputs
    k: int  #: what is contracted: inputs
    fp8: frozenset[str] = frozenset(GEMMS)  #: the GEMMs that the policy allows in FP8


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step of one replica: its linears, parameters and sharding plan."""

    linears: tuple[Linear, ...]  #: all that are multiplied in a step
    parameters: Mapping[str, tuple[int, ...]]  #: name -> shape
    plan: Mapping[str, str] = field(default_factory=dict[str, str])  #: as Hugging Face's: "layers.*.up" -> "colwise"
    dtype: torch.dtype = torch.bfloat16  #: of parameters, gradients and activations
    attention_flops: float = 0.0  #: forward and backward
    heads: Mapping[str, int] = field(default_factory=dict[str, int])  #: what tp must divide besides sizes
    min_speedup: float = MIN_SPEEDUP  #: as in Policy

    @property
    def tokens(self) -> int:
        """The tokens of one replica: the rows of its linears."""
        return max(linear.m for linear in self.linears)

    def style(self, fqn: str) -> str:
        """Return the way in which tp shards a layer: one of ``_STYLES``, or "" if every rank has all of it."""
        value = self.plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", fqn), "")
        return next((style for style in _STYLES if value.startswith(style)), "")

    def reads(self, linear: Linear) -> tuple[Any, ...]:
        """Return a key that linears share if they read one tensor: column-parallel ones of one module (q, k, v; gate,
        up).
        """
        shared = self.style(linear.fqn) == "colwise"
        return (linear.fqn.rpartition(".")[0], linear.m, linear.k) if shared else (linear.fqn,)

    def local(self, linear: Linear, mesh: Mesh) -> Linear:
        """Return the part of ``linear`` that one rank multiplies."""
        style, tp = self.style(linear.fqn), mesh.tp
        if style == "colwise":
            return dataclasses.replace(linear, n=linear.n // tp)
        if style == "rowwise":
            return dataclasses.replace(linear, k=linear.k // tp)
        return dataclasses.replace(linear, m=linear.m // (tp if mesh.sp else 1))

    def shape(self, name: str, tp: int = 1) -> tuple[int, ...]:
        """Return the shape of a parameter on one rank of ``tp``."""
        first, *others = self.parameters[name] or (1,)
        module, _, kind = name.rpartition(".")
        style = self.style(module)
        if style == "colwise" or (style == "embedding" and kind == "weight"):
            return first // tp, *others
        if style == "rowwise" and kind == "weight":
            return first, others[0] // tp, *others[1:]
        return first, *others

    def check(self, mesh: Mesh) -> None:
        """Raise ``ConfigError`` unless ``mesh.tp`` divides everything that it shards."""
        if mesh.tp == 1:
            return
        if not any(self.style(linear.fqn) == "rowwise" for linear in self.linears):
            raise ConfigError("mesh: tp > 1, but the model's config has no plan for it (base_model_tp_plan).")
        sizes = {f"the {size} {name}": size for name, size in self.heads.items()}
        for linear in self.linears:
            if (style := self.style(linear.fqn)) in ("colwise", "rowwise"):
                size, what = (linear.n, "outputs") if style == "colwise" else (linear.k, "inputs")
                sizes[f"the {size} {what} of {linear.fqn}"] = size
        sizes |= {f"the {self.tokens} tokens": self.tokens} if mesh.sp else {}
        for name, size in sizes.items():
            if size % mesh.tp:
                raise ConfigError(f"mesh: tp={mesh.tp} does not divide {name}.")


def of_model(model: Any, report: Report, seq: int) -> Workload:
    """Return the step of a Hugging Face model, from what ``explain(model, ..., training=True)`` reports of one
    replica's batch with sequences of ``seq`` tokens. A model with experts raises ``ConfigError``.
    """
    if experts := [gemm.fqn for gemm in report.gemms if gemm.op == "grouped_mm"]:
        raise ConfigError(f"mesh: {experts[0]}: the cost model does not support experts (MoE).")
    allowed: dict[str, set[str]] = {}
    for gemm in report.gemms:
        if gemm.recipe is not None or gemm.by_profitability:
            allowed.setdefault(gemm.name, set()).add(gemm.gemm)
    linears = tuple(
        Linear(fqn=g.name, m=int(g.m), n=int(g.n), k=int(g.k), fp8=frozenset(allowed.get(g.name, ())))
        for g in report.gemms
        if g.op == "linear" and g.gemm == "fprop"
    )
    config = model.config.get_text_config()
    names = {"attention heads": "num_attention_heads", "key and value heads": "num_key_value_heads"}
    heads = {name: size for name, key in names.items() if isinstance(size := getattr(config, key, None), int)}
    count = heads.get("attention heads", 0)
    width = count * (getattr(config, "head_dim", None) or config.hidden_size // max(count, 1))
    return Workload(
        linears=linears,
        parameters={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        plan=dict(getattr(model, "tp_plan", None) or {}),
        dtype=next(model.parameters()).dtype,
        # causal: two matmuls of 2 * tokens * seq * width over half of seq in forward, five in backward
        attention_flops=7.0 * max(linear.m for linear in linears) * seq * width * config.num_hidden_layers,
        heads=heads,
        min_speedup=report.policy.min_speedup,
    )


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a step, with its ``payload`` in bytes as ``ir.collectives.bytes_sent`` counts it."""

    purpose: str  #: "weights", "gradients", "activations" or "amaxes"
    kind: str  #: "all_gather", "reduce_scatter" or "all_reduce"
    axis: str  #: "dp", "fsdp", "tp" or "all"
    direction: str  #: "forward" or "backward"
    dtype: str  #: as it is sent; "fp8" for both types
    payload: int  #: bytes of the whole tensor

    @property
    def overlaps(self) -> bool:
        """Whether compute can hide it: it can hide communication of parameters, not what the next kernel waits for."""
        return self.axis in ("dp", "fsdp")


def collectives(
    work: Workload, mesh: Mesh, recipe: Recipe | None = None, fp8: Mapping[str, set[str]] | None = None
) -> Mapping[Collective, int]:
    """Return the collectives of one step, and how many there are of each.

    Args:
        work, mesh: the step, and the GPUs it runs on.
        recipe: of the GEMMs in FP8.
        fp8: the GEMMs that run in FP8, by the name of their linear (``step_cost.decide``).
    """
    candidates = [*_of_parameters(work, mesh, recipe, fp8 or {}), *_of_activations(work, mesh, recipe, fp8 or {})]
    return Counter(collective for collective in candidates if mesh.group(collective.axis)[0] > 1)


def sent_in_fp8(work: Workload, mesh: Mesh, recipe: Recipe | None, fp8: Mapping[str, set[str]]) -> dict[str, Linear]:
    """Return the weights that FSDP2 gathers in FP8, from the second step on, and the linears that read them.

    The shards do not cut their tiles, and only GEMMs in FP8 read them (``passes/gather_weights/``). Where dgrad reads
    other numbers than fprop, each gather brings one layout, so that those of the root, which are gathered once, are
    not among them.
    """
    if recipe is None or mesh.fsdp == 1 or mesh.tp > 1:
        return {}
    quantizer = recipe.quantizer("weight")
    kind, apart = SCALINGS[quantizer.scaling], _layouts_differ(recipe)
    tile = max(quantizer.block) if apart else quantizer.block[0]
    if kind.not_sent is not None:
        return {}
    linears: dict[str, Linear] = {}
    for linear in work.linears:
        name = f"{linear.fqn}.weight"
        if name in work.parameters and {"fprop", "dgrad"} <= fp8.get(linear.fqn, set()):
            rows, columns = work.shape(name)
            if apart and not _layer(name):
                continue
            shards = mesh.fsdp * (tile if tile > 1 else 1)
            if rows % shards == 0 and rows % 16 == columns % 16 == 0:  # others are uneven or padded
                linears[name] = linear
    return linears


def _of_parameters(
    work: Workload, mesh: Mesh, recipe: Recipe | None, fp8: Mapping[str, set[str]]
) -> Iterator[Collective]:
    dtype, size = str(work.dtype).removeprefix("torch."), work.dtype.itemsize
    one = functools.partial(Collective, purpose="gradients", direction="backward", dtype=dtype)
    for name in work.parameters:
        sharded = mesh.tp > 1 and work.shape(name, mesh.tp) != work.shape(name)
        # each rank has its own rows (sp) or its own heads: its gradient is a part
        if not sharded and (mesh.sp or work.style(name.rpartition(".")[0]) == "replicated_with_grad_allreduce"):
            yield one(kind="all_reduce", axis="tp", payload=size * math.prod(work.shape(name)))
    if mesh.fsdp == 1:
        total = size * sum(math.prod(work.shape(name, mesh.tp)) for name in work.parameters)
        for start in range(0, total, BUCKET):
            yield one(kind="all_reduce", axis="dp", payload=min(BUCKET, total - start))
        return
    sent = sent_in_fp8(work, mesh, recipe, fp8)
    narrow = fsdp_units(work, mesh, sent)
    for unit, elements in fsdp_units(work, mesh).items():
        payload, name = size * elements, dtype
        gathered = payload - (size - 1) * narrow.get(unit, 0)
        if recipe is not None and unit in narrow:
            gathered, name = gathered + _tiles(work, recipe, sent, unit), "uint8"  # one message, of bytes
        # the root's parameters stay gathered between forward and backward
        for direction in ("forward", "backward") if unit else ("forward",):
            yield one(
                purpose="weights", kind="all_gather", axis="fsdp", direction=direction, payload=gathered, dtype=name
            )
        yield one(kind="reduce_scatter", axis="fsdp", payload=payload)
        yield one(kind="all_reduce", axis="dp", payload=payload // mesh.fsdp)
    kind = None if recipe is None else SCALINGS[recipe.quantizer("weight").scaling]
    if kind is not None and sent and not kind.has_state and not kind.tiled:
        # of weights that are multiplied as one; a scale per column is that of the rows of all ranks, too
        per_weight = {work.reads(linear): 1 if kind.one_scale else work.shape(name)[1] for name, linear in sent.items()}
        scales = sum(per_weight.values())
        yield one(purpose="amaxes", kind="all_reduce", axis="fsdp", dtype="float32", payload=4 * scales)


def _layouts_differ(recipe: Recipe) -> bool:
    """Return whether dgrad reads other numbers of a weight than fprop."""
    quantizer = recipe.quantizer("weight")
    return not SCALINGS[quantizer.scaling].one_scale and quantizer.block[0] <= 1


def _tiles(work: Workload, recipe: Recipe, sent: Iterable[str], unit: str) -> int:
    """Return the bytes of the scales of rows or tiles that are gathered with the weights of a unit."""
    quantizer = recipe.quantizer("weight")
    kind = SCALINGS[quantizer.scaling]
    shapes = [work.shape(name) for name in sent if _layer(name) == unit]
    scale_shapes = [kind.scale_shape(shape[0], shape[1], quantizer.block) for shape in shapes]
    return kind.scale_dtype.itemsize * sum(math.prod(shape) for shape in scale_shapes if shape is not None)


def fsdp_units(work: Workload, mesh: Mesh, names: Iterable[str] | None = None) -> dict[str, int]:
    """Give the number of elements gathered together, by layer (the module up to the first number); "" has the rest."""
    units: dict[str, int] = {}
    for name in work.parameters if names is None else names:
        first, *others = work.shape(name, mesh.tp)
        rows = -(-first // mesh.fsdp) * mesh.fsdp  # FSDP2 pads dim 0 so that all ranks have as many
        units[_layer(name)] = units.get(_layer(name), 0) + rows * math.prod(others)
    return units


def _layer(name: str) -> str:
    match = re.match(r"(.*?\.\d+)\.", name)
    return match[1] if match else ""


def _of_activations(
    work: Workload, mesh: Mesh, recipe: Recipe | None, fp8: Mapping[str, set[str]]
) -> Iterator[Collective]:
    kind = SCALINGS[recipe.quantizer("input").scaling] if recipe is not None else None
    readers: dict[Any, list[Linear]] = {}
    for linear in work.linears:
        readers.setdefault(work.reads(linear), []).append(linear)

    def in_fp8(linears: list[Linear], *gemms: str) -> bool:
        return all(gemm in fp8.get(linear.fqn, ()) for linear in linears for gemm in gemms)

    size, dtype = work.dtype.itemsize, str(work.dtype).removeprefix("torch.")
    one = functools.partial(Collective, purpose="activations", axis="tp", dtype=dtype)
    amax = functools.partial(one, purpose="amaxes", kind="all_reduce", dtype="float32")

    def gathered(direction: str, numbers: int, narrow: bool) -> Iterator[Collective]:
        """Yield gathers. One scale of the whole tensor serves both layouts; others would have to be sent twice."""
        narrow = narrow and kind is not None and kind.one_scale
        if narrow and kind is not None and kind.own_scale:  # the scale is that of the whole tensor
            yield amax(direction=direction, payload=4)
        width, name = (1, "fp8") if narrow else (size, dtype)
        yield one(kind="all_gather", direction=direction, dtype=name, payload=width * numbers)

    summed = "reduce_scatter" if mesh.sp else "all_reduce"
    for linears in readers.values() if mesh.tp > 1 else ():
        first = linears[0]
        style = work.style(first.fqn)
        if style == "colwise":
            if mesh.sp:
                yield from gathered("forward", first.m * first.k, in_fp8(linears, "fprop", "wgrad"))
            yield one(kind=summed, direction="backward", payload=size * first.m * first.k)
        elif style == "rowwise":
            yield one(kind=summed, direction="forward", payload=size * first.m * first.n)
            if mesh.sp:
                yield from gathered("backward", first.m * first.n, in_fp8(linears, "dgrad", "wgrad"))
    for name, shape in work.parameters.items() if mesh.tp > 1 else ():
        if work.style(name.rpartition(".")[0]) == "embedding":
            numbers = work.tokens * shape[-1]
            yield one(kind=summed, direction="forward", payload=size * numbers)
            if mesh.sp:
                yield one(kind="all_gather", direction="backward", payload=size * numbers)
    if recipe is not None and recipe.reduces_amax:
        tensors = {
            (linear.fqn, x)
            for linear in work.linears
            for g in fp8.get(linear.fqn, ())
            for x in GEMM_OPERANDS[cast(GemmName, g)]
        }
        if tensors:  # all of the step together, and a flag
            yield amax(axis="all", direction="backward", payload=4 * (3 + len(tensors)))
