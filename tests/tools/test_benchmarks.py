"""benchmarks/: runs that lose nothing, what is timed and counted, and the two attentions."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor.compile_fx import compile_fx
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import attention, compile_time, contenders, first_hour, measure, plots, report, tables
from benchmarks import blocks as tuned
from benchmarks.records import Run
from benchmarks.sections import host, limits
from fp8graph import offline
from generated import generate, quantize_after, quantize_inputs, triton_kernels

ROOT = Path(__file__).parents[2]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tiny(path: Path, **settings: Any) -> Run:
    return Run(path, tiny=True, compiler="eager", **settings)


# --- a run ----------------------------------------------------------------------------------------------------------


def test_cheap_sections_run(tmp_path: Path) -> None:
    assert first_hour.main(["facts", "sweep", "--tiny", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.jsonl")
    first, *lines = lines_of(path)
    assert first["section"] == "run"
    assert first["tiny"]
    assert first["machine"]["torch"] == torch.__version__
    assert [line for line in lines if "failed" in line] == []
    swept = [line for line in lines if "contender" in line]
    assert [line["contender"] for line in swept] == ["bf16", "tensorwise", "delayed", "rowwise"]
    assert all(line["wall_ms"] > 0 and line["host_ms"] > 0 for line in swept)
    assert [set(line["in_fp8"]) for line in swept] == [set(), *[{"fprop", "dgrad", "wgrad"}] * 3]
    assert [line["section"] for line in lines if "section_s" in line] == ["facts", "sweep"]
    assert report.load(tmp_path) == []  # a tiny run is no result


@pytest.mark.slow
def test_the_script_of_the_next_fifteen_minutes_runs(tmp_path: Path) -> None:
    """All of it in small: each contender that it names is measured, and nothing fails or runs out of time."""
    script = ROOT / "benchmarks" / "fifteen_minutes.sh"
    assert len(script.read_text(encoding="utf-8")) <= 2000
    environment = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable}
    subprocess.run(["bash", str(script), "tiny"], cwd=ROOT, env=environment, check=True, capture_output=True)
    runs = [lines_of(path) for path in sorted(tmp_path.glob("*.jsonl"))]
    assert [list(run[0]["sections"]) for run in runs] == [
        ["table", "layers"], ["decode", "smallest"], ["linears"], ["layers"],
    ]  # fmt: skip
    for first, *lines in runs:
        assert [line for line in lines if {"failed", "stopped", "skipped"} & line.keys()] == []
        for section in first["sections"]:
            timed = {line["contender"] for line in lines if line["section"] == section and "contender" in line}
            possible = set(first_hour.OF_SECTION[section](tiny(tmp_path / "none.jsonl")))
            assert timed >= possible & {*first["only"]}
        assert {*first["only"]} <= {line.get("contender") for line in lines}
    whole = {line["contender"]: line for line in runs[0] if "tokens_per_s" in line}
    assert len({line["text"] for line in whole.values()}) == 1
    assert all(line["losses"][-1] < line["losses"][0] for line in whole.values())  # of fresh text
    assert whole["tensorwise"]["gemms_in_fp8"] == whole["tensorwise"]["gemms"] - 3  # the head's
    bounds = {line["scaling"]: line for line in runs[0] if "R" in line}
    assert [*bounds] == ["tensor", "row"]  # of the recipes that are measured, from the same rounds
    rounds = {line["contender"]: line["wall_ms"] for line in runs[0] if line.get("measure") == "rounds"}
    assert bounds["row"]["R"] == rounds["GEMMs alone, bf16"] / rounds["GEMMs alone, row"]
    searched = [line for line in runs[1] if line["section"] == "smallest" and line.get("measure") == "rounds"]
    assert {line["hidden"] for line in searched} == {768, 1536}


@pytest.mark.slow
def test_a_checkpoint_is_decoded(tmp_path: Path) -> None:
    """The model before it, which --only need not name, writes it, and its linears multiply what it stores."""
    names = ["--only", "bf16", "--only", "rowwise, FP8 checkpoint"]
    assert first_hour.main(["decode", "--tiny", "--out", str(tmp_path), *names]) == 0
    (path,) = tmp_path.glob("*.jsonl")
    lines = lines_of(path)
    assert [line for line in lines if "failed" in line or "stopped" in line] == []
    decoded = {line["contender"]: line for line in lines if "checksum" in line}
    assert [*decoded] == ["bf16", "rowwise", "rowwise, FP8 checkpoint"]
    assert [line.get("gemms_in_fp8") for line in decoded.values()] == [None, 7, 7]
    assert len({line["checksum"] for line in decoded.values()}) == 3  # a checkpoint's inputs have other scales


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gem"], "there is no section 'gem'. Did you mean 'gemm'?"),
        (["layers:long"], "layers:long: the seconds of a section are a number"),
        (["layers", "--only", "torchao"], "no section here has a contender 'torchao'. "),
        (["layers", "--only", "rowwise, FP8 checkpoint"], "no section here has a contender"),  # decode has it
    ],
)
def test_arguments_that_would_measure_nothing_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        first_hour.main([*arguments, "--tiny"])
    assert message in capsys.readouterr().err


def test_a_changed_tree_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fp8graph.tools.record.machine.commit", lambda: ("1234567-dirty", ["passes/lower.py"]))
    with pytest.raises(SystemExit):
        first_hour.main(["host", "--out", str(tmp_path)])
    assert "changed since commit 1234567: passes/lower.py. Commit it, or pass --any-tree" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_contenders_that_were_never_reached_come_first() -> None:
    run = Run()
    for names in (first_hour.OF_SECTION["linears"](run), first_hour.OF_SECTION["layers"](run)):
        assert [*names][:3] == ["bf16", "tensorwise", "torchao tensorwise"]
    sequences = [(case.batch, case.contender) for case in first_hour.inference.cases(run)]
    assert sequences[:3] == [(32, "bf16"), (32, "tensorwise"), (32, "delayed")]


def test_failed_contender_does_not_stop_the_others(tmp_path: Path) -> None:
    """One contender that does not compile, one option that Inductor lacks; the others are measured."""
    run = tiny(tmp_path / "run.jsonl")

    def broken(_model: nn.Module) -> Any:
        raise RuntimeError("no such compiler")

    chosen = {
        "bf16": contenders.bf16(run),
        "broken": broken,
        "unknown option": contenders.fp8(run, "tensorwise", inductor_options={"no_such_option": 1}),
        "tensorwise": contenders.fp8(run, "tensorwise"),
    }
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    contenders.compare(run, "linears", lambda: nn.Linear(32, 32, bias=False, dtype=torch.bfloat16), x, chosen)
    lines = lines_of(tmp_path / "run.jsonl")
    failed = {line["contender"]: line for line in lines if "failed" in line}
    assert failed.keys() == {"broken", "unknown option"}
    assert failed["broken"]["failed"] == "RuntimeError: no such compiler"
    assert "raise RuntimeError" in "\n".join(failed["broken"]["traceback"])
    assert str(ROOT) not in (tmp_path / "run.jsonl").read_text(encoding="utf-8")
    assert "Inductor has no option 'no_such_option'" in failed["unknown option"]["failed"]
    assert [line["contender"] for line in lines if line.get("measure") == "rounds"] == ["bf16", "tensorwise"]


def test_a_contender_that_fails_leaves_no_memory_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model was freed inside the next one's measurement, whose resident memory was -2,148 MiB."""
    alive: weakref.WeakSet[nn.Linear] = weakref.WeakSet()
    monkeypatch.setattr("fp8graph.tools.record.machine.allocated", lambda: sum(m.weight.nbytes for m in list(alive)))
    monkeypatch.setattr(contenders, "allocated", lambda: sum(m.weight.nbytes for m in list(alive)))

    class Fails(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, _x: Any) -> Any:
            raise RuntimeError("does not compile")

    def made(size: int) -> nn.Linear:
        model = nn.Linear(256, size, bias=False)
        alive.add(model)
        return model

    sizes = iter((256, 4096, 256))
    run = tiny(tmp_path / "run.jsonl")
    chosen = {"bf16": lambda m: (m, None), "fails": lambda m: (Fails(m), None), "next": lambda m: (m, None)}
    x = torch.randn(4, 256, requires_grad=True)
    contenders.compare(run, "layers", lambda: made(next(sizes)), x, chosen)
    alone = {x["contender"]: x["resident_mib"] for x in lines_of(run.path) if x.get("measure") == "alone"}  # pyright: ignore
    assert alone == {"bf16": 0.25, "next": 0.25}


