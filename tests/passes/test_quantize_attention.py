"""quantize_attention: q, k and v are quantized; forward and backward read the same numbers; the rest is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import fp8graph
from attentions import FORMS_IN_TRAINING, OPS, Attention, asking, exact, qkv, results, rounded, sdpa, written_out
from fp8graph import Float8CurrentScaling, Float8RowwiseScaling, Policy, Rule
from fp8graph.numerics import sqnr_db
from helpers import NONE, brief, eager_backend, first_fast, first_slow, same_bits, view_of

POWER_2 = Float8CurrentScaling(power_2_scale=True)
EXACT = Float8RowwiseScaling(power_2_scale=False)


TENSORWISE = asking("tensorwise")


def reason(module: Any, *args: Tensor, policy: Policy = TENSORWISE, training: bool = True) -> str:
    report = fp8graph.explain(module, *args, policy=policy, training=training)
    return report.attention[0].reason


CAUSAL = torch.ones(16, 16, dtype=torch.bool).tril()
MODULES: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "plain": (sdpa(), {"keys": 32}),
    "causal": (sdpa(is_causal=True), {}),
    "mask": (sdpa(attn_mask=CAUSAL), {}),
    "grouped queries": (sdpa(is_causal=True, enable_gqa=True), {"kv_heads": 2}),
    "dropout": (sdpa(dropout_p=0.3), {}),
    "dropout, causal, grouped queries": (sdpa(dropout_p=0.3, is_causal=True, enable_gqa=True), {"kv_heads": 2}),
    "written out": (written_out(between=lambda s: s.masked_fill(~CAUSAL, -math.inf)), {}),
    "written out, dropout": (written_out(after=lambda p: functional.dropout(p, 0.3)), {"keys": 32}),
    "tokens before heads": (
        Attention(lambda q, k, v: sdpa()(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)))),
        {},
    ),
    "size 96": (sdpa(is_causal=True), {"size": 96}),
    "size 128": (sdpa(is_causal=True), {"size": 128}),
    "size 256": (sdpa(is_causal=True), {"size": 256}),
    "bf16": (sdpa(is_causal=True), {"dtype": torch.bfloat16}),
}


# Not bit for bit: torch multiplies q and k with the root of the scale before they are quantized, and repeats k and v; a
# bmm of other strides may add in another order.
NEARLY = ("dropout", "dropout, causal, grouped queries", "written out, dropout")


PER_HEAD = ("mask", "grouped queries", "written out", "tokens before heads", "bf16")


@first_fast(
    ("name", "recipe"),
    [*((name, "tensorwise") for name in MODULES), *((name, "rowwise") for name in PER_HEAD), (NEARLY[1], EXACT)],
)
def test_the_program_runs_on_what_e4m3_leaves_of_q_k_and_v(name: str, recipe: Any) -> None:
    """The program's results for the rounded tensors, bit for bit: the output, and gradients straight through."""
    module, sizes = MODULES[name]
    torch.manual_seed(1)
    q, k, v = qkv(**sizes)
    settings: dict[str, Any] = {}
    if recipe != "tensorwise":
        settings = {"heads": k.shape[1], "power_2": recipe == "rowwise", "epsilon": 1e-12}
    of_q: dict[str, Any] = settings | ({"heads": q.shape[1]} if settings and name in NEARLY else {})
    expected = results(module, rounded(q, **of_q), rounded(k, **settings), rounded(v, **settings), policy=NONE)
    got = results(module, q, k, v, policy=asking(recipe))
    if name in NEARLY:
        assert all(sqnr_db(e, g) > 100 for e, g in zip(expected, got, strict=True))
    else:
        assert same_bits(expected, got)
    assert sqnr_db(results(module, q, k, v, policy=NONE)[0], got[0]) < 40


@first_fast(
    ("size", "kv_heads", "causal", "dtype", "bound"),
    [
        (64, 4, False, torch.float32, 110),
        (96, 2, True, torch.float32, 110),
        (128, 1, True, torch.float32, 110),
        (256, 4, True, torch.float32, 110),
        (64, 2, True, torch.bfloat16, 42),
    ],
)
@first_fast("recipe", [POWER_2, EXACT])
def test_the_oracle(size: int, kv_heads: int, causal: bool, dtype: torch.dtype, bound: float, recipe: Any) -> None:
    """FP32: only the sums are rounded. bf16: torch's kernel rounds the probabilities and the results."""
    torch.manual_seed(2)
    given = qkv(kv_heads=kv_heads, size=size, dtype=dtype)
    own: dict[str, Any] = {"power_2": True} if recipe is POWER_2 else {"heads": kv_heads, "epsilon": 1e-12}
    expected = exact(*(rounded(x, **own) for x in given), causal=causal)
    got = results(sdpa(is_causal=causal, enable_gqa=True), *given, policy=asking(recipe))
    for one, other in zip(expected, got, strict=True):
        assert sqnr_db(one, other.double()) > bound


