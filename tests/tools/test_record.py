"""fp8graph bench record: the models, their FLOPs and text, the contenders, and the file of one run."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import fp8graph
from fp8graph import hardware
from fp8graph.cli import main
from fp8graph.recipes import GEMMS, resolve_recipe
from fp8graph.tools import record
from fp8graph.tools.record import contenders, forms, machine, workloads
from fp8graph.tools.record.workloads import WORKLOADS

CPU = torch.device("cpu")
LLAMA = WORKLOADS["llama-3-8b"]


# --- workloads ------------------------------------------------------------------------------------------------------


def test_flops_are_those_of_both_ways_of_counting() -> None:
    """Llama-3-8B at 8,192 tokens: 57.9 and 51.5 GFLOP per token; of a mixture the experts that a token visits."""
    assert LLAMA.multiplied() == 8_030_261_248 - 128_256 * 4096
    flop = LLAMA.flop_per_token()
    assert flop["titan"] == 6 * 7_504_924_672 + 12 * 32 * 4096 * 8192
    assert flop["titan"] - flop["megatron"] == 6 * 32 * 4096 * 8192
    experts = 3 * 2048 * 1024
    other = 4 * 2048 * 2048 + 4 * 2048 + 64 * 2048  # attention, norms (of q and k, too), router
    assert WORKLOADS["olmoe-1b-7b"].multiplied() == 16 * (8 * experts + other) + 2048 + 50304 * 2048
    small = WORKLOADS["llama-3.2-1b"]
    assert small.multiplied() == 1_235_814_400  # the head multiplies by the embedding


def test_the_memory_decides_how_a_model_is_trained() -> None:
    """An H200 trained Llama-3-8B with AdamW in 101,496 MiB at most."""
    modes = {gib: str(LLAMA.mode(gib * 1024)) for gib in (24, 48, 80, 140)}
    assert modes == {24: "None", 48: "SGD, blocks checkpointed", 80: "AdamW, blocks checkpointed", 140: "AdamW"}
    assert LLAMA.needs_mib(workloads.MODES[0]) > 101_496
    assert str(WORKLOADS["llama-3.2-1b"].mode(32 * 1024)) == "AdamW, blocks checkpointed"  # an RTX 5090


def test_text_is_fresh_in_each_step() -> None:
    tokens, said = workloads.text(200, 5000)
    assert tokens.shape == (5000,)
    assert int(tokens.max()) == 199  # words beyond the vocabulary share the last number
    assert not torch.equal(tokens[:1000], tokens[1000:2000])
    assert "standard library" in said
    with pytest.raises(fp8graph.ConfigError, match="Train for fewer steps"):
        workloads.text(1000, 10**9)


# --- contenders -----------------------------------------------------------------------------------------------------


def test_a_missing_library_or_gemm_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert contenders.why_not("Transformer Engine delayed", CPU) == "transformer_engine is not installed"
    here = hardware.from_target("sm_90")
    monkeypatch.setattr(contenders.hardware, "of_device", lambda _device: here)
    reasons = {name: contenders.why_not(name, CPU) for name in contenders.CONTENDERS if "torch" not in name}
    assert [name for name, reason in reasons.items() if "is emulated" in reason] == ["mxfp8"]


@pytest.mark.parametrize(("name", "head", "fast"), [("head in FP8", True, False), ("fast accumulation", False, True)])
def test_choices_that_change_numbers_are_contenders_of_their_own(name: str, head: bool, fast: bool) -> None:
    model = workloads.tiny(LLAMA).build(CPU)
    backend = contenders.CONTENDERS[f"tensorwise, {name}"](model, "eager")
    assert backend is not None
    model(torch.arange(32)[None]).logits.float().sum().backward()
    assert {g.recipe is not None for g in backend.report.gemms if g.fqn == "lm_head"} == {head}
    recipe: Any = resolve_recipe(cast(Any, backend.policy.default))
    assert all(recipe.fast_accum(gemm) for gemm in GEMMS) == fast


def test_transformer_engine_takes_the_same_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its interface, which is made up here: it needs a GPU. Weights are copied, and the head stays."""
    regions: list[Any] = []

    class Linear(nn.Linear):
        def __init__(self, inputs: int, outputs: int, bias: bool, params_dtype: torch.dtype, device: Any) -> None:
            super().__init__(inputs, outputs, bias=bias, dtype=params_dtype, device=device)

    class Autocast:
        def __init__(self, **settings: Any) -> None:
            regions.append(settings)

        def __enter__(self) -> None: ...
        def __exit__(self, *_: Any) -> None: ...

    modules = {"transformer_engine": {}, "transformer_engine.pytorch": {"Linear": Linear, "autocast": Autocast},
               "transformer_engine.common": {"recipe": SimpleNamespace(DelayedScaling=lambda: "delayed")}}  # fmt: skip
    for name, values in modules.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["transformer_engine"].pytorch = sys.modules["transformer_engine.pytorch"]  # pyright: ignore
    model = workloads.tiny(LLAMA).build(CPU)
    ids = torch.arange(8)[None]
    expected = model(ids).logits
    contenders.CONTENDERS["Transformer Engine delayed"](model, "eager")
    assert torch.equal(model(ids).logits, expected)
    assert sum(type(m) is Linear for m in model.modules()) == 14
    assert type(model.lm_head) is nn.Linear
    assert regions == [{"enabled": True, "recipe": "delayed"}]


