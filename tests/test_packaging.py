"""The package: what is in it, what it imports, and that a user's own ``models`` and ``passes`` do no harm."""

from __future__ import annotations

import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import fp8graph
import release_check
from fp8graph.backend import named_backend
from fp8graph.passes import JOINT_PIPELINE, WEIGHT_LOWERING

ROOT = Path(__file__).parent.parent


# Runs each argument in a process where nothing of fp8graph is imported, but torch, which takes seconds.
IN_NEW_PROCESSES = """
import os, sys, traceback, torch
for code in sys.argv[1:]:
    if (child := os.fork()) == 0:
        try:
            exec(code, {})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"failed: {code}")
"""


def python(code: str, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_every_package_is_found(tmp_path: Path) -> None:
    """With the links of a checkout, and without them, as in a source distribution."""
    shutil.copy(ROOT / "setup.py", tmp_path)
    expected: set[str] = set()
    for folder, name in (("fp8graph", "fp8graph"), ("passes", "fp8graph.passes"), ("models", "fp8graph.models")):
        files = (file.relative_to(ROOT / folder) for file in (ROOT / folder).rglob("__init__.py"))
        inner = {file.parent for file in files if folder != "fp8graph" or file.parts[0] not in ("passes", "models")}
        expected |= {".".join((name, *part.parts)) for part in inner}
        for part in inner:
            (tmp_path / folder / part).mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / part / "__init__.py").touch()
    for root in (ROOT, tmp_path):
        assert runpy.run_path(str(root / "setup.py"), run_name="setup")["packages"]() == sorted(expected)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and a source distribution of the checkout, and the unpacked sources, ``checkout``."""
    pytest.importorskip("setuptools", "77")
    folder = tmp_path_factory.mktemp("release")
    checkout = folder / "checkout"
    leave = shutil.ignore_patterns(
        ".venv*", ".git", "__pycache__", "*.egg-info", ".hypothesis", ".*_cache", "build", "dist"
    )
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=leave)
    for kind in ("sdist", "wheel"):
        done = python(f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})", checkout)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "Warning" not in done.stderr, done.stderr[-2000:]
    return folder


@pytest.mark.slow
def test_the_source_distribution_has_what_the_readme_points_to(release: Path) -> None:
    (archive,) = release.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    links = set(re.findall(r"\]\(([\w./-]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"docs/coverage.md", "examples"} <= links
    assert links - names == set()
    assert {"passes/match.py", "models/general.py", "constraints.txt", "setup.py", ".ci/run", "Makefile"} <= names
    for folder in ("tests", "examples", "docs", "benchmarks", "fp8graph", "tools"):
        files = {file for file in (release / "checkout" / folder).rglob("*") if file.is_file()}
        paths = {str(file.relative_to(release / "checkout")) for file in files}
        assert {
            path for path in paths if not path.startswith(("fp8graph/passes/", "fp8graph/models/"))
        } - names == set()


@pytest.mark.slow
def test_the_wheel_holds_the_product(release: Path, tmp_path: Path) -> None:
    (wheel,) = release.glob("*.whl")
    expected = release_check.expected_in_the_wheel()
    assert {"fp8graph/py.typed", "fp8graph/passes/match.py", "fp8graph/report/page/page.html"} <= expected
    assert {"fp8graph/report/vendor/dagre/LICENSE", "fp8graph/report/vendor/echarts/licenses/LICENSE-d3"} <= expected
    assert release_check.wrong_with_the_wheel(wheel) == []
    with zipfile.ZipFile(wheel) as packed, zipfile.ZipFile(tmp_path / "other.whl", "w") as other:
        for name in packed.namelist():
            if not name.endswith(("py.typed", "licenses/LICENSE")):
                other.writestr(name, packed.read(name))
        other.writestr("tests/test_packaging.py", "")
    problems = ["missing: fp8graph/py.typed", "not of the product: tests/test_packaging.py", "no License-File: LICENSE"]
    assert release_check.wrong_with_the_wheel(tmp_path / "other.whl") == problems


def test_the_page_of_a_package_index() -> None:
    """README.md is shown there alone: its links lead to a forge, if there is one, and else are plain text."""
    long_description = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["long_description"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    relative = r"\]\((?!https?:|#)[^)]*\)"
    assert len(re.findall(relative, readme)) > 10
    plain, linked = (long_description(readme, source) for source in (None, "https://forge.org/blob/v1"))
    assert re.findall(relative, plain) == re.findall(relative, linked) == []
    assert "![" not in plain
    assert "in the source distribution" in plain.splitlines()[-1]
    assert "[one HTML page](https://forge.org/blob/v1/docs/report.md)" in linked
    assert "(https://forge.org/blob/v1/benchmarks/results/train_recipes_confidence.png?raw=true)" in linked
    fences = re.findall(r"(?ms)^```.*?^```$", readme)
    assert len(fences) == 3
    assert fences == re.findall(r"(?ms)^```.*?^```$", plain) == re.findall(r"(?ms)^```.*?^```$", linked)
    assert long_description("[a](https://b.org) [c](#d)\n", "x") == "[a](https://b.org) [c](#d)\n"


def test_a_tag_that_is_not_the_version_publishes_nothing() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    (check,) = re.findall(r"name: The tag is the version\n +run: (.*)\n", workflow)
    version = fp8graph.__version__
    for tag, code in ((f"v{version}", 0), (f"v{version}1", 1), (version, 1)):
        done = subprocess.run(["bash", "-c", check], env={**os.environ, "GITHUB_REF_NAME": tag}, cwd=ROOT, check=False)
        assert done.returncode == code
    assert f"fp8graph-{version}-py3-none-any.whl" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_each_extra_is_used_before_a_release() -> None:
    assert set(release_check.USES) == {"", *release_check.user_extras()}


@pytest.mark.parametrize("name", ["passes", "models"])
def test_the_links(name: str) -> None:
    link = ROOT / "fp8graph" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"


@pytest.mark.parametrize("name", ["passes", "models"])
def test_the_short_names_are_refused(name: str) -> None:
    done = python(f"import {name}", ROOT)
    assert done.returncode != 0
    assert f"import fp8graph.{name}, not {name}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["passes", "models"])
def test_a_users_own_folders(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("mine = True")
    code = f"import fp8graph, {name}; import fp8graph.{name} as ours; print({name}.mine, hasattr(ours, 'mine'))"
    done = python(code, tmp_path)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_the_core_needs_torch_only(tmp_path: Path) -> None:
    extras = [
        "rich",
        "matplotlib",
        "plotext",
        "transformers",
        "hypothesis",
        "sphinx",
        "myst_nb",
        "jupytext",
        "docutils",
    ]
    code = f"import fp8graph, sys; print([m for m in {extras} if m in sys.modules])"
    assert python(code, tmp_path).stdout.strip() == "[]"


def test_the_site_is_built_by_an_extra() -> None:
    """Tools for building the site come with ``docs`` and ``dev``, and with nothing that users of fp8graph install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [re.split(r"[<>=]", need)[0] for need in project["dependencies"]] == ["torch", "sympy"]
    wants = {extra: " ".join(needs) for extra, needs in project["optional-dependencies"].items()}
    assert [extra for extra, needs in wants.items() if "sphinx" in needs] == ["docs"]
    assert [extra for extra, needs in wants.items() if re.search(r"\[[\w,]*docs", needs)] == ["dev"]
    pinned = (ROOT / "constraints.txt").read_text().lower()
    assert all(f"\n{name}==" in pinned for name in ("sphinx", "myst-nb", "furo"))


