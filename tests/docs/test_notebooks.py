"""Every notebook is on the site, opens in Jupyter, runs as it stands, and shows what its text promises.

The site's build runs the cells in Jupyter's kernel, and shows what they print. Here they run as a script in this
process: on every torch, with warnings as errors, and with what they computed at hand.
"""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import fp8graph
from fp8graph.offline import available
from helpers import in_one_test
from samples import ROOT

jupytext: Any = importlib.import_module("jupytext")
pyplot: Any = importlib.import_module("matplotlib.pyplot")

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.py"))
README = (FOLDER / "README.md").read_text(encoding="utf-8")
HEADER = re.compile(r"\A# ---\n.*?\n# ---\n+", re.DOTALL)


def cells(notebook: Path) -> list[Any]:
    return jupytext.reads(notebook.read_text(encoding="utf-8"), fmt="py:percent").cells


def test_every_notebook_is_in_the_table_and_on_the_site() -> None:
    contents = README.split("```{toctree}")[1].split("```")[0].split()
    assert [f"{name}.py" for name in contents if name != ":hidden:"] == re.findall(
        r"^\| \[\w+\.py\]\((.*)\)", README, re.M
    )
    assert sorted(name for name in contents if name != ":hidden:") == [notebook.stem for notebook in NOTEBOOKS]
    assert "\nNotebooks <../notebooks/README>\n" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert sorted(RUNS) == [notebook.stem for notebook in NOTEBOOKS]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebooks_convert_to_ipynb_and_back(notebook: Path, tmp_path: Path) -> None:
    """Prose and code in turn, and the same text after a way through the file that ``jupytext --to ipynb`` writes."""
    text = notebook.read_text(encoding="utf-8")
    found = jupytext.reads(text, fmt="py:percent")
    assert found.metadata["kernelspec"]["name"] == "python3"
    assert found.cells[0].source.startswith("# ")
    jupytext.write(found, tmp_path / "it.ipynb")
    again = jupytext.writes(jupytext.read(tmp_path / "it.ipynb"), fmt="py:percent")
    assert HEADER.sub("", again) == HEADER.sub("", text)
    kinds = [cell.cell_type for cell in found.cells]
    assert set(kinds) == {"markdown", "code"}
    assert "code code code" not in " ".join(kinds)


