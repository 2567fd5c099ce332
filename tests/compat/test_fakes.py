"""fakes: fake tensors without dispatch, and what stands for an input that is traced again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fp8graph.compat import fakes
from fp8graph.compat.fakes import TracingContext, tracing


@pytest.mark.parametrize("inside", [True, False])
def test_a_fake_without_dispatch_is_that_of_the_op(inside: bool) -> None:
    mode, device = FakeTensorMode(), torch.device("cpu")
    with mode:
        expected = torch.empty(3, 4, dtype=torch.float8_e4m3fn)
        made = fakes.contiguous_fake(mode, device, [3, 4], torch.float8_e4m3fn) if inside else None
    made = made if made is not None else fakes.contiguous_fake(mode, device, [3, 4], torch.float8_e4m3fn)
    facts = [(type(x), x.shape, x.stride(), x.dtype, x.device) for x in (made, expected)]
    assert facts[0] == facts[1]
    assert made.fake_mode is mode


def test_fake_input_prefers_the_example_of_dynamo() -> None:
    """Dynamo's stand-in for the input, if there is one."""
    node, example = fx.Graph().placeholder("x"), torch.ones(2)
    assert fakes.fake_input(node, example, None) is example
    fake = node.meta["example_value"] = FakeTensorMode().from_tensor(example)
    assert fakes.fake_input(node, example, None) is fake
    assert fakes.fake_input(node, example, TracingContext(FakeTensorMode())) is fake


def test_a_float_keeps_its_symbol_in_another_mode() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    node, fake = fx.Graph().placeholder("x"), mode.from_tensor(torch.tensor(2.0))
    fake.item_memo = symbol = 2.5  # pyright: ignore
    node.meta["example_value"] = fake
    again: Any = fakes.fake_input(node, None, TracingContext(mode))
    assert again.item_memo is symbol


def test_fake_tensors_are_distinguished() -> None:
    mode, a, b = FakeTensorMode(), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    fake = mode.from_tensor(a)
    assert fakes.is_fake_of(fake, a)
    assert not fakes.is_fake_of(fake, b)


def test_calls_that_trace() -> None:
    """Only while Dynamo compiles, and only with fake tensors."""
    mode = FakeTensorMode()
    fake, real = mode.from_tensor(torch.ones(2)), torch.ones(2)
    assert not fakes.called_to_trace([fake])
    with tracing(TracingContext(mode)):
        assert fakes.called_to_trace([3, fake])
        assert not fakes.called_to_trace([3, real])


def test_fake_tensors_of_a_gpu_are_copied_without_one() -> None:
    with FakeTensorMode(), fakes.without_device_guards():
        x, y = (torch.empty(4, 6, device="cuda") for _ in range(2))
        assert x.copy_(y) is x


def test_the_tensors_that_a_subclass_wraps() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = torch.ones(2), torch.zeros(2)
    assert fakes.wrapped_tensors(a) == []
    found = fakes.wrapped_tensors(TwoTensor(a, b))
    assert found[0] is a
    assert found[1] is b


def test_wrapped_tensors_skip_other_fields_of_a_subclass() -> None:
    """A DTensor lists its DeviceMesh; a subclass may wrap another."""
    from torch.testing._internal.two_tensor import TwoTensor

    class Sharded(TwoTensor):
        mesh = object()

        def __tensor_flatten__(self) -> Any:
            names, context = super().__tensor_flatten__()
            return [*names, "mesh"], context

    inner = TwoTensor(torch.ones(2), torch.zeros(2))
    outer = Sharded(inner, torch.ones(2))
    found = fakes.wrapped_tensors(outer)
    assert [x is y for x, y in zip(found, (inner, inner.a, inner.b, outer.b), strict=True)] == [True] * 4


def test_assumptions_about_sizes_are_checked_at_run_time() -> None:
    def chosen(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = x[mask]
        torch._check(rows.shape[0] >= 2)
        return rows * 2

    with FakeTensorMode(shape_env=ShapeEnv()):
        inputs = [torch.empty(4, 3), torch.empty(4, dtype=torch.bool)]
        module = make_fx(chosen)(*inputs)
    x, one = torch.randn(4, 3), torch.arange(4) < 1
    assert module(x, one).shape == (1, 3)
    fakes.assert_sizes(module, inputs)
    with pytest.raises(RuntimeError, match="u0 >= 2"):
        module(x, one)
    assert torch.equal(module(x, ~one), x[1:] * 2)