def test_a_step_that_fails_in_its_turn_is_one_line(tmp_path: Path) -> None:
    run = Run(tmp_path / "run.jsonl")
    run.begin_section(left=1)

    def broken() -> None:
        raise RuntimeError("broken")

    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in ("bf16", "delayed", "rowwise")}
    medians = contenders.in_turns(run, "linears", {**steps, "tensorwise": broken})
    lines = lines_of(tmp_path / "run.jsonl")
    assert [line.get("failed") for line in lines] == ["RuntimeError: broken", None, None, None]
    assert [len(line["rounds_ms"]) for line in lines[1:]] == [contenders.ROUNDS] * 3
    assert medians == {line["contender"]: line["wall_ms"] for line in lines[1:]}
    orders = {tuple(calls[start : start + 15 : 5]) for start in range(0, 15 * contenders.ROUNDS, 15)}
    assert len(orders) > 3  # whoever came first was always bf16


def test_every_ablation_is_a_backend() -> None:
    made = contenders.ablations(Run(), "tensorwise")
    backends = [compile(nn.Linear(4, 4))[1] for compile in made.values()]
    assert len({repr((b.policy, b.settings, b.settings.inductor)) for b in backends if b is not None}) == 9
    assert len(made) == 9


def test_a_section_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    def broken(_run: Run) -> None:
        raise ValueError("broken")

    def whole(run: Run) -> None:
        run.write("whole", limit=torch._dynamo.config.recompile_limit)

    sections = {"broken": broken, "whole": whole}
    first_hour.run_sections(tiny(tmp_path / "run.jsonl"), dict.fromkeys(sections), sections)
    lines = lines_of(tmp_path / "run.jsonl")
    assert [line["failed"] for line in lines if "failed" in line] == ["ValueError: broken"]
    assert [line["limit"] for line in lines if "limit" in line] == [256]  # contenders share one forward


