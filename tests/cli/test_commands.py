"""The command line, as a stranger meets it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fp8graph
from fp8graph.cli import COMMANDS, main, missing, parser
from fp8graph.words import extras
from fp8graph.words.extras import EXTRAS, install


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "nosuch"], "no file or folder 'nosuch', and transformers"),
        (["explain", "lama"], "no model type 'lama'. Did you mean 'llama'?"),
        (["explain", "nosuch.json"], "nosuch.json: no such file or folder."),
        (["explain", "folder/nosuch"], "folder/nosuch: no such file or folder."),
        (["explain", "llama", "--class", "NoSuch"], "has no class 'NoSuch'"),
        (
            ["explain", "bert", "--class", "BertForMaskedLMM"],
            "no class 'BertForMaskedLMM'. Did you mean 'BertForMaskedLM'",
        ),
        (
            ["export", "nosuch", str(Path(fp8graph.__file__).parent)],
            "fp8graph: exists. Choose another folder, or pass --overwrite to replace it.",
        ),
        (["explain", "llama", "--class", "AutoModelForImageClassification"], "cannot build AutoModelForImageClass"),
        (["plan", "t5", "--mesh", "dp=2"], "plan predicts causal language models, and T5ForConditionalGeneration"),
        pytest.param(
            ["explain", "llama", "--seq", "16", "--graph", "nosuch"],
            "no stage 'nosuch'. Stages here: before, after, ",
            marks=pytest.mark.slow,
        ),
        (["explain", "llama", "--html", "nosuch/page.html"], "nosuch/page.html: cannot be written"),
        (["tune", "nosuch", "--text", "x.txt", "--out", "nosuch/p.toml"], "nosuch/p.toml: cannot be written"),
        (["tune", "nosuch", "--text", "x.txt", "--plot", "p.docx"], "p.docx: must end in .png, .svg, .pdf."),
        (["explain", "llama", "--target", "nosuch.json"], "nosuch.json: not a calibration file"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err.splitlines()
    assert message in error[-1]
    assert len(error[-1]) < 400
    assert all("cut to 2 layers" in line for line in error[:-1])


WRONG = {
    "--recipe foo": "argument --recipe: unknown recipe 'foo'. Available: 'tensorwise', ",
    "--recipe rowise": "argument --recipe: unknown recipe 'rowise'. Did you mean 'rowwise'?",
    "--recipe tensorwise bf16": "argument --recipe: unknown recipe 'bf16'. For no FP8: 'high_precision'",
    "--target h100": "argument --target: target must be 'cpu', a GPU like 'sm_90' or 'gfx942', or a calib",
    "--target sm_999": "argument --target: target: there is no 'sm_999'. Known: sm_70, ",
    "--policy no.toml": "argument --policy: no.toml: no such file or folder",
    "--policy rowwise": "argument --policy: rowwise: no such file or folder. Did you mean --recipe rowwise?",
}


def test_wrong_recipes_targets_and_policies_are_errors_before_torch_is_imported() -> None:
    """Of an installed package, or an editable one: torch takes tens of seconds to be read from a slow disk."""
    commands = ("demo", "explain llama", "plan llama --mesh dp=2", "tune a --text b", "export a b", "bench")
    lines = [f"{command} {wrong}" for command in commands for wrong in WRONG if _takes(command, wrong)]
    script = f"""
import sys
from fp8graph.cli import main
for line in {lines}:
    try:
        main(line.split())
    except SystemExit as done:
        assert done.code == 2
    assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    errors = [line for line in done.stderr.splitlines() if ": error: " in line]
    assert len(errors) == len(lines)
    for line, error in zip(lines, errors, strict=True):
        (wrong,) = re.findall("--(?:recipe|target|policy) .*", line)
        assert WRONG[wrong] in error


@pytest.mark.parametrize("number", ["abc", "0", "-3", "1.5"])
def test_a_wrong_number_is_shown(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "llama", f"--seq={number}"])
    message = f"argument --seq: must be a whole number of at least 1, not {number!r}\n"
    assert capsys.readouterr().err.endswith(message)


def _takes(command: str, wrong: str) -> bool:
    option, *values = wrong.split()
    name = command.split()[0]
    takes = {each.name: each.arguments for each in COMMANDS}[name].get(option)
    return takes is not None and (len(values) == 1 or "nargs" in takes)


