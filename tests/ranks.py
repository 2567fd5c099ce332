"""Run a function on several processes of this machine, joined by gloo, and collect what each returns."""

from __future__ import annotations

import datetime
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing


def run_ranks(function: Callable[..., Any], ranks: int, folder: Path, *args: Any, seconds: float = 300) -> list[Any]:
    """``function(rank, *args)`` on ``ranks`` processes; what it returns goes through ``torch.save``.

    Raises:
        RuntimeError: a rank raised or was killed; with what it said. The others are stopped.
        TimeoutError: not all were done after ``seconds``.
    """
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_main, args=(function, rank, ranks, str(folder), args)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        end = datetime.datetime.now() + datetime.timedelta(seconds=seconds)
        for process in processes:
            process.join(max(0.0, (end - datetime.datetime.now()).total_seconds()))
        if any(process.is_alive() for process in processes):
            raise TimeoutError(f"ranks still running after {seconds} s: {[p.is_alive() for p in processes]}")
    finally:
        for process in processes:
            process.kill()
    errors = [file.read_text() for file in sorted(folder.glob("*.error"))]
    if errors or any(process.exitcode for process in processes):
        raise RuntimeError(f"exit codes {[p.exitcode for p in processes]}\n" + "\n".join(errors))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _main(function: Callable[..., Any], rank: int, ranks: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)  # of one collective
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timeout)
    try:
        torch.save(function(rank, *args), Path(folder) / f"{rank}.pt")
    except BaseException:
        (Path(folder) / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
    dist.destroy_process_group()
