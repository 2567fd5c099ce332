"""The rooms of the house, from the ground up: imports only go down, and no file is too long to read."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from helpers import in_one_test

ROOT = Path(__file__).parent.parent
PRODUCT = ROOT / "fp8graph"

# A room imports from itself and from rooms of lower floors; rooms of one floor do not know each other.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("version", "late", "words"),
    ("errors",),
    ("compat", "files", "records"),
    ("offline",),
    ("recipes",),
    ("numerics",),
    ("hardware", "models", "checkpoints", "libraries"),
    ("ir",),
    ("analysis",),
    ("runtime", "report"),
    ("passes",),
    ("backend",),
    ("tools",),
    ("integrations", "extras"),
    ("cli",),
    ("face",),  # every public name
    ("__main__", ""),  # "": fp8graph/__init__.py, which loads the face when it is needed
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


@functools.cache
def parsed(file: Path) -> ast.Module:
    """The syntax of a file, which no test changes."""
    return ast.parse(file.read_text(encoding="utf-8"))


def imported(name: str) -> Iterator[tuple[str, int]]:
    """The names that a module imports from fp8graph, anywhere (in functions, for annotations too), with the line."""
    return imported_by(parsed(MODULES[name]), name)


def imported_by(tree: ast.AST, name: str) -> Iterator[tuple[str, int]]:
    """The same for the text of a module. A text that names a module may be imported, as ``import_module`` does."""
    for node in ast.walk(tree):
        texts: list[str | None] = []
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            texts = [constant_text(node, name)]
        elif isinstance(node, ast.Call) and len(given := [*node.args, *(k.value for k in node.keywords)]) > 1:
            first, *packages = (constant_text(each, name) or "" for each in given)
            texts = [package + first for package in packages if first.startswith(".")]
        for module in (named_module(text) for text in texts if text):
            if module and not f"{name}.".startswith(f"{module}."):  # the folders that it is in are imported before it
                yield module, getattr(node, "lineno", 0)
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


def constant_text(node: ast.AST, name: str) -> str | None:
    """The text that an expression in the module ``name`` is, if it is made of constants and the module's names."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name) and node.id in ("__name__", "__package__"):
        full = f"fp8graph.{name}".removesuffix(".")
        is_package = node.id == "__name__" or MODULES[name].name == "__init__.py"
        return full if is_package else full.rpartition(".")[0]
    if isinstance(node, ast.FormattedValue):
        return constant_text(node.value, name)
    parts = node.values if isinstance(node, ast.JoinedStr) else []
    parts = [node.left, node.right] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) else parts
    texts = [constant_text(part, name) for part in parts]
    return "".join(filter(None, texts)) if texts and None not in texts else None


def named_module(text: str) -> str:
    """The module below fp8graph that a text names, or the one with the object that it names; "" if there is none."""
    parts = re.split("[.:]", text)[1:] if re.fullmatch(r"fp8graph(\.\w+)+(:[\w.]+)?", text) else []
    starts = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((start for start in starts if start in MODULES), "")


def room(name: str) -> str:
    return name.split(".")[0]


def test_every_file_has_a_room() -> None:
    assert {room(name) for name in MODULES} == FLOOR.keys()


def test_imports_go_down() -> None:
    above = [
        f"{name}, line {line}: {target or 'fp8graph'}"
        for name in MODULES
        for target, line in imported(name)
        if room(target) != room(name) and FLOOR[room(target)] >= FLOOR[room(name)]
    ]
    assert above == []


@in_one_test(
    ("text", "modules"),
    [
        ('importlib.import_module("fp8graph.tools.export")', {"tools.export"}),
        ('__import__("fp8graph.tools" + ".export").f()', {"tools", "tools.export"}),
        ('import_module(".export", package="fp8graph.tools")', {"tools", "tools.export"}),
        ('import_module(f".{x}", __package__), import_module("." + "nodes", __package__)', {"ir.nodes"}),
        ('import_module(f"{__name__}.a.b"), getLogger("fp8graph.ir")', set[str]()),
        ('sys.modules["fp8graph.cli"].main, load("fp8graph.backend.entry:compile")', {"cli", "backend.entry"}),
        ('"fp8graph.guard", "fp8graph", f"{x}.tools", "tools", "see fp8graph.tools", b"fp8graph.tools"', set[str]()),
        ("from fp8graph.ir import nodes; import fp8graph.report.tables", {"ir.nodes", "report.tables"}),
    ],
)
def test_imports_are_seen(text: str, modules: set[str]) -> None:
    assert {name for name, _ in imported_by(ast.parse(text), "ir.sites")} == modules


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


def test_few_files_have_no_room() -> None:
    assert len([file for file in PRODUCT.glob("*.py")]) <= 8


# Outside of compat: ``backend`` names some itself, ``errors`` lies below compat.
MAY_NAME_PRIVATE_TORCH = {"compat", "errors"}
# A module without underscore that torch's documentation does not have.
UNDOCUMENTED = "torch.distributed.distributed_c10d"


def is_private(name: str) -> bool:
    """``torch._x``, ``torch.x._y``; not ``torch.__version__``, and no op, whatever it is called."""
    parts = name.split(".")
    hidden = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return parts[0] == "torch" and parts[1:2] != ["ops"] and hidden