def test_the_budget_stops_a_run(tmp_path: Path) -> None:
    """In the middle of a measurement that does not end, and before every section after it."""

    def endless(run: Run) -> None:
        run.write("endless", number=1)
        while True:
            time.sleep(0.01)

    sections = {"endless": endless, "after": lambda run: run.write("after", number=2)}
    start = time.monotonic()
    first_hour.run_sections(tiny(tmp_path / "run.jsonl", budget=0.3), dict.fromkeys(sections), sections)
    assert time.monotonic() - start < 5
    found = [
        {k: v for k, v in line.items() if k in ("number", "failed", "stopped")}
        for line in lines_of(tmp_path / "run.jsonl")
    ]
    assert found == [
        {"number": 1}, {"failed": "OutOfTime: the budget of 0.3 s is over"}, {}, {"stopped": "the run's time is over"},
    ]  # fmt: skip


def test_sections_share_the_budget() -> None:
    run = Run(budget=100)
    run.begin_section(left=4)
    assert not run.late()
    assert not run.late(0.5)
    assert run._section[1] == pytest.approx(25, abs=1)
    run.begin_section(left=3, seconds=60)
    assert run.left == pytest.approx(60, abs=1)
    run = Run(budget=0)
    run.begin_section(left=1, seconds=60)
    assert run.late()  # the run's end is a section's, too


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_what_needs_one_is_named(tmp_path: Path) -> None:
    first_hour.run_sections(Run(tmp_path / "run.jsonl"), dict.fromkeys(["gemm", "train"]))
    assert [(x["section"], x["skipped"]) for x in lines_of(tmp_path / "run.jsonl")] == [
        ("gemm", "no GPU with FP8 here"), ("train", "no GPU with FP8 here"),
    ]  # fmt: skip


# --- measuring ------------------------------------------------------------------------------------------------------


