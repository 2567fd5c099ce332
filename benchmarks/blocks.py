"""Milliseconds of the kernels of quantization by the blocks of their programs: ``python -m benchmarks.blocks [FILE]``.

Needs a GPU, and some minutes there: kernels are compiled in this process. One JSON line per kernel, fastest first: what
``fix_large_casts`` in fp8graph/compat/inductor.py chooses from.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch._inductor import config as inductor_config
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

import fp8graph
from benchmarks.measure import DEVICE
from benchmarks.records import RESULTS
from benchmarks.sections.quantization import compiled, inputs, jobs
from fp8graph.offline.kernels import text_of

# rows or columns x the others, warps: 4 to 32 numbers for each thread
TILES: Final = [
    (x, y, warps)
    for x, y, warps in itertools.product((32, 64, 128, 256), (32, 64, 128, 256), (4, 8, 16))
    if 4 <= x * y // (32 * warps) <= 32 and 2048 <= x * y <= 16384
]
LOOPS: Final = [
    (height, width, warps)
    for height, width, warps in itertools.product((8, 16, 32, 64), (64, 128, 256, 512, 1024), (8, 16, 32))
    if 4 <= height * width // (32 * warps) <= 16
]
ROWS: Final = [(1, width, warps) for width in (1024, 2048, 4096, 8192) for warps in (4, 8, 16, 32)]
LARGE: Final = (8192, 14336)  # tokens, and the inner size of Llama-3-8B
CASES: Final = [
    *itertools.product(("nothing", "silu_mul", "swiglu backward"), ("tensorwise", "delayed", "rowwise"), [LARGE]),
    *itertools.product(("rms_norm",), ("tensorwise", "delayed"), [(8192, 4096)]),
    *itertools.product(("nothing",), ("delayed",), [(4096, 4096), (4096, 14336), (14336, 4096)]),
    *itertools.product(("silu_mul", "swiglu backward"), ("delayed",), [(2048, 14336)]),
]


def offered(signature: Mapping[str, str], names: set[str]) -> tuple[list[tuple[int, int, int]], tuple[str, str]]:
    """The blocks to try for a kernel, and their names; none: those that Inductor tries.

    Args:
        signature: the types of the kernel's parameters.
        names: of the blocks that Inductor gives it.
    """
    casts = any(kind.startswith("*fp8") for kind in signature.values())
    if names == {"XBLOCK", "YBLOCK"}:
        return (TILES if casts else []), ("XBLOCK", "YBLOCK")
    if names == {"XBLOCK", "R0_BLOCK"}:
        return (LOOPS if casts else ROWS), ("XBLOCK", "R0_BLOCK")
    return [], ("", "")


@contextlib.contextmanager
def all_blocks(found: Callable[[str, list[tuple[float, str]]], None]) -> Generator[None]:
    """Try all blocks in each kernel that is loaded, and call ``found(kernel, [(ms, blocks)])``, fastest first."""
    import triton

    start, measure = CachingAutotuner.__init__, CachingAutotuner.benchmark_all_configs

    def with_all(self: Any, fn: Any, triton_meta: Any, configs: list[Any], *args: Any, **settings: Any) -> None:
        blocks, names = offered(triton_meta["signature"], {*configs[0].kwargs})
        made = [
            triton.Config(dict(zip(names, sizes, strict=True)), num_warps=warps, num_stages=1)
            for *sizes, warps in blocks
        ]
        start(self, fn, triton_meta, made or configs, *args, **settings)

    def measured(self: Any, *args: Any, **settings: Any) -> Any:
        times = measure(self, *args, **settings)
        found(self.fn.__name__, sorted((ms, text_of(k.config)) for k, ms in times.items()))
        return times

    with (
        mock.patch.object(CachingAutotuner, "__init__", with_all),
        mock.patch.object(CachingAutotuner, "benchmark_all_configs", measured),
    ):
        yield


def main(path: Path) -> None:
    functions = jobs()
    here: dict[str, Any] = {"compile_threads": 1, "force_disable_caches": True}  # a worker knows only Inductor's blocks
    with path.open("w", encoding="utf-8") as file, inductor_config.patch(here):
        for producer, recipe, (rows, columns) in CASES:
            case = {"quantized": producer, "recipe": recipe, "rows": rows, "columns": columns}

            def write(kernel: str, times: list[tuple[float, str]], case: dict[str, Any] = case) -> None:
                found = [[round(ms, 5), blocks] for ms, blocks in times]
                file.write(json.dumps({**case, "kernel": kernel, "found": found}) + "\n")
                file.flush()

            with all_blocks(write):
                compiled(functions[producer, recipe], inputs(producer, rows, columns), fp8graph.Backend())


if __name__ == "__main__":
    if DEVICE.type == "cpu":
        sys.exit("Blocks are measured on a GPU, and there is none.")
    torch.manual_seed(0)
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "blocks.jsonl")
