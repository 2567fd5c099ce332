"""Many GPUs: how a model is distributed over them, and the network between them.

Sources: NVIDIA's H100 data sheet and DGX B200 user guide (NVLink 4 and 5: 450 and 900 GB/s per direction; one port of
400 Gb/s per GPU between nodes); NCCL's src/graph/tuning.cc (rings and trees; 3.4 us per hop over NVLink, 14 us over the
network). That collectives reach 80 % of NVLink and 90 % of the network is an assumption: nccl-tests measures it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fp8graph.errors import ConfigError
from fp8graph.hardware.speed import Speed
from fp8graph.ir.collectives import bytes_sent

MOST_GPUS: Final = 16_384


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How many GPUs along each axis; those of ``tp`` are neighbours, then those of ``fsdp``, then those of ``dp``.

    Raises:
        ConfigError: (a ``ValueError``) for sizes that are no whole numbers > 0, ``sp`` without ``tp``, or more than
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
        """The mesh that ``dp=4,fsdp=8,tp=8,sp`` describes: axes in any order; ``sp`` alone is ``sp=1``."""
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
        """The groups along ``axis`` (one of the axes, or "all"): their ranks, and the distance between neighbours."""
        strides = {"tp": 1, "fsdp": self.tp, "dp": self.tp * self.fsdp}
        return (self.gpus, 1) if axis == "all" else (getattr(self, axis), strides[axis])

    def __str__(self) -> str:
        return f"dp={self.dp},fsdp={self.fsdp},tp={self.tp}" + ",sp" * self.sp


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
    def of_target(target: str) -> Network:
        """The network of an "sm_XX", or the one under "network" in a calibration file (``Speed.load``)."""
        name, values = target, None
        if target.endswith(".json"):
            name, _ = Speed.load(target)
            values = json.loads(Path(target).read_text(encoding="utf-8")).get("network")
        try:
            return Network(**values) if values is not None else _NETWORKS[name.removesuffix("a")]
        except TypeError as error:
            raise ConfigError(f"{target}: network: {error}") from None
        except KeyError:
            known = f"no network is known for {name} (known: {', '.join(_NETWORKS)})"
            raise ConfigError(f'{known}. Use a calibration file with a "network" as target.') from None

    def seconds(self, kind: str, payload: int, ranks: int, stride: int) -> float:
        """The time of one collective: in a ring, or for an all_reduce in a tree if that has less latency."""
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


_NETWORKS: Final = {
    "sm_90": _network("8 x NVLink 4, 400 Gb/s", 450),  # H100, H200
    "sm_100": _network("8 x NVLink 5, 400 Gb/s", 900),  # B200
}
