"""cast_in_tiles: which tensors one kernel quantizes, and that their numbers are those of the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from fp8graph import offline
from fp8graph.compat import inductor
from fp8graph.ir import ops
from fp8graph.ir.nodes import nodes
from fp8graph.numerics.formats import SCALE, SCALE_INV
from fp8graph.numerics.tile_casts import CAST, launches_of
from fp8graph.passes.cast_in_tiles import cast_in_tiles
from fp8graph.passes.connect_scales import update_page
from helpers import first_fast, graph_text, in_one_test, same_bits

E4M3, SIZE = torch.float8_e4m3fn, (2048, 2048)
ORDERS = {"rowwise_order": "transposed", "columnwise_order": "transposed"}


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "writes_tiles", lambda device: True)


def quantized(*parts: Tensor, **changes: Any) -> list[Tensor]:
    settings: dict[str, Any] = {"rowwise": [4, 512], "columnwise": [16, 128], "scaling": "block", "block": [1, 128]}
    settings |= ORDERS | changes
    x, *more = parts
    layouts = settings.pop("rowwise"), settings.pop("columnwise")
    power_2 = settings.pop("power_2_scale", True)
    return list(ops.quantize(x, E4M3, power_2, 0.0, *layouts, **settings, **({"more": more} if more else {})))


def delayed(scales: Tensor | None, *parts: Tensor, **changes: Any) -> list[Tensor]:
    """The second of three tensors whose scales a table holds."""
    orders = {"rowwise_order": "", "columnwise_order": ""}
    settings: dict[str, Any] = {"scaling": "delayed", "block": [], "scales": scales, "row": 1, "columnwise": [16, 16]}
    return quantized(*parts, power_2_scale=False, **settings | orders | changes)


TABLE = (3, 2)


def graph_of(function: Callable[..., Any], *sizes: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> fx.Graph:
    """The graph after the pass. Only shapes matter."""
    fakes = [torch.empty(size, dtype=dtype) for size in sizes]
    graph = make_fx(function, select_decomp_table(), tracing_mode="fake")(*fakes).graph
    cast_in_tiles(graph)
    return graph


def casts(graph: fx.Graph) -> list[tuple[str, list[str]]]:
    """The function of each cast, and its inputs."""
    return [(cast(str, node.args[1]), [str(x) for x in cast(Any, node.args[0])]) for node in nodes(graph, (CAST,))]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return nn.functional.silu(gate) * up


def swiglu_backward(gate: Tensor, dy: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(dy * up, gate), dy * nn.functional.silu(gate)


def other_backward(gate: Tensor, dy: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """In which the slope's second sigmoid is that of up."""
    wide = gate.float()
    sigmoid, slope = torch.sigmoid(wide), wide * (1 - torch.sigmoid(up.float())) + 1
    return ((dy * up).float() * sigmoid * slope).to(gate.dtype), dy * nn.functional.silu(gate)


SQUARE: dict[str, Any] = {"block": [128, 128], "rowwise": [16, 512], "rowwise_order": "", "columnwise_order": ""}


