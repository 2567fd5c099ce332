"""quantize_attention for a Hopper GPU with FlashAttention-3: what is emitted, and what is emulated with its reason.

No GPU is needed, and none has run this. torch's kernel for meta tensors takes what is given to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import fp8graph
from attentions import Attention, qkv, sdpa, written_out
from fp8graph import (
    Backend,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Fp8GraphError,
    Policy,
    Rule,
    offline,
)
from fp8graph.backend import inductor_passes
from fp8graph.compat import attention
from fp8graph.compat.attention import HAS_QUANTIZED_ATTENTION
from fp8graph.ir import verify
from fp8graph.numerics import sqnr_db
from fp8graph.passes.attention.ops import attend, scaled_attention
from fp8graph.tools import explain
from helpers import first_fast, graph_inputs_for, in_one_test

pytestmark = pytest.mark.skipif(not HAS_QUANTIZED_ATTENTION, reason="this torch has no op for FP8 attention")
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "gradients": False}


@pytest.fixture
def flash_attention_3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the user's program had activated it."""
    monkeypatch.setattr(attention, "active_implementation", lambda: "FA3")
    yield
    torch._dynamo.reset()


def asking(recipe: Any = "tensorwise") -> Policy:
    return Policy([Rule("*", recipe, op="attention")], default=None)


def report_of(
    module: Any, *args: Tensor, recipe: Any = "tensorwise", target: str = "sm_90", training: bool = False
) -> fp8graph.Report:
    return fp8graph.explain(module, *args, policy=asking(recipe), target=target, training=training)


@pytest.mark.usefixtures("flash_attention_3")
def test_the_graph_before_and_after() -> None:
    report = report_of(sdpa(is_causal=True, enable_gqa=True), *qkv(kv_heads=2, **BF16))
    (row,) = report.attention
    assert (row.execution, row.dtypes, row.reason) == (
        "native",
        ("e4m3", "bf16"),
        'rule "*" (op attention) -> tensorwise',
    )
    view = report.graphs[0]
    assert "aten._scaled_dot_product_flash_attention_for_cpu(arg0_1, arg1_1, arg2_1, 0.0, True)" in view.before
    assert [line for line in view.after.splitlines() if "dequantize" in line or "for_cpu" in line] == []
    data, scales = ("query_data, key_data, value_data", "expand_default, expand_default_1, expand_default_2")
    line = f"attention: bf16[2, 4, 16, 64] = fp8graph.scaled_attention({data}, {scales}, is_causal=True, scale=None)"
    assert line in view.after
    assert "expand_default: f32[2, 2] = aten.expand(view_default, [2, 2])" in view.after
    assert "; 1 in FP8" in str(report)
    assert "emulated" not in str(report)


@pytest.mark.usefixtures("flash_attention_3")
@first_fast(
    "recipe",
    ["tensorwise", "rowwise", Float8CurrentScaling(hadamard_qk=True), Float8RowwiseScaling(hadamard_qk=True)],
    ids=["tensorwise", "rowwise", "tensorwise, transformed", "rowwise, transformed"],
)
def test_the_module_of_the_report_computes_attention(recipe: Any) -> None:
    """On a CPU, by the reference. A transform of q and k changes nothing but what is rounded."""

    def body(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(2, 16, -1, 64).transpose(1, 2) for x in (q, k, v))
        return sdpa(is_causal=True, enable_gqa=True)(q, k, v).transpose(1, 2).reshape(2, 16, 256)

    given = [torch.randn(2, 16, size).bfloat16() for size in (256, 128, 128)]
    view = report_of(Attention(body), *given, recipe=recipe).graphs[0]
    assert "fp8graph.scaled_attention(" in view.after
    assert view.after.count("fp8graph.rotate(") == (0 if isinstance(recipe, str) else 2)
    (got,) = view.module(*given)
    assert 20 < sqnr_db(body(*given), got) < 40


@pytest.mark.slow
@pytest.mark.usefixtures("flash_attention_3")
@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("rowwise", marks=pytest.mark.slow)])
def test_the_generated_code_calls_flash_attention_3(recipe: str) -> None:
    def body(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(2, 128, 4, 64).transpose(1, 2) for x in (q, k, v))
        return sdpa()(q.sin(), k, v).transpose(1, 2).reshape(2, 128, 256)

    generating = explain.Generating(asking(recipe), target="sm_90")
    given = [torch.randn(2, 128, 256).bfloat16() for _ in range(3)]
    explain.trace(generating, Attention(body), given, {}, False)
    ((_, code),) = generating.generator.code
    assert code.count("torch.ops.aten._scaled_dot_product_flash_attention.quantized.default(") == 0
    assert code.count("= torch.ops.aten._scaled_dot_product_flash_attention.quantized(") == 1
    assert "flash_attention_for_cpu" not in code


@in_one_test("size", [64, 96, 128, 256])
def test_torchs_own_rules_take_it(size: int) -> None:
    q, k, v = (torch.empty(2, heads, 16, size, dtype=torch.float8_e4m3fn, device="meta") for heads in (4, 2, 2))
    scale = torch.empty(2, 2, device="meta")
    out = attend(q, k, v, scale, scale, scale, True, 0.125)
    assert (out.shape, out.dtype, out.device.type) == (q.shape, torch.bfloat16, "meta")