@first_fast("recipe", ["tensorwise", "rowwise"])
@first_fast("which", [0, 1, 2], ids="qkv")
def test_infinities_and_nan_reach_the_result(recipe: str, which: int) -> None:
    """Where attention in high precision shows them, too."""
    for value in (math.inf, -math.inf, math.nan):
        given = qkv()
        with torch.no_grad():
            given[which][0, 0, 3, 5] = value
        output, *_ = results(sdpa(), *given, policy=asking(recipe))
        plain, *_ = results(sdpa(), *given, policy=NONE)
        assert not plain.isfinite().all()
        assert not output[~plain.isfinite()].isfinite().any()


def test_the_graph_before_and_after() -> None:
    view = view_of(sdpa(is_causal=True), *qkv(), policy=TENSORWISE)
    settings = "dtype=e4m3, rowwise=[1, 1], columnwise=[]"
    before, after = view.stages["save_for_backward"], brief(view.after)
    assert "aten._scaled_dot_product_flash_attention_for_cpu(primals_1, primals_2, primals_3, 0.0, True)" in before
    for i, name in enumerate(("query", "key", "value"), 1):
        assert f"quantize_{name}: (e4m3[2, 4, 16, 64], f32[]) = fp8graph.quantize(primals_{i}, {settings})" in after
        decoded = f"f32[2, 4, 16, 64] = fp8graph.dequantize({name}_data, {name}_scale_inv, dtype=f32"
        assert after.count(decoded) == 2  # forward and backward
    numbers = [f"dequantize_default{end}" for end in ("", "_1", "_2", "_3", "_4", "_5")]
    assert f"aten._scaled_dot_product_flash_attention_for_cpu({', '.join(numbers[:3])}, 0.0, True)" in after
    assert f"_for_cpu_backward(tangents_1, {', '.join(numbers[3:])}, alias_1, getitem_1, 0.0, True)" in after


def test_one_scale_per_head_of_keys() -> None:
    view = view_of(sdpa(enable_gqa=True), *qkv(kv_heads=2), policy=asking("rowwise"))
    assert "quantize_query: (e4m3[4, 2048], f32[4, 1])" in view.after  # 2 of 4 heads, 16 tokens, 64
    assert "quantize_key: (e4m3[4, 1024], f32[4, 1])" in view.after


def test_backward_keeps_fp8() -> None:
    """In place of q, k and v: their bytes and scales."""
    module = Attention(lambda q, k, v: sdpa()(q.sin(), k.sin(), v.sin()))
    view = view_of(module, *qkv(), policy=TENSORWISE)
    (saved,) = [set(view.saved)]
    assert {f"{name}_{part}" for name in ("query", "key", "value") for part in ("data", "scale_inv")} <= saved
    assert not any(name.startswith(("dequantize", "sin")) for name in saved)


def test_strides_stay_as_they_are() -> None:
    """[batch, tokens, heads, size] in memory, as models have it: the result is viewed without a copy."""

    def body(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(2, 16, 4, 64).transpose(1, 2) for x in (q, k, v))
        return sdpa()(q, k, v).transpose(1, 2).reshape(2, 16, 256)

    given = [torch.randn(2, 16, 256, requires_grad=True) for _ in range(3)]
    for recipe in ("tensorwise", "rowwise"):
        before, after = (view_of(Attention(body), *given, policy=policy).after for policy in (NONE, asking(recipe)))
        assert after.count("aten.clone(getitem") == before.count("aten.clone(getitem") == 0


def test_tensors_that_are_one_are_quantized_once() -> None:
    view = view_of(Attention(lambda q, k, v: sdpa()(q, k, k)), *qkv(), policy=TENSORWISE)
    assert view.after.count("fp8graph.quantize(") == 2


