"""ops: torch's operators by names that last, and their arguments by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8graph.compat import ops
from fp8graph.compat.ops import copy_each, largest_of_each, named_arguments, raise_each, schema

aten = torch.ops.aten


def node(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return fx.Graph().call_function(target, args, kwargs)


def test_arguments_have_names_however_they_are_given() -> None:
    x, y = fx.Graph().placeholder("x"), fx.Graph().placeholder("y")
    wanted = {"self": x, "other": y, "alpha": 2}
    assert named_arguments(node(aten.add.Tensor, x, y, alpha=2)) == wanted
    assert named_arguments(node(aten.add.Tensor, self=x, other=y, alpha=2)) == wanted


def test_missing_arguments_have_their_defaults() -> None:
    x = fx.Graph().placeholder("x")
    assert named_arguments(node(aten.sum.dim_IntList, x, [0])) == {
        "self": x,
        "dim": [0],
        "keepdim": False,
        "dtype": None,
    }


def test_a_default_that_is_a_list_is_a_new_one_for_each_node() -> None:
    def default() -> list[int]:
        return named_arguments(node(aten.max_pool2d.default))["padding"]

    default().append(3)
    assert default() == [0, 0]


def test_an_argument_that_is_missing_is_none() -> None:
    assert named_arguments(node(aten.sin.default)) == {"self": None}


def test_schemas_have_names_and_aliases() -> None:
    assert [argument.name for argument in schema(aten.view.default).arguments] == ["self", "size"]
    assert schema(aten.view.default).returns[0].alias_info is not None
    assert schema(aten.sin.default).returns[0].alias_info is None


def test_each_is_copied_and_sizes_must_fit() -> None:
    targets = (torch.zeros(2), torch.zeros(3))
    copy_each(targets, [torch.ones(2), torch.full((3,), 2.0)])
    assert [x.tolist() for x in targets] == [[1, 1], [2, 2, 2]]
    with pytest.raises(RuntimeError, match="size"):
        copy_each(targets, [torch.ones(2), torch.ones(4)])


def test_a_scaled_matmul_decodes_and_rounds_once() -> None:
    a, b = torch.randn(16, 32).to(torch.float8_e4m3fn), torch.randn(48, 32).to(torch.float8_e4m3fn)
    scale_a, scale_b = torch.tensor(0.5), torch.tensor(2.0)
    settings: dict[str, Any] = {"bias": None, "out_dtype": torch.float32, "use_fast_accum": False}
    got = ops.scaled_mm(a, b.t(), scale_a, scale_b, **settings)
    assert torch.allclose(got, a.float() @ b.float().t(), rtol=1e-6, atol=1e-5)
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        ops.scaled_mm(a.float(), b.t().float(), scale_a, scale_b, **settings)


def test_magnitudes() -> None:
    found = largest_of_each([torch.tensor([1.0, -3.0]), torch.tensor([2.0, torch.nan]), torch.ones(2, 2)])
    assert [x.shape for x in found] == [()] * 3
    assert (found[0], found[2]) == (3.0, 1.0)
    assert found[1].isnan()


def test_larger_ones_are_kept() -> None:
    page = torch.zeros(3, 4)
    raise_each([page[0, 2], page[1, 2]], [torch.tensor(2.0), torch.tensor(torch.nan)])
    raise_each([page[0, 2]], [torch.tensor(1.0)])
    assert page[0].tolist() == [0, 0, 2, 0]
    assert page[1, 2].isnan()


@pytest.mark.skipif(not ops.HAS_SCALED_ADDMM, reason="torch before 2.15 has no scaled_addmm")
def test_a_scaled_gemm_that_adds_has_the_shape_of_its_addend() -> None:
    """On fake CUDA tensors: torch's own checks of layouts, dtypes and scales. It has not been run on a GPU."""
    with FakeTensorMode():
        addend = torch.empty(32, 48, device="cuda")
        a = torch.empty(32, 64, dtype=torch.float8_e5m2, device="cuda")
        b = torch.empty(48, 64, dtype=torch.float8_e4m3fn, device="cuda")
        scale = torch.empty((), device="cuda")
        out = ops.scaled_addmm(addend, a, b.t(), scale, scale, use_fast_accum=False)
    assert (out.shape, out.dtype, out.stride()) == ((32, 48), torch.float32, (48, 1))
