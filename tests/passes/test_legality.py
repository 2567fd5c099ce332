"""legality: what FP8 cannot multiply on any device, and the text of every reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import Float8BlockScaling, Policy, Rule
from fp8graph.passes.assign.legality import is_batched, why_not_in_fp8
from helpers import Weight, in_one_test, passed

BF16 = torch.bfloat16
ENDS = torch.tensor([8, 16], dtype=torch.int32)  # of two groups of rows


class Function(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: Tensor) -> Tensor:
        return self.body(*args)


def grouped(a: Tensor, b: Tensor, ends: Tensor | None = None, **more: Any) -> Tensor:
    return torch._grouped_mm(a, b, offs=ends, **more)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


NO_GROUPS = "grouped matmul of 3 x 3 dims: only rows in groups x one matrix per group"
OTHER_FORM = "grouped matmul with a bias, another result dtype or no offsets"
REFUSALS: list[Any] = [
    pytest.param(torch.mm, [ones(8, 8, dtype=torch.float64)] * 2, "FP8 cannot multiply float64", id="fp64"),
    pytest.param(torch.mm, [ones(8, 8, dtype=torch.complex64)] * 2, "FP8 cannot multiply complex64", id="complex"),
    pytest.param(torch.mm, [ones(8, 8, dtype=torch.int32)] * 2, "FP8 cannot multiply int32", id="int"),
    pytest.param(torch.mm, [ones(0, 8), ones(8, 16)], "an operand is empty: [0, 8]", id="no rows"),
    pytest.param(torch.mm, [ones(8, 0), ones(0, 16)], "an operand is empty: [8, 0]", id="nothing to sum"),
    # torch itself refuses these two where they run; FP8 is not to hide that
    pytest.param(
        torch.mm,
        [ones(8, 8), ones(8, 8, dtype=BF16)],
        "operands of two dtypes: torch.float32, torch.bfloat16",
        id="two",
    ),
    pytest.param(
        lambda a, b, c: torch.addmm(c, a, b),
        [ones(8, 8), ones(8, 8), ones(8, dtype=torch.float64)],
        "the result is torch.float64",
        id="result",
    ),
    pytest.param(grouped, [ones(2, 16, 32, dtype=BF16), ones(2, 32, 16, dtype=BF16)], NO_GROUPS, id="batches"),
    pytest.param(
        grouped,
        [ones(2, 16, 32, dtype=BF16), ones(32, 16, dtype=BF16), ENDS],
        NO_GROUPS.replace("3 x 3", "3 x 2"),
        id="weight on the left",
    ),
    pytest.param(
        lambda a, b, ends: grouped(a, b, ends, out_dtype=BF16),
        [ones(16, 32, dtype=BF16), ones(2, 32, 16, dtype=BF16), ENDS],
        OTHER_FORM,
        id="result of a grouped matmul",
    ),
]


@in_one_test(("body", "args", "reason"), REFUSALS)
def test_illegal_gemm_has_its_reason(body: Any, args: list[Tensor], reason: str) -> None:
    policy = Policy([Rule("*", "tensorwise", op="*")])
    (gemm,) = fp8graph.explain(Function(body), *args, policy=policy, training=False).gemms
    assert gemm.recipe is None
    assert gemm.reason == f'{reason} (rule "*" (op *) asked for tensorwise)'


def test_tiles_across_groups_of_rows() -> None:
    policy = Policy([Rule("*", Float8BlockScaling(x_block=(2, 48)), op="*")])
    args = ones(16, 32, dtype=BF16), ones(2, 32, 48, dtype=BF16), ENDS
    (gemm,) = fp8graph.explain(Function(grouped), *args, policy=policy, training=False).gemms
    assert gemm.reason == 'tiles of 2 rows do not fit groups of rows (rule "*" (op *) asked for blockwise)'


def decided(rule: Rule | None, *shapes: tuple[int, ...]) -> list[tuple[bool, str | None]]:
    """Whether each GEMM of ``a @ w`` is batched, and why it is not in FP8."""
    policy = Policy([rule] if rule else [], default="tensorwise")
    module = Weight(lambda w, a: torch.matmul(a, w), *shapes[1])
    _, compilation = passed(module, torch.randn(shapes[0], requires_grad=True), last="match", policy=policy)
    (site,) = compilation.sites
    resolution = policy.resolve(site.fqn, site.op)
    return [(is_batched(gemm), why_not_in_fp8(gemm, resolution)) for gemm in site.gemms]


def test_one_of_several_matrices_waits_for_a_rule() -> None:
    reason = "batched matmul: torch has no scaled bmm; a rule that names it gets it emulated"
    assert decided(None, (3, 8, 32), (3, 32, 16)) == [(True, reason)] * 3
    assert decided(Rule("*", "tensorwise"), (3, 8, 32), (3, 32, 16)) == [(True, None)] * 3


@pytest.mark.parametrize("shapes", [((1, 8, 32), (1, 32, 16)), ((8, 32), (32, 16)), ((3, 8, 32), (32, 16))])
def test_product_with_one_matrix_is_legal(shapes: Any) -> None:
    assert decided(None, *shapes) == [(False, None)] * 3
