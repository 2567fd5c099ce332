"""Builds a release from the checkout, looks into it, installs it, and uses each extra: ``make release-check``.

    .venv-release/bin/python tools/release_check.py FOLDER

The wheel goes into a clean virtual environment without extras. Each extra then gets an environment of its own, which
holds what that extra brought, and reads the rest from the first. A check that fails ends the run.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOR_DEVELOPERS = {"test", "docs", "dev", "release"}  # extras that are for work on fp8graph itself
# A source distribution holds no links to folders. `make fp8graph/passes fp8graph/models` makes these two again.
NOT_IN_THE_SOURCES = {"fp8graph/models", "fp8graph/passes", ".gitignore"}

TRAINS = """
import warnings
warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch itself, without numpy
import torch, fp8graph
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)).bfloat16()
x = torch.randn(32, 64, dtype=torch.bfloat16)
fp8graph.compile(model, compiler="eager")
before = [parameter.detach().clone() for parameter in model.parameters()]
(model(x) - x).float().square().mean().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
print("changed:", sum(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
print(str(fp8graph.backend_of(model).report).splitlines()[0])
layer = torch.compile(torch.nn.Linear(64, 64), backend="fp8graph", options={"compiler": "eager"})
print("by name:", tuple(layer(torch.randn(16, 64)).shape))
"""

EXPORTS = """
import torch, fp8graph
model, fresh = (torch.nn.Sequential(torch.nn.Linear(128, 256, bias=False)).bfloat16() for _ in range(2))
x = torch.randn(16, 128, dtype=torch.bfloat16)
y = fp8graph.compile(model, recipe="tensorwise", compiler="eager")(x)
fp8graph.load_checkpoint(fresh, fp8graph.export(model, "checkpoint", "fp8"))
error = (fp8graph.compile(fresh, compiler="eager")(x) - y).norm() / y.norm()
print("loaded:", fresh[0].weight.dtype, "near" if error < 0.1 else f"far: {error}")
"""

KERNELS = """
import torch, fp8graph
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256)).bfloat16()
report = fp8graph.explain(model, torch.randn(64, 256, dtype=torch.bfloat16), target="sm_90")
print("kernels for sm_90:", len(report.kernels))
"""

# Of each extra: what is run, its exit code, and what it prints, as a regular expression. PYTHON is the environment's.
USES: dict[str, list[tuple[Sequence[str], int, str]]] = {
    "": [
        (("-c", TRAINS), 0, r"changed: 4\n5 of 5 GEMMs in FP8, 100 % .*\nby name: \(16, 64\)"),
        (("-m", "fp8graph", "explain", "llama"), 2, r'transformers is missing. Run: pip install "fp8graph\[hf\]"'),
        (("-m", "fp8graph", "completion", "bash"), 2, r'shtab is missing. Run: pip install "fp8graph\[cli\]"'),
    ],
    "hf": [(("-m", "fp8graph", "explain", "llama", "--table"), 0, r"\d+ of \d+ GEMMs in FP8")],
    "checkpoints": [(("-c", EXPORTS), 0, r"loaded: torch\.float8_e4m3fn near")],
    "cli": [
        (("-m", "fp8graph", "completion", "bash"), 0, r"complete .*fp8graph"),
        (("-c", "import fp8graph.report.tree as tree; print(tree.Tree)"), 0, r"rich\.tree"),
    ],
    "kernels": [(("-c", KERNELS), 0, r"kernels for sm_90: [1-9]")],
    "demo": [(("-m", "fp8graph", "demo", "--steps", "5", "--compiler", "eager"), 0, r"(?s)GEMMs.*\.png")],
    "notebooks": [
        (("{sources}/notebooks/first_training.py",), 0, r"\nFP8:  from \d"),
        (
            ("-m", "jupytext", "--to", "ipynb", "-o", "first.ipynb", "{sources}/notebooks/first_training.py"),
            0,
            "Writing",
        ),
    ],
    "examples": [(("{sources}/examples/lora.py",), 0, r"\n7 weights quantized in 8 steps")],
}


def expected_in_the_wheel() -> set[str]:
    """Every file of the product, by its path in the wheel, without the metadata's folder."""
    found: set[str] = set()
    for folder, place in (("fp8graph", "fp8graph"), ("passes", "fp8graph/passes"), ("models", "fp8graph/models")):
        for file in (ROOT / folder).rglob("*"):
            parts = file.relative_to(ROOT / folder).parts
            linked = folder == "fp8graph" and parts[0] in ("passes", "models")
            if file.is_file() and "__pycache__" not in parts and not linked:
                found.add(f"{place}/{'/'.join(parts)}")
    return found


def wrong_with_the_wheel(wheel: Path) -> list[str]:
    """Files that the wheel has and should not, or the other way round; and licences that its metadata does not name."""
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if not name.endswith("/")}
        metadata = packed.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    files = {name for name in names if ".dist-info/" not in name}
    problems = [f"missing: {name}" for name in sorted(expected_in_the_wheel() - files)]
    problems += [f"not of the product: {name}" for name in sorted(files - expected_in_the_wheel())]
    vendored = ROOT / "fp8graph" / "report" / "vendor"
    licences = {ROOT / "LICENSE", *(file for file in vendored.rglob("*") if re.match("LICENSE|NOTICE", file.name))}
    stated = set(re.findall(r"(?m)^License-File: (.*)$", metadata))
    problems += [
        f"no License-File: {path}"
        for path in sorted(str(file.relative_to(ROOT)) for file in licences)
        if path not in stated or not any(name.endswith(f".dist-info/licenses/{path}") for name in names)
    ]
    problems += [f"a link that leads nowhere: {link}" for link in re.findall(r"\]\((?!https?:|#)[^)]*\)", metadata)]
    return problems


