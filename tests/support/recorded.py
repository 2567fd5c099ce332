"""The generated GPU code of each torch as data: how it is measured and compared. Needs triton, no GPU.

``make record-kernels TORCH=2.11.0`` writes tests/data/kernels-2.11.0.json (tools/record_kernels.py), to which
codegen/test_kernels.py holds that torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fp8graph.offline import KernelRecord
from fp8graph.offline.kernels import CompiledKernel
from fp8graph.recipes import Recipe, resolve_recipe
from fp8graph.recipes.policy import Policy
from generated import (
    MIB,
    MIXTURES,
    decoder_layer,
    generate,
    quantize_after,
    quantize_after_backward,
    quantize_inputs,
    report_of_experts,
    triton_kernels,
)
from kept import kept

TORCH = torch.__version__.partition("+")[0]
FILE = Path(__file__).parents[1] / "data" / f"kernels-{TORCH}.json"

# One tensor of 8192 rows in bf16, quantized: 8192 x 4096 are 64 MiB, an FP8 copy is 32.


class Case(NamedTuple):
    recipe: str
    operand: Any  # "grad_output": quantized both ways, behind a producer in backward
    producer: str
    layouts: str
    columns: int = 4096

    def __str__(self) -> str:
        return " ".join(map(str, self))


LAYOUTS = {"row": (True, False), "column": (False, True), "both": (True, True)}
RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
PRODUCERS = ("rms_norm", "silu_mul", "add", "gelu")
CASES = [
    Case("rowwise", "input", "nothing", "row"),
    Case("rowwise", "input", "nothing", "column"),
    *(Case(recipe, "input", "nothing", "both") for recipe in RECIPES if recipe != "rowwise"),
    Case("blockwise", "weight", "nothing", "row"),
    Case("blockwise", "weight", "nothing", "both"),
    *(Case(r, "input", p, layouts) for p, r, layouts in itertools.product(PRODUCERS, RECIPES, ("row", "both"))),
    *(Case(r, "grad_output", p, "both") for p, r in itertools.product(("swiglu", "norm"), RECIPES)),
    # the norm's loop has 4090 columns, the tiles' 4096: Inductor does not fuse loops of two sizes
    *(Case(recipe, "input", "rms_norm", "row", 4090) for recipe in ("blockwise", "mxfp8")),
]


def of_case(case: Case) -> list[float]:
    """The number of kernels, and the MiB that they move."""
    if case.operand == "grad_output":
        function = quantize_after_backward(case.producer, case.recipe)
    else:
        function = quantize_after(case.producer, case.recipe, case.operand, *LAYOUTS[case.layouts])
    return count(triton_kernels(generate(function, quantize_inputs(8192, case.columns)).kernels))


def count(kernels: Sequence[KernelRecord]) -> list[float]:
    return [len(kernels), round(sum(k.bytes for k in kernels) / MIB, 1)]


# A Llama-3-8B layer with 8192 tokens, all but GEMMs and attention. "weights": its weights are quantized, once per
# kind of weight (q, k and v together; o; gate and up together; down).
MEASURED = ("delayed", "tensorwise", "rowwise", "blockwise")  # their largest kernels are compiled, too: ``COMPILED``
TILED = ("blockwise", "mxfp8")  # their copies are counted (loops along rows read again what they wrote)
QUANTIZING = (*MEASURED, "mxfp8")  # a step is also generated with its weights
_DEFAULT: dict[str, tuple[Recipe | None, str]] = {
    "bf16": (None, "sm_90"),
    **{recipe: (resolve_recipe(recipe), "sm_90") for recipe in MEASURED},
    **{recipe: (resolve_recipe(recipe), "sm_100") for recipe in ("mxfp8", "nvfp4")},
    "tensorwise sm_100": (resolve_recipe("tensorwise"), "sm_100"),
}
# Blackwell's GPUs that are not for data centers.
_CARDS: dict[str, tuple[Recipe | None, str]] = {"mxfp8 sm_120": (resolve_recipe("mxfp8"), "sm_120")}
DEQUANTIZED = "dequantized"  # behind a layer's name: its backward reads what fprop multiplied
# The experts of one layer of a mixture, with 8192 tokens: all but grouped GEMMs.
EXPERTS = "experts"
_EXPERTS: dict[str, tuple[Recipe | None, str]] = {
    f"{name} {EXPERTS} {recipe or 'bf16'}": (resolve_recipe(recipe), target)
    for name, (recipe, target) in itertools.product(
        MIXTURES, ((None, "sm_90"), ("rowwise", "sm_90"), ("mxfp8", "sm_100"), ("nvfp4", "sm_100"))
    )
}
_DEQUANTIZED = {
    f"{layer} {DEQUANTIZED}": (dataclasses.replace(recipe, backward_override=DEQUANTIZED), target)
    for layer, (recipe, target) in _DEFAULT.items()
    if recipe is not None
}
LAYERS = _DEFAULT | _DEQUANTIZED | _CARDS | _EXPERTS
COMPILED = (*MEASURED, *_CARDS, *(f"{name} {EXPERTS} mxfp8" for name in MIXTURES))
DIRECTIONS = ("forward", "backward", "weights")
LARGEST = 10


@kept
def layer_launches(layer: str) -> tuple[KernelRecord, ...]:
    """The kernels of ``LAYERS[layer]``, libraries' too. Half a minute, so all tests share it."""
    recipe, target = LAYERS[layer]
    if EXPERTS in layer:
        policy = Policy(default=recipe, min_speedup=0)
        return tuple(report_of_experts(layer.partition(f" {EXPERTS} ")[0], policy, target).kernels)
    return tuple(decoder_layer(Policy(default=recipe), target))


