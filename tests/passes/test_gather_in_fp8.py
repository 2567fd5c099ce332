"""gather_in_fp8: FP8 travels, or the report says why not. No process is started."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8graph
import parallelism
from fp8graph import DelayedScaling, Policy
from gathers import Rows, Sequence, Sharded, Turned, gather, reasons_of, report_of
from generated import OF_ONE_INDUCTOR
from helpers import brief, first_fast

if dist.is_available():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
else:
    pytest.skip("torch without torch.distributed", allow_module_level=True)


pytestmark = pytest.mark.usefixtures("group_of_two")
DELAYED = DelayedScaling(initial_scale="one")  # with "auto" each rank begins with a scale of its own


def lines_of(report: fp8graph.Report) -> list[str]:
    """The rewritten graph's collectives and what makes and takes what travels, without shapes of names."""
    wanted = ("_c10d_functional", "fp8graph.amax", "fp8graph.scales", "fp8graph.quantize", "fp8graph.columnwise")
    lines = (line for line in brief(report.graphs[0].after).splitlines() if any(name in line for name in wanted))
    return [re.sub(r"_c10d_functional\.|fp8graph\.", "", x) for x in lines]


def test_the_amax_is_reduced_and_fp8_is_sent() -> None:
    """Of a shard [16, 32] 512 bytes and an amax go, not 1024; wgrad's copy is made after the gather."""
    report = report_of(Rows().bfloat16(), torch.randn(16, 32).bfloat16())
    assert lines_of(report)[:8] == [
        "amax_default: f32[1] = amax(primals_1)",
        "all_reduce_default: f32[1] = all_reduce(amax_default, max, 0)",
        "reduced_amax: f32[1] = wait_tensor(all_reduce_default)",
        "scales: f32[1, 2] = scales(reduced_amax, dtype=e4m3)",
        "quantize_input_2: (e4m3[16, 32], f32[1]) = quantize(primals_1, dtype=e4m3, rowwise=[1, 16], columnwise=[], "
        "scales=scales)",
        "gather_rowwise: uint8[32, 32] = all_gather_into_tensor(view_dtype, 2, 0)",
        "wait_tensor_default: uint8[32, 32] = wait_tensor(gather_rowwise)",
        "columnwise: e4m3[32, 32] = columnwise(view_dtype_1, multiples=[16, 16])",
    ]
    amax, gathered, *_ = report.collectives
    assert (amax.kind, amax.bytes_sent, amax.shape, amax.dtype) == ("all_reduce", 4, (1,), "float32")
    assert (gathered.tensor, gathered.dtype, gathered.bytes_sent) == ("proj input", "uint8", 512)
    assert gathered.reason == "quantized before it is sent, 1024 bytes otherwise"


def test_delayed_scaling_has_its_scale_before() -> None:
    """Nothing is reduced before the gather."""
    kinds = [(c.kind, c.dtype) for c in report_of(Rows(), torch.randn(16, 32), DELAYED).collectives]
    assert kinds[0] == ("all_gather", "uint8")


def test_both_operands_that_sequence_parallelism_gathers() -> None:
    """The input of up and gate once, although each linear gathers it, and down's gradient in backward."""
    report = report_of(Sequence(), torch.randn(16, 128).bfloat16().float(), "tensorwise")
    sent = [(c.direction, c.tensor, c.dtype) for c in report.collectives if c.kind == "all_gather"]
    assert sent == [("forward", "up input", "uint8"), ("backward", "down grad_output", "uint8")]


def test_rows_of_several_sequences_are_moved_as_before() -> None:
    """DTensor's gather along the sequence: shards [2, 8, 128] become [2, 16, 128]."""
    report = report_of(Sequence(dim=1), torch.randn(2, 8, 128))
    text = report.graphs[0].after
    assert "uint8[2, 16, 128] = aten.cat(" in text
    assert reasons_of(report)[0] == "quantized before it is sent, 8192 bytes otherwise"


@torch.no_grad()
def test_scales_of_rows_travel_beside_the_data() -> None:
    """Where only fprop reads them: 2 KiB of data and one scale per row, 4 KiB in bf16."""
    sent = report_of(Rows(64).bfloat16(), torch.randn(32, 64).bfloat16(), "rowwise").collectives
    assert [(c.dtype, c.shape, c.bytes_sent) for c in sent] == [("uint8", (32, 64), 2048), ("float32", (32, 1), 128)]


@torch.no_grad()
@pytest.mark.parametrize(
    ("recipe", "scales"), [("blockwise", ("float32", (32, 1), 128)), ("mxfp8", ("uint8", (32, 4), 128))]
)
def test_scales_of_tiles_travel_beside_the_data(recipe: str, scales: Any) -> None:
    sent = report_of(Rows(128).bfloat16(), torch.randn(32, 128).bfloat16(), recipe).collectives
    assert [(c.dtype, c.shape, c.bytes_sent) for c in sent] == [("uint8", (32, 128), 4096), scales]


def test_square_tiles_travel_once_for_both_directions() -> None:
    """A weight's shards of 128 x 128 tiles: its columnwise copy is the transposed one, as are its scales."""
    report = report_of(Sharded().bfloat16(), torch.randn(32, 128).bfloat16(), "blockwise")
    sent = [(c.dtype, c.shape) for c in report.collectives if c.kind == "all_gather"]
    assert sent == [("uint8", (128, 128)), ("float32", (1, 1))]