@in_one_test("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_its_links(notebook: Path) -> None:
    """Of a file, from where the notebook is: the site's build knows the headings."""
    prose = "\n".join(cell.source for cell in cells(notebook) if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", prose)
    assert links
    assert [link for link in links if not (FOLDER / link).is_file()] == []


@in_one_test("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_cell_prints_what_it_shows(notebook: Path) -> None:
    """Jupyter shows the value of a last expression, too: of a picture's legend, an address in memory."""
    sources = [cell.source for cell in cells(notebook) if cell.cell_type == "code"]
    last = [statement for source in sources if isinstance(statement := ast.parse(source).body[-1], ast.Expr)]
    called = {ast.unparse(one.value.func) if isinstance(one.value, ast.Call) else ast.unparse(one) for one in last}
    assert called <= {"print", "plt.show", "report.check"}


Cells = Mapping[str, Any]  # the names of a notebook after its last cell


def first_training(found: Cells, printed: str) -> None:
    assert found["fp8"][-1] < 0.6 * found["fp8"][0]
    assert found["average"](found["fp8"]) == pytest.approx(found["average"](found["bf16"]), rel=0.02)
    assert found["in_reverse"] != found["bf16"]
    assert found["in_reverse"] == pytest.approx(found["bf16"], rel=0.02)
    assert "42 of 45 GEMMs in FP8" in printed
    assert re.findall(r"^(\S+ \w+): output head", printed, re.M) == [
        f"lm_head {g}" for g in ("fprop", "dgrad", "wgrad")
    ]


def choose_a_policy(found: Cells, printed: str) -> None:
    speeds = re.findall(r"^On sm_90, predicted: GEMMs ([\d.]+) times", printed, re.M)
    assert float(speeds[0]) == 1 < float(speeds[1])
    tuned = found["found"]
    assert 0.2 < tuned.chosen.error <= 0.3
    slopes = [(b.error - a.error) / (b.speedup - a.speedup) for a, b in (tuned.curve[:2], tuned.curve[-2:])]
    assert slopes[0] < slopes[1]  # flat at first, steep at the end
    assert fp8graph.Policy.load(found["folder"] / "policy.toml") == tuned.policy
    errors = [score.error for score in found["scores"]]
    assert errors == sorted(errors, reverse=True)
    assert found["count"] < len(errors) / 4
    assert 0 < sum(gemm.recipe is None for gemm in found["report"].gemms if gemm.fqn != "lm_head")


def lora_on_fp8_checkpoint(found: Cells, printed: str) -> None:
    fp8_run, bf16_run = found["results"]["FP8"], found["results"]["bf16"]
    assert fp8_run["after"] < 0.95 * fp8_run["before"]
    assert fp8_run["after"] == pytest.approx(bf16_run["after"], rel=0.02)
    assert fp8_run["losses"] == pytest.approx(bf16_run["losses"], rel=0.05)
    everything, bf16, fp8 = found["memory"].values()
    assert sum(fp8.values()) < sum(bf16.values()) < sum(everything.values()) / 2
    assert fp8["weights"] < 0.6 * bf16["weights"]
    assert fp8["trained"] == bf16["trained"]
    assert "\n14 weights are, bit for bit, those of the file\n" in printed
    assert "\nthe same logits: True\n" in printed
    in_fp8 = {gemm.name.rpartition(".")[2] for gemm in found["report"].gemms if gemm.recipe is not None}
    assert in_fp8 == {"base_layer"}


def kernels_without_a_gpu(found: Cells, printed: str) -> None:
    assert {kernel.graph for kernel in found["kernels"]} == {"forward", "backward"}
    largest = found["largest"]
    assert {"exp", "quantize_input_2"} <= set(largest.nodes)  # activation and quantization are one kernel
    assert f"def {largest.name}" in printed
    assert "448.0" in largest.source
    assert len(re.findall(r"tl\.store\(.*\n", largest.source)) == 2  # as it is, and transposed
    assert re.search(r"\ncvt\.\S*e4m3x2\S* ", printed)
    assert found["machine"].spills == 0
    assert found["sizes"]["bf16"] < found["sizes"]["delayed"] < found["sizes"]["tensorwise"]
    assert "recipes: mxfp8" in printed


RUNS: dict[str, tuple[int, Callable[[Cells, str], None]]] = {  # the pictures of each, and what it must have found
    "choose_a_policy": (2, choose_a_policy),
    "first_training": (2, first_training),
    "kernels_without_a_gpu": (2, kernels_without_a_gpu),
    "lora_on_fp8_checkpoint": (2, lora_on_fp8_checkpoint),
}


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Files go to a folder of their own, and pictures to none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pyplot.switch_backend("agg")
    monkeypatch.delenv("DISPLAY", raising=False)  # plt.show() warns where a window could open, and shows none
    yield
    pyplot.close("all")


@pytest.mark.usefixtures("apart")
# transformers' own, in PEFT's call; nothing of ours
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.release  # the site's build runs the same cells each day
@pytest.mark.parametrize("name", RUNS)
def test_notebook(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if name == "kernels_without_a_gpu" and not available():
        pytest.skip("triton is not installed, and generates these kernels")
    pictures, check = RUNS[name]
    pyplot.close("all")  # other tests'
    found = runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    check(found, printed)
    assert len(pyplot.get_fignums()) == pictures
    # the site shows what is printed: without paths of the machine that built it, and without colors for a terminal
    assert [path for path in (str(ROOT), str(tmp_path), str(Path.home()), "\x1b") if path in printed] == []
