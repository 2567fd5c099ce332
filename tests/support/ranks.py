"""Run a function on several processes of this machine, joined by gloo, and collect what each returns."""

from __future__ import annotations

import datetime
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

# What every rank needs: where processes can be forked, it is imported once (four seconds) and not by each of them.
IMPORTED = [
    "fp8graph.backend",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
]


def run_ranks(
    function: Callable[..., Any],
    ranks: int,
    folder: Path,
    *args: Any,
    seconds: float = 300,
    collective_seconds: float = 60,
    lost: int | None = None,
) -> list[Any]:
    """``function(rank, *args)`` on ``ranks`` processes; what it returns goes through ``torch.save``.

    Args:
        seconds: for all of it.
        collective_seconds: how long one collective waits for the others.
        lost: the rank that is to be killed or stopped on the way: nobody waits for it, it returns nothing.

    Raises:
        RuntimeError: a rank raised or was killed; with what it said. The others are stopped.
        TimeoutError: not all were done after ``seconds``.
    """
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload(IMPORTED)
    processes = [
        context.Process(target=_main, args=(function, rank, ranks, str(folder), collective_seconds, args))
        for rank in range(ranks)
    ]
    awaited = [process for rank, process in enumerate(processes) if rank != lost]
    for process in processes:
        process.start()
    try:
        end = datetime.datetime.now() + datetime.timedelta(seconds=seconds)
        for process in awaited:
            process.join(max(0.0, (end - datetime.datetime.now()).total_seconds()))
        if any(process.is_alive() for process in awaited):
            raise TimeoutError(f"ranks still running after {seconds} s: {[p.is_alive() for p in processes]}")
    finally:
        for process in processes:
            process.kill()
            process.join()
    errors = [file.read_text() for file in sorted(folder.glob("*.error"))]
    if errors or any(process.exitcode for process in awaited):
        raise RuntimeError(f"exit codes {[p.exitcode for p in processes]}\n" + "\n".join(errors))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks) if rank != lost]


def run_each(rank: int, calls: dict[Any, tuple[Callable[..., Any], tuple[Any, ...]]]) -> dict[Any, Any]:
    """``function(rank, *arguments)`` of each of ``calls``, by name: a launch takes seconds."""
    return {name: function(rank, *arguments) for name, (function, arguments) in calls.items()}


def _main(
    function: Callable[..., Any], rank: int, ranks: int, folder: str, collective_seconds: float, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=collective_seconds)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timeout)
    try:
        torch.save(function(rank, *args), Path(folder) / f"{rank}.pt")
    except BaseException:
        (Path(folder) / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
    dist.destroy_process_group()
