"""Run the tests of a library that trains models, in an environment of its own: ``make test-hosts``.

A host is one entry of :data:`HOSTS`. Its environment has this checkout, the host in the pinned version and what its
tests import; the pins of ``constraints.txt`` hold, but for those packages that the host pins otherwise. The result goes
into ``tests/data/hosts.json``, and from there into the table of docs/support.md.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from timed import result_of, today

ROOT: Final = Path(__file__).parents[1]
DATA: Final = ROOT / "tests" / "data" / "hosts.json"
PAGE: Final = ROOT / "docs" / "support.md"
_HEAD: Final = "| trainer | torch | Python | tests of its own code | when |\n|---|---|---|---|---|\n"
_TESTS: Final = ("pytest", "pytest-randomly", "pytest-timeout", "hypothesis", "numpy", "safetensors", "transformers")
_VERSIONS: Final = """
import importlib.metadata, platform, sys, torch
print(importlib.metadata.version(sys.argv[1]), torch.__version__.partition("+")[0], platform.python_version())
"""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A library that trains models."""

    version: str
    tests: tuple[str, ...]  # files that run its own code
    pins: tuple[str, ...] = ()  # packages that it pins otherwise than constraints.txt
    needs: tuple[str, ...] = ()  # further packages
    alone: bool = False  # without what it requires: the tests run files that need torch and transformers only


HOSTS: Final[dict[str, Host]] = {
    "axolotl": Host(  # its own pins, but of what is not needed to train
        version="0.19.0",
        tests=("tests/integrations/test_axolotl.py",),
        pins=(
            "accelerate",
            "fsspec",
            "huggingface_hub",
            "peft",
            "pydantic",
            "pydantic_core",
            "torchao",
            "transformers",
        ),
        needs=(
            "accelerate==1.13.0",
            "addict",
            "axolotl-contribs-lgpl==0.0.7",
            "axolotl-contribs-mit==0.0.6",
            "bitsandbytes",
            "colorama",
            "datasets==4.8.4",
            "evaluate==0.4.1",
            "fastcore",
            "fire",
            "numba",
            "peft==0.20.0",
            "posthog==6.7.11",
            "pydantic==2.12.5",
            "python-dotenv",
            "torchao==0.17.0",
            "transformers==5.16.1",
            "triton",
            "trl==1.9.0",
            "wandb",
        ),
        alone=True,
    ),
    "deepspeed": Host(version="0.19.8", tests=("tests/integrations/test_deepspeed.py",)),
    "llamafactory": Host(
        version="0.9.5",
        tests=("tests/integrations/test_llamafactory.py",),
        needs=("accelerate", "peft"),
        alone=True,
    ),
    "nemo-automodel": Host(version="0.7.0", tests=("tests/integrations/test_automodel.py",), alone=True),
    "ray": Host(version="2.60.0", tests=("tests/integrations/test_ray.py",), needs=("ray[train]",)),
    "torchtitan": Host(
        version="0.3.0",
        tests=("tests/integrations/test_torchtitan.py",),
        pins=("fsspec",),
        needs=("torchao", "triton"),
    ),
    "trl": Host(version="1.16.0", tests=("tests/integrations/test_trl.py",), needs=("accelerate",)),
    "veomni": Host(  # its package requires no transformers; its models are made of this one's
        version="0.1.12",
        tests=("tests/integrations/test_veomni.py",),
        pins=("huggingface_hub", "tokenizers", "transformers"),
        needs=("psutil", "transformers==5.9.0"),
        alone=True,
    ),
    "verl": Host(
        version="0.9.1",
        tests=("tests/integrations/test_verl.py",),
        pins=("huggingface_hub", "tokenizers", "transformers"),
    ),
}


def environment(name: str, host: Host) -> Path:
    """The Python of the host's environment, which is made the first time."""
    folder = ROOT / f".venv-host-{name}"
    python = folder / "bin" / "python"
    itself = [f"{name}=={host.version}"]
    asked = [*([] if host.alone else itself), *host.needs, *_TESTS]
    ready = folder / "ready"
    if not ready.exists() or ready.read_text(encoding="utf-8") != repr([itself, asked]):
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [pin for pin in pins if pin.partition("==")[0].lower() not in host.pins]
        (folder / "constraints.txt").write_text("".join(kept), encoding="utf-8")
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "-c", str(folder / "constraints.txt"), "-e", str(ROOT), *asked], check=True)
        if host.alone:
            subprocess.run([*install, "--no-deps", *itself], check=True)
        ready.write_text(repr([itself, asked]), encoding="utf-8")
    return python


def ran(name: str, host: Host, python: Path) -> tuple[dict[str, Any], int]:
    """Run the host's tests, slow ones included: the row for the data file, and the exit code."""
    found = subprocess.run([python, "-c", _VERSIONS, name], check=True, capture_output=True, text=True)
    version, torch, of_python = found.stdout.split()
    command = [str(python), "-m", "pytest", "-q", "-rs", "-m", "not release and not gpu", *host.tests]
    result, code = result_of(command)
    return {"version": version, "torch": torch, "python": of_python, "result": result, "when": today()}, code


def table(rows: dict[str, dict[str, str]]) -> str:
    """The table of docs/support.md: one row for each host that ran."""
    cells = (
        (f"{name} {row['version']}", row["torch"], row["python"], row["result"], row["when"])
        for name, row in sorted(rows.items())
    )
    return _HEAD + "".join(f"| {' | '.join(each)} |\n" for each in cells)


def with_table(page: str, rows: dict[str, dict[str, str]]) -> str:
    """``page`` with the table of these rows. Raises ValueError if it has none, or several."""
    before, *after = page.split(_HEAD)
    if len(after) != 1:
        raise ValueError("docs/support.md has no table of trainers, or several.")
    return before + table(rows) + re.sub(r"\A(?:\|.*\n)*", "", after[0])


def recorded() -> dict[str, dict[str, str]]:
    """The last run of each host, by its name."""
    return json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}


def main(names: list[str]) -> int:
    if unknown := [name for name in names if name not in HOSTS]:
        print(f"{unknown[0]} is not a host. Hosts: {', '.join(HOSTS)}.", file=sys.stderr)
        return 2
    worst = 0
    for name in names or HOSTS:
        row, code = ran(name, HOSTS[name], environment(name, HOSTS[name]))
        rows = {**recorded(), name: row}
        DATA.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
        worst = max(worst, code)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
