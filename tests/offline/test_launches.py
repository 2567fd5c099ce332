"""Which scheduled nodes a launch runs: found by the buffers that it writes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8graph import offline
from fp8graph.numerics.tile_casts import CAST
from fp8graph.offline.generate import _library_call, _Part, _parts_of, _read_call, _results, _stored
from generated import generate

E4M3 = torch.float8_e4m3fn


def part(node: int, makes: str = "", overwrites: str = "", reads: str = "") -> _Part:
    made, over, read = (frozenset(names.split()) for names in (makes, overwrites, reads))
    return _Part(node=node, makes=made, overwrites=over, reads=read, moved={})


def test_the_arguments_of_a_call() -> None:
    call = "triton_poi_fused_0.run(buf1, reinterpret_tensor(buf2, (4, 8), (8, 1), 16), 4096, s0, stream=stream0)"
    assert _read_call(call) == ("triton_poi_fused_0", ["buf1", "buf2", "", "s0"])


def test_results_are_the_output_pointers() -> None:
    """Of which a kernel may leave the memory as it is, and keep the result in registers for its next loop."""
    source = (
        "\ndef triton_poi_fused_0(in_out_ptr0, in_ptr0, out_ptr1, out_ptr2, xnumel, XBLOCK : tl.constexpr):\n"
        "    tmp0 = tl.load(in_out_ptr0 + (x0), None)\n    tl.store(out_ptr1 + (x0), tmp0, None)\n"
        "    tl.atomic_add(out_ptr2 + (x1), tmp0, None)\n"
    )
    given = "triton_poi_fused_0", source, ["buf1", "buf2", "buf3", "buf4", ""]
    assert _results(*given) == {"buf1", "buf3", "buf4"}
    assert _stored(*given) == {"buf3", "buf4"}


def test_a_launch_that_reads_what_waits_does_not_run_it() -> None:
    """A node that was not launched yet may be read from by nobody; one that writes the same tensor later waits."""
    parts = [part(0, "buf0", reads="arg0"), part(1, "buf1", reads="buf0")]
    assert _parts_of(["buf0", "buf1"], {"buf1"}, parts) == [parts[1]]


def test_a_combo_node_in_two_launches() -> None:
    parts = [part(0, "buf0", reads="arg0"), part(0, "buf1", reads="arg1"), part(1, "buf2", reads="buf0 buf1")]
    assert _parts_of(["arg1", "buf1"], {"buf1"}, parts) == [parts[1]]
    assert _parts_of(["arg0", "arg1", "buf0", "buf1"], {"buf0", "buf1"}, parts) == parts[:2]


def test_one_tensor_that_several_launches_overwrite() -> None:
    """Each is found by what it reads; one that reads the same is another node's, and its turn comes later."""
    parts = [part(0, overwrites="cache", reads="q"), part(0, overwrites="cache", reads="k")]
    later = part(1, overwrites="cache", reads="k")
    assert _parts_of(["k", "cache"], {"cache"}, [*parts, later]) == [parts[1]]
    assert _parts_of(["q", "k", "cache"], {"cache"}, [*parts, later]) == parts
    assert _parts_of(["k", "cache"], {"cache"}, [later]) == [later]


def test_the_part_that_a_library_call_runs() -> None:
    """Found by the buffer that it fills or makes, else by the tensor that it overwrites."""
    gemm, op, reduction = part(0, "buf0", reads="arg0"), part(1, "buf1", reads="buf0"), part(2, overwrites="buf1")
    parts = [gemm, op, reduction]
    assert _library_call("    extern_kernels.mm(a, b, out=reinterpret_tensor(buf0, (4, 8), (8, 1), 0))", parts) is gemm
    assert _library_call("    buf1 = torch.ops.aten.sort.stable(buf0, stable=False)", parts) is op
    assert _library_call("    torch.ops._c10d_functional.all_reduce_.default(buf1, 'sum', '0')", parts) is reduction
    assert _library_call("    extern_kernels.mm(buf0, buf1, out=buf3)", parts) is None


@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
def test_kernels_written_by_hand_have_bytes_sources_and_costs() -> None:
    """Two launches that write halves of a tensor count it once; each names what it makes, and none what it reads."""

    def function(gate: Tensor, up: Tensor) -> list[Tensor]:
        half = gate.neg()
        rows = CAST([gate, up], "swiglu", E4M3, True, 0.0, [1, 128], -1, True, False, ["", ""], 0)
        square = CAST([gate, half], "", E4M3, True, 0.0, [128, 128], -2, False, True, ["", ""], 0)
        return [*rows, *square]

    kernels = generate(function, [torch.empty(256, 384, dtype=torch.bfloat16)] * 2).kernels
    by_hand = [kernel for kernel in kernels if kernel.name.startswith("cast_tiles")]
    numbers, scales = 256 * 384, 4 * 2 * 3
    assert [kernel.bytes for kernel in by_hand] == [
        (2 * 2 + 2) * numbers + 128 * 2 * scales,
        *[(2 + 1) * numbers + 2 * scales] * 2,
    ]
    assert {name for kernel in by_hand for name in kernel.writes} == {"cast", "cast_1"}
    assert by_hand[0].compiled is not None
    assert by_hand[0].compiled.fp8_store == 16
