"""explain, wherever it is called, and on the command line: what stays in high precision and why."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8graph
from fp8graph import offline
from fp8graph.cli import main
from helpers import ALL, first_fast

CONTEXTS: list[Any] = [contextlib.nullcontext, torch.no_grad, torch.inference_mode]


@pytest.mark.slow
def test_explain_a_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "llama", "--seq", "16", "--target", "sm_90"]) == 0
    out, err = capsys.readouterr()
    assert err == (
        "fp8graph: LlamaForCausalLM, cut to 2 layers per stack (num_hidden_layers: 32); --layers N for another number\n"
    )
    assert "0 of 45 GEMMs in FP8" in out  # 16 tokens: quantizing the weights for them takes longer than what they gain
    assert "not faster in FP8: predicted 0." in out
    assert main(["explain", "llama", "--seq", "16", "--target", "sm_90", "--inference"]) == 0
    assert "10 of 15 GEMMs in FP8" in capsys.readouterr().out  # o would not be faster, the host could not launch more
    assert main(["explain", "llama", "--seq", "16", "--target", "cpu"]) == 0
    assert "42 of 45 GEMMs in FP8" in capsys.readouterr().out


@pytest.mark.slow
def test_explain_says_how_many_tokens_it_assumed_and_how_many_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "llama", "--target", "sm_90"]) == 0
    out, err = capsys.readouterr()
    assert "0 of 45 GEMMs in FP8" in out
    first, *_, last = err.splitlines()
    assert first.startswith("fp8graph: LlamaForCausalLM, 1 x 128 tokens assumed (--batch and --seq change that), ")
    assert last == (
        "fp8graph: no GEMM is faster in FP8 with 1 x 128 tokens. From 8 x 128 tokens on, some are: --batch 8."
    )
    assert main(["explain", "llama", "--target", "sm_90", "--batch", "8", "--table"]) == 0
    out, err = capsys.readouterr()
    assert "4 of 45 GEMMs in FP8" in out
    assert err.splitlines()[0].startswith("fp8graph: LlamaForCausalLM, 8 x 128 tokens assumed (")
    assert "faster" not in err
    assert main(["explain", "vit", "--inference", "--layers", "1"]) == 0
    assert capsys.readouterr().err.startswith(
        "fp8graph: ViTForImageClassification, a batch of 1 assumed (--batch changes"
    )


@pytest.mark.slow
def test_a_model_too_narrow_for_fp8_is_said_to_be_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tiny_models import llama_config

    llama_config(1).save_pretrained(tmp_path)
    assert main(["explain", str(tmp_path), "--target", "sm_90"]) == 0
    assert capsys.readouterr().err.endswith(
        "no GEMM is faster in FP8 with 1 x 128 tokens, nor with 128 x 128 tokens.\n"
    )
    assert main(["explain", str(tmp_path)]) == 0  # for a CPU, which has no speed to gain
    assert capsys.readouterr().err == (
        "fp8graph: LlamaForCausalLM, 1 x 128 tokens assumed (--batch and --seq change that)\n"
    )


@pytest.mark.slow
def test_explain_a_config_with_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tiny_models import llama_config

    llama_config(1).save_pretrained(tmp_path)
    policy = tmp_path / "policy.toml"
    policy.write_text('[[rules]]\npattern = "*.down_proj"\nrecipe = "high_precision"\n')
    arguments = ["explain", str(tmp_path), "--inference", "--policy", str(policy), "--json"]
    assert main(arguments) == 0
    gemms = json.loads(capsys.readouterr().out)["graphs"][0]["gemms"]
    assert {g["fqn"] for g in gemms if g["recipe"] is None} == {"model.layers.0.mlp.down_proj"}
    assert main(["explain", str(tmp_path), "--inference", "--graph", "after"]) == 0
    assert "fp8graph.scaled_mm(" in capsys.readouterr().out
    texts = list[str]()
    for stage in ("assign", "score"):  # of a pass that this graph does not need: as the one before left it
        assert main(["explain", str(tmp_path), "--inference", "--graph", stage]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert main(["explain", str(tmp_path), "--inference", "--html", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").exists()


@first_fast("recipe", ["tensorwise", "delayed"])
@first_fast("made_in", CONTEXTS)
@first_fast("read_in", CONTEXTS, others=pytest.mark.release)
def test_lazy_parts_of_a_report_keep_its_grad_mode(made_in: Any, read_in: Any, recipe: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    policy = fp8graph.Policy(default=recipe, min_speedup=0)
    with made_in():
        report = fp8graph.explain(model, torch.zeros(32, 64), policy=policy, target="sm_90")
    (view,) = report.graphs
    assert view.training == (made_in is contextlib.nullcontext)
    assert len(report.gemms) == (5 if view.training else 2)
    with read_in():
        module = view.module
        assert torch.is_grad_enabled() == (read_in is contextlib.nullcontext)
        if offline.available() and recipe == "tensorwise":
            assert any(kernel.name == "extern_kernels._scaled_mm" for kernel in report.kernels)
    assert sum(node.target is torch.ops.fp8graph.scaled_mm.default for node in module.graph.nodes) == len(report.gemms)


@pytest.mark.slow
def test_explain_as_often_as_one_likes() -> None:
    """Dynamo compiles no code more than eight times; 0 of 0 GEMMs came then."""
    for size in range(16, 16 * 13, 16):
        report = fp8graph.explain(nn.Sequential(nn.Linear(size, 32)), torch.zeros(16, size), policy=ALL)
        assert all(gemm.recipe for gemm in report.gemms)
        assert len(report.gemms) == 2


@pytest.mark.slow
def test_a_page_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "gpt2", "--seq", "16", "--inference", "--json", "--html", str(tmp_path / "r.html")]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["graphs"][0]["gemms"]) == 13
    assert err.endswith(f"fp8graph: wrote {tmp_path / 'r.html'}\n")
    assert (tmp_path / "r.html").exists()