@pytest.mark.slow
def test_help_comes_at_once(tmp_path: Path) -> None:
    """Without torch, whose import takes seconds; installed or not, all names are there when they are asked for."""
    try:
        importlib.metadata.distribution("fp8graph")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fp8graph is not installed here: a bare checkout registers the backend at once")
    done = python("import sys; from fp8graph import cli; print('torch' in sys.modules); cli.main(['--help'])", tmp_path)
    assert done.stdout.startswith("False\nusage: fp8graph"), done.stderr
    names = "print(len(fp8graph.__all__), fp8graph.compile.__name__)"
    first = ("from fp8graph import Backend as b", "import fp8graph; b = fp8graph.Backend", "from fp8graph import *")
    modules = ("backend", "models", "recipes.policy", "tools.explain")
    codes = [*(f"{code}; import fp8graph; {names}" for code in first), *(f"import fp8graph.{m}" for m in modules)]
    done = python(IN_NEW_PROCESSES, tmp_path, *codes)
    assert done.stdout.split() == [str(len(fp8graph.__all__)), "compile"] * 3, done.stderr
    assert done.returncode == 0, done.stderr
    done = python("import fp8graph; fp8graph.nosuch", tmp_path)
    assert "module 'fp8graph' has no attribute 'nosuch'" in done.stderr


@pytest.mark.slow
def test_a_bare_checkout_has_the_backend(tmp_path: Path) -> None:
    code = "import fp8graph, torch; print('fp8graph' in torch._dynamo.list_backends())"
    assert python(code, tmp_path).stdout.strip() == "True"


def test_an_installation_has_the_entry_point() -> None:
    try:
        importlib.metadata.distribution("fp8graph")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fp8graph is not installed here: a bare checkout registers the backend in code")
    (entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="fp8graph")
    assert entry.load() is named_backend


def test_public_names_are_documented() -> None:
    public = [
        n
        for n in vars(fp8graph)
        if not n.startswith("_") and getattr(vars(fp8graph)[n], "__module__", "").startswith("fp8graph")
    ]
    assert {"Backend", "Policy", "Rule", "autocast", "compile", "explain", "backend_of", "Report"} <= set(public)
    assert [name for name in public if not (getattr(fp8graph, name).__doc__ or "").strip()] == []
    functions = [n for n in vars(fp8graph.numerics) if not n.startswith("_") and callable(vars(fp8graph.numerics)[n])]
    own = [n for n in functions if getattr(vars(fp8graph.numerics)[n], "__module__", "") == "fp8graph.numerics"]
    assert [n for n in own if not vars(fp8graph.numerics)[n].__doc__] == []


def test_each_pass_says_what_becomes_of_a_graph() -> None:
    passes = (*(each.run for each in JOINT_PIPELINE), *WEIGHT_LOWERING)
    assert [run.__name__ for run in passes if "->" not in (sys.modules[run.__module__].__doc__ or "")] == []