def test_kernels_of_a_profile() -> None:
    """Per call, by kind, the longest first; ranges that span kernels are not counted."""

    def event(name: str, count: int, us: float, device: str = "DeviceType.CUDA", annotation: bool = False) -> Any:
        times = {"self_device_time_total": us} if "CUDA" in device else {"self_cpu_time_total": us}
        zero = {"self_device_time_total": 0.0, "self_cpu_time_total": 0.0}
        return SimpleNamespace(
            key=name, count=count, device_type=device, is_user_annotation=annotation, **(zero | times)
        )

    events = [
        event("nvjet_qqtst_128x256", 4, 4000.0),
        event("triton_red_fused_abs_amax_0", 2, 1000.0),
        event("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 2, 3000.0),
        event("Memcpy DtoD (Device -> Device)", 2, 200.0),
        event("void multi_tensor_apply_kernel", 2, 100.0),
        event("## Call CompiledFxGraph ##", 2, 8000.0, annotation=True),
        event("aten::mm", 4, 500.0, device="DeviceType.CPU"),
        event("cuLaunchKernelEx", 8, 900.0, device="DeviceType.CPU"),
    ]
    found = measure.kernels_of(events, calls=2, longest=2)
    assert found["gpu_ms"] == pytest.approx(4.15)
    assert found["launches"] == 6
    assert found["by_kind_ms"] == {"gemm": 2.0, "attention": 1.5, "triton": 0.5, "copy": 0.1, "optimizer": 0.05}
    assert [name for name, *_ in found["kernels"]] == [events[0].key, events[2].key]
    assert found["cpu"] == [["cuLaunchKernelEx", 4, 0.45], ["aten::mm", 2, 0.25]]  # where the host's time goes
    assert set(plots.COLORS) == {*measure.KINDS, "other"}


def test_tuned_kernels_name_their_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of code loaded since; a kernel that did not run has several launchers."""

    def tuner(name: str, launchers: int) -> Any:
        made: Any = CachingAutotuner.__new__(CachingAutotuner)
        config = SimpleNamespace(kwargs={"XBLOCK": 64}, num_warps=8, num_stages=1)
        made.__dict__.update(inductor_meta={"kernel_name": name}, compile_results=[None] * 6)
        made.launchers = [SimpleNamespace(config=config)] * launchers
        return made

    old, new = SimpleNamespace(a=tuner("old", 1)), SimpleNamespace(a=tuner("ran", 1), b=tuner("waits", 6), c=3)
    monkeypatch.setattr(measure.PyCodeCache, "modules", [old, new])
    assert measure.chosen_configurations(1) == [("ran", 6, "XBLOCK=64 num_warps=8 num_stages=1")]
    assert len(measure.chosen_configurations()) == measure.loaded_code() == 2


def test_the_gemms_have_layouts_that_a_gpu_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own checks for CUDA, on fake tensors: operands and scales of every scaling."""
    monkeypatch.setattr(limits, "DEVICE", torch.device("cuda"))
    made: list[str] = []
    with FakeTensorMode():
        for name, make in limits.variants(512, 768, 1024):
            if "aligned" not in name:  # a slice of a fake CUDA tensor needs a build with CUDA
                assert [tuple(out.shape) for out in make()()] == [(512, 768)] * 2, name
                made.append(name)
    assert {name.split()[0] for name in made} == {"bf16", "tensor", "row", "block"}


def test_code_generations_and_traces_are_counted() -> None:
    compile_time.counters.clear()

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        patches: Any = {"force_disable_caches": True}
        return compile_fx(module, inputs, inner_compile=host.answer_only, config_patches=patches)  # pyright: ignore

    torch.compile(nn.Linear(4, 4), backend=backend)(torch.randn(2, 4))
    assert compile_time.counts() == {"graphs": 1, "traces": 1, "code_generations": 0}


def test_a_compile_that_fails_is_in_the_file_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is written after each process."""
    written: list[Any] = []

    def once(cache: str, option: str, name: str, layers: str) -> dict[str, Any]:
        if name == compile_time.REGIONS:
            return {"failed": "TypeError: made up"}
        seconds, used = (2.0, 4.0) if name == compile_time.PLAIN else (3.0, 5.0)
        counted = {"traces": 1, "kernels": 24}
        return {"seconds": seconds, "cpu_seconds": used, "passes": 0.5, "counts": counted}

    monkeypatch.setattr(compile_time, "in_fresh_process", once)
    names = [compile_time.PLAIN, compile_time.REGIONS, compile_time.WHOLE]
    results: dict[str, Any] = {}
    compile_time.measure_compile(2, 1, names, results, lambda: written.append(json.dumps(results)))
    assert len(written) == 4
    table = tables.compile_time({"compile": json.loads(written[-1])})
    assert "| 2 | tensorwise | cold | 3.0 | 1.50 | 1 |  | 24 |" in table
    assert "| 2 | tensorwise, regions cold |  | failed: TypeError: made up |" in table


def test_code_for_a_gpu_is_compared_with_that_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"bf16": 4.0, "tensorwise": 7.0}

    def once(cache: str, option: str, name: str) -> dict[str, Any]:
        if name == "delayed":
            return {"failed": "TypeError: made up"}
        return {"generate": seconds[name], "compile": 1.0, "kernels": 38, "distinct": 30, "configurations": 72}

    monkeypatch.setattr(compile_time, "in_fresh_process", once)
    results: dict[str, Any] = {}
    compile_time.measure_gpu(3, list(compile_time.GPU_CONTENDERS), results, lambda: None)
    table = tables.gpu_code_time(results)
    assert "| tensorwise | 7.0 | 1.0 | 1.60 | 38 | 30 | 72 |" in table
    assert "| delayed | failed: TypeError: made up |" in table


def test_cpu_seconds_count_children_that_ended() -> None:
    before = compile_time.cpu_seconds()
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    assert compile_time.cpu_seconds() - before > 0.02  # of a process that does nothing itself


def test_host_time_leaves_the_compiled_code_out() -> None:
    """Results have the right shapes, and nothing computed them."""
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 16, bias=False)).bfloat16()
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    for compile in (host.plain, host.rewritten("tensorwise", bind=True), host.rewritten("delayed")):
        compiled = compile(model)
        compiled(x)
        out = compiled(x)
        assert (out.shape, out.dtype) == ((4, 16), torch.bfloat16)
        assert out.count_nonzero() == 0


def test_host_time_is_that_of_weights_whose_numbers_are_not_read_in_each_call() -> None:
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 16, bias=False)).bfloat16()
    x, functions = torch.randn(4, 32, dtype=torch.bfloat16), list[int]()
    for prepared in (host.as_on_a_gpu(), contextlib.nullcontext()):
        compiled = host.rewritten("tensorwise")(model)
        with torch.no_grad():
            with prepared:
                for _ in range(3):
                    compiled(x)
            functions.append(host.functions_of(lambda compiled=compiled: compiled(x)))
    assert functions[0] + 20 < functions[1]


# --- attention ------------------------------------------------------------------------------------------------------


def attention_of(model: Any, **inputs: Any) -> list[dict[str, Any]]:
    """The keyword arguments of each call of attention in Dynamo's graph."""
    found: list[dict[str, Any]] = []

    def backend(module: fx.GraphModule, _inputs: Any) -> Any:
        target = torch.nn.functional.scaled_dot_product_attention
        found.extend(dict(n.kwargs) for n in module.graph.find_nodes(op="call_function", target=target))
        return module

    torch.compile(model, backend=backend)(**inputs)
    return found


@pytest.mark.slow
def test_the_lines_for_flash_attention() -> None:
    """Those of docs/performance.md, run as they stand: no mask, is_causal; and that transformers' way is another."""
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    snippet = next(part for part in page.split("```python\n") if "AttentionMaskInterface" in part).split("```")[0]
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=1, num_hidden_layers=1,
        vocab_size=32, use_cache=False,
    )  # fmt: skip
    ids = torch.arange(8).reshape(1, 8)
    mask = torch.ones(1, 8, dtype=torch.long)
    model = LlamaModel(config).eval()
    expected = model(input_ids=ids).last_hidden_state
    (stock,) = attention_of(model, input_ids=ids, attention_mask=mask)
    assert isinstance(stock["attn_mask"], fx.Node)  # when it is not, the page can be shorter
    exec(snippet, {"model": model})
    torch._dynamo.reset()
    (call,) = attention_of(model, input_ids=ids, attention_mask=mask)
    assert (call["attn_mask"], call["is_causal"]) == (None, True)
    assert torch.equal(model(input_ids=ids).last_hidden_state, expected)