# --- the file -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("record") / "record.json"
    names = ["bf16", "tensorwise", "Transformer Engine delayed"]
    arguments = [part for name in names for part in ("--only", name)]
    command = [
        "bench",
        "record",
        "--tiny",
        "--model",
        "llama-3-8b",
        "--steps",
        "5",
        "--out",
        str(path),
        "--entity",
        "me",
    ]
    assert main([*command, *arguments]) == 0
    return path


def test_a_record_has_all_that_its_figures_rest_on(tiny_record: Path) -> None:
    written = json.loads(tiny_record.read_text(encoding="utf-8"))
    assert written["tiny"]
    assert written["machine"]["torch"] == torch.__version__
    bf16, fp8, absent = written["rows"]
    assert (absent["contender"], absent["skipped"]) == (
        "Transformer Engine delayed",
        "transformer_engine is not installed",
    )
    for row in (bf16, fp8):
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["step_s"])
        assert len(row["losses"]) == len(row["steps_s"]) == 5
        assert row["losses"][0] == pytest.approx(6.24, abs=0.1)  # ln 512
        assert row["flop_per_token"].keys() == {"titan", "megatron"}
        assert {
            "peak_mib",
            "resident_mib",
            "watts",
            "sm_mhz",
            "peak_flops",
            "compile_s",
            "text",
            "optimizer",
        } < row.keys()
    assert bf16["losses"][0] == pytest.approx(fp8["losses"][0], abs=0.02)  # the same weights and tokens
    assert fp8["gemms_in_fp8"] == 42
    assert [path.name for path in tiny_record.parent.glob("*.part")] == []


def test_the_same_run_in_the_form_of_torchtitan(tiny_record: Path) -> None:
    """Entity, model, hardware, configuration and versions, under the name that its benchmarks ask for."""
    (path,) = tiny_record.parent.glob("*.md")
    assert path.name.startswith("llama-3-8b, tiny_")
    assert path.name.endswith("_me.md")
    text = path.read_text(encoding="utf-8")
    for heading in ("Models", "Hardware", "Configuration", "Results", "Versions and Dates"):
        assert f"### {heading}\n" in text
    assert "measured by me" in text
    assert f"| torch | {torch.__version__} |" in text
    assert "left out: transformer_engine is not installed" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorwise", "delayed", "torchao tensorwise"])
def test_checkpointed_blocks_train_alike(name: str) -> None:
    """Whoever has less memory than an H200 trains so: blocks run again in backward, and the losses stay."""
    modes = workloads.MODES[:2]
    assert [mode.checkpointed for mode in modes] == [False, True]
    rows = [record.train(workloads.tiny(LLAMA), name, CPU, mode, steps=5, compiler="eager") for mode in modes]
    assert rows[0]["losses"] == pytest.approx(rows[1]["losses"], abs=0.01)
    assert [row["optimizer"] for row in rows] == ["AdamW", "AdamW, blocks checkpointed"]


