"""shards: rows are quantized as the whole weight would be, and what stands in its place is shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8graph.numerics.quantization import output_names, quantize_layouts
from fp8graph.numerics.scalings import QuantizeArguments
from fp8graph.passes.gather_weights.gathered_copies import Memory, quantizes_rows

E4M3 = torch.float8_e4m3fn
SCALES = torch.tensor([[64.0, 1 / 64]])
KINDS: dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]] = {
    "tensorwise": ("tensor", (), ("rowwise",)),
    "delayed": ("delayed", (), ("rowwise", "amax")),
    "blockwise": ("block", (128, 128), ("rowwise", "rowwise_scale_inv")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_ranks_are_those_of_the_whole_weight(kind: str) -> None:
    scaling, block, wanted = KINDS[kind]
    settings: dict[str, Any] = {"scaling": scaling, "block": block}
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    scales = {} if block else {"scales": SCALES}
    rounded = weight.to(torch.bfloat16)
    whole = quantize_layouts(rounded, E4M3, False, 0.0, [1, 1], [], **settings, **scales)
    names = output_names(scaling, ["rowwise"])
    run = quantizes_rows(QuantizeArguments(None, E4M3, False, 0.0, [1, 1], [], **settings), [torch.bfloat16], wanted)
    found: dict[str, list[Tensor]] = {name: [] for name in wanted}
    for rows in weight.chunk(2):
        buffers = {
            "rowwise": torch.empty(128, 128, dtype=E4M3),
            "rowwise_scale_inv": torch.empty(1, 1),
            "amax": torch.empty(()),
        }
        run(rows, *scales.values(), *(buffers[name] for name in wanted))
        for name in wanted:
            found[name].append(buffers[name])
    for name in wanted:
        if name == "amax":
            assert [x.item() for x in found[name]] == [rows.abs().max().item() for rows in rounded.chunk(2)]
        else:
            expected = whole[names.index(name)]
            assert torch.equal(torch.cat(found[name]).to(torch.float32), expected.to(torch.float32))


def test_placeholder_of_whole_weights_grows_to_the_largest() -> None:
    memory, device = Memory(), torch.device("cpu")
    small, large = (memory.nan(torch.Size((rows, 8)), torch.float32, device) for rows in (2, 4))
    again = memory.nan(torch.Size((2, 8)), torch.float32, device)
    assert small.isnan().all()
    assert large.isnan().all()
    assert again.data_ptr() == large.data_ptr() != small.data_ptr()
    assert memory.nan(torch.Size((2, 8)), torch.bfloat16, device).dtype == torch.bfloat16
