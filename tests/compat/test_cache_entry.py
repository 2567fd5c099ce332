"""Bytes in torch's compile cache: the entry that is found again carries its own, and no other's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters

from fp8graph.compat import aot
from fp8graph.compat.inductor import compile_fx, compile_fx_inner
from helpers import in_one_test

pytestmark = pytest.mark.usefixtures("empty_cache")


class Carrying:
    """A backend whose entries carry the number of their compilation, and whether that found the batch to be even."""

    def __init__(self) -> None:
        self.compiled = 0
        self.carried: bytes | None = None

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        def inner_compile(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            if not kwargs.get("is_backward"):
                self.compiled += 1
                (x,) = [x for x in inputs if isinstance(x, Tensor)]
                even = bool(x.shape[0] % 2 == 0)  # a guard of the entry, if the size is symbolic
                aot.carry(f"{self.compiled} {even}".encode())
            return compile_fx_inner(module, inputs, **kwargs)

        compiled: Any = compile_fx(module, inputs, inner_compile=inner_compile)
        self.carried = aot.carried(compiled)
        return compiled

    def run(self, x: Tensor, **options: Any) -> tuple[bytes | None, int]:
        """Compile as a new process would: what the code's entry carries, and the number of hits."""
        torch._dynamo.reset()
        counters.clear()
        y = torch.compile(lambda x: x.sin(), backend=self, **options)(x)
        if y.requires_grad:
            y.sum().backward()  # torch may make the entry not until then
        return self.carried, counters["aot_autograd"]["autograd_cache_hit"]


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [False, True])
def test_the_entry_carries_bytes(gradients: bool) -> None:
    backend, x = Carrying(), torch.ones(4, requires_grad=gradients)
    backend.run(x)
    assert backend.run(x) == (b"1 True", 1)
    assert backend.compiled == 1


def test_entries_under_one_key_carry_their_own() -> None:
    """torch keeps several under a key, one for each set of guards on the symbols: a key would not name one of them."""
    backend, even, odd = Carrying(), torch.ones(4), torch.ones(5)
    first, second = backend.run(even, dynamic=True), backend.run(odd, dynamic=True)
    assert (first[1], second[1]) == (0, 0)
    for x, carried in ((even, b"1 True"), (odd, b"2 False"), (torch.ones(8), b"1 True")):
        assert backend.run(x, dynamic=True) == (carried, 1)
    assert backend.compiled == 2


@pytest.mark.filterwarnings("ignore:TwoTensor does not implement _stable_hash_for_caching")
@pytest.mark.slow
def test_the_entry_of_a_graph_with_tensor_subclasses_carries_them() -> None:
    """Such a graph has metadata of its own, beside that of the graph that Dynamo saw."""
    from torch.testing._internal.two_tensor import TwoTensor

    class Twice(Carrying):
        def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            def inner_compile(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
                aot.carry(b"of the inner graph")
                return compile_fx_inner(module, inputs, **kwargs)

            compiled: Any = compile_fx(module, inputs, inner_compile=inner_compile)
            self.carried = aot.carried(compiled)
            return compiled

    backend, x = Twice(), TwoTensor(torch.ones(4), torch.zeros(4))
    backend.run(x)
    assert backend.run(x) == (b"of the inner graph", 1)


def test_other_functions_carry_nothing() -> None:
    aot.carry(b"outside of any compilation")
    assert aot.carried(torch.sin) is None


@in_one_test("device", torch._C._autocast_supported_devices())
def test_the_dtype_of_autocast_decides_on_each_device(device: str) -> None:
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    states = [aot.state_that_decides()]
    try:
        torch.set_autocast_enabled(device, True)
        for choice in (torch.bfloat16, torch.float16):
            torch.set_autocast_dtype(device, choice)
            states.append(aot.state_that_decides())
    finally:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    assert len(set(map(repr, states))) == 3
    assert aot.state_that_decides() == states[0]


def test_the_dtypes_that_a_graph_is_traced_with_are_state() -> None:
    found = [aot.state_that_decides()]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            found.append(aot.state_that_decides())
    torch.set_default_dtype(torch.float64)
    try:
        found.append(aot.state_that_decides())
    finally:
        torch.set_default_dtype(torch.float32)
    assert len({*map(repr, found)}) == 4
    assert aot.state_that_decides() == found[0]
