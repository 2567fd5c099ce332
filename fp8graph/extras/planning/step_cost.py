"""The cost of a training step on many GPUs: its time and the bytes that each GPU sends, per recipe.

    step = GEMMs + attention + what moves memory + the optimizer + communication that nothing hides

GEMMs, including the quantization of their operands, take ``roofline.gemm_seconds`` on the sizes that a rank has, in FP8
if the policy allows it and it pays (``passes/assign/profit.py``), as in the compiler. Collectives
(``workload.py``) take the time that ``Network`` gives. ``Plan.assumptions`` has the rest; docs/scale.md compares
results with published ones.

Sources: ``speed.py`` for each GPU; NVIDIA's H100 data sheet and DGX B200 user guide (NVLink 4 and 5: 450 and 900 GB/s
per direction; one port of 400 Gb/s per GPU between nodes); NCCL's src/graph/tuning.cc (rings and trees; 3.4 us per hop
over NVLink, 14 us over the network). That collectives reach 80 % of NVLink and 90 % of the network is an assumption:
nccl-tests measures it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fp8graph.errors import ConfigError
from fp8graph.extras.planning.workload import Collective, Linear, Mesh, Workload, collectives, fsdp_units
from fp8graph.hardware import Hardware
from fp8graph.hardware.speed import ATTENTION_SHARE, MOVED, Speed, gemm_seconds
from fp8graph.ir.collectives import bytes_sent
from fp8graph.passes.assign.profit import Choice, Fp8Gemm, Quantized, Uses, judge
from fp8graph.recipes import GEMMS, GemmName, Layout, Recipe, RecipeLike, resolve_recipe
from fp8graph.report.tables import aligned

RECIPES: Final = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
_HEADER: Final = ("recipe", "step ms", "speedup", "tokens/s/GPU", "GEMMs ms", "others ms", "exposed ms")


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network between GPUs. Bandwidths are those that collectives reach, in bytes per second and direction.

    Raises:
        ConfigError: (a ``ValueError``) for a value that is negative, not finite, or an ``overlap`` above 1.
    """

    name: str  #: for the assumptions of a plan
    gpus_per_node: int = 8  #: neighbours, which the faster links connect
    node_bandwidth: float  #: of a GPU within its node, in bytes per second
    network_bandwidth: float  #: of a GPU between nodes, in bytes per second
    node_latency: float = 3.4e-6  #: seconds of one hop
    network_latency: float = 14e-6  #: seconds of one hop between nodes
    overlap: float = 0.9  #: the share of compute behind which data-parallel communication can hide

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self)[1:]:
            value = getattr(self, f.name)
            number = type(value) is int or (type(value) is float and f.name != "gpus_per_node")
            least = 0 if f.name in ("overlap", "node_latency", "network_latency") else 1
            if not number or not least <= value < math.inf or (f.name == "overlap" and value > 1):
                raise ConfigError(f"Network({f.name}={value!r}): must be a number >= {least}, overlap at most 1.")

    @staticmethod
    def of_target(target: str, gpus: int = 2) -> Network:
        """Return the network of an "sm_XX", or the one under "network" in a calibration file (``Speed.load``).

        One of ``gpus`` sends nothing: where no network is known, it gets one of a single GPU.
        """
        name, values = target, None
        if target.endswith(".json"):
            name, _ = Speed.load(target)
            values = json.loads(Path(target).read_text(encoding="utf-8")).get("network")
        try:
            return Network(**values) if values is not None else _NETWORKS[name.removesuffix("a")]
        except TypeError as error:
            raise ConfigError(f"{target}: network: {error}") from None
        except KeyError:
            if gpus == 1:
                return _ALONE
            raise ConfigError(
                f"no network is known for {name} (known: {', '.join(_NETWORKS)}). One GPU needs none (--mesh dp=1); "
                'for several use a calibration file with a "network" as target: docs/scale.md has one.'
            ) from None

    def seconds(self, kind: str, payload: int, ranks: int, stride: int) -> float:
        """Return the time of one collective: in a ring, or for an all_reduce in a tree if that has less latency."""
        if ranks == 1:
            return 0.0
        together = min(ranks, max(1, self.gpus_per_node // stride))  # how many GPUs of the group are in one node
        nodes = -(-ranks // together)
        bandwidth = self.node_bandwidth if nodes == 1 else min(self.node_bandwidth, together * self.network_bandwidth)
        latency = (ranks - nodes) * self.node_latency + (nodes - 1) * self.network_latency
        if kind == "all_reduce":
            tree = (together - 1) * self.node_latency + math.ceil(math.log2(nodes)) * self.network_latency
            latency = 2 * min(latency, tree)
        return bytes_sent(kind, payload, ranks) / bandwidth + latency


def _network(name: str, nvlink: float) -> Network:
    """Eight GPUs per node, 400 Gb/s per GPU: collectives reach 80 % of NVLink and 90 % of the network."""
    return Network(name=name, node_bandwidth=0.8e9 * nvlink, network_bandwidth=0.9 * 50e9)


_ALONE: Final = Network(name="one GPU", gpus_per_node=1, node_bandwidth=1, network_bandwidth=1)
_NETWORKS: Final = {
    "sm_90": _network("8 x NVLink 4, 400 Gb/s", 450),  # H100, H200
    "sm_100": _network("8 x NVLink 5, 400 Gb/s", 900),  # B200
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """The step of one recipe: its seconds, and its collectives."""

    recipe: str  #: its name; the first step of a plan is in high precision: "bf16", "fp16" or "fp32"
    gemms: float  #: seconds, with the quantization of their operands
    others: float  #: seconds of attention, memory traffic, the optimizer
    exposed: float  #: seconds of communication that nothing hides
    communication: float  #: seconds of all of it
    collectives: Mapping[Collective, int]  #: how many of each

    @property
    def seconds(self) -> float:
        """The predicted time of the step."""
        return self.gemms + self.others + self.exposed


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The predicted training step on ``mesh``: in high precision first, then under each recipe."""

    mesh: Mesh  #: the GPUs, as given
    speed: Speed  #: the rates of one GPU
    network: Network  #: between the GPUs, as given
    tokens: int  #: of one replica
    steps: tuple[Step, ...]  #: high precision first, then one per recipe
    state_bytes: int  #: parameters, gradients and moments of AdamW on one GPU
    copy_bytes: int  #: FP8 copies of weights on one GPU; FSDP2's gathered weights have none

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions behind the numbers."""
        net, speed = self.network, self.speed
        collectives = (
            f"collectives reach {net.node_bandwidth / 1e9:.0f} GB/s per GPU within nodes of {net.gpus_per_node} and "
            f"{net.network_bandwidth / 1e9:.0f} GB/s between them, in rings or, for all_reduce, trees; a hop takes "
            f"{net.node_latency * 1e6:.1f} and {net.network_latency * 1e6:.1f} us, even for a few bytes."
        )
        return (
            f"{speed.name}: GEMMs reach {speed.bf16_flops / 1e12:.0f} TFLOP/s in bf16 and {speed.fp8_flops / 1e12:.0f} "
            f"in FP8, memory {speed.bandwidth / 1e12:.2f} TB/s; attention is causal, in bf16, at half the bf16 rate.",
            f"{net.name}: {'nothing is sent.' if net is _ALONE else collectives}",
            "A step has one micro-batch; nothing is recomputed; there is no pipeline or context parallelism; all ranks "
            "are equally fast.",
            f"Besides GEMMs and attention, {MOVED:.2f} times as many values move through memory as go into and out of "
            "linears, a third of them in forward, under every recipe; AdamW moves its state once.",
            f"Communication over dp and fsdp hides behind up to {net.overlap:.0%} of the compute of its direction and "
            "does not slow it; communication over tp, and of amaxes, is exposed.",
            "DDP reduces gradients in their dtype, 25 MiB at a time. FSDP2 gathers each layer twice and the rest once: "
            "without tp, weights as bytes in FP8 where no shard cuts a tile (under rowwise and mxfp8 one layout per "
            "gather, so that the rest's are not among them), all else in the parameters' dtype. Delayed scaling "
            "reduces all amaxes of a step at once, over all GPUs.",
            "Linears of one module that read one tensor share its collectives and are multiplied as one; logits stay "
            "sharded over tp (the loss is computed on the shards).",
            "With sp, tensors gathered for GEMMs in FP8 are sent in FP8 if they have one scale (tensorwise, delayed).",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, ready for JSON: seconds, and bytes per GPU and step."""
        own = ("tokens", "state_bytes", "copy_bytes", "assumptions")
        parts = ("recipe", "seconds", "gemms", "others", "exposed", "communication")
        steps: list[dict[str, Any]] = []
        for step in self.steps:
            rows = [dataclasses.asdict(c) | {"count": count} for c, count in step.collectives.items()]
            values = {name: getattr(step, name) for name in parts}
            steps.append({**values, "sent": self.sent(step), "collectives": rows})
        return {
            "mesh": dataclasses.asdict(self.mesh) | {"gpus": self.mesh.gpus},
            "speed": self.speed.name,
            "network": dataclasses.asdict(self.network),
            "steps": steps,
            **{name: getattr(self, name) for name in own},
        }

    def sent(self, step: Step) -> dict[str, int]:
        """Return the bytes that each GPU sends, by purpose, collective, axis and dtype."""
        sent: dict[str, int] = {}
        for c, count in step.collectives.items():
            key = f"{c.purpose}: {c.kind} over {c.axis}, {c.dtype}"
            sent[key] = sent.get(key, 0) + count * bytes_sent(c.kind, c.payload, self.mesh.group(c.axis)[0])
        return sent

    def __str__(self) -> str:
        first, tokens = self.steps[0], self.mesh.dp * self.mesh.fsdp * self.tokens
        times: list[tuple[str, ...]] = [_HEADER]
        for step in self.steps:
            total, *parts = (f"{1e3 * part:,.1f}" for part in (step.seconds, step.gemms, step.others, step.exposed))
            rate = f"{self.tokens / step.seconds / self.mesh.tp:,.0f}"
            times.append((step.recipe, total, f"{first.seconds / step.seconds:.2f}", rate, *parts))
        sent = [self.sent(step) for step in self.steps]
        rows = [("sent by each GPU, MB per step", *(step.recipe for step in self.steps))]
        for key in dict.fromkeys(key for amounts in sent for key in amounts):
            rows.append((key, *(f"{amounts[key] / 1e6:,.3f}" if key in amounts else "-" for amounts in sent)))
        rows.append(("all", *(f"{sum(amounts.values()) / 1e6:,.3f}" for amounts in sent)))
        lines = [
            f"{self.mesh}: {self.mesh.gpus:,} GPUs, {tokens:,} tokens per step, {self.tokens:,} per replica",
            "",
            *aligned(times, ruled=True),
            "",
            *aligned(rows, ruled=True),
            "",
            f"On each GPU: {self.state_bytes / 1e9:,.1f} GB of parameters, gradients and AdamW's moments (FP32), "
            f"{self.copy_bytes / 1e9:,.1f} GB of FP8 weights; activations are not included.",
        ]
        return "\n".join([*lines, "", "Assumptions:", *(f"* {text}" for text in self.assumptions)])


def decide(
    work: Workload, mesh: Mesh, speed: Speed, recipe: Recipe | None
) -> tuple[dict[str, set[str]], dict[str, float]]:
    """Return the GEMMs that run in FP8, by linear; and the seconds of all GEMMs and quantizations, by direction."""
    fp8, seconds = {linear.fqn: set[str]() for linear in work.linears}, {"forward": 0.0, "backward": 0.0}
    families: dict[Any, list[Linear]] = {}
    for linear in work.linears:
        families.setdefault((work.reads(linear), linear.fp8), []).append(linear)
    for family in families.values():
        # the compiler quantizes weights once per update and leaves that out; a step has one update. What FSDP2
        # gathers it quantizes in forward and in backward
        judged = list(_choices(work, mesh, speed, recipe, family, kept=mesh.fsdp == 1))
        paid = list(_choices(work, mesh, speed, recipe, family, kept=False))
        speedups = judge(judged, work.min_speedup)
        pairs = zip(judged, paid, strict=True)
        chosen = {cost.gemms[0]: cost for choice, cost in pairs if speedups[choice] >= work.min_speedup}
        uses = Uses(list(chosen.values()))
        for linear in family:
            fp8[linear.fqn].update(chosen)
        parts = [work.local(linear, mesh) for linear in family]
        for gemm in GEMMS:
            high = sum(gemm_seconds(speed, *_sizes(gemm, x.m, x.n, x.k), work.dtype) for x in parts)
            took = chosen[gemm].fp8_seconds(uses) if gemm in chosen else high
            seconds["forward" if gemm == "fprop" else "backward"] += took
    return fp8, seconds


def _choices(
    work: Workload, mesh: Mesh, speed: Speed, recipe: Recipe | None, family: Sequence[Linear], *, kept: bool
) -> Iterator[Choice]:
    """Yield the GEMMs of linears that read one tensor, which are multiplied as one."""
    parts = [work.local(linear, mesh) for linear in family]
    m, n, k = parts[0].m, sum(part.n for part in parts), parts[0].k
    x = Quantized(key="input", elements=m * k)
    dy = Quantized(key="grad_output", elements=m * n)
    w, again = (Quantized(key=key, elements=n * k, fused=False, kept=kept) for key in ("weight", "weight again"))
    read: dict[GemmName, tuple[tuple[Quantized, Layout], tuple[Quantized, Layout]]] = {
        "fprop": ((x, "rowwise"), (w, "rowwise")),
        "dgrad": ((dy, "rowwise"), (w if mesh.fsdp == 1 else again, "columnwise")),
        "wgrad": ((dy, "columnwise"), (x, "columnwise")),
    }
    for gemm in GEMMS:
        if recipe is not None and recipe.covers(gemm) and gemm in family[0].fp8:
            rows, columns, depth = _sizes(gemm, m, n, k)
            yield Choice(
                gemms=(gemm,),
                before=tuple(_sizes(gemm, part.m, part.n, part.k) for part in parts),
                products=(Fp8Gemm(m=rows, n=columns, k=depth, reads=read[gemm]),),
                dtype=work.dtype,
                scaling=recipe.quantizer("input").scaling,
                speed=speed,
            )


def _sizes(gemm: GemmName, m: int, n: int, k: int) -> tuple[int, int, int]:
    """m, n and k of one GEMM of the linear [m, k] -> [m, n]."""
    return {"fprop": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[gemm]


def _step(
    work: Workload, mesh: Mesh, speed: Speed, network: Network, name: str, recipe: Recipe | None
) -> tuple[Step, dict[str, set[str]]]:
    fp8, gemms = decide(work, mesh, speed, recipe)
    others, optimizer = _others(work, mesh, speed)
    sent = collectives(work, mesh, recipe, fp8)
    exposed = communication = 0.0
    for direction, compute in others.items():
        hidden = 0.0
        for collective, count in sent.items():
            if collective.direction == direction:
                ranks, stride = mesh.group(collective.axis)
                seconds = count * network.seconds(collective.kind, collective.payload, ranks, stride)
                communication += seconds
                exposed += seconds
                hidden += seconds if collective.overlaps else 0.0
        exposed -= min(hidden, network.overlap * (gemms[direction] + compute))
    total, other = sum(gemms.values()), sum(others.values()) + optimizer
    parts: dict[str, Any] = {"exposed": exposed, "communication": communication, "collectives": sent}
    return Step(recipe=name, gemms=total, others=other, **parts), fp8


def _others(work: Workload, mesh: Mesh, speed: Speed) -> tuple[dict[str, float], float]:
    """Return the seconds of attention and memory traffic, by direction; and the seconds of the optimizer."""
    rows = mesh.tp if mesh.sp else 1
    numbers = 0.0
    for linear in work.linears:
        style = work.style(linear.fqn)
        inputs = linear.k / (mesh.tp if style == "rowwise" else rows)
        outputs = linear.n / (mesh.tp if style == "colwise" else rows)
        numbers += linear.m * (inputs + outputs)
    moved = MOVED * numbers * work.dtype.itemsize / speed.bandwidth
    attention = work.attention_flops / mesh.tp / (ATTENTION_SHARE * speed.bf16_flops)
    # reads and writes the parameter and two moments in FP32, reads the gradient
    elements = sum(fsdp_units(work, mesh).values()) // mesh.fsdp
    optimizer = elements * (3 * work.dtype.itemsize + 16) / speed.bandwidth
    return {"forward": moved / 3 + attention * 2 / 7, "backward": moved * 2 / 3 + attention * 5 / 7}, optimizer


def plan(
    work: Workload, mesh: Mesh, *, hardware: Hardware, network: Network, recipes: Sequence[RecipeLike] | None = None
) -> Plan:
    """Predict the step of ``work`` on ``mesh`` in high precision and under each of ``recipes``.

    Args:
        work: from ``workload.of_model``, or one of your own.
        mesh, hardware, network: the GPUs that it runs on.
        recipes: by default those of ``RECIPES`` that the hardware multiplies.

    Raises:
        ConfigError: (a ``ValueError``) for hardware of unknown speed, a recipe that it does not multiply, and a mesh
            that does not divide ``work``.
    """
    if (speed := hardware.speed) is None:
        raise ConfigError(f"mesh: the speed of {hardware.name!r} is not known. Name a GPU, for example target='sm_90'.")
    work.check(mesh)
    high = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(str(work.dtype), "fp32")
    step, _ = _step(work, mesh, speed, network, high, None)
    steps, quantized = [step], set[str]()
    for recipe in filter(None, map(resolve_recipe, RECIPES if recipes is None else recipes)):
        if hardware.multiplies(recipe.quantizer("input").scaling):
            step, fp8 = _step(work, mesh, speed, network, recipe.name, recipe)
            steps.append(step)
            quantized |= {name for name, gemms in fp8.items() if gemms & {"fprop", "dgrad"}}
        elif recipes is not None:
            raise ConfigError(
                f"recipe: {hardware.name} emulates {recipe.name}, so there is no speed to predict. Is the target right?"
            )
    weights = [name for name in work.parameters if name.removesuffix(".weight") in quantized]
    return Plan(
        mesh=mesh,
        speed=speed,
        network=network,
        tokens=work.tokens,
        steps=tuple(steps),
        state_bytes=sum(fsdp_units(work, mesh).values()) // mesh.fsdp * (2 * work.dtype.itemsize + 8),
        copy_bytes=2 * sum(math.prod(work.shape(name, mesh.tp)) for name in weights) if mesh.fsdp == 1 else 0,
    )
