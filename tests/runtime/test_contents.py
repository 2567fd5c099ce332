"""Whether tensors hold other numbers than before: fingerprints, and when something looks at them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies
from torch import Tensor

from fp8graph.runtime import contents
from fp8graph.runtime.contents import EVERY, Watch, contents_of, fingerprint, same_contents


@settings(deadline=None, max_examples=60)
@given(
    elements=strategies.integers(1, 40_000),
    dtype=strategies.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
    offset=strategies.integers(0, 9),
    data=strategies.data(),
)
def test_equal_bytes_have_one_fingerprint_and_any_bit_counts(
    elements: int, dtype: torch.dtype, offset: int, data: Any
) -> None:
    memory = torch.randn(elements + offset).to(dtype)
    x = memory[offset:]
    before = fingerprint(x)
    assert before == fingerprint(x.clone())
    place = data.draw(strategies.integers(0, x.nbytes - 1))
    x.view(torch.uint8)[place] ^= 1 << data.draw(strategies.integers(0, 7))
    assert fingerprint(x) != before


def test_order_counts_and_constants_do_not_cancel() -> None:
    x = torch.randn(64, 4096)
    assert fingerprint(x) != fingerprint(x[torch.randperm(64)])
    assert fingerprint(x) != fingerprint(x.roll(1, 1))
    assert len({fingerprint(torch.full((256, 4096), value)) for value in (0.0, 1.0, 2.0, -1.0)}) == 4
    assert fingerprint(torch.empty(0)) == fingerprint(torch.empty(0, 3))


def test_tensors_on_a_cpu_are_compared_at_each_call() -> None:
    args = [torch.randn(32, 32), torch.zeros(3), torch.randn(8)]

    def pick(args: Sequence[Any]) -> tuple[Any, Any]:
        return args[0], args[2]

    same = same_contents(pick, contents_of(pick(args)))
    assert same(args)
    args[1].add_(1)  # not among them
    assert same(args)
    args[2].data.mul_(2)
    assert not same(args)


class Arrival:
    """An event of a device that a test decides on."""

    def __init__(self) -> None:
        self.arrived = False

    def query(self) -> bool:
        return self.arrived

    def synchronize(self) -> None:
        self.arrived = True


class Device:
    """In the place of a device: what was launched and sent, and what the clock says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches, self.now = 0, 0.0
        self.arrivals: list[Arrival] = []
        self.changed: list[list[int]] = []
        self.pauses = 0
        monkeypatch.setattr(contents, "_table", self._table)
        monkeypatch.setattr(contents, "sent_to_host", self._sent)
        monkeypatch.setattr(contents.time, "monotonic", lambda: self.now)

    def _table(self, tensors: Sequence[Tensor]) -> Any:
        def read() -> Tensor:
            self.launches += 1
            return torch.tensor([*map(fingerprint, tensors)])

        return read

    def _sent(self, tensor: Tensor) -> tuple[Any, Tensor]:
        self.arrivals.append(Arrival())
        return self.arrivals[-1], tensor

    def paused(self) -> None:
        self.pauses += 1

    def watch(self, tensors: list[Tensor], **how: Any) -> Watch:
        before = [torch.tensor(fingerprint(x)) for x in tensors]
        return Watch(tensors, before, lambda found: self.changed.append([*found]), self.paused, **how)


def test_a_watch_looks_once_in_many_calls_and_waits_in_none(monkeypatch: pytest.MonkeyPatch) -> None:
    device, tensors = Device(monkeypatch), [torch.randn(16, 16) for _ in range(3)]
    watch = device.watch(tensors)
    tensors[1].data.mul_(2)
    assert all(watch(()) for _ in range(EVERY - 1))
    assert device.launches == 0
    assert all(watch(()) for _ in range(3 * EVERY))  # it is not there yet, and nothing else is launched
    assert (device.launches, device.changed) == (1, [])
    device.arrivals[0].arrived = True
    assert not watch(())
    assert device.changed == [[1]]
    assert device.pauses == 0


def test_unchanged_tensors_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    device, tensors = Device(monkeypatch), [torch.randn(16, 16)]
    watch = device.watch(tensors)
    for _ in range(10 * EVERY):
        assert watch(())
        for arrival in device.arrivals:
            arrival.arrived = True
    assert (device.launches, device.changed) == (10, [])


def test_a_pause_ends_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights may have been replaced meanwhile: what is there now is quantized, and nothing is late."""
    device, tensors = Device(monkeypatch), [torch.randn(16, 16)]
    watch = device.watch(tensors)
    device.now += 0.9 * contents.PAUSE
    assert watch(())
    device.now += 1.1 * contents.PAUSE
    assert not watch(())
    assert (device.pauses, device.launches, device.changed) == (1, 0, [])


def test_in_strict_mode_it_looks_and_waits_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    device, tensors = Device(monkeypatch), [torch.randn(16, 16) for _ in range(2)]
    watch = device.watch(tensors, every=True)
    assert watch(())
    tensors[0].data.add_(1)
    assert not watch(())
    assert device.changed == [[0]]


def test_where_nothing_can_look_copies_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    watch = Watch([torch.randn(4)], [None], lambda found: device.changed.append([*found]), None)
    assert [watch(()) for _ in range(EVERY)] == [True] * (EVERY - 1) + [False]
    assert device.changed == [[]]


INTERPRETED = """
import torch
from fp8graph.runtime.fingerprints import BLOCK, Table
tensors = [torch.randn(64, 48).bfloat16(), torch.randn(3 * BLOCK + 5), torch.zeros(3, 4), torch.randn(BLOCK)]
table = Table(tensors)
before = table()
assert torch.equal(table(), before)
copies = [x.clone() for x in tensors]
assert torch.equal(Table(copies)(), before)
def changes(position, write):
    kept = tensors[position].clone()
    write(tensors[position])
    assert (table() != before).nonzero().flatten().tolist() == [position], position
    tensors[position].copy_(kept)
    assert torch.equal(table(), before)
changes(0, lambda x: x.copy_(x[torch.randperm(64)]))
changes(1, lambda x: x[-1:].add_(1))
changes(1, lambda x: x[BLOCK:BLOCK + 1].mul_(-1))
changes(2, lambda x: x.fill_(1))
changes(3, lambda x: x.view(torch.int32)[7:8].bitwise_xor_(1))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux")
def test_the_kernel_of_a_gpu_reads_each_word_of_each_tensor() -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    subprocess.run([sys.executable, "-c", INTERPRETED], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)


def test_the_kernel_compiles_for_a_gpu() -> None:
    """For sm_90, without one: one atomic addition per program, and no spill."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget

    from fp8graph.runtime.fingerprints import BLOCK, add_fingerprints

    types = {"addresses": "*i64", "sizes": "*i64", "owners": "*i32", "firsts": "*i32", "sums": "*i64"}
    source = triton.compiler.ASTSource(
        fn=add_fingerprints, signature={**types, "BLOCK": "constexpr"}, constexprs={(5,): BLOCK}
    )
    options = {"enable_fp_fusion": True}  # of no meaning for integers, but Triton 3.9 warns where nobody chooses
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert ptx.count("atom.global") == 1
    assert "st.local" not in ptx
