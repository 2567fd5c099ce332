"""Record the GPU code that the installed torch generates, for codegen/test_kernels.py. Needs triton, no GPU.

make record-kernels TORCH=2.11.0  # writes tests/data/kernels-2.11.0.json, in a venv of that torch
make record-kernels TORCH=2.11.0 LAYERS=dequantized  # of it, only the layers that have this in their names
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import recorded
from fp8graph import offline
from fp8graph.offline.kernels import CompiledKernel
from recorded import DIRECTIONS, EXPERTS, FILE, TORCH


def best(configurations: Sequence[CompiledKernel]) -> CompiledKernel:
    """No spills, then the widest stores to FP8 data, then the fewest instructions per element.

    Which one the autotuner takes only a GPU can say. Kernels of one loop differ in their tiles only, so that what all
    configurations have in common (a reduction in one piece) may be left out of the number of elements.
    """

    def cost(compiled: CompiledKernel) -> tuple[float, ...]:
        values = {name: int(value) for name, value in (word.split("=") for word in compiled.configuration.split())}
        elements = math.prod(value for name, value in values.items() if "BLOCK" in name) / values["num_warps"]
        return compiled.spills, -(compiled.fp8_store or 0), compiled.instructions / elements

    return min(configurations, key=cost)


def _record(part: str) -> dict[str, Any]:
    """All, or only the layers with ``part`` in their names."""
    layers: dict[str, Any] = {}
    for layer in recorded.LAYERS:
        if part not in layer:
            continue
        print(f"{layer}...", flush=True)  # minutes each
        layers[layer] = recorded.of_layer(layer)
        if layer.partition(" ")[0] in recorded.TILED or EXPERTS in layer:
            layers[layer]["copies"] = recorded.copies_of_layer(layer)
        if layer in recorded.QUANTIZING:
            layers[layer]["weights_in_step"] = recorded.weights_in_step(layer)
        if EXPERTS in layer:
            layers[layer]["called"] = recorded.called_by_layer(layer)
        if layer in recorded.COMPILED:
            layers[layer]["largest"] = [
                identity | recorded.costs(best(offline.compile_kernel(kernel.source, kernel.target)))
                for identity, kernel in recorded.largest(layer)
            ]
    cases: dict[str, list[float]] = {}
    if part:
        known = json.loads(FILE.read_text(encoding="utf-8"))
        return known | {"layers": {layer: (known["layers"] | layers)[layer] for layer in recorded.LAYERS}}
    for case in recorded.CASES:
        torch._dynamo.reset()
        cases[str(case)] = recorded.of_case(case)
    return {"torch": TORCH, "triton": importlib.metadata.version("triton"), "layers": layers, "tensors": cases}


def _text(value: Any, indent: str = "") -> Iterator[str]:
    """JSON with a kernel or a count in each line."""
    line = json.dumps(value)
    if len(line) < 400 or not isinstance(value, (dict, list)):
        yield line
        return
    items = (
        [(f"{json.dumps(k)}: ", v) for k, v in value.items()] if isinstance(value, dict) else [("", v) for v in value]
    )
    yield "{" if isinstance(value, dict) else "["
    for index, (key, item) in enumerate(items):
        yield ("," if index else "") + f"\n{indent} {key}"
        yield from _text(item, indent + " ")
    yield f"\n{indent}" + ("}" if isinstance(value, dict) else "]")


def main() -> None:
    data = _record(" ".join(sys.argv[1:]))
    FILE.write_text("".join(_text(data)) + "\n", encoding="utf-8")
    print(f"{FILE}: torch {data['torch']}, triton {data['triton']}")
    for layer, measured in data["layers"].items():
        counts = ("{} {} kernels, {} MiB".format(graph, *measured[graph]) for graph in DIRECTIONS)
        print(f"\n{layer}: {'; '.join(counts)}")
        if "largest" in measured:
            print(recorded.table(measured["largest"]))


if __name__ == "__main__":
    main()