@in_one_test(
    ("function", "inputs", "expected"),
    [
        (lambda x: quantized(x), 1, ("", [0])),
        (lambda x, y, z: quantized(x, y, z), 3, ("", [0, 1, 2])),
        (lambda x: quantized(x, **SQUARE), 1, ("", [0])),
        (lambda x, y: quantized(x, y, **SQUARE, columnwise=[], keep_scales=True, dim=-2), 2, ("", [0, 1])),
        (lambda g, u: quantized(swiglu(g, u)), 2, ("swiglu", [0, 1])),
        (lambda g, u: quantized(u * nn.functional.silu(g)), 2, ("swiglu", [0, 1])),
        (lambda g, d, u: quantized(*swiglu_backward(g, d, u)), 3, ("swiglu_backward", [0, 1, 2])),
        (lambda x, y, t: delayed(t, x, y, dim=-2)[:-1], 2, ("", [0, 1, 2])),
        (lambda g, u, t: delayed(t, swiglu(g, u))[:-1], 2, ("swiglu", [0, 1, 2])),
        (lambda g, d, u, t: delayed(t, *swiglu_backward(g, d, u))[:-1], 3, ("swiglu_backward", [0, 1, 2, 3])),
    ],
    ids=[
        *("both layouts", "side by side", "square tiles", "a weight's parts", "SwiGLU", "up first"),
        *("SwiGLU's backward", "delayed", "delayed, SwiGLU", "delayed, its backward"),
    ],
)
def test_one_kernel_casts_and_computes(function: Any, inputs: int, expected: tuple[str, list[int]]) -> None:
    graph = graph_of(function, *[SIZE] * inputs, *([TABLE] if len(expected[1]) > inputs else []))
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    assert casts(graph) == [(expected[0], [names[index] for index in expected[1]])]
    assert not list(nodes(graph, (ops.quantize,)))


@pytest.mark.parametrize("halves", [lambda x: x.split(2048, 1), lambda x: (x[:, :2048], x[:, 2048:])])
def test_halves_of_a_product_are_read_where_they_are(halves: Any) -> None:
    """The GEMM of gate and up is one."""
    graph = graph_of(lambda x, w: quantized(swiglu(*halves(x @ w.t()))), SIZE, (4096, 2048))
    ((name, inputs),) = casts(graph)
    assert name == "swiglu"
    assert len(set(inputs)) == 2


def test_the_result_of_attention_is_read_where_it_is() -> None:
    def attend(q: Tensor) -> list[Tensor]:
        q = q.transpose(1, 2)  # of a GEMM's result
        o, *_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
        return quantized(o.transpose(1, 2).reshape(2048, 2048))

    ((name, inputs),) = casts(graph_of(attend, (1, 2048, 16, 128)))
    assert (name, len(inputs)) == ("", 1)


def test_the_text_before_and_after() -> None:
    graph = graph_of(lambda g, u: quantized(swiglu(g, u)), SIZE, SIZE)
    (line,) = [line for line in graph_text(graph).splitlines() if "fp8graph_tiles" in line]
    orders = "[transposed, transposed]"
    assert line.partition(" = ")[2] == (
        f"fp8graph_tiles.cast([g_1, u_1], swiglu, e4m3, True, 0.0, [1, 128], -1, True, False, {orders}, 0)"
    )


NOTHING: list[tuple[str, list[str]]] = []


@in_one_test(
    ("function", "sizes"),
    [
        pytest.param(lambda x: quantized(x * 2), [SIZE], id="computed: Inductor fuses it"),
        pytest.param(lambda x, y: quantized(nn.functional.gelu(x) * y), [SIZE] * 2, id="another function"),
        pytest.param(lambda x, y: quantized(swiglu(x, y), power_2_scale=False), [SIZE] * 2, id="FP32 scales"),
        pytest.param(lambda x, y: quantized(swiglu(x + 1, y)), [SIZE] * 2, id="of a computed gate"),
        pytest.param(lambda g, d, u: quantized(*swiglu_backward(g, d, u)[::-1]), [SIZE] * 3, id="up's gradient first"),
        pytest.param(lambda g, d, u: quantized(*other_backward(g, d, u)), [SIZE] * 3, id="another gradient"),
        pytest.param(lambda x: quantized(x, columnwise=[]), [SIZE], id="one layout"),
        pytest.param(lambda x: quantized(x, block=[1, 64]), [SIZE], id="other tiles"),
        pytest.param(lambda x: quantized(x), [(1920, 2048)], id="small"),
        pytest.param(lambda x: quantized(x), [(2100, 2048)], id="ragged"),
        pytest.param(lambda x: quantized(x), [(2048, 2176)], id="padded"),
        pytest.param(lambda x: quantized(x.t()), [SIZE], id="transposed"),
        pytest.param(lambda x: quantized(x[:, 4:2052]), [(2048, 2056)], id="loads that are not aligned"),
        pytest.param(lambda x: quantized(x, scaling="block_e8m0"), [SIZE], id="E8M0"),
        pytest.param(lambda x: quantized(x, rowwise_order="128x4"), [SIZE], id="scales in blocks"),
        pytest.param(lambda x, t: delayed(t, x, columnwise=[])[:-1], [SIZE, TABLE], id="delayed: one layout"),
        pytest.param(lambda x: delayed(None, x)[:-1], [SIZE], id="delayed: no scales yet"),
        pytest.param(lambda x, t: delayed(t, x)[-1] * 2, [SIZE, TABLE], id="delayed: amaxes of rows"),
    ],
)
def test_casts_that_are_left_to_inductor(function: Any, sizes: Any) -> None:
    assert casts(graph_of(function, *sizes)) == NOTHING


