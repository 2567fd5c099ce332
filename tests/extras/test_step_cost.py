"""The cost model of many GPUs: its collectives are those that real ranks run; its times follow from what it states."""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import fp8graph
import parallelism
from fp8graph import hardware
from fp8graph.cli import main
from fp8graph.extras.planning import Mesh, Network, step_cost, workload
from fp8graph.extras.planning.workload import MOST_GPUS, Linear, Workload
from fp8graph.ir.collectives import bytes_sent
from fp8graph.recipes import resolve_recipe
from helpers import in_one_test
from ranks import run_ranks
from tiny_models import llama_config
from workloads import llama, llama_8b, tiny_model

HOPPER = hardware.from_target("sm_90")
NETWORK = Network.of_target("sm_90")


def plan(work: Workload, mesh: str, **settings: Any) -> step_cost.Plan:
    where: dict[str, Any] = {"hardware": HOPPER, "network": NETWORK}
    return step_cost.plan(work, Mesh.parse(mesh), **(where | settings))


# ---- against real ranks


def net(how: str, ranks: int) -> tuple[Workload, Mesh]:
    """The model of tests/support/parallelism.py: what one replica multiplies, and the mesh that ``how`` stands for."""
    mesh = {
        "ddp": Mesh(dp=ranks),
        "fsdp": Mesh(fsdp=ranks),
        "tp": Mesh(tp=ranks),
        "tp and sp": Mesh(tp=ranks, sp=ranks > 1),
        "fsdp and tp": Mesh(fsdp=2, tp=max(1, ranks // 2)),
    }[how]
    rows = parallelism.ROWS * ranks // (mesh.dp * mesh.fsdp)
    sizes = {"up": (parallelism.INNER, parallelism.HIDDEN), "down": (parallelism.HIDDEN, parallelism.INNER)}
    linears = [Linear(fqn=f"layers.{i}.{name}", m=rows, n=n, k=k) for i in range(2) for name, (n, k) in sizes.items()]
    head = Linear(fqn="lm_head", m=rows, n=16, k=parallelism.HIDDEN, fp8=frozenset())
    work = Workload(
        linears=(*linears, head),
        parameters={name: tuple(p.shape) for name, p in parallelism.Net().named_parameters()},
        plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"},
        dtype=torch.float32,
    )
    return work, mesh


Counted = Counter[tuple[str, int]]  # (kind, payload in bytes)


# what runs on so many ranks: one launch for all of it
RUN: dict[int, list[tuple[str, str | None]]] = {
    2: [
        *(("ddp", recipe) for recipe in (None, "delayed")),
        # layer by layer, and yet all amaxes together; with a recipe: weights in FP8
        *(("fsdp", recipe) for recipe in (None, "delayed", "tensorwise", "rowwise", "mxfp8")),
        *(("tp", recipe) for recipe in (None, "tensorwise", "delayed")),
        # what has one scale is gathered in FP8
        *(("tp and sp", recipe) for recipe in (None, "tensorwise", "delayed", "rowwise")),
    ],
    3: [("fsdp", None)],  # sizes that 3 does not divide are padded
    4: [
        ("ddp", None),
        *(("fsdp", recipe) for recipe in (None, "tensorwise", "delayed")),
        ("tp", None),
        *(("tp and sp", recipe) for recipe in (None, "tensorwise")),
        *(("fsdp and tp", recipe) for recipe in (None, "delayed")),
    ],
}


def count_collectives_of(
    rank: int, runs: list[tuple[str, str | None]]
) -> dict[tuple[str, str | None], tuple[Counted, Counted]]:
    """By kind and recipe: every collective of the third training step, and those that the report says."""
    ranks = dist.get_world_size()
    found: dict[tuple[str, str | None], tuple[Counted, Counted]] = {}
    for how, recipe in runs:
        model, data = parallelism.model_and_data(ranks)
        backend = parallelism.backend_for(recipe or "high_precision")
        compiled, owner = parallelism.parallelize(how, model, backend)
        batches = parallelism.data_of(how, rank, ranks, data)
        optimizer = torch.optim.SGD(owner.parameters(), lr=0.1)
        for batch in batches[:2]:
            train_step(compiled, owner, optimizer, batch, how)
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu, record_shapes=True) as profile:
            train_step(compiled, owner, optimizer, batches[2], how)
        with tempfile.TemporaryDirectory() as folder:
            profile.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
        reported: Counted = Counter()
        for c in backend.report.collectives:
            width = getattr(torch, c.dtype).itemsize * (c.ranks if c.kind == "all_gather" else 1)
            reported[c.kind, width * math.prod(map(int, c.shape))] += 1
        found[how, recipe] = collectives_of(events, ranks), reported
    return found


def train_step(compiled: Any, owner: Any, optimizer: Any, batch: Any, how: str) -> None:
    compiled(batch).square().mean().backward()
    for parameter in owner.parameters():
        if how == "tp and sp" and not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)  # the head, which saw this rank's rows
    optimizer.step()
    optimizer.zero_grad()


