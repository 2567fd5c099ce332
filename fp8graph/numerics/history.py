"""The arithmetic of delayed scaling: scales and amax histories, as plain functions that ``lower`` traces.

A page holds the state of some tensors, FP32 [tensors, 4 + length]: the inverse of the scale (stored, so that no kernel
computes it), the scale, 1 if that is yet to come from the tensor's own amax (else 0), a zero that aligns the rows, the
amax history. One tensor's state is contiguous: an update is
one reduction over rows. Slot 0 of a history is the staging slot of the current step; slots 1 ... length - 1 go from the
oldest to the newest earlier step. This is Transformer Engine's order.

One update of a page, at the end of forward or of backward::

    history[0] = amax of this step
    scale      = fp8_max * 2^-margin / amax(history)      "max" over all slots, "most_recent" = slot 0
    history    = [0, history[2], ..., history[length - 1], history[0]]

* If a tensor's amax is 0 (the layer did not run, or its input was zero), inf or nan, neither its history nor its scale
  changes. An overflow therefore cannot freeze a scale, and a skipped layer keeps its history. A tensor that was not
  quantized again (a weight whose FP8 copy is kept) has no amax, and its row does not change.
* With length 1 the only slot is staging and history: the scale follows the last amax, and the slot is 0 between steps.
* A NaN element makes the amax NaN (Transformer Engine's kernels skip NaN elements): such a step is not recorded.
* With several ranks a graph only stages its amaxes: slot 0 keeps the largest. They are reduced over the ranks and
  recorded when the step is over (``passes/connect_scales/amax_reduction.py``). A rank on which a tensor did not occur
  (its amax is 0) records the amax of the others, so histories stay the same.
* ``scale`` overflows to FLT_MAX; an ``amax(history)`` of 0, inf or nan keeps the old scale.

Source: ``delayed_scaling.cu`` and ``quantization.py`` in Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fp8graph.compat import autograd
from fp8graph.numerics.experts import group_of_rows, not_empty
from fp8graph.numerics.formats import SCALE, SCALE_INV, amax_of, inverse
from fp8graph.numerics.hints import divide
from fp8graph.recipes import FLT_MAX, AmaxAlgorithm, DelayedScaling, ScaleAlgorithm

HEADER = 4  # columns of a page before the history: scale_inv, scale, UNSET, 0
UNSET = 2  # 1 for a tensor that has no scale yet, and no amax: any amax that is recorded makes it 0


def page_shape(length: int, tensors: int) -> tuple[int, int]:
    return tensors, HEADER + length


def of_length(amaxes: Tensor, length: int) -> Tensor:
    """Return a history [slots] cut to ``length`` slots, or padded with zeros at its end.

    Source: ``adjust_amax_history_length`` in Transformer Engine's ``module/base.py``.
    """
    made = amaxes.new_zeros(length)
    kept = min(amaxes.numel(), length)
    made[:kept] = amaxes[:kept]
    return made


def new_page(length: int, tensors: int, device: torch.device | str = "cpu", *, unset: bool = False) -> Tensor:
    """Return a page before the first step: scales 1, empty histories.

    Args:
        unset: these scales are to come from the tensors' own amaxes.
    """
    with torch.inference_mode(False), torch.no_grad():  # a page used in evaluation may be trained with later
        page = torch.zeros(page_shape(length, tensors), dtype=torch.float32, device=device)
        page[:, [SCALE_INV, SCALE]] = 1.0
        page[:, UNSET] = float(unset)
    return page


def write_row(page: Tensor, row: int, scale: Tensor, history: Tensor, *, unset: bool = False) -> None:
    """Give a tensor another state, scale [1] and history [length], in place.

    Args:
        unset: a scale of 1 without any amax is none: it is to come from the tensor's own amax.
    """
    # an autograd graph may hold the page for a later backward, which must read the new scales
    with torch.no_grad(), autograd.unnoticed_writes(page):
        write_scale(page[row], scale.reshape(()).to(page.device))
        page[row, HEADER:] = history.to(page.device)
        page[row, UNSET] = ((page[row, SCALE] == 1.0) & ~page[row, HEADER:].any()) * float(unset)


def write_scale(rows: Tensor, scale: Tensor) -> None:
    """Give ``rows`` [..., columns] of a page other scales [...], in place."""
    rows[..., SCALE], rows[..., SCALE_INV] = scale, scale.reciprocal()


def read_scales(page: Tensor, copy: bool) -> Tensor:
    """[tensors, 4]: the table of scales; as a copy if they are needed after the update of the page, or if rows of the
    page are not aligned.

    The copy is not a ``clone``, which Inductor removes: it would save a view of the page for backward, which would
    then read the updated scales. Scales are positive, so the clamp changes nothing.
    """
    return page[:, :HEADER].clamp_min(0.0) if copy or page.shape[1] % HEADER else page[:, :HEADER]


def delayed_scale(amax: Tensor, old_scale: Tensor, fp8_max: float, margin: float) -> Tensor:
    """``fp8_max * 2^-margin / amax``, one IEEE division; the old scale where amax is 0, inf or nan."""
    scale = divide(torch.full_like(amax, fp8_max * 2.0**-margin), amax).clamp_max(FLT_MAX)
    return torch.where((amax > 0.0) & (amax <= FLT_MAX), scale, old_scale)


def initial_scales(
    scales: Tensor, parts: Sequence[Tensor], offs: Tensor | None, row: int, fp8_max: float, margin: float
) -> Tensor:
    """[1, 4]: a row of a table of scales; where it is unset, with the scale of the tensor's own amax.

    Args:
        scales: of :func:`read_scales`.
        parts, offs: of the tensor (``QuantizeArguments``).
    """
    amaxes = [amax_of(part, -1) for part in parts]
    if offs is not None:  # rows after those of the last group may hold anything
        amaxes = [torch.where(group_of_rows(offs, x.shape[0]) < offs.shape[0], x, 0.0) for x in amaxes]
    own = scales[row : row + 1]
    amax = _largest(amaxes).amax(0, keepdim=True)
    scale = torch.where(own[:, UNSET] > 0.0, delayed_scale(amax, own[:, SCALE], fp8_max, margin), own[:, SCALE])
    return torch.stack([inverse(scale), scale, own[:, UNSET], own[:, UNSET + 1]], 1)


def staged_page(page: Tensor, amaxes: Sequence[Tensor]) -> Tensor:
    """Return a new page with ``amaxes`` in those staging slots where they are larger; NaN wins. ``page`` is not
    changed.
    """
    staged = torch.maximum(page[:, HEADER], _largest(amaxes)).unsqueeze(1)
    return torch.where(torch.arange(page.shape[1], device=page.device) == HEADER, staged, page)


def largest_to_send(amaxes: Sequence[Tensor]) -> Tensor:
    """[tensors]: the largest number of each, for a reduction over ranks."""
    return without_nan(_largest(amaxes))


def without_nan(amaxes: Tensor) -> Tensor:
    """NaN becomes inf, which survives any reduction: a step that overflowed on one rank is recorded on none."""
    return torch.where(amaxes <= FLT_MAX, amaxes, torch.inf)


def _largest(amaxes: Sequence[Tensor]) -> Tensor:
    """[tensors]: the largest number of each. Tensors of one length are reduced by one kernel."""
    positions: dict[Any, list[int]] = {}
    for position, amax in enumerate(amaxes):
        positions.setdefault(str(amax.shape), []).append(position)  # as text: a dynamic size has no hash
    largest: list[Tensor | None] = [None] * len(amaxes)
    for equal in positions.values():
        reduced = torch.stack([not_empty(amaxes[i].reshape(-1)) for i in equal]).amax(1)  # experts may get no row
        for position, value in zip(equal, reduced.unbind(), strict=True):
            largest[position] = value
    return torch.stack(cast("list[Tensor]", largest))


def updated_page(
    page: Tensor,
    amaxes: Sequence[Tensor],
    fp8_max: float,
    margin: float,
    amax_compute_algo: AmaxAlgorithm,
    scaling_factor_compute_algo: ScaleAlgorithm | None = None,
    recipe: DelayedScaling | None = None,
    *,
    packed: bool = False,
) -> Tensor:
    """Return a new page, as it is after a step with ``amaxes``. ``page`` is not changed.

    ``amaxes``: for each tensor FP32 of any shape; or, if ``packed``, one tensor [tensors].
    """
    old_scale = page[:, SCALE]
    amax = amaxes[0] if packed else _largest(amaxes)
    seen = (amax > 0.0) & (amax <= FLT_MAX)
    columns = page.shape[1]
    column = torch.arange(columns, device=page.device)  # [4 + length]; all over the whole page: one kernel
    if amax_compute_algo == "max":
        newest = torch.maximum(torch.where(column > HEADER, page, 0.0).amax(1), amax)
    elif amax_compute_algo == "most_recent":
        newest = amax
    else:
        newest = amax_compute_algo(torch.cat([amax.unsqueeze(0), page[:, HEADER + 1 :].t()]))  # [length, tensors]
    if scaling_factor_compute_algo is None or recipe is None:
        scale = delayed_scale(newest, old_scale, fp8_max, margin)
    else:
        scale = scaling_factor_compute_algo(newest, old_scale, fp8_max, recipe)
    amax, seen, scale = (x.unsqueeze(1) for x in (amax, seen, scale))
    shifted = torch.constant_pad_nd(page[:, 1:], [0, 1])  # slot i + 1 at i
    new = torch.where(column == columns - 1, amax, shifted)
    new = torch.where(column == HEADER, 0.0, new)  # the staging slot; with length 1 it is the only one
    new = torch.where(column < HEADER, torch.where(column == SCALE, scale, 0.0), new)
    return torch.where(seen, torch.where(column == SCALE_INV, inverse(scale), new), page)
