"""The machine of a measurement: its versions, the commit, the board's watts and clock meanwhile, a warm start."""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from fp8graph import hardware
from fp8graph.errors import ConfigError
from fp8graph.version import __version__

CHECKOUT: Final = Path(__file__).parents[3]
MIB: Final = 2**20
_WRITTEN: Final = ("benchmarks/results/", "docs/")
_PACKAGES: Final = ("triton", "transformers", "torchao", "transformer_engine")


def version_of(package: str) -> str:
    """Return the installed version, or "missing"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _git(*arguments: str) -> str:
    with contextlib.suppress(OSError):  # no git
        done = subprocess.run(["git", "-C", str(CHECKOUT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.rstrip() if done.returncode == 0 else ""
    return ""


def commit() -> tuple[str, list[str]]:
    """Return fp8graph's commit, and the files that differ from it; "" where it was not installed from a checkout.

    Results and pages change no measurement, and a run of several benchmarks writes them. A package that lies below
    somebody else's checkout (a virtual environment in their project) has no commit of theirs.
    """
    if not _git("ls-files", "fp8graph/version.py"):
        return "", []
    files = [line[3:] for line in _git("status", "--porcelain", "-uno").split("\n") if line]
    changed = [file for file in files if not (file.startswith(_WRITTEN) or file == "README.md")]
    return _git("describe", "--always") + ("-dirty" if changed else ""), changed


def refuse_changed_tree() -> None:
    """Raise where no commit would reproduce a measurement.

    Raises:
        ConfigError: with the files that differ, and the option that measures all the same.
    """
    name, changed = commit()
    if not name:
        raise ConfigError(
            "this installation of fp8graph names no commit, so nobody could repeat the measurement. Install it from a "
            'clone (pip install -e ".[hf,cli]"), or pass --any-tree: such a file is not published.'
        )
    if changed:
        raise ConfigError(
            f"changed since commit {name.removesuffix('-dirty')}: {', '.join(changed[:5])}"
            f"{f' and {len(changed) - 5} more' if changed[5:] else ''}. Commit it, or pass --any-tree: what is "
            "measured then is not published."
        )


def this_machine() -> dict[str, Any]:
    """Return where and when: versions, the commit, the GPU and its clocks."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: version_of(package) for package in _PACKAGES},
        "fp8graph": __version__,
        "commit": commit()[0],
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if (device := hardware.current_device()).type != "cpu":
        facts |= {"gpu": hardware.device_name(device), "cuda": torch.version.cuda, "clocks": clocks()}
        facts |= {"cudnn": torch.backends.cudnn.version(), "memory_mib": memory_mib(device)}
    return facts


def memory_mib(device: torch.device) -> float:
    """Return the memory of the GPU; more than any model needs for a CPU."""
    return 2**30 if device.type == "cpu" else torch.accelerator.get_memory_info(device)[1] / MIB


def _smi(query: str, *more: str, units: str = "") -> list[str] | None:
    """Return the command that prints ``query``; None without nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    return None if tool is None else [tool, f"--query-gpu={query}", f"--format=csv,noheader{units}", *more]


def clocks() -> str:
    """Return clocks, power and temperature of the GPU now; "" without nvidia-smi."""
    command = _smi("clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,driver_version")
    return (
        "" if command is None else subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    )


@dataclass
class Board:
    """Samples of a GPU, five per second: watts, and the clock of its SMs in MHz. Empty without nvidia-smi."""

    watts: list[float] = field(default_factory=list)
    sm_mhz: list[float] = field(default_factory=list)

    def medians(self, last: int | None = None) -> dict[str, float | None]:
        """Return the medians of the ``last`` samples, or of all, under the names that a row gives them."""
        chosen = {"watts": self.watts, "sm_mhz": self.sm_mhz}
        return {
            name: statistics.median(values[-last:] if last else values) if values else None
            for name, values in chosen.items()
        }


@contextlib.contextmanager
def sampled() -> Generator[Board]:
    """Sample the board meanwhile; its lists are filled at the end."""
    board = Board()
    command = _smi("power.draw,clocks.sm", "-lms", "200", units=",nounits")
    if command is None:
        yield board
        return
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        try:
            yield board
        finally:
            reader.terminate()
            for line in reader.communicate()[0].splitlines():
                with contextlib.suppress(ValueError):  # "[N/A]", or a line that was cut off
                    watts, clock = map(float, line.split(","))
                    board.watts.append(watts)
                    board.sm_mhz.append(clock)


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def allocated() -> int:
    """Return the bytes of tensors on the GPU; 0 without one."""
    return torch.accelerator.memory_allocated() if torch.accelerator.is_available() else 0


def start_peak() -> None:
    """Forget the most that was allocated until now."""
    if torch.accelerator.is_available():
        torch.accelerator.reset_peak_memory_stats()


def peak_mib(before: int) -> float | None:
    """Return the most that was allocated at once since :func:`start_peak`, beyond ``before`` bytes; None: no GPU."""
    return (torch.accelerator.max_memory_allocated() - before) / MIB if torch.accelerator.is_available() else None


def baseline() -> int:
    """Return the bytes that are allocated once everything that nobody holds is gone: compiled modules are in cycles."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    return allocated()


def warm_up(device: torch.device, backend: str = "inductor") -> float:
    """Start CUDA, cuBLAS, cuDNN's attention and Inductor's workers, so that no contender pays for it; return seconds.

    Whoever came first was charged with the start of the process: 27 seconds in place of 10.
    """
    start = time.perf_counter()

    def attend(x: torch.Tensor) -> torch.Tensor:
        heads = nn.functional.silu(x @ x.transpose(-1, -2)) @ x
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).float().square().sum()

    x = torch.randn(1, 2, 256, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(attend, backend=backend)(x).backward()
    torch.compiler.reset()
    synchronize()
    return round(time.perf_counter() - start, 1)