WIDTHS = {"float": 4, "unsigned char": 1}  # of the types that a trace names


def collectives_of(events: Any, ranks: int) -> Counted:
    """From a profiler's trace. Gloo reduces to scatter: its all_reduces are those asked for and the reduce_scatters."""
    found: Counted = Counter()
    reduced: Counted = Counter()
    for event in events:
        args = event.get("args", {})
        types = args.get("Input type", ())
        shapes = (
            shape if kind in WIDTHS else [] for kind, shape in zip(types, args.get("Input Dims", ()), strict=True)
        )
        numbers = [WIDTHS.get(kind, 1) * math.prod(shape) for kind, shape in zip(types, shapes, strict=True)]
        name = event.get("name")
        if name == "c10d::_allgather_base_":
            found["all_gather", numbers[0]] += 1
        elif name == "_c10d_functional::all_gather_into_tensor":
            found["all_gather", numbers[0] * ranks] += 1
        elif name == "c10d::_reduce_scatter_base_":
            found["reduce_scatter", numbers[1]] += 1
        elif name == "_c10d_functional::reduce_scatter_tensor":
            found["reduce_scatter", numbers[0]] += 1
        elif name == "gloo:all_reduce":
            reduced["all_reduce", numbers[0]] += 1
    scattered = {("all_reduce", payload): count for (kind, payload), count in found.items() if kind == "reduce_scatter"}
    reduced.subtract(scattered)
    assert min(reduced.values(), default=0) >= 0
    return found + reduced


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
@pytest.mark.release
@pytest.mark.parametrize("ranks", RUN)
def test_real_ranks_run_these_collectives(ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(count_collectives_of, ranks, tmp_path, RUN[ranks], seconds=500):
        for (how, recipe), (real, reported) in found.items():
            work, mesh = net(how, ranks)
            everything = {linear.fqn: set(linear.fp8) for linear in work.linears} if recipe else {}
            predicted: Counted = Counter()
            for c, count in workload.collectives(work, mesh, resolve_recipe(recipe), everything).items():
                predicted[c.kind, c.payload] += count
            assert real == predicted, (how, recipe)
            # DDP's and FSDP2's are outside of the graphs
            assert not reported - real
            if how in ("tp", "tp and sp"):
                # the gradients of norms and head, which saw a rank's own rows
                assert sum((real - reported).values()) == (5 if how == "tp and sp" else 0)


# ---- bytes


def sent(work: Workload, mesh: str, recipe: str | None = None) -> dict[tuple[str, str, str], int]:
    """Bytes by (purpose, kind, dtype), with every GEMM in FP8 that may be."""
    spread = Mesh.parse(mesh)
    fp8 = {linear.fqn: set(linear.fp8) for linear in work.linears} if recipe else {}
    result: dict[tuple[str, str, str], int] = {}
    for c, count in workload.collectives(work, spread, resolve_recipe(recipe), fp8).items():
        key = c.purpose, c.kind, c.dtype
        result[key] = result.get(key, 0) + count * bytes_sent(c.kind, c.payload, spread.group(c.axis)[0])
    return result


@in_one_test("mesh", ["dp=8", "fsdp=8", "tp=8", "tp=8,sp", "dp=4,fsdp=64,tp=8,sp", "dp=2048,tp=8"])
@in_one_test("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
def test_fp8_sends_no_more(mesh: str, recipe: str) -> None:
    before, after = sent(llama_8b(), mesh), sent(llama_8b(), mesh, recipe)
    amaxes = sum(count for (purpose, *_), count in after.items() if purpose == "amaxes")
    assert sum(after.values()) - amaxes <= sum(before.values())
    assert amaxes < 1.5e-4 * sum(before.values())  # rowwise: a number for each column of a weight


def test_sequence_parallel_sends_what_tensor_parallel_sends() -> None:
    """An all_reduce is a reduce_scatter and an all_gather; only the gradients of norms come on top."""
    work = llama_8b()
    tensor, sequence = sent(work, "tp=8"), sent(work, "tp=8,sp")
    norms = 65 * bytes_sent("all_reduce", 2 * 4096, 8)
    assert sequence["gradients", "all_reduce", "bfloat16"] == norms
    activations = sum(count for (purpose, *_), count in sequence.items() if purpose == "activations")
    assert activations == sum(tensor.values())


def test_fp8_all_gathers_send_half_the_bytes() -> None:
    """Forward gathers the inputs of q/k/v and of gate/up, backward the gradients of o's and down's outputs."""
    work = llama_8b()
    layers = 32 * 4 * bytes_sent("all_gather", 8192 * 4096, 8)  # in bytes of one
    others = 2 * bytes_sent("all_gather", 2 * 8192 * 4096, 8)  # the head's input, the embedding's gradient
    before = sent(work, "tp=8,sp")
    assert before["activations", "all_gather", "bfloat16"] == 2 * layers + others
    for recipe in ("tensorwise", "delayed"):
        after = sent(work, "tp=8,sp", recipe)
        assert after["activations", "all_gather", "fp8"] == layers
        assert after["activations", "all_gather", "bfloat16"] == others
    for recipe in ("rowwise", "blockwise", "mxfp8"):
        assert sent(work, "tp=8,sp", recipe) == before
    assert sent(work, "tp=8,sp", "tensorwise")["amaxes", "all_reduce", "float32"] == 32 * 4 * bytes_sent(
        "all_reduce", 4, 8
    )
    assert sent(work, "tp=8,sp", "delayed")["amaxes", "all_reduce", "float32"] == bytes_sent(
        "all_reduce", 4 * (3 + 3 * len([x for x in work.linears if x.fp8])), 8
    )


def test_a_gemm_in_high_precision_is_fed_in_high_precision() -> None:
    """One of gate and up left alone: their input travels as it is, and so does what a layer's wgrad reads."""
    work = llama(hidden=256, inner=512, layers=1, heads=4, kv_heads=4, vocabulary=64, seq=128)
    fp8 = {linear.fqn: set(linear.fp8) for linear in work.linears}
    fp8["model.layers.0.mlp.up_proj"] = set()
    fp8["model.layers.0.self_attn.o_proj"].remove("wgrad")
    found = workload.collectives(work, Mesh(tp=2, sp=True), resolve_recipe("tensorwise"), fp8)
    gathers = {(c.direction, c.dtype): count for c, count in found.items() if c.kind == "all_gather"}
    # forward: q/k/v in FP8, gate/up and the head not; backward: down in FP8, o and the embedding not
    assert gathers == {
        ("forward", "fp8"): 1, ("forward", "bfloat16"): 2, ("backward", "fp8"): 1, ("backward", "bfloat16"): 2
    }  # fmt: skip


def test_ddp_reduces_all_gradients_in_buckets() -> None:
    work = llama_8b()
    found = workload.collectives(work, Mesh(dp=8))
    bytes_of_gradients = 2 * sum(math.prod(shape) for shape in work.parameters.values())
    assert sum(c.payload * count for c, count in found.items()) == bytes_of_gradients
    assert sum(found.values()) == math.ceil(bytes_of_gradients / workload.BUCKET)
    assert {c.kind for c in found} == {"all_reduce"}


def test_hybrid_sharding_reduces_shards_over_replicas() -> None:
    work, mesh = llama_8b(), Mesh(dp=4, fsdp=8)
    found = workload.collectives(work, mesh)
    scattered = sum(c.payload * count for c, count in found.items() if c.kind == "reduce_scatter")
    assert sum(c.payload * count for c, count in found.items() if c.axis == "dp") == scattered // 8
    assert sum(count for c, count in found.items() if c.purpose == "weights") == 2 * 32 + 1
    assert sum(count for c, count in found.items() if c.purpose == "gradients") == 2 * 33


# ---- time


def test_a_ring_and_a_tree() -> None:
    net = Network(name="n", node_bandwidth=100e9, network_bandwidth=10e9, node_latency=1e-6, network_latency=10e-6)
    assert net.seconds("all_gather", 8 * 10**9, 8, 1) == pytest.approx(7e9 / 100e9 + 7e-6)
    # two nodes of 8: eight network ports; 14 hops within nodes, one between
    assert net.seconds("all_gather", 16 * 10**9, 16, 1) == pytest.approx(15e9 / 80e9 + 14e-6 + 10e-6)
    # one GPU of each of 16 nodes: a port each
    assert net.seconds("reduce_scatter", 16 * 10**9, 16, 8) == pytest.approx(15e9 / 10e9 + 15 * 10e-6)
    assert net.seconds("all_reduce", 16 * 10**9, 16, 8) == pytest.approx(30e9 / 10e9 + 2 * 4 * 10e-6)
    assert net.seconds("all_reduce", 10**9, 1, 8) == 0.0


def test_compute_hides_data_parallel_communication_up_to_a_share() -> None:
    work = llama_8b()
    step = plan(work, "fsdp=8", recipes=[]).steps[0]
    assert step.communication > 0.1
    assert step.exposed == 0.0
    slow = Network(name="slow", node_bandwidth=1e9, network_bandwidth=1e9)
    step = plan(work, "fsdp=8", recipes=[], network=slow).steps[0]
    optimizer = sum(math.prod(shape) for shape in work.parameters.values()) // 8 * 22 / scale_speed().bandwidth
    compute = step.gemms + step.others - optimizer
    assert step.exposed == pytest.approx(step.communication - slow.overlap * compute)
    nothing = Network(name="nothing", node_bandwidth=1e9, network_bandwidth=1e9, overlap=0)
    step = plan(work, "fsdp=8", recipes=[], network=nothing).steps[0]
    assert step.exposed == pytest.approx(step.communication)


def scale_speed() -> Any:
    assert HOPPER.speed is not None
    return HOPPER.speed


def test_tensor_parallel_communication_is_exposed() -> None:
    step = plan(llama_8b(), "tp=8", recipes=[]).steps[0]
    assert step.exposed == pytest.approx(step.communication)
    assert step.exposed > 0


def test_shards_take_a_part_of_the_time() -> None:
    work = llama_8b()
    whole, half = (plan(work, mesh, recipes=["tensorwise"]) for mesh in ("dp=8", "dp=4,tp=2,sp"))
    for a, b in zip(whole.steps, half.steps, strict=True):
        assert 0.5 * a.gemms <= b.gemms < 0.55 * a.gemms  # smaller GEMMs are a little less worth
    assert half.state_bytes < 0.51 * whole.state_bytes


@pytest.mark.slow
def test_the_compiler_and_the_plan_choose_the_same_gemms() -> None:
    """768 tokens, in a CUDA graph: the plan does not ask how fast the host launches. Not all are faster in FP8."""
    config = llama_config(1)
    config.update({"hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16, "head_dim": 128})
    with torch.device("meta"):
        model = tiny_model(config)
    ids = torch.zeros(1, 768, dtype=torch.long)
    asked: dict[str, Any] = {"target": "sm_90", "policy": None, "training": True, "cache_weights": "update"}
    asked["inductor_options"] = {"triton.cudagraphs": True}
    report = fp8graph.explain(model, input_ids=ids, labels=ids, **asked)
    work = workload.of_model(model, report, 768)
    found, _ = step_cost.decide(work, Mesh(dp=8), scale_speed(), resolve_recipe("tensorwise"))
    decided = {(g.name, g.gemm): g.recipe is not None for g in report.gemms if g.op == "linear"}
    assert {(name, gemm) for name, gemms in found.items() for gemm in gemms} == {k for k, v in decided.items() if v}
    assert len(set(decided.values())) == 2


def test_published_figures() -> None:
    """TorchTitan, Llama 3.1 8B on 8 H100, FSDP2, 8192 tokens: tensorwise 1.25 to 1.28 times bf16, rowwise 1.10 times.

    The model is not tuned to them: it takes rates of an H100 at 700 W and 3.35 TB/s (theirs ran at 500 W and 2.4 TB/s),
    and knows nothing of recomputation. It says 1.24 and 1.22; docs/scale.md has both. This holds it there.
    """
    found = plan(llama_8b(), "fsdp=8", recipes=["tensorwise", "rowwise"])
    high, *fp8 = (step.seconds for step in found.steps)
    assert [round(high / seconds, 2) for seconds in fp8] == [1.24, 1.22]
    assert 1.25 - 0.1 < high / fp8[0] < 1.28 + 0.1


# ---- what users type


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("tp=3", "tp=3 does not divide the 32 attention heads"),
        ("tp=16", "tp=16 does not divide the 8 key and value heads"),
        ("tp=8,sp", "tp=8 does not divide the 100 tokens"),
    ],
)
def test_tp_must_divide_heads_and_tokens(mesh: str, message: str) -> None:
    with pytest.raises(fp8graph.ConfigError, match=message):
        plan(llama_8b(seq=100), mesh)


def test_sizes_that_tp_must_divide() -> None:
    work = llama(hidden=256, inner=510, layers=1, heads=4, kv_heads=4, vocabulary=64, seq=128)
    with pytest.raises(fp8graph.ConfigError, match=r"the 510 outputs of model\.layers\.0\.mlp\.gate_proj"):
        plan(work, "tp=4")
    without = Workload(linears=work.linears, parameters=work.parameters)
    with pytest.raises(fp8graph.ConfigError, match="no plan for it"):
        plan(without, "tp=2")
    assert plan(without, "dp=2").steps


def test_hardware_and_recipes() -> None:
    work = llama_8b()
    blackwell = plan(work, "dp=8", hardware=hardware.from_target("sm_100"), network=Network.of_target("sm_100"))
    assert [step.recipe for step in blackwell.steps] == ["bf16", "tensorwise", "delayed", "rowwise", "mxfp8"]
    with pytest.raises(fp8graph.ConfigError, match="sm_90 emulates mxfp8"):
        plan(work, "dp=8", recipes=["mxfp8"])
    with pytest.raises(fp8graph.ConfigError, match="the speed of 'sm_80' is not known"):
        plan(work, "dp=8", hardware=hardware.from_target("sm_80"))
    with pytest.raises(fp8graph.ConfigError, match="no network is known for sm_89"):
        Network.of_target("sm_89")


def test_one_gpu_needs_no_network() -> None:
    alone = Network.of_target("sm_120", 1)
    step = plan(llama_8b(), "dp=1", hardware=hardware.from_target("sm_120"), network=alone)
    assert "one GPU: nothing is sent." in step.assumptions
    assert all(each.exposed == 0 for each in step.steps)
    assert Network.of_target("sm_90", 1) == Network.of_target("sm_90")
    with pytest.raises(fp8graph.ConfigError, match=r"sm_120 .* One GPU needs none \(--mesh dp=1\)"):
        Network.of_target("sm_120")


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama_config(1).save_pretrained(tmp_path)
    meshes = ["dp=2,fsdp=2,tp=2,sp", "dp=8"]
    assert main(["plan", str(tmp_path), "--seq", "128", "--mesh", *meshes]) == 0
    out = capsys.readouterr().out
    assert "dp=2,fsdp=2,tp=2,sp: 8 GPUs, 512 tokens per step, 128 per replica" in out
    assert "dp=8,fsdp=1,tp=1: 8 GPUs, 1,024 tokens per step" in out
    assert out.count("Assumptions:") == 2
    rows = [line.split("  ")[0] for line in out.splitlines()]
    assert rows.count("blockwise") == 2
    assert "weights: all_gather over fsdp, bfloat16" in rows
    assert main(["plan", str(tmp_path), "--seq", "128", "--mesh", "dp=8", "--json", "--recipe", "rowwise"]) == 0
    (values,) = json.loads(capsys.readouterr().out)
    assert [step["recipe"] for step in values["steps"]] == ["bf16", "rowwise"]
    (gradients,) = values["steps"][0]["collectives"]
    assert gradients == {
        "purpose": "gradients", "kind": "all_reduce", "axis": "dp", "direction": "backward", "dtype": "bfloat16",
        "payload": gradients["payload"], "count": 1,
    }  # fmt: skip
    assert values["steps"][0]["sent"] == {
        "gradients: all_reduce over dp, bfloat16": bytes_sent("all_reduce", gradients["payload"], 8)
    }


@pytest.mark.slow
def test_experts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tiny_models import TINY

    TINY["mixtral"].build(1).config.save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--seq", "32", "--mesh", "dp=8"]) == 2
    assert "the cost model does not support experts" in capsys.readouterr().err


def test_one_gpu_sends_nothing() -> None:
    assert not workload.collectives(llama_8b(), Mesh())


def test_the_largest_mesh() -> None:
    found = plan(llama_8b(), f"dp={MOST_GPUS // 512},fsdp=64,tp=8,sp")
    assert found.mesh.gpus == MOST_GPUS
    assert [step.recipe for step in found.steps] == ["bf16", "tensorwise", "delayed", "rowwise", "blockwise"]
    assert all(math.isfinite(step.seconds) and step.exposed <= step.communication for step in found.steps)