def test_ratios_are_of_the_same_model() -> None:
    """On a board that is known: its share by torchtitan's way of counting."""
    row = {"model": "a", "contender": "bf16", "tokens_per_s": 10_767.0, "step_s": 1, "compile_s": 1, "losses": [1.0],
           "flop_per_token": LLAMA.flop_per_token(), "peak_flops": 989e12, "peak_mib": 85_132.0, "watts": 691.5,
           "sm_mhz": None}  # fmt: skip
    rows = [row, row | {"contender": "tensorwise", "tokens_per_s": 14_419.0}, row | {"model": "b", "tokens_per_s": 1.0}]
    titles = dict(zip(forms.COLUMNS, forms.cells(rows[1], rows), strict=True))
    assert titles["times bf16"] == "1.339"
    assert (titles["TFLOP/s (titan)"], titles["of the board"], titles["TFLOP/s (Megatron)"]) == ("835", "84%", "742")
    assert (titles["peak GiB"], titles["W"], titles["SM MHz"]) == ("83.1", "692", "")
    assert forms.cells(rows[2], rows)[2] == "1.000"


def test_a_contender_that_fails_is_a_row_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("does not compile")

    monkeypatch.setitem(contenders.CONTENDERS, "tensorwise", broken)  # pyright: ignore[reportArgumentType]
    names = ["tensorwise", "bf16"]
    found = record.record(tmp_path / "r.json", CPU, models=["llama-3-8b"], contenders=names, steps=4, is_tiny=True)
    failed, done = found["rows"]
    assert failed["failed"] == "RuntimeError: does not compile"
    assert done["step_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "tensorwize"], "there is no contender 'tensorwize'. Did you mean 'tensorwise'?"),
        (["--model", "llama"], "there is no model 'llama'."),
        (["--steps", "3"], "--steps 3: the first 3 are not timed; give more."),
        (["--out", "nosuch/r.json"], "cannot be written"),
        (["--out", "r.txt"], "must end in .json"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "record", "--tiny", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("commit", "message"),
    [
        (("1234567-dirty", ["passes/a.py"]), "changed since commit 1234567: passes/a.py. Commit it"),
        (("", []), "names no commit"),
    ],
)
def test_a_tree_that_no_commit_reproduces_is_refused(
    commit: Any, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "commit", lambda: commit)
    assert main(["bench", "record", "--out", str(tmp_path / "r.json")]) == 2
    assert message in (error := capsys.readouterr().err)
    assert "--any-tree" in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_nothing_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "record", "--any-tree", "--out", str(tmp_path / "r.json")]) == 2
    assert "nothing to measure" in capsys.readouterr().err


def test_a_boards_watts_and_clocks_are_sampled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool, printed = tmp_path / "nvidia-smi", tmp_path / "printed"
    lines = r"100.0, 1500\n[N/A], 1\n300.0, 1700\n200.0, 1600\n"
    tool.write_text(f"#!/bin/sh\nprintf '{lines}'; touch {printed}; exec sleep 60\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with machine.sampled() as board:
        while not printed.exists():
            time.sleep(0.01)
    assert board.medians() == {"watts": 200.0, "sm_mhz": 1600.0}
    assert board.medians(last=2) == {"watts": 250.0, "sm_mhz": 1650.0}


def test_results_and_pages_leave_a_tree_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second benchmark of a session is of the same code: the first one's results differ, and nothing else."""
    status = [" M benchmarks/results/checkpointing.json", " M docs/measurements.md", " M README.md"]

    def git(command: str, *_: str) -> str:
        return {"ls-files": "fp8graph/version.py", "status": "\n".join(status), "describe": "1234567"}[command]

    monkeypatch.setattr(machine, "_git", git)
    assert machine.commit() == ("1234567", [])
    status.append(" M benchmarks/contenders.py")
    assert machine.commit() == ("1234567-dirty", ["benchmarks/contenders.py"])