def layer_kernels(layer: str) -> list[KernelRecord]:
    """The generated ones."""
    return triton_kernels(layer_launches(layer))


def of_layer(layer: str) -> dict[str, list[float]]:
    return {graph: count([k for k in layer_kernels(layer) if k.graph == graph]) for graph in DIRECTIONS}


@kept
def _with_weights(layer: str) -> tuple[KernelRecord, ...]:
    recipe, target = LAYERS[layer]
    return tuple(triton_kernels(decoder_layer(Policy(default=recipe), target, cache_weights=True)))


def weights_in_step(layer: str) -> dict[str, list[float]]:
    """The kernels and MiB that each direction has more where it quantizes its weights: no copies are kept in training.

    Forward makes the rowwise copies, and backward those that it reads.
    """
    made: dict[str, list[float]] = {}
    for direction in DIRECTIONS[:2]:
        kernels, mib = count([kernel for kernel in _with_weights(layer) if kernel.graph == direction])
        without = of_layer(layer)[direction]
        made[direction] = [kernels - without[0], round(mib - without[1], 1)]
    return made


def called_by_layer(layer: str) -> dict[str, int]:
    """The launches of libraries' kernels by name: GEMMs, and anything else that is not generated."""
    names = (k.name.removesuffix(".default") for k in layer_launches(layer) if k.kind != "triton")
    return dict(Counter(name.rpartition(".")[2] for name in names))


_ASSIGNED = re.compile(r"^\s+(tmp\w+) = (.*)$")
_STORED = re.compile(r"tl\.store\(.*, (tmp\w+)(?:\.to\([^)]*\))?, \w+\)$")
_AS_IT_IS = re.compile(r"tl\.(load|where|full|broadcast_to)\(.*|tmp\w+(\.to\(.*\)| (<|>=|&) tmp\w+)?")
_SMALL = 2**16  # bytes: pages of scaling states are copied, too


def copies(kernel: KernelRecord, *, zeros: bool = True) -> bool:
    """Whether a kernel writes a tensor as it was read (in another place or order), or the ``zeros`` of its padding."""
    as_read: set[str] = set()
    for line in kernel.source.splitlines() if kernel.bytes > _SMALL else ():
        if (assigned := _ASSIGNED.match(line)) is not None:
            name, value = assigned.groups()
            used = set() if value.startswith("tl.load(") else {*re.findall(r"\btmp\w+", value)}
            as_read.discard(name)
            if (
                value.startswith("tl.load(")
                or (zeros and not used)
                or (used and used <= as_read and _AS_IT_IS.fullmatch(value))
            ):
                as_read.add(name)
        elif (stored := _STORED.search(line)) is not None and stored[1] in as_read:
            return True
    return False


def copies_of_layer(layer: str) -> dict[str, int]:
    """The number of kernels that copy; zeros begin the scales of experts' groups, and are no copies there."""
    found = [k for k in layer_kernels(layer) if copies(k, zeros=EXPERTS not in layer)]
    return {graph: sum(k.graph == graph for k in found) for graph in DIRECTIONS}


def largest(layer: str) -> list[tuple[dict[str, Any], KernelRecord]]:
    """The kernels of a layer whose launches move most bytes, and what names them: no counter of Inductor's."""
    kernels: dict[tuple[str, str], list[KernelRecord]] = {}
    for kernel in layer_kernels(layer):
        kernels.setdefault((kernel.graph, kernel.source), []).append(kernel)
    found: list[tuple[dict[str, Any], KernelRecord]] = []
    for launches in sorted(kernels.values(), key=lambda launches: -round(launches[0].bytes / MIB))[:LARGEST]:
        kernel = launches[0]
        # "poi": no reduction, "red": in a loop, "per": all at once; "unk": no reduction, with fixed blocks
        _, loop, *_ = kernel.name.split("_")
        ops = " ".join(op.removeprefix("aten.") for op in kernel.ops)
        identity = {"graph": kernel.graph, "loop": loop, "ops": ops, "launches": len(launches)}
        found.append((identity | {"mib": round(kernel.bytes / MIB)}, kernel))
    return found


def costs(compiled: CompiledKernel) -> dict[str, Any]:
    """See :class:`CompiledKernel`; ``store`` and ``load`` are the bytes of the narrowest one."""
    return {
        "configuration": compiled.configuration,
        "registers": compiled.registers,
        "spills": compiled.spills,
        "instructions": compiled.instructions,
        "fp8_store": compiled.fp8_store,
        "store": min(compiled.stores, default=None),  # atomic ones are no stores
        "load": min(compiled.loads, default=None),
    }


def is_worse(then: dict[str, Any], now: dict[str, Any]) -> bool:
    """Another kernel, no such configuration, or a higher cost."""
    return (
        any(now.get(name) != then[name] for name in ("graph", "loop", "ops", "launches", "mib", "configuration"))
        or any(now[name] > then[name] for name in ("registers", "spills", "instructions"))
        or any((now[name] or 0) < (then[name] or 0) for name in ("fp8_store", "store"))
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of equal keys, one line each."""
    names = list(rows[0])
    lines = [names, *(["-" if row[name] is None else str(row[name]) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