def test_recipes_and_targets_that_exist_are_taken() -> None:
    line = ["explain", "llama", "--recipe", "rowwise_with_gw_hp", "--target", "sm_90a"]
    assert (parser().parse_args(line).recipe, parser().parse_args(line).target) == ("rowwise_with_gw_hp", "sm_90a")
    assert parser().parse_args(["plan", "llama", "--mesh", "dp=2", "--target", "a.json"]).target == "a.json"
    assert parser().parse_args(["tune", "a", "--text", "b", "--recipe", "mxfp8", "delayed"]).recipe[1] == "delayed"


@pytest.mark.parametrize(("package", "extra"), [("rich", "cli"), ("transformers", "hf")])
def test_a_missing_extra(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(*_: Any) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr("fp8graph.tools.doctor.machine", absent)
    assert main(["doctor"]) == 2
    assert f'{package} is missing. Run: pip install "fp8graph[{extra}]"' in capsys.readouterr().err


def test_a_file_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "report.html")

    monkeypatch.setattr("fp8graph.tools.doctor.machine", full)
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == "fp8graph: [Errno 28] No space left on device: 'report.html'\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"fp8graph {fp8graph.__version__}\n"


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fp8graph.tools.doctor.machine", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "\nfp8graph: interrupted\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nosuch"],
        ["demo", "--steps", "0"],
        ["demo", "--compiler", "x"],
        ["plan", "llama"],
        ["explain", "llama", "--graph", "x", "--table"],
    ],
)
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: fp8graph" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["explian", "llama"], "explain"),
        (["inpsect", "folder"], "inspect"),
        (["bench", "recrod"], "record"),
        (["demo", "--compiler", "inductr"], "inductor"),
        (["completion", "bsh"], "bash"),
        (["nothing-like-it"], None),
    ],
)
def test_the_command_or_choice_that_was_meant_is_named(
    arguments: list[str], meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    error = capsys.readouterr().err.splitlines()[-1]
    assert "invalid choice: " in error
    assert error.endswith(f" Did you mean {meant!r}?") if meant else "mean" not in error


def test_help_is_quick() -> None:
    """Of an installed package: neither torch nor rich is imported, nor what looks for installed packages."""
    script = """
import sys
before = set(sys.modules)
from fp8graph.cli import parser
parser().format_help()
slow = {"torch", "rich", "transformers", "numpy", "shtab", "importlib.metadata"} & set(sys.modules) - before
print(sorted(slow))
"""
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout in ("[]\n", "['importlib.metadata']\n")  # an editable install is asked for


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in (command.name for command in COMMANDS):
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: fp8graph {name} ")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "fp8graph" in script
    assert "--min-speedup" in script


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a shell does it: the words of a line are given, and what could follow is asked for."""
    assert main(["completion", "bash"]) == 0
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    ask = """
source completion
COMP_WORDS=(fp8graph explain llama --ta) COMP_CWORD=3
_shtab_fp8graph
echo "${COMPREPLY[@]}"
"""
    done = subprocess.run(["bash", "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == ["--table", "--target"]


def test_the_doctor_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "shtab" else object())
    assert missing() == [("shtab", 'not installed. Run: pip install "fp8graph[cli]"')]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert missing() == [("optional packages", "all installed")]
    assert install("nosuch") is None


def test_a_checkout_that_is_not_installed_names_itself(tmp_path: Path) -> None:
    """No index has fp8graph, so that pip would find none of this name, or a stranger's."""
    (tmp_path / "extras.py").write_bytes(Path(extras.__file__).read_bytes())
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import extras; print(extras.install('rich'))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f'pip install -e "{tmp_path.parents[1]}[cli]"\n'


def test_extras_bring_what_is_said_of_them() -> None:
    with (Path(fp8graph.__file__).parents[1] / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    for package, extra in EXTRAS.items():
        assert any(re.match(rf"{package}\b", requirement) for requirement in extras[extra]), package


@pytest.mark.slow
def test_a_closed_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ``fp8graph explain llama | head``: no traceback."""
    script = "import sys; from fp8graph.cli import main\nfrom fp8graph.tools import doctor\ndef machine():\n"
    script += "  raise BrokenPipeError\ndoctor.machine = machine\nsys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_plan_gets_policy_target_and_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def traced(_model: Any, _inputs: Any, **settings: Any) -> None:
        given.update(settings)
        raise fp8graph.ConfigError("seen")

    monkeypatch.setattr("fp8graph.cli._traced", traced)
    policy = tmp_path / "policy.toml"
    policy.write_text('default = "rowwise"')
    assert main(["plan", "llama", "--mesh", "dp=8", "--policy", str(policy), "--target", "sm_100"]) != 0
    assert (given["policy"], given["target"], given["recipe"]) == (policy, "sm_100", None)