def test_the_benchmarks_attention_is_causal() -> None:
    model = attention.llama(1, 64, attention.CAUSAL, torch.device("cpu"))
    (call,) = attention_of(model, x=torch.randn(1, 8, 64, dtype=torch.bfloat16))
    assert (call["attn_mask"], call["is_causal"]) == (None, True)


@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
def test_blocks_of_kernels_that_cast_are_all_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "TILES", [(32, 64, 8), (64, 32, 4)])
    made = generate(quantize_after("nothing", "tensorwise", "weight", True, True), quantize_inputs(2048, 2048))
    (source,) = (kernel.source for kernel in triton_kernels(made.kernels) if "*fp8" in kernel.source)
    with tuned.all_blocks(lambda *_: None):
        found = offline.compile_kernel(source, "sm_90")
    tiles = ["XBLOCK=32 YBLOCK=64 num_warps=8 num_stages=1", "XBLOCK=64 YBLOCK=32 num_warps=4 num_stages=1"]
    assert [compiled.configuration for compiled in found] == tiles
    assert tuned.offered({"in_ptr0": "*bf16"}, {"XBLOCK", "YBLOCK"})[0] == []  # Inductor's own
    assert set(tuned.LOOPS) > {(32, 256, 32), (16, 512, 32), (32, 128, 16), (64, 128, 16)}  # what was chosen
