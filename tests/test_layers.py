"""The rooms of the house, from the ground up: imports only go down, and no file is too long to read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = ROOT / "fp8graph"

# A room imports from itself and from rooms of lower floors; rooms of one floor do not know each other.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "version"),
    ("compat", "records"),
    ("offline",),
    ("recipes",),
    ("numerics",),
    ("hardware", "models"),
    ("ir",),
    ("analysis",),
    ("passes", "runtime", "report"),
    ("backend",),
    ("tools", "planning"),
    ("cli",),
    ("__main__", ""),  # "": fp8graph/__init__.py, the face
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def modules() -> dict[str, Path]:
    """Every file of the product by its name: "ir.nodes", "ir" for ``ir/__init__.py``."""
    folders = {"": PRODUCT, "passes": ROOT / "passes", "models": ROOT / "models"}
    found: dict[str, Path] = {}
    for name, folder in folders.items():
        for file in folder.rglob("*.py"):
            parts = [name, *file.relative_to(folder).with_suffix("").parts]
            if name or parts[1] not in ("passes", "models"):  # links, which some Pythons follow
                found[".".join(part for part in parts if part and part != "__init__")] = file
    return found


MODULES = modules()


def imported(name: str) -> Iterator[tuple[str, int]]:
    """What a module imports of fp8graph, wherever it does (in functions, for annotations too), with the line."""
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: relative"
            if (node.module or "").split(".")[0] == "fp8graph":
                base = (node.module or "").removeprefix("fp8graph").removeprefix(".")
                for alias in node.names:
                    inner = f"{base}.{alias.name}".removeprefix(".")
                    yield inner if inner in MODULES else base, node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "fp8graph":
                    yield alias.name.removeprefix("fp8graph").removeprefix("."), node.lineno


def room(name: str) -> str:
    return name.split(".")[0]


def test_every_file_has_a_room() -> None:
    assert {room(name) for name in MODULES} == FLOOR.keys()


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_down(name: str) -> None:
    above = [
        f"line {line}: {target or 'fp8graph'}"
        for target, line in imported(name)
        if room(target) != room(name) and FLOOR[room(target)] >= FLOOR[room(name)]
    ]
    assert above == []


def test_there_is_no_circle() -> None:
    graph = {name: {target for target, _ in imported(name) if target != name} for name in MODULES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for target in graph[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("name", MODULES)
def test_a_file_can_be_read(name: str) -> None:
    assert len(MODULES[name].read_text(encoding="utf-8").splitlines()) <= 300


def test_few_files_have_no_room() -> None:
    assert len([file for file in PRODUCT.glob("*.py")]) <= 8