def run(command: Sequence[str | Path], folder: Path | None = None, code: int = 0) -> str:
    """The output of a command, which must end with ``code``; it does not see the checkout, nor this environment."""
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode != code:
        sys.exit(f"{' '.join(map(str, command))}\nended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def environment(folder: Path, requirement: str, below: Path | None = None) -> Path:
    """A new virtual environment with ``requirement`` in it, over that of another Python; returns its Python."""
    python = folder / "bin" / "python"
    run([sys.executable, "-m", "venv", *(["--without-pip"] if below else []), folder])
    pip = [python, "-m", "pip"]
    if below is not None:
        of = 'import sysconfig; print(sysconfig.get_path("purelib"))'
        packages = [run([each, "-I", "-c", of]).strip() for each in (python, below)]
        Path(packages[0], "below.pth").write_text(packages[1] + "\n", encoding="utf-8")
        pip = [below, "-m", "pip", "--python", python]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-warn-script-location"]
    run([*pip, "install", *quiet, "-c", ROOT / "constraints.txt", requirement])
    return python


def check_help(python: Path) -> None:
    """``fp8graph --help`` answers at once: it imports Python's own modules and fp8graph's, and nothing else."""
    script = python.parent / "fp8graph"
    begun = imported([python, "-I", "-X", "importtime", "-c", ""])  # what .pth files import each time
    found = imported([python, "-I", "-X", "importtime", script, "--help"]) - begun
    foreign = sorted(found - sys.stdlib_module_names - {"fp8graph"})
    start = time.perf_counter()
    run([script, "--help"])
    print(f"fp8graph --help: {time.perf_counter() - start:.2f} s; imports of other packages: {foreign or 'none'}")
    if "fp8graph" not in found or foreign:
        sys.exit(f"fp8graph --help imports {foreign}")


def imported(command: Sequence[str | Path]) -> set[str]:
    """The top-level modules that a Python with ``-X importtime`` imports."""
    return {name.split(".")[0] for name in re.findall(r"(?m)^import time:.*\| +([\w.]+)$", run(command))}


def check_doctor(python: Path, core: Path) -> None:
    """``fp8graph doctor`` names each optional package that pip has not installed, with the command, and no other."""
    pip = [core, "-m", "pip", "--python", python]
    listed = json.loads(run([*pip, "list", "--format", "json", "--disable-pip-version-check"]))
    installed = {package["name"] for package in listed}
    of_extras = 'from fp8graph.words.extras import EXTRAS; print(*(f"{p}={e}" for p, e in EXTRAS.items()))'
    extra_of = dict(pair.split("=") for pair in run([python, "-I", "-c", of_extras]).split())
    printed = run([python, "-I", "-m", "fp8graph", "doctor"])
    told = dict(re.findall(r'(?m)^(\w+) +not installed\. Run: pip install "fp8graph\[(\w+)\]"$', printed))
    if told != {package: extra for package, extra in extra_of.items() if package not in installed}:
        sys.exit(f"fp8graph doctor says that these are missing: {told}; pip has {sorted(installed)}")


def check_uses(extra: str, python: Path, folder: Path, sources: Path) -> None:
    """The statement of ``USES`` on an extra."""
    folder.mkdir(exist_ok=True)
    for arguments, code, pattern in USES[extra]:
        printed = run([python, "-I", *(part.replace("{sources}", str(sources)) for part in arguments)], folder, code)
        if not re.search(pattern, printed):
            sys.exit(f"{' '.join(arguments)}\nprints\n{printed}\nand not {pattern}")


def check_sources(archive: Path, folder: Path) -> Path:
    """The source distribution holds every file of the repository, but for two links, and works; returns its folder."""
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (sources,) = folder.iterdir()
    kept = set(run(["git", "ls-files"], ROOT).splitlines()) - NOT_IN_THE_SOURCES
    if missing := sorted(name for name in kept if not (sources / name).is_file()):
        sys.exit(f"not in the source distribution: {missing}")
    run(["make", "fp8graph/passes", "fp8graph/models"], sources)
    print(f"source distribution: {len(kept)} files of the repository")
    return sources


def main(folder: Path) -> None:
    """Leaves the files of the release in ``folder``, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    run([sys.executable, "-m", "build", "--outdir", folder, ROOT])
    (wheel,), (archive,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    run([sys.executable, "-m", "twine", "check", "--strict", wheel, archive])
    if problems := wrong_with_the_wheel(wheel):
        sys.exit("\n".join([f"{wheel.name}:", *problems]))
    print(f"{wheel.name}: {len(expected_in_the_wheel())} files, all of the product")
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        sources = check_sources(archive, work / "sources")
        core = environment(work / "core", str(wheel))
        check_help(core)
        for extra in USES:
            start = time.perf_counter()
            python = environment(work / f"with {extra}", f"{wheel}[{extra}]", core) if extra else core
            check_doctor(python, core)
            check_uses(extra, python, work / f"use {extra}", sources)
            print(
                f"{f'fp8graph[{extra}]' if extra else 'without extras'}: {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    print(f"{folder}: ready to be published")


def user_extras() -> set[str]:
    """The extras of pyproject.toml that are for users."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project["optional-dependencies"]) - FOR_DEVELOPERS


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
