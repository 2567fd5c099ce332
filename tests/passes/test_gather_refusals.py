"""The refusals of gather_in_fp8: which tensors it gathers in high precision, and the text of every reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import DelayedScaling, Policy, Rule
from fp8graph.analysis import gather_path
from fp8graph.ir.decisions import InitialScales
from fp8graph.ir.nodes import USES_KEY
from gathers import Rows, Sequence, Sharded, gather, reasons_of, report_of
from helpers import facts_of

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
    pytest.mark.usefixtures("group_of_two"),
]


@pytest.mark.parametrize(
    ("inner", "reason"),
    [(512, "quantized before it is sent"), (256, "256 rows, contracted in backward, are padded")],
)
def test_padded_columns_of_square_tiles_are_gathered_as_they_are(inner: int, reason: str) -> None:
    """On sm_90 dgrad contracts over a multiple of 512 rows of the weight; the shards' scales are not padded."""
    module = Sharded(512, inner).bfloat16()
    policy = Policy(default="blockwise", min_speedup=0)
    report = report_of(module, torch.randn(32, 512).bfloat16().requires_grad_(), policy, target="sm_90")
    assert reasons_of(report)[0].startswith(reason)


TRAINING = "a scale per column spans all ranks, so both layouts would have to be sent"
BF16 = torch.bfloat16
REFUSALS: list[Any] = [
    pytest.param(Rows(also=torch.exp), (16, 32), "tensorwise", "read in high precision too, by exp", id="reader"),
    pytest.param(Rows(), (16, 32), "rowwise", TRAINING, id="scales of columns"),
    pytest.param(Rows(40), (16, 40), "tensorwise", "shards of 16 x 40 are padded", id="padding"),
    pytest.param(Rows(), (16, 32), "nvfp4", "NVFP4 tensors are never sent quantized", id="nvfp4"),
    pytest.param(
        Rows(128).to(BF16), (128, 128), "mxfp8", "no fewer bytes: 33792 in both directions, 32768 as it is", id="bytes"
    ),
    pytest.param(
        Rows(128), (48, 128), "blockwise", "shards of 48 rows are not a multiple of the 128-row tile", id="tiles"
    ),
    pytest.param(
        Sequence(dim=1),
        (2, 128, 128),
        "blockwise",
        "shards of 256 rows are not a multiple of the 128-row tile, or",
        id="batches",
    ),
    pytest.param(
        Rows(), (16, 32), DelayedScaling(reduce_amax=False), "its amaxes are not reduced over the ranks", id="amaxes"
    ),
    pytest.param(
        Rows(),
        (16, 32),
        Policy(rules=[Rule("proj", "tensorwise", wgrad="rowwise")]),
        "quantized in another way too, by quantize_input",
        id="two recipes",
    ),
    pytest.param(
        Rows(), (16, 32), Policy(rules=[Rule("proj", "tensorwise", wgrad=None)]), "read in high precision", id="wgrad"
    ),
]


@pytest.mark.parametrize(("module", "shape", "policy", "reason"), REFUSALS)
def test_gather_in_high_precision_gives_its_reason(module: nn.Module, shape: Any, policy: Any, reason: str) -> None:
    dtype = next(module.parameters()).dtype
    report = report_of(module, torch.randn(shape, dtype=dtype), policy)
    assert reasons_of(report)[0].startswith(reason)
    assert "uint8" not in {c.dtype for c in report.collectives}
    assert reason in str(report)


@pytest.mark.parametrize(
    ("gathering", "reducing", "recipe", "may_differ"),
    [
        ({0, 1}, {0, 1}, DelayedScaling(), False),
        ({0, 1}, {0, 1, 2, 3}, DelayedScaling(), False),
        ({0, 1}, {1, 2}, DelayedScaling(), True),  # one of them is not enough
        ({0, 1}, set[int](), DelayedScaling(), True),
        (set[int](), {0, 1}, DelayedScaling(), True),  # an unknown group
        ({0, 1}, {0, 1}, DelayedScaling(reduce_amax=False), True),
    ],
)
def test_all_ranks_that_gather_must_reduce_together(
    gathering: Any, reducing: Any, recipe: Any, may_differ: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather_path.collectives, "ranks_of", frozenset)
    node: Any = SimpleNamespace(meta={USES_KEY: [SimpleNamespace(recipe=recipe, is_weight=False)]})
    compilation: Any = SimpleNamespace(facts=facts_of(Policy(), amax_group=reducing))
    assert gather_path.scale_may_differ(node, gathering, compilation) is may_differ
    begins: Any = SimpleNamespace(facts=facts_of(Policy(), amax_group=reducing, conditions=(InitialScales(),)))
    assert gather_path.scale_may_differ(node, gathering, begins)  # each rank has the amax of its shard


@pytest.mark.parametrize("dim", [0, 1])
def test_square_tiles_of_several_sequences_are_gathered_as_they_are(dim: int) -> None:
    """A tile would have rows of two sequences, and its scale is not one of a row."""
    report = report_of(Rows(128, dim=dim), torch.randn(2, 128, 128), fp8graph.Float8BlockScaling(x_block=(128, 128)))
    assert reasons_of(report) == [
        "shards of 256 rows are not a multiple of the 128-row tile, or are reshaped after the gather"
    ]


@pytest.mark.slow
def test_rows_whose_number_forward_asks_for() -> None:
    """A dynamic batch: what was gathered is asked for its size, which the FP8 copy would not have."""
    backend = fp8graph.Backend(Policy(default="delayed"), compiler="eager")
    compiled = torch.compile(Sequence(dim=1), backend=backend, dynamic=True)
    compiled(torch.randn(3, 48, 128, requires_grad=True)).sum().backward()
    assert reasons_of(backend.report)[0] == "the number of its rows is dynamic"


class Product(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return gather(x, 0) @ y


def test_rows_of_a_dynamic_size() -> None:
    backend = fp8graph.Backend(Policy([Rule("*", "tensorwise", op="*")]), compiler="eager")
    x, y = torch.randn(16, 48), torch.randn(48, 32)
    torch._dynamo.mark_dynamic(x, 1)
    torch._dynamo.mark_dynamic(y, 0)
    torch.compile(Product(), backend=backend)(x, y)
    assert reasons_of(backend.report) == ["the size of its rows is dynamic"]


class Experts(nn.Module):
    """A gather of the rows of all groups, or of the experts."""

    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.rows = rows
        self.w = nn.Parameter(torch.randn(4 if rows else 2, 48, 32, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
        x, w = (gather(x, 0), self.w) if self.rows else (x, gather(self.w, 0))
        return torch._grouped_mm(x, w.transpose(-2, -1), offs=ends)


@pytest.mark.parametrize(("rows", "reason"), [(True, "quantized with offs"), (False, "quantized with per_matrix")])
def test_operands_of_experts(rows: bool, reason: str) -> None:
    policy = Policy([Rule("*", "tensorwise", op="*")], min_speedup=0)
    report = report_of(Experts(rows), torch.randn(16 if rows else 32, 32, dtype=torch.bfloat16), policy)
    assert reasons_of(report)[0] == reason
