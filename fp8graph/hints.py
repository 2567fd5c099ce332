"""What the numerics tell Inductor about memory. It changes no number."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch._inductor.lowering import register_lowering

_library: Final = torch.library.Library("fp8graph_hints", "DEF")
_library.define("stored(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("stored", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("fp8graph_hints::stored", torch.empty_like, lib=_library)


def stored(x: Tensor) -> Tensor:
    """``x``, written to memory in the shape that it has here.

    Inductor merges the dims of a view that follows before it looks for loops to fuse: a cast of [rows, tiles, 128]
    that is flattened no longer looks like the amax over the last dim. Stored in its own shape it is one kernel with
    the amax, and the view is free. It also stores once what several GEMMs read: Inductor does not know that
    ``_scaled_mm`` reads from memory, and would store the tensor for each of them.
    """
    return torch.ops.fp8graph_hints.stored(x)


def _store(x: Any) -> Any:
    x.realize()
    return x


register_lowering(torch.ops.fp8graph_hints.stored.default, type_promotion_kind=None)(_store)