def test_checkpointed_code_is_run_again_as_it_was() -> None:
    def body(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return checkpoint(lambda *x: sdpa()(*(y.sin() for y in x)), q, k, v, use_reentrant=False)

    given = qkv()
    torch.manual_seed(0)
    plain = results(Attention(lambda q, k, v: sdpa()(q.sin(), k.sin(), v.sin())), *given, policy=TENSORWISE)
    assert same_bits(results(Attention(body), *given, policy=TENSORWISE), plain)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_flex_attention(recipe: str) -> None:
    def body(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + i - j)  # pyright: ignore[reportDeprecated]

    given = qkv(queries=128, gradients=False)
    with torch.no_grad():
        got, expected = (
            torch.compile(Attention(body), backend=eager_backend(policy))(*inputs)
            for policy, inputs in (
                (asking(recipe), given),
                (
                    NONE,
                    [rounded(x, 4, power_2=True, epsilon=1e-12) if recipe == "rowwise" else rounded(x) for x in given],
                ),
            )
        )
    assert same_bits([got], [expected])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_attention_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch trains it on GPUs only; its reference of the backward runs anywhere."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)

    def body(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + i - j)  # pyright: ignore[reportDeprecated]

    given = qkv(queries=128)
    expected = results(Attention(body), *map(rounded, given), policy=NONE)
    assert same_bits(expected, results(Attention(body), *given, policy=TENSORWISE))
    forward, backward = fp8graph.explain(Attention(body), *given, policy=TENSORWISE, training=True).attention
    assert (forward.form, forward.execution, backward.direction) == ("flex", "emulated", "backward")


@pytest.mark.parametrize("form", FORMS_IN_TRAINING)
def test_each_op_and_its_backward_read_decoded_numbers(form: str) -> None:
    view = fp8graph.explain(Attention(OPS[form][0]), *qkv(), policy=TENSORWISE, training=True).graphs[0]
    lines = [line.split(" = ")[1] for line in view.after.splitlines() if "= aten._scaled_dot_product" in line]
    numbers = [f"dequantize_default{end}" for end in ("", "_1", "_2", "_3", "_4", "_5")]
    assert [", ".join(numbers[:3]) in lines[0], ", ".join(numbers[3:]) in lines[1], len(lines)] == [True, True, 2]


def test_report_rows_of_quantized_attention() -> None:
    report = fp8graph.explain(sdpa(), *qkv(), policy=TENSORWISE, training=True)
    forward, backward = report.attention
    assert forward.reason.startswith('rule "*" (op attention) -> tensorwise; emulated: ')
    assert (forward.recipe, forward.execution, forward.dtypes) == ("tensorwise", "emulated", ("e4m3", "fp32"))
    assert (backward.recipe, backward.execution) == (None, "high precision")
    assert backward.reason == "backward stays in high precision; it reads the quantized q, k and v"
    assert "; 1 in FP8 (1 emulated)" in str(report)
    report.check()


def test_only_a_rule_that_names_attention_quantizes_it() -> None:
    assert reason(sdpa(), *qkv(), policy=Policy([Rule("*", "tensorwise", op="*")])) == (
        'attention stays in high precision unless a rule with op="attention" asks for it'
    )
    kept = Policy([Rule("*", None, op="*"), Rule("*", "tensorwise", op="attention")])
    assert reason(sdpa(), *qkv(), policy=kept) == 'rule "*" (op *) -> high precision'
    report = fp8graph.explain(sdpa(), *qkv(), policy=kept, training=True)
    assert report.unused_rules == ['rule "*" (op attention) -> tensorwise']


def test_a_region_switches_it_off() -> None:
    def body(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with fp8graph.autocast(enabled=False):
            return sdpa()(q, k, v)

    assert reason(Attention(body), *qkv()) == "autocast(enabled=False)"


both = Policy([Rule("*", "tensorwise", op="matmul"), Rule("*", "tensorwise", op="attention")], default=None)


@pytest.mark.parametrize(
    ("module", "sizes", "policy", "why"),
    [
        pytest.param(sdpa(), {}, asking("delayed"), "delayed has no scales for attention", id="delayed"),
        pytest.param(sdpa(), {}, asking("blockwise"), "one scale per tensor or per head, not one per tile", id="block"),
        pytest.param(sdpa(), {}, asking("mxfp8"), "one scale per tensor or per head, not one per tile", id="mxfp8"),
        pytest.param(sdpa(), {}, asking("nvfp4"), "one scale per tensor or per head, not one per tile", id="nvfp4"),
        pytest.param(sdpa(), {"dtype": torch.float64}, TENSORWISE, "FP8 cannot multiply float64", id="float64"),
        pytest.param(written_out(), {}, both, "its matmuls are in FP8 already", id="its matmuls are in FP8"),
    ],
)
def test_refusals(module: nn.Module, sizes: dict[str, Any], policy: Policy, why: str) -> None:
    report = fp8graph.explain(module, *qkv(**sizes), policy=policy, training=True)
    assert {row.recipe for row in report.attention} == {None}
    assert why in report.attention[0].reason
    assert "fp8graph.dequantize(query" not in report.graphs[0].after
    with pytest.raises(fp8graph.Fp8CoverageError, match="attention: not in FP8"):
        report.check()
    backend = fp8graph.Backend(policy, compiler="eager", strict=True)
    with pytest.raises(fp8graph.Fp8CoverageError, match="1 GEMMs and attentions that a rule asks for cannot run"):
        torch.compile(module, backend=backend)(*qkv(**sizes))


@first_slow("recipe", ["rowwise", "tensorwise", Float8CurrentScaling(hadamard_qk=True)])
def test_generated_code(recipe: Any) -> None:
    """Inductor's C++, forward and backward, of a module with a layout as models have it."""

    def body(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(2, 16, -1, 64).transpose(1, 2) for x in (q, k, v))
        return sdpa(is_causal=True, enable_gqa=True)(q.sin(), k, v).transpose(1, 2).reshape(2, 16, 256)

    given = [torch.randn(2, 16, size) for size in (256, 128, 128)]
    expected = results(Attention(body), *given, policy=asking(recipe))
    backend = fp8graph.Backend(asking(recipe))
    inputs = [x.clone().requires_grad_() for x in given]
    out = torch.compile(Attention(body), backend=backend)(*inputs)
    (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum().backward()
    got = [out.detach(), *(x.grad for x in inputs if x.grad is not None)]
    assert all(sqnr_db(one, other) > 60 for one, other in zip(expected, got, strict=True))
    assert backend.report.attention[0].recipe == (recipe if isinstance(recipe, str) else "tensorwise")


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "fused"), [(NONE, 1), (TENSORWISE, 0)], ids=["high precision", "quantized"])
def test_inductor_fuses_what_is_written_out_unless_it_is_quantized(policy: Policy, fused: int) -> None:
    """docs/attention.md says so."""
    module = Attention(lambda q, k, v: torch.matmul(q, k.transpose(-2, -1)).div(8.0).softmax(dim=-1).matmul(v))
    counters.clear()
    with torch._inductor.config.patch(fx_graph_cache=False), torch.no_grad():
        torch.compile(module, backend=fp8graph.Backend(policy))(*qkv(gradients=False))
    assert counters["inductor"]["fuse_attention"] == fused


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_number_of_tokens_may_be_dynamic(recipe: str) -> None:
    backend = eager_backend(asking(recipe))
    compiled = torch.compile(sdpa(), backend=backend)
    for queries in (16, 24):
        given = [x.detach() for x in qkv(queries=queries)]
        for x in given:
            torch._dynamo.mark_dynamic(x, 2)
        assert 20 < sqnr_db(sdpa()(*given), compiled(*given)) < 40
    assert len(backend.report.graphs) == 1


def test_the_number_of_heads_may_not() -> None:
    given = [x.detach() for x in qkv()]
    backend = eager_backend(asking("rowwise"))
    torch.compile(sdpa(), backend=backend, dynamic=True)(*given)
    assert "one scale per head needs to know how many there are" in backend.report.attention[0].reason


def test_flex_attention_that_broadcasts_keys_has_a_scale_for_each_of_their_heads() -> None:
    class Broadcast(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return flex_attention(q, k, v, block_mask=mask)

    mask = create_block_mask(lambda b, h, i, j: i >= j, 3, None, 128, 128, device="cpu")
    q, k, v = torch.randn(3, 4, 128, 64), torch.randn(1, 4, 128, 64), torch.randn(1, 4, 128, 64)
    report = fp8graph.explain(Broadcast(), q, k, v, policy=asking("rowwise"), training=False)
    assert [row.recipe for row in report.attention] == ["rowwise"], report.attention[0].reason
    assert "[4, 8192]" in report.graphs[0].after  # keys and values: one row per head
    assert "[12, 8192]" in report.graphs[0].after  # queries


def test_a_second_product_of_the_same_probabilities_is_a_matmul() -> None:
    class Twice(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
            shares = torch.softmax(q @ k.transpose(-1, -2), -1)
            return shares @ v, shares @ w

    x = [torch.randn(2, 2, 16, 32) for _ in range(4)]
    report = fp8graph.explain(Twice(), *x, policy=TENSORWISE, training=True)
    assert len({row.name for row in report.attention}) == 1
    assert report.graphs[0].after.count("= fp8graph.quantize(") == 3