def names_of_torch(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Each name of torch that a file imports or reads, like "torch.nn.Linear", with the line."""
    known = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
                known |= {alias.asname: alias.name} if alias.asname else {}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        inner, path = node, list[str]()
        while isinstance(inner, ast.Attribute):
            path.insert(0, inner.attr)
            inner = inner.value
        if path and isinstance(inner, ast.Name) and inner.id in known:
            yield ".".join([known[inner.id], *path]), inner.lineno


def test_private_names_of_torch_stand_in_compat() -> None:
    named = [
        f"{name}, line {line}: {text}"
        for name, file in MODULES.items()
        if room(name) not in MAY_NAME_PRIVATE_TORCH
        for text, line in names_of_torch(parsed(file))
        if is_private(text) or text.startswith(UNDOCUMENTED)
    ]
    assert named == []


def test_private_names_are_recognised() -> None:
    text = """
import torch, torch._a
from torch.utils import _b as b
import torch.distributed as dist
dist.x._c, torch.d._e.f, b.g, torch.__version__, torch.ops._h.i, torch.nn.Linear
"""
    found = {name for name, _ in names_of_torch(ast.parse(text)) if is_private(name)}
    assert found == {"torch._a", "torch.utils._b", "torch.utils._b.g"} | {
        "torch.distributed.x._c",
        "torch.d._e",
        "torch.d._e.f",
    }


def test_tests_have_rooms_too() -> None:
    """As the product's: a file of tests lies in the folder of what it tests."""
    tests = ROOT / "tests"
    assert len(list(tests.glob("test_*.py"))) <= 6
    rooms = {file.parent.name for file in tests.glob("*/test_*.py")}
    assert rooms - FLOOR.keys() == {"codegen", "docs", "fuzz", "scenarios", "support"}


def names_of_passes() -> set[str]:
    """Every name that the list of passes imports, and those that it gives to second runs."""
    tree = parsed(MODULES["passes"])
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    ours = (node for node in imports if (node.module or "").startswith("fp8graph.passes."))
    found = {alias.name for node in ours for alias in node.names}
    keywords = (node for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "again")
    return found | {str(ast.literal_eval(node.value)) for node in keywords}


def compared_texts(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Each text that a file compares something with, alone or in a tuple, a list or a set, with the line."""
    for node in ast.walk(tree):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        sides += [node.value] if isinstance(node, ast.MatchValue) else []
        for side in sides:
            for part in getattr(side, "elts", [side]):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value, part.lineno


def test_no_code_compares_with_the_name_of_a_pass() -> None:
    """A pass leaves what others need in ``Compilation`` or in the metadata of nodes, and need not be known by name."""
    passes = names_of_passes()
    assert {"fold", "share_tokens", "find_attention"} <= passes
    compared = [
        f"{name}, line {line}: {text}"
        for name, file in MODULES.items()
        for text, line in compared_texts(parsed(file))
        if text in passes
    ]
    assert compared == []


def test_compared_texts_are_found() -> None:
    text = """
if a == "b" or "c" != d or e in ("f", "g"): pass
match h:
    case "i": pass
"j".strip(), k["l"]
"""
    assert {name for name, _ in compared_texts(ast.parse(text))} == {"b", "c", "f", "g", "i"}


def test_a_docstring_begins_with_a_verb_or_the_thing() -> None:
    """Not with a question word, after which a reader has to wait for the subject. Those of tests, too."""
    others = [file for folder in ("tests", "benchmarks", "examples", "tools") for file in (ROOT / folder).rglob("*.py")]
    texts = {file: file.read_text(encoding="utf-8") for file in (*MODULES.values(), *others)}
    opening = re.compile(r'^\s*r?"""\s*(?:What|How|Why|It)\b.*', re.MULTILINE)
    assert [(str(file), found) for file, text in texts.items() for found in opening.findall(text)] == []


def test_a_function_of_the_product_is_described_from_a_verb_on() -> None:
    """Properties, and what a ``with`` statement holds, are described as what they are."""
    things = re.compile(r"(?:The|A|An|Whether|One|All(?!-)|Each|Every|Those|That|Both)\b")
    as_nouns = re.compile(r"(?:.*\.)?(?:property|cached_property|contextmanager)\b")
    texts: list[str] = []
    for name, file in MODULES.items():
        for function in ast.walk(parsed(file)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(function)):
                is_noun = any(as_nouns.match(ast.unparse(decorator)) for decorator in function.decorator_list)
                if things.match(text) and not is_noun:
                    texts.append(f"{name}.{function.name}: {text.splitlines()[0]}")
    assert texts == []


def test_a_test_is_named_by_subject_and_expectation() -> None:
    """Its name is what a reader of a failure sees first: it does not begin with a question word, or with "it"."""
    function = re.compile(r"^ *def (test_(?:what|how|why|it)_\w*)", re.MULTILINE)
    files = (ROOT / "tests").rglob("test_*.py")
    assert [f"{file}: {name}" for file in files for name in function.findall(file.read_text(encoding="utf-8"))] == []


PARTICIPLES = frozenset({"asked", "found", "known", "taken", "told"})


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The names that a module gives to values: variables, attributes, parameters, functions, classes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.FunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.Import() | ast.ImportFrom():
                yield from ((each.asname, node.lineno) for each in node.names if each.asname)
            case _:
                pass


def test_no_participle_names_a_value() -> None:
    """A name says what a value is, which "found" and "asked" do not: a reader has to look up who asked for what."""
    trees = {name: parsed(file) for name, file in MODULES.items()}
    named = {(name, line, each) for name, tree in trees.items() for each, line in bound_names(tree)}
    assert sorted(each for each in named if each[2].strip("_") in PARTICIPLES) == []


def test_names_of_values_are_seen() -> None:
    text = """
def asked(known, *, taken=1): told: int = known
class Found: pass
for a, b.held in (c := []): import os as said
"""
    names = {name for name, _ in bound_names(ast.parse(text))}
    assert names == {"asked", "known", "taken", "told", "Found", "a", "held", "c", "said"}
