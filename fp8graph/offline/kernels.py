"""One kernel launch of generated code, and the cost of its compiled kernel: registers, instructions, loads and stores.

The cost is read from the cubin with the tools that come with triton (cuobjdump), and from the cubin's PTX. No GPU is
needed.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from fp8graph.compat import inductor
from fp8graph.errors import Fp8GraphError
from fp8graph.offline.fake_gpu import fake_gpu

Direction = Literal["forward", "backward", "weights"]
# an instruction, with its predicate if it has one; the hexadecimal encoding follows in a second comment
_INSTRUCTION: Final = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """One kernel in one configuration of its tile, compiled for one target."""

    configuration: str  #: like "XBLOCK=1 R0_BLOCK=2048 num_warps=8 num_stages=1"
    registers: int  #: per thread
    spills: int  #: bytes of stack per thread, which is where ptxas spills registers to
    shared: int  #: bytes per block
    #: Counted in the code of one thread: the body of a loop counts once, padding does not count, and the slow paths
    #: of divisions count, though few threads take them.
    instructions: int
    loads: dict[int, int]  #: bytes that one instruction loads from global memory -> how many such instructions
    stores: dict[int, int]  #: the same of stores
    fp8_store: int | None  #: bytes of the narrowest store to FP8 data; None if the kernel writes none
    ptx: str  #: its source in PTX


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
    def compiled(self) -> CompiledKernel | None:
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
        costs = ("registers", "spills", "shared", "instructions", "loads", "stores", "fp8_store")
        names = [f.name for f in dataclasses.fields(self) if f.name not in ("source", "target")]
        values = {name: list(x) if isinstance(x := getattr(self, name), tuple) else x for name in names}
        return values | {cost: getattr(self.compiled, cost, None) for cost in costs}


@functools.cache
def _first(source: str, target: str) -> CompiledKernel:
    return compile_kernel(source, target, configuration="first")[0]


def compile_kernel(source: str, target: str, *, configuration: str = "all") -> list[CompiledKernel]:
    """Compile a generated kernel for ``target``.

    Args:
        source: the module that Inductor generated.
        target: a GPU like "sm_90".
        configuration: "all" that Inductor's autotuner would try on the GPU, the "first" of them, or one of them,
            as :attr:`Compiled.configuration` names it.

    Returns:
        In the order of the autotuner; nothing if it does not try that configuration.
    """
    tuner = precompile(source, target, configuration=configuration)
    signature = [kind for kind in tuner.triton_meta["signature"].values() if kind != "constexpr"]
    return [
        _read(
            result.kernel.asm["cubin"],
            result.kernel.asm["ptx"],
            signature,
            shared=int(result.kernel.metadata.shared),
            configuration=text_of(result.config),
        )
        for result in tuner.compile_results
    ]


def precompile(source: str, target: str, *, configuration: str = "all") -> Any:
    """Compile a kernel as :func:`compile_kernel` does, without reading its code.

    Returns:
        Inductor's tuner of it, with a result in ``compile_results`` for each configuration.
    """
    with fake_gpu(target), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.py"
        path.write_text(source, encoding="utf-8")
        # functions that it calls stand before or after it
        (name,) = re.findall(r"^@triton_heuristics.*?^def (\w+)\(", source, re.MULTILINE | re.DOTALL)
        namespace: dict[str, Any] = {"__file__": str(path), "__name__": f"fp8graph_offline_{name}"}
        exec(compile(source, str(path), "exec"), namespace)
        tuner = namespace[name]
        if configuration == "first":
            tuner.configs = tuner.configs[:1]
        elif configuration != "all":
            tuner.configs = [c for c in tuner.configs if text_of(c) == configuration]
        if tuner.configs:
            with inductor.with_options({"use_static_cuda_launcher": False}):  # keep triton's object: it has the code
                tuner.precompile(warm_cache_only=True)
        return tuner


def text_of(configuration: Any) -> str:
    """Return a ``triton.Config`` in one line."""
    values = {
        **configuration.kwargs,
        "num_warps": configuration.num_warps,
        "num_stages": configuration.num_stages,
    }
    return " ".join(f"{name}={value}" for name, value in values.items())


def _read(cubin: bytes, ptx: str, signature: Sequence[str], *, shared: int, configuration: str) -> CompiledKernel:
    """Disassemble ``cubin``.

    Args:
        cubin: the code of one kernel.
        ptx: the text that ptxas compiled to it.
        signature: Triton's types of the parameters that the kernel has at run time, like "*fp8e4nv" and "i32".
        shared: bytes of shared memory per block, which depend on the launch.
        configuration: for the record.

    Raises:
        Fp8GraphError: the disassembler's text is not understood.
    """
    resources, code = _dump(cubin, "--dump-resource-usage"), _dump(cubin, "--dump-sass")
    usage = re.search(r"REG:(\d+) STACK:(\d+)", resources)
    instructions = [name for name in _INSTRUCTION.findall(code) if name != "NOP"]
    if usage is None or not instructions:
        raise Fp8GraphError(f"cuobjdump does not list the resources of a kernel: {resources}{code[:500]}")
    return CompiledKernel(
        configuration=configuration,
        registers=int(usage[1]),
        spills=int(usage[2]),
        shared=shared,
        instructions=len(instructions),
        loads=_widths(instructions, ("LDG", "LDGSTS")),
        stores=_widths(instructions, ("STG",)),
        fp8_store=min(_stores_to(ptx, [kind.startswith("*fp8") for kind in signature]), default=None),
        ptx=ptx,
    )


def _dump(cubin: bytes, option: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def _widths(instructions: Sequence[str], names: Sequence[str]) -> dict[int, int]:
    """``STG.E.EF.64`` moves 64 bits, ``STG.E.U8`` 8, and ``STG.E`` 32."""
    counted: Counter[int] = Counter()
    for instruction in instructions:
        name, *modifiers = instruction.split(".")
        if name in names:
            bits = [int(m[1]) for modifier in modifiers if (m := re.fullmatch(r"[US]?(\d+)", modifier))]
            counted[(bits[0] if bits else 32) // 8] += 1
    return dict(sorted(counted.items()))


# a register and the values that it is computed from: parameters and other registers, none read from memory
_COMPUTED: Final = re.compile(
    r"^\s*(?:@!?%\w+ )?(?:ld\.param|(?!ld|st|atom|red)[a-z])[\w.:]*\s+(%rd?\d+), (.*);", re.MULTILINE
)
_STORE: Final = re.compile(r"\bst\.global(?:\.[A-Za-z_]+\w*(?:::\w+)*)*?(?:\.v(\d))?\.[bfsu](\d+)\s+\[\s*(%rd\d+)")


def _stores_to(ptx: str, wanted: Sequence[bool]) -> list[int]:
    """Return the bytes of each store through one of the ``wanted`` parameters.

    SASS does not say which tensor a store belongs to; in PTX its address is a sum in which one term is a parameter, or
    one of several that a block of threads selects. ptxas keeps the width of each store.
    """
    sources: defaultdict[str, set[str]] = defaultdict(set)
    for register, operands in _COMPUTED.findall(ptx):
        sources[register] |= set(re.findall(r"%rd?\d+|_param_\d+", operands))
    sizes: list[int] = []
    for vector, bits, address in _STORE.findall(ptx):
        seen, todo = {address}, [address]
        while todo:
            new = sources[todo.pop()] - seen
            seen |= new
            todo += new
        if any(f"_param_{index}" in seen for index, is_wanted in enumerate(wanted) if is_wanted):
            sizes.append(int(vector or 1) * int(bits) // 8)
    return sizes
