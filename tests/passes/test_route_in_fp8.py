"""route_in_fp8: tokens are quantized before they are routed to their experts, or the report says why not."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import expert_parallel
import fp8graph
from fp8graph.numerics import sqnr_db
from helpers import eager_backend, first_fast, first_slow, same_bits, step
from ranks import run_each, run_ranks
from tiny_models import causal_lm

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)
pytest.importorskip("transformers.integrations.moe")  # its op for experts in FP32

HIDDEN, EXPERTS = 32, 4


class Routed(nn.Module):
    """Each of 16 tokens is copied ``copies`` times, in the order of its experts."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(EXPERTS, 48, HIDDEN, dtype=dtype))

    def forward(self, x: Tensor, rows: Tensor, offs: Tensor) -> Tensor:
        taken, w = x[rows], self.w.transpose(-2, -1)
        if x.dtype == torch.bfloat16:
            return torch._grouped_mm(taken, w, offs=offs)
        return torch.ops.transformers.grouped_mm_fallback(taken, w, offs)


class Read(Routed):
    """Something else reads the tokens in the order of their experts."""

    def forward(self, x: Tensor, rows: Tensor, offs: Tensor) -> Tensor:
        taken = x[rows]
        return torch.ops.transformers.grouped_mm_fallback(taken, self.w.transpose(-2, -1), offs) * taken.mean(1, True)


class Linear(Routed):
    """One expert for all."""

    def forward(self, x: Tensor, rows: Tensor, offs: Tensor) -> Tensor:
        return nn.functional.linear(x[rows], self.w[0])


def arguments(copies: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, HIDDEN, generator=generator).to(dtype).requires_grad_()
    rows = torch.randperm(16 * copies, generator=generator) // copies
    return x, rows, torch.tensor([10, 10, 15, 16 * copies], dtype=torch.int32)


def policy(recipe: Any, **gemms: Any) -> fp8graph.Policy:
    return fp8graph.Policy([fp8graph.Rule("*", recipe, op="*", **gemms)], default=None)