def flex(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flex_attention(q, k, v)  # pyright: ignore[reportDeprecated]


@pytest.mark.usefixtures("flash_attention_3")
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("module", "sizes", "settings", "why"),
    [
        (sdpa(), {}, {"target": "sm_100"}, "torch's FP8 attention is FlashAttention-3, for sm_90 only; this is sm_100"),
        (sdpa(), {}, {"target": "sm_89"}, "for sm_90 only; this is sm_89"),
        (sdpa(), {}, {"target": "gfx942"}, "gfx942 has no FP8 attention in torch"),
        (sdpa(), {"size": 72}, {}, "FlashAttention-3 takes heads of 16, 32, ..., 256 elements, not 72"),
        (sdpa(), {"size": 320}, {}, "FlashAttention-3 takes heads of 16, 32, ..., 256 elements, not 320"),
        (sdpa(), {"gradients": True}, {"training": True}, "FP8 attention in torch is forward only, this is training"),
        (written_out(), {}, {}, "takes the place of scaled_dot_product_attention, this is written out"),
        (Attention(flex), {"queries": 128}, {}, "takes the place of scaled_dot_product_attention, this is flex"),
        (sdpa(attn_mask=torch.zeros(16, 16).bfloat16()), {}, {}, "takes no mask that is a tensor"),
        (sdpa(), {"dtype": torch.float16}, {}, "FP8 attention in torch returns bf16, the program's is float16"),
        (
            sdpa(is_causal=True),
            {"keys": 32},
            {},
            "16 queries and 32 keys: a causal mask starts at another corner there",
        ),
    ],
)
def test_emulated_attention_has_its_reason(
    module: nn.Module, sizes: dict[str, Any], settings: dict[str, Any], why: str
) -> None:
    report = report_of(module, *qkv(**{**BF16, **sizes}), **settings)
    assert report.attention[0].execution == "emulated"
    assert why in report.attention[0].reason
    assert "scaled_attention" not in report.graphs[0].after


@pytest.mark.usefixtures("flash_attention_3")
def test_an_op_of_a_gpu_with_dropout_or_a_logsumexp_that_is_read() -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    dropped = Attention(lambda q, k, v: flash(q, k, v, 0.1, False)[0])
    assert "takes no dropout" in report_of(dropped, *qkv(**BF16)).attention[0].reason
    read = Attention(lambda q, k, v: flash(q, k, v)[:2])
    assert "its logsumexp or its random state is read" in report_of(read, *qkv(**BF16)).attention[0].reason
    plain = Attention(lambda q, k, v: flash(q, k, v, scale=0.5)[0])
    view = report_of(plain, *qkv(**BF16)).graphs[0]
    assert "is_causal=False, scale=0.5)" in view.after


@pytest.mark.parametrize("active", [None, "FA4"])
def test_flash_attention_3_must_be_active(active: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "active_implementation", lambda: active)
    (row,) = report_of(sdpa(), *qkv(**BF16)).attention
    now = "FA4 is" if active else "it is not"
    assert row.reason.endswith(f'torch.nn.attention.activate_flash_attention_impl("FA3"); {now}')


def test_a_torch_without_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "HAS_QUANTIZED_ATTENTION", False)
    assert "has no op for FP8 attention" in report_of(sdpa(), *qkv(**BF16)).attention[0].reason


def test_code_of_another_implementation_is_not_taken_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    identities: list[str | None] = []
    original = inductor_passes.JointPass.__init__

    def noted(self: Any, known: Any, identity: str | None, *args: Any, **kwargs: Any) -> None:
        identities.append(identity)
        original(self, known, identity, *args, **kwargs)

    monkeypatch.setattr(inductor_passes.JointPass, "__init__", noted)
    for active in (None, "FA3", "FA3"):
        monkeypatch.setattr(attention, "active_implementation", lambda active=active: active)
        torch._dynamo.reset()
        torch.compile(sdpa(), backend=Backend(asking(), compiler="eager"))(*qkv(**BF16))
    assert len(identities) == 3
    assert identities[0] != identities[1] == identities[2]


def fp8(*shape: int) -> Tensor:
    return torch.zeros(shape).to(torch.float8_e4m3fn)


@in_one_test(
    ("q", "scale", "problem"),
    [
        (fp8(2, 4, 8, 16), torch.ones(2, 4), "scales .* for \\(2, 2\\) heads"),
        (fp8(2, 4, 8, 16), torch.ones(2, 2).double(), "scales"),
        (fp8(2, 4, 16, 8).mT, torch.ones(2, 2), "with strides"),
        (torch.zeros(2, 4, 8, 16), torch.ones(2, 2), "attention of torch.float32"),
    ],
)
def test_a_valid_node(q: Tensor, scale: Tensor, problem: str) -> None:
    def graph_of(q: Tensor, scale: Tensor) -> torch.fx.Graph:
        graph = torch.fx.Graph()
        k = fp8(2, 2, 8, 16)
        args = graph_inputs_for(graph, [q, k, k, scale, scale, scale, False, None])
        node = graph.call_function(scaled_attention, tuple(args))
        node.meta |= {"fp8graph_pass": "test", "val": args[0].meta["val"]}
        graph.output([node])
        return graph

    verify.verify(graph_of(fp8(2, 4, 8, 16), torch.ones(2, 2)), after="x")
    with pytest.raises(Fp8GraphError, match=problem):
        verify.verify(graph_of(q, scale), after="x")
