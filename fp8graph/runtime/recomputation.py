"""Keep the scales of forwards that torch.utils.checkpoint runs again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8graph.compat import autograd
from fp8graph.ir.extra_inputs import PageLayout
from fp8graph.numerics import history


class Recomputations:
    """The scales that checkpointed forwards read, until backward runs these forwards again.

    ``torch.utils.checkpoint`` around compiled code calls it twice. The second call must use the scales of the first,
    which the update of the first call has replaced, and must not update anything. (The reentrant variant's first call
    runs without gradients and updates nothing; its second call does.) A repeated call is recognized by its inputs.
    """

    LIMIT = 4096  # number of forwards that are remembered, since hooks for saved tensors need not mean a recomputation

    def __init__(self) -> None:
        self._scales: dict[Any, list[Tensor]] = {}

    def pages(self, layouts: Sequence[PageLayout], pages: list[Tensor], args: Sequence[Any]) -> list[Tensor]:
        """The pages to run with: ``pages``, or in a recomputation copies with the earlier scales."""
        if autograd.in_backward():
            scales = self._scales.pop(_call_key(args), None)
            if scales is None:
                return pages
            return [
                page if layout.backward else torch.cat([old, page[:, history.HEADER :]], dim=1)
                for layout, page, old in zip(layouts, pages, scales, strict=True)
            ]
        if autograd.saved_tensors_hooks():
            if len(self._scales) >= self.LIMIT:
                del self._scales[next(iter(self._scales))]
            self._scales[_call_key(args)] = [page[:, : history.HEADER].clone() for page in pages]
        return pages


def _call_key(args: Sequence[Any]) -> Any:
    return tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in args)
