"""The cost of a compiled Triton kernel: its registers, instructions, and the width of its loads and stores.

It is read from the cubin with the tools that come with triton (cuobjdump), and from the cubin's PTX. No GPU is needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fp8graph.errors import Fp8GraphError


@dataclass(frozen=True, kw_only=True)
class Compiled:
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


# an instruction, with its predicate if it has one; the hexadecimal encoding follows in a second comment
_INSTRUCTION: Final = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)", re.MULTILINE)
_GLOBAL_LOADS: Final = ("LDG", "LDGSTS")
_GLOBAL_STORES: Final = ("STG",)


def read(cubin: bytes, ptx: str, signature: Sequence[str], *, shared: int, configuration: str) -> Compiled:
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
    return Compiled(
        configuration=configuration,
        registers=int(usage[1]),
        spills=int(usage[2]),
        shared=shared,
        instructions=len(instructions),
        loads=_widths(instructions, _GLOBAL_LOADS),
        stores=_widths(instructions, _GLOBAL_STORES),
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
    """The bytes of each store through one of the ``wanted`` parameters.

    SASS does not say which tensor a store belongs to; in PTX its address is a sum in which one term is a parameter, or
    one of several that a block of threads selects. ptxas keeps the width of each store.
    """
    sources: defaultdict[str, set[str]] = defaultdict(set)
    for register, operands in _COMPUTED.findall(ptx):
        sources[register] |= set(re.findall(r"%rd?\d+|_param_\d+", operands))
    found: list[int] = []
    for vector, bits, address in _STORE.findall(ptx):
        seen, todo = {address}, [address]
        while todo:
            new = sources[todo.pop()] - seen
            seen |= new
            todo += new
        if any(f"_param_{index}" in seen for index, is_wanted in enumerate(wanted) if is_wanted):
            found.append(int(vector or 1) * int(bits) // 8)
    return found


def text_of(configuration: Any) -> str:
    """A ``triton.Config`` in one line."""
    values = {
        **configuration.kwargs,
        "num_warps": configuration.num_warps,
        "num_stages": configuration.num_stages,
    }
    return " ".join(f"{name}={value}" for name, value in values.items())