def test_other_types_are_left_to_inductor() -> None:
    assert casts(graph_of(quantized, SIZE, dtype=torch.float16)) == NOTHING


def test_rounding_between_operations_is_left_to_inductor() -> None:
    with inductor_config.patch(emulate_precision_casts=True):
        assert casts(graph_of(lambda g, u: quantized(swiglu(g, u)), SIZE, SIZE)) == NOTHING
        assert casts(graph_of(lambda x: quantized(x), SIZE)) == [("", ["x_1"])]


def test_other_devices_are_left_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert casts(graph_of(quantized, SIZE)) == NOTHING


@first_fast(
    "function",
    [
        lambda x, y, _: quantized(x, y),
        lambda x, y, _: quantized(x, y, power_2_scale=False, dim=-2),
        lambda x, y, _: quantized(x, y, **SQUARE, columnwise=[], keep_scales=True, dim=-2),
        lambda x, y, t: with_page(t, delayed(t, x, y)),
        lambda x, y, t: with_page(t, delayed(t, x, y, dim=-2)),
    ],
    ids=["both layouts", "FP32 scales", "a weight's parts", "delayed", "delayed, rows"],
)
def test_results_are_those_of_quantize(function: Any) -> None:
    table = torch.cat([torch.rand(3, 2) + 0.5, torch.zeros(3, 4)], 1)
    tensors = [*torch.randn(2, *SIZE).bfloat16(), table]
    graph = graph_of(function, *(x.shape for x in tensors))
    assert len(casts(graph)) == 1
    assert same_bits(fx.GraphModule(nn.Module(), graph)(*tensors), function(*tensors))


def test_a_tensor_under_delayed_scaling_has_one_amax() -> None:
    graph = graph_of(lambda x, page: with_page(page, delayed(page, x)), SIZE, TABLE)
    (update,) = nodes(graph, (update_page,))
    (amax,) = {*cast("list[fx.Node]", update.args[1])}
    assert amax.meta["val"].shape == (1,)


@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
def test_the_kernel_reads_the_scale_of_its_tensor() -> None:
    described = [inductor.Described(shape=(128, 128), stride=(128, 1)), inductor.Described(shape=(3, 2), stride=(6, 1))]
    _, zeros, (launch,) = launches_of(described, "", E4M3, False, 0.0, [], -1, True, False, ["", ""], 2)
    assert (launch.constants["at_scale"], launch.constants["at_scale_inv"]) == (2 * 6 + SCALE, 2 * 6 + SCALE_INV)
    assert (launch.reads["a"], launch.reads["table"]) == (0, 1)
    assert zeros == [launch.writes["of_tiles"]]  # the amax is the largest of it and of all tiles


def with_page(page: Tensor, results: list[Tensor]) -> list[Tensor]:
    """The copies, their scale, and the page that the amaxes of one tensor are recorded in."""
    *copies, amax = results
    return [*copies, update_page(page, [amax] * len(page), 448.0, 0.0, "max")]