def test_views_of_the_whole_in_the_same_shape_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """DTensor takes all rows of a gathered weight, and views them as they are."""

    def sliced(x: Any, dim: int) -> Any:
        whole = gather(x, dim)
        return torch.ops.aten.slice.Tensor(whole, 0, 0, whole.shape[0]).view(whole.shape)

    monkeypatch.setattr("gathers.gather", sliced)
    for recipe in ("tensorwise", "blockwise"):
        report = report_of(Sharded().bfloat16(), torch.randn(32, 128).bfloat16(), recipe)
        assert "aten.slice" in report.graphs[0].before
        assert reasons_of(report)[0] == "quantized before it is sent, 32768 bytes otherwise"


def test_a_shard_of_a_weight_is_kept_in_fp8() -> None:
    """Its quantization runs once per update; what is gathered is not kept."""
    backend = fp8graph.Backend(Policy(default="tensorwise"), compiler="eager", cache_weights="update")
    model = Sharded()
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        compiled(torch.randn(32, 128)).sum().backward()
    assert backend.weights.quantized == 1
    assert backend.weights.bytes == 128 * 128 + 4
    assert "primals_3: e4m3[128, 128]" in backend.report.graphs[0].after


def test_a_gathered_weight_that_travels_in_high_precision_is_not_kept() -> None:
    backend = fp8graph.Backend(Policy(default="rowwise"), compiler="eager")
    torch.compile(Sharded(), backend=backend)(torch.randn(32, 128, requires_grad=True)).sum().backward()
    assert backend.report.weights == 0


@first_fast("recipe", ["tensorwise", DELAYED, "rowwise", "blockwise"])
def test_a_dynamic_number_of_rows_stays_dynamic(recipe: Any) -> None:
    """A tensor with one scale is quantized before the gather all the same."""
    backend = fp8graph.Backend(Policy(default=recipe), compiler="eager")
    x = torch.randn(48, 128, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)  # raises if a pass makes it a number
    torch.compile(Rows(128), backend=backend)(x).sum().backward()
    gathered = next(c for c in backend.report.collectives if c.kind == "all_gather")
    assert isinstance(gathered.shape[0], str)
    assert (gathered.dtype == "uint8") == (recipe in ("tensorwise", DELAYED))


def test_the_report_has_a_table_of_them(tmp_path: Any) -> None:
    report = report_of(Rows(), torch.randn(16, 32))
    assert "forward: 2 collectives, in which each rank sends 0.5 KiB" in str(report)
    report.to_html(tmp_path / "report.html")
    assert '"collectives":[["collective","count"' in (tmp_path / "report.html").read_text()
    assert report.to_dict()["graphs"][0]["collectives"][1]["dtype"] == "uint8"


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_weights_gathered_by_fsdp2_are_quantized_in_each_direction(recipe: str) -> None:
    """Kept in FP8, or waiting in FP8 for backward, the weights of a model would be whole on every rank."""
    model = parallelism.Net()
    block = model.layers[0]
    backend = fp8graph.Backend(Policy(default=recipe), compiler="eager")
    for module in (block, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    block.compile(backend=backend)
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert backend.weights.bytes == 0
    forward, backward = backend.report.graphs[0].after.split("# backward")
    for text, unwanted in ((forward, "columnwise=[],"), (backward, "rowwise=[],")):
        made = [line for line in text.splitlines() if re.match(r"quantize_weight\S*: ", line)]
        assert len(made) == 2
        assert all(unwanted in f"{line.removesuffix(')')}," for line in made)


def test_casts_are_done_before() -> None:
    """A gather in FP32 of what torch.autocast multiplies in bf16."""
    report = report_of(Turned(lambda x: x.bfloat16()).to(torch.bfloat16), torch.randn(16, 32))
    assert reasons_of(report)[0] == "quantized before it is sent, 2048 bytes otherwise"
    assert "prims.convert_element_type(primals_1, bfloat16)" in report.graphs[0].after.replace("bf16", "bfloat16")


def test_without_fsdp2_a_weight_is_kept() -> None:
    backend = fp8graph.Backend(Policy(default="tensorwise"), compiler="eager", cache_weights="update")
    block = nn.Linear(32, 48, bias=False)
    torch.compile(block, backend=backend)(torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert backend.weights.bytes > 0


@pytest.mark.slow
@OF_ONE_INDUCTOR
@pytest.mark.parametrize(("recipe", "forward", "backward"), [("tensorwise", 8, 9), ("delayed", 8, 7)])
def test_kernels_on_a_gpu(recipe: str, forward: int, backward: int) -> None:
    """sm_90, generated without one: an amax and a cast of the shard, and one columnwise copy after the gather."""
    report = fp8graph.explain(
        Sequence(4096, 8192).to(torch.bfloat16),
        torch.randn(4096, 4096, dtype=torch.bfloat16),
        policy=Policy(default=recipe),
        target="sm_90",
        cache_weights="update",
    )
    if recipe == "tensorwise" and torch.__version__ >= "2.15":
        forward -= 1  # its Inductor fuses one more
    kernels = {name: [k for k in report.kernels if k.graph == name] for name in ("forward", "backward")}
    counts = {name: len([k for k in found if k.name.startswith("triton")]) for name, found in kernels.items()}
    assert counts == {"forward": forward, "backward": backward}
    copies = [k.bytes for found in kernels.values() for k in found if k.bytes == 2 * 8192 * 4096]
    assert len(copies) == 2  # of 8192 x 4096 FP8 numbers, read and written once: up's and gate's input, down's gradient
