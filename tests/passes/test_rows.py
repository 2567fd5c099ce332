"""The rows of the report that passes make: one for each GEMM, as it was decided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fp8graph import Policy, Rule
from fp8graph.ir.settings import Settings
from fp8graph.records import GemmRecord
from helpers import ALL, Two, passed


def records(
    module: nn.Module, *, policy: Any = ALL, dtype: torch.dtype = torch.float32, **known: Any
) -> list[GemmRecord]:
    x = torch.randn(16, 32, dtype=dtype, requires_grad=True)
    _, compilation = passed(module.to(dtype), x, last="assign", policy=policy, **known)
    return [compilation.explain(row) for row in compilation.rows if isinstance(row, GemmRecord)]


def test_sizes_are_those_of_the_gemm() -> None:
    found = {r.gemm: (r.m, r.n, r.k) for r in records(nn.Linear(32, 48))}
    assert found == {"fprop": (16, 48, 32), "dgrad": (16, 32, 48), "wgrad": (48, 32, 16)}


def test_dtypes_are_those_that_are_multiplied() -> None:
    found = {r.gemm: r.dtypes for r in records(nn.Linear(32, 48), dtype=torch.bfloat16)}
    assert found["fprop"] == ("e4m3", "e4m3", "bf16")
    assert "e5m2" in found["dgrad"]


def test_a_device_has_types_of_its_own() -> None:
    settings = Settings(target="gfx942")
    found = records(nn.Linear(32, 48), dtype=torch.bfloat16, settings=settings)
    assert found[0].dtypes == ("e4m3fnuz", "e4m3fnuz", "bf16")


def test_row_of_a_gemm_in_high_precision() -> None:
    found = records(nn.Linear(32, 48), policy=Policy([Rule("*", None)]))
    assert {(r.recipe, r.execution, r.dtypes) for r in found} == {(None, "high precision", ("fp32", "fp32", "fp32"))}
    assert {(r.rule, r.reason, r.required, r.missing) for r in found} == {
        (0, 'rule "*" -> high precision', False, False)
    }


@pytest.mark.parametrize("policy", [ALL, Policy([Rule("*", "tensorwise")], min_speedup=0)])
def test_gemms_named_by_a_rule_are_required(policy: Policy) -> None:
    assert {r.required for r in records(nn.Linear(32, 48), policy=policy)} == {bool(policy.rules)}


def test_siblings_are_named_once_they_are_one() -> None:
    x = torch.randn(16, 32, requires_grad=True)
    _, compilation = passed(Two(), x, last="assign")
    before = [*compilation.rows]
    compilation.amend({("up", 0, "dgrad"): "one GEMM with gate, other"}, dtype="fp32")
    changed = [row for row, old in zip(compilation.rows, before, strict=True) if row != old]
    assert [
        (r.fqn, r.gemm, r.reason, r.dtypes[2]) for r in map(compilation.explain, changed) if isinstance(r, GemmRecord)
    ] == [("up", "dgrad", "default; one GEMM with gate, other", "fp32")]
