"""The tree that explain prints."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from rich.console import Console

import fp8graph
from fp8graph import cli
from fp8graph.report.tree import Notes, tree
from tiny_models import TINY


def printed(report: fp8graph.Report, *, color: bool = False) -> tuple[list[str], list[str]]:
    """The tree's lines and its reasons."""
    notes, out = Notes(), io.StringIO()
    Console(file=out, width=200, force_terminal=color, color_system="standard" if color else None).print(
        tree(report, "Model", notes)
    )
    return out.getvalue().splitlines(), notes.lines()


def of_family(name: str, **settings: Any) -> fp8graph.Report:
    with torch.device("meta"):
        model = TINY[name].build(2).bfloat16()
    ids = torch.zeros(2, 16, dtype=torch.long)
    return fp8graph.explain(model, input_ids=ids, labels=ids, training=True, **settings)


@pytest.mark.slow
def test_layers_are_a_branch_and_reasons_are_said_once(llama: fp8graph.Report) -> None:
    lines, reasons = printed(llama)
    assert [line.rstrip() for line in lines] == [
        "Model",
        "├── model.layers.* (2)",
        "│   ├── self_attn  CPU flash attention  high precision [2]",
        "│   │   ├── q_proj  32 x 64 x 64  tensorwise",
        "│   │   ├── k_proj  32 x 32 x 64  tensorwise",
        "│   │   ├── v_proj  32 x 32 x 64  tensorwise",
        "│   │   └── o_proj  32 x 64 x 64  tensorwise",
        "│   └── mlp",
        "│       ├── gate_proj  32 x 128 x 64  tensorwise",
        "│       ├── up_proj    32 x 128 x 64  tensorwise",
        "│       └── down_proj  32 x 64 x 128  tensorwise",
        "└── lm_head  32 x 256 x 64  high precision [1]",
    ]
    assert reasons == [
        "[1] output head: the loss reads its output",
        '[2] attention stays in high precision unless a rule with op="attention" asks for it',
    ]


@pytest.fixture(scope="module")
def llama() -> fp8graph.Report:
    return of_family("llama", target="cpu")


@pytest.mark.slow
def test_gemms_of_several_kinds_are_named() -> None:
    policy = fp8graph.Policy(
        [fp8graph.Rule("*.0.mlp.down_proj", "tensorwise", wgrad=None), fp8graph.Rule("*.q_proj", "mxfp8")]
    )
    lines, reasons = printed(of_family("llama", target="cpu", policy=policy))
    (down,) = [line for line in lines if "down_proj" in line and "wgrad" in line]
    assert down.split("down_proj", 1)[1].split() == (
        "32 x 64 x 128 fprop, dgrad tensorwise wgrad high precision [2]".split()
    )
    (q,) = [line for line in lines if "q_proj" in line]
    assert q.endswith("mxfp8, emulated [1]")
    assert reasons[0].startswith("[1] rule")


class Blocks(torch.nn.Module):
    """Layers of one name with other sizes, and no gradient of the input."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (torch.nn.Sequential(OrderedDict(fc=torch.nn.Linear(64, 64))) for _ in range(3))
        self.layers = torch.nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_module_has_one_line() -> None:
    """Layer 0 has no dgrad, and a rule names layer 1: three kinds, each with fprop's shape."""
    policy = fp8graph.Policy([fp8graph.Rule("layers.1.fc", None), fp8graph.Rule("*", "tensorwise")])
    report = fp8graph.explain(Blocks(), torch.zeros(32, 64), policy=policy, target="cpu", training=True)
    lines, _ = printed(report)
    assert [line.strip(" ├└─│") for line in lines[1:]] == [
        "layers",
        "0.fc  32 x 64 x 64  tensorwise",
        "1.fc  32 x 64 x 64  high precision [1]",
        "2.fc  32 x 64 x 64  tensorwise",
    ]


@pytest.mark.slow
def test_every_site_has_a_line() -> None:
    report = of_family("mixtral")
    lines, _ = printed(report)
    text = "\n".join(lines)
    assert {gemm.fqn.rpartition(".")[2] for gemm in report.gemms} - set(text.replace("[1]", "").split()) == set()


@pytest.mark.slow
def test_colors(llama: fp8graph.Report) -> None:
    lines, _ = printed(llama, color=True)
    (q,) = [line for line in lines if "q_proj" in line]
    assert "\x1b[32mtensorwise" in q
    (head,) = [line for line in lines if "lm_head" in line]
    assert "\x1b[2mhigh precision" in head


@pytest.mark.slow
def test_a_pipe_gets_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "llama", "--seq", "16", "--inference", "--recipe", "mxfp8", "--target", "sm_90"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) > 80
    assert "\x1b" not in out
    assert all(line == line.rstrip() for line in out.splitlines())


def test_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not cli._has_rich()
    error = capsys.readouterr().err
    assert error == (
        'fp8graph: rich is missing: a table in place of the tree of layers. Run: pip install "fp8graph[cli]"\n'
    )