def ran(module: nn.Module, recipe: Any, copies: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Result and gradients, and the backend."""
    torch._dynamo.reset()
    backend = eager_backend(policy(recipe))
    x, rows, offs = arguments(copies, dtype)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    return [step(compiled, x, rows, offs, parameters=module.parameters()) for _ in range(2)][1], backend


def lines(view: Any) -> list[str]:
    wanted = ("fp8graph.quantize", "fp8graph.columnwise", "aten.index.Tensor", "fp8graph.scaled_grouped_mm")
    found = (line.partition("  #")[0] for line in view.after.splitlines() if any(name in line for name in wanted))
    return [re.sub(r"fp8graph\.|aten\.|, power_2_scale=\w+, amax_epsilon=[\d.e-]+|, out_dtype.*", "", x) for x in found]


def reasons(backend: Any) -> list[str]:
    return [r.reason for r in backend.report.refusals if r.what == "quantized before it is routed"]


def test_rows_with_their_scales() -> None:
    """16 tokens are quantized, 64 rows of bytes are moved; the scales of columns are those of each expert's rows."""
    _, backend = ran(Routed(), "rowwise")
    (view,) = backend.report.graphs
    assert [line for line in lines(view) if "_weight" not in line][:6] == [
        "quantize_input_2: (e4m3[16, 32], f32[16, 1]) = quantize(primals_1, dtype=e4m3, rowwise=[1, 1], columnwise=[], "
        "scaling=row)",
        "index_tensor: uint8[64, 32] = index.Tensor(view_dtype, [primals_2])",
        "index_tensor_1: f32[64, 1] = index.Tensor(tokens_rowwise_scale_inv, [primals_2])",
        "index: f32[64, 32] = index.Tensor(primals_1, [primals_2])",
        "quantize_default: (e4m3[32, 64], f32[4, 32]) = quantize(index, dtype=e4m3, rowwise=[], columnwise=[1, 1], "
        "scaling=row, offs=primals_4)",
        "grouped_fprop: f32[64, 48] = scaled_grouped_mm(view_dtype_1, weight_rowwise, index_tensor_1, "
        "weight_rowwise_scale_inv, primals_4",
    ]


def test_one_scale_known_beforehand() -> None:
    """Both layouts of 64 rows are copies of what was quantized for 16 tokens."""
    _, backend = ran(Routed(), "delayed")
    (view,) = backend.report.graphs
    assert lines(view)[:3] == [
        "quantize_input_2: (e4m3[16, 32], f32[1], f32[16]) = quantize(primals_1, dtype=e4m3, rowwise=[1, 1], "
        "columnwise=[], scaling=delayed, scales=scales)",
        "index_tensor: uint8[64, 32] = index.Tensor(view_dtype, [primals_2])",
        "columnwise_default: e4m3[32, 64] = columnwise(view_dtype_1, multiples=[1, 1], offs=primals_4)",
    ]
    assert "f32[64, 32] = aten.index.Tensor(" not in view.after


@first_fast("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_the_numbers_of_quantizing_afterwards(recipe: str, dtype: torch.dtype) -> None:
    module = Routed(dtype)
    with expert_parallel.without_the_pass():
        expected, before = ran(module, recipe, dtype=dtype)
    got, backend = ran(module, recipe, dtype=dtype)
    assert same_bits(got, expected)
    assert not reasons(backend)
    if recipe == "delayed":
        state, other = dict(backend.state_dict()), dict(before.state_dict())
        assert state.keys() == other.keys()
        assert all(torch.equal(state[key], other[key]) for key in state)


@pytest.mark.parametrize(
    ("recipe", "copies", "module", "reason"),
    [
        ("rowwise", 2, Routed, "no fewer bytes: 32 rows are made from 16"),
        ("delayed", 3, Routed, "no fewer bytes: 48 rows are made from 16"),
        ("tensorwise", 4, Routed, "each expert has one scale, that of the tokens which it takes"),
        ("blockwise", 4, Routed, "the same pass over the permuted rows makes their columnwise copy"),
        ("mxfp8", 4, Routed, "the same pass over the permuted rows makes their columnwise copy"),
        (fp8graph.Float8BlockScaling(x_block=(128, 128)), 4, Linear, "128 rows share the scale of a tile"),
        ("delayed", 4, Read, "the moved rows are read in high precision, too, by mean"),
    ],
    ids=str,
)
def test_tokens_quantized_after_routing_have_a_reason(
    recipe: Any, copies: int, module: type[Routed], reason: str
) -> None:
    dtype = torch.bfloat16 if copies < 4 else torch.float32
    _, backend = ran(module(dtype), recipe, copies, dtype)
    assert reasons(backend) == [reason]
    assert "tokens_" not in backend.report.graphs[0].after


def test_rows_in_another_order_are_not_candidates() -> None:
    _, backend = ran(Routed(), "rowwise", 1)
    assert reasons(backend) == []
    assert "tokens_" not in backend.report.graphs[0].after


# One layer with 64 tokens, by family, with as many experts per token as its large models have. On sm_90, before and
# after: quantize nodes, and the rows that they quantize in forward, of the experts' inputs and of what is between them.
FAMILIES: dict[str, tuple[dict[str, Any], dict[bool, tuple[tuple[int, int], tuple[int, int]]]]] = {
    "Mixtral": (
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        {False: ((2, 256), (2, 256)), True: ((4, 256), (4, 256))},
    ),
    "GptOss": (
        {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 4},
        {False: ((2, 512), (2, 320)), True: ((4, 512), (5, 320))},
    ),
    "Qwen3Moe": (
        {"head_dim": 16, "num_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 48},
        {False: ((2, 1024), (2, 576)), True: ((4, 1024), (5, 576))},
    ),
    "DeepseekV3": (  # its shared experts read the same tokens, which are quantized once for all
        {
            **{"num_key_value_heads": 4, "n_routed_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 48},
            **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
            **{"v_head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
        },
        {False: ((4, 1152), (3, 640)), True: ((9, 1152), (9, 640))},
    ),
}


@first_slow("training", [False, True], ids=["inference", "training"])
@first_slow("family", FAMILIES)
def test_rows_that_are_quantized(family: str, training: bool) -> None:
    settings, expected = FAMILIES[family]

    def counted() -> tuple[int, int]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        policy = fp8graph.Policy([fp8graph.Rule("*experts*", "rowwise", op="*")], default=None, min_speedup=0)
        ids = torch.zeros(1, 64, dtype=torch.long)
        labels: dict[str, Any] = {"labels": ids} if training else {}
        model = causal_lm(family, **settings)(1).bfloat16()
        asked: dict[str, Any] = {"policy": policy, "training": training, "target": "sm_90", "cache_weights": "update"}
        report = fp8graph.explain(model, input_ids=ids, use_cache=False, **asked, **labels)
        made = [line for graph in report.graphs for line in graph.after.splitlines() if "fp8graph.quantize(" in line]
        inputs = (re.search(r"^quantize_input\S* \(e4m3\[(\d+), .*rowwise=\[\d", line) for line in made)
        return len(made), sum(int(found[1]) for found in inputs if found)

    with expert_parallel.without_the_pass():
        before = counted()
    assert (before, counted()) == expected[training]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_generated_code_computes_the_same(recipe: str) -> None:
    module = Routed()
    x, rows, offs = arguments()
    results: list[list[Tensor]] = []
    for compiler in ("eager", "inductor"):
        torch._dynamo.reset()
        backend = fp8graph.Backend(policy(recipe), compiler=compiler)
        compiled = torch.compile(module, backend=backend, fullgraph=True)
        results.append(step(compiled, x, rows, offs, parameters=module.parameters()))
        assert not reasons(backend)
    assert same_bits(*results)


FROM_ROWWISE = fp8graph.MXFP8BlockScaling(columnwise_from_rowwise=True)
DELAYED = fp8graph.DelayedScaling(initial_scale="one")  # with "auto" ranks have scales of their own at first
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mxfp8 from rowwise, training": (FROM_ROWWISE, {}),
    "mxfp8 from rowwise, exact splits": (FROM_ROWWISE, {"exact": True}),
    "mxfp8, training": ("mxfp8", {}),
    **{f"{recipe}, training": (recipe, {}) for recipe in ("tensorwise", "rowwise")},
    **{f"{recipe}, inference": (recipe, {"training": False}) for recipe in ("rowwise", "blockwise", "mxfp8")},
    "delayed, training": (DELAYED, {}),
    "delayed, inference": (DELAYED, {"training": False}),
    "delayed, weighted before": (DELAYED, {"weighted": "before"}),
    "delayed, exact splits": (DELAYED, {"exact": True}),
    "rowwise, exact splits": ("rowwise", {"exact": True, "training": False}),
    "delayed, generated": (DELAYED, {"compiler": "inductor"}),
}
COLUMNS = "backward needs copies with the scales of columns, from high precision: both would have to be sent"


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    @cache
    def found(ranks: int) -> list[dict[str, Any]]:
        calls = {name: (expert_parallel.both, case) for name, case in CASES.items()}
        return run_ranks(run_each, ranks, tmp_path_factory.mktemp(f"experts{ranks}"), calls)

    return found


@first_slow("ranks", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_experts_on_several_ranks(name: str, ranks: int, on_ranks: Callable[[int], list[dict[str, Any]]]) -> None:
    """The numbers of quantizing after the all-to-all, bit for bit, and of one process that has all experts."""
    recipe, settings = CASES[name]
    every = [rank[name] for rank in on_ranks(ranks)]
    for after, before in every:
        assert same_bits(before["outputs"], after["outputs"])
        if settings.get("training", True):
            assert same_bits([before["up"], before["down"]], [after["up"], after["down"]])
    one = expert_parallel.train(0, recipe, **settings, ranks=1)
    for step_of_all, whole in zip(
        zip(*(before["outputs"] for _, before in every), strict=True), one["outputs"], strict=True
    ):
        # tensorwise: a rank fills up with copies of its first token, which count in the amaxes of experts
        assert sqnr_db(whole, torch.cat(step_of_all)) > {"tensorwise": 28, DELAYED: 60}.get(recipe, 100)


@first_slow("ranks", [2, 4])
def test_bytes_of_an_all_to_all(ranks: int, on_ranks: Callable[[int], list[dict[str, Any]]]) -> None:
    """A quarter of those of FP32, with scales of rows and of 32 numbers beside them."""
    rows = expert_parallel.EXPERTS * expert_parallel.TOKENS // ranks
    hidden = expert_parallel.HIDDEN
    full, one, four = (rows * size * (ranks - 1) // ranks for size in (4 * hidden, hidden, 4))
    high = ("float32", full)
    expected = {
        "tensorwise, training": ([high, high], [high, high]),
        "rowwise, training": ([high, high], [high, high]),
        "mxfp8, training": ([high, high], [high, high]),
        "mxfp8 from rowwise, training": (
            [("uint8", one), ("uint8", four // 2), high],
            [("uint8", one), ("uint8", four // 2), high],
        ),
        "delayed, training": ([("uint8", one), high], [("uint8", one), high]),
        "delayed, weighted before": ([("uint8", one), high], [("uint8", one), high]),
        "rowwise, inference": ([("uint8", one), ("float32", four), high], []),
        "mxfp8, inference": ([("uint8", one), ("uint8", four // 2), high], []),
        "delayed, inference": ([("uint8", one), high], []),
    }
    for rank in on_ranks(ranks):
        for name, (forward, backward) in expected.items():
            _, found = rank[name]
            assert [(dtype, sent) for where, dtype, sent in found["sent"] if where == "forward"] == forward
            assert [(dtype, sent) for where, dtype, sent in found["sent"] if where == "backward"] == backward
        exact = [(where, dtype) for where, dtype, _ in rank["delayed, exact splits"][1]["sent"] if dtype != "int64"]
        assert exact == [(where, dtype) for where in ("forward", "backward") for dtype in ("uint8", "float32")]
        assert rank["rowwise, training"][1]["refused"] == rank["mxfp8, training"][1]["refused"] == {COLUMNS}
        for name in ("delayed, training", "mxfp8 from rowwise, training", "mxfp8 from rowwise, exact splits"):
            assert rank[name][1]["refused"] == set()
