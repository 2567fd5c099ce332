"""One kernel launch of generated code, and its compiled kernel."""

from __future__ import annotations

import functools
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fp8graph.compat import inductor
from fp8graph.offline import cubin
from fp8graph.offline.cubin import Compiled
from fp8graph.offline.pretend import pretend

Direction = Literal["forward", "backward", "weights"]


@dataclass(frozen=True, kw_only=True)
class KernelRecord:
    """One kernel launch of a generated graph, in the order of the launches. Nothing is run, and no GPU is needed."""

    name: str  #: as generated; of a library call, the op
    graph: Direction  #: "weights": runs once per update of the weights
    kind: str  #: "triton": generated; "extern": a GEMM or another library call
    ops: tuple[str, ...]  #: the ATen ops that it fuses
    bytes: int  #: read and written, as Inductor counts buffers; 0 for library calls
    number: int | None = None  #: of its graph in report.graphs; None: it is in none, as a kernel of weights
    nodes: tuple[str, ...] = ()  #: of that graph after all passes: those that it computes, or a part of them
    reads: tuple[str, ...] = ()  #: inputs of its graph that it reads: in backward, what forward saved
    writes: tuple[str, ...] = ()  #: those of ``nodes`` that it writes to memory
    source: str = ""  #: the generated module of a Triton kernel
    target: str = ""  #: the GPU, like "sm_90"

    @property
    def compiled(self) -> Compiled | None:
        """The kernel compiled in the first configuration that Inductor would try; None for a library call."""
        return _first(self.source, self.target) if self.source else None

    @property
    def registers(self) -> int | None:
        """Registers per thread of the first configuration; None for a library call."""
        return self.compiled.registers if self.compiled else None

    @property
    def spills(self) -> int | None:
        """Bytes of stack per thread, which is where ptxas spills registers to; None for a library call."""
        return self.compiled.spills if self.compiled else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, those of :attr:`compiled` included: this compiles the kernel."""
        compiled = self.compiled
        costs = ("registers", "spills", "shared", "instructions", "loads", "stores", "fp8_store")
        return {
            "name": self.name,
            "graph": self.graph,
            "kind": self.kind,
            "ops": list(self.ops),
            "bytes": self.bytes,
            "number": self.number,
            "nodes": list(self.nodes),
            "reads": list(self.reads),
            "writes": list(self.writes),
            **{cost: getattr(compiled, cost, None) for cost in costs},
        }


@functools.cache
def _first(source: str, target: str) -> Compiled:
    return compile_kernel(source, target, configuration="first")[0]


def compile_kernel(source: str, target: str, *, configuration: str = "all") -> list[Compiled]:
    """Compile a generated kernel for ``target``.

    Args:
        source: the module that Inductor generated.
        target: a GPU like "sm_90".
        configuration: "all" that Inductor's autotuner would try on the GPU, the "first" of them, or one of them,
            as :attr:`Compiled.configuration` names it.

    Returns:
        In the order of the autotuner; nothing if it does not try that configuration.
    """
    with pretend(target), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.py"
        path.write_text(source, encoding="utf-8")
        (name,) = re.findall(r"^def (triton_\w+)\(", source, re.MULTILINE)[:1]
        namespace: dict[str, Any] = {"__file__": str(path), "__name__": f"fp8graph_offline_{name}"}
        exec(compile(source, str(path), "exec"), namespace)
        tuner = namespace[name]
        if configuration == "first":
            tuner.configs = tuner.configs[:1]
        elif configuration != "all":
            tuner.configs = [c for c in tuner.configs if cubin.text_of(c) == configuration]
        if not tuner.configs:
            return []
        with inductor.with_options({"use_static_cuda_launcher": False}):  # keep triton's object: it has the code
            tuner.precompile(warm_cache_only=True)
        signature = [kind for kind in tuner.triton_meta["signature"].values() if kind != "constexpr"]
        return [
            cubin.read(
                result.kernel.asm["cubin"],
                result.kernel.asm["ptx"],
                signature,
                shared=int(result.kernel.metadata.shared),
                configuration=cubin.text_of(result.config),
            )
            for result in tuner.compile_results
        ]
