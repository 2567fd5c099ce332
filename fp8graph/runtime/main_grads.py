"""The FP32 gradients that wgrad's results are added to: see ``passes/accumulate_wgrad.py``.

A weight's own ``main_grad`` (a convention of Megatron and Transformer Engine) is added to, and zeroed by who made it.
Otherwise a buffer is kept for an FP32 weight and becomes its ``.grad`` when backward begins: zeroed first if it has no
``.grad`` (``zero_grad()`` may have run since forward), with the numbers of another ``.grad`` if it has one.

A graph takes the memory of a buffer as a tensor of its own: optimizers and ``zero_grad`` write to ``.grad``, and
autograd would count these writes as changes of what it saved for backward.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fp8graph.compat import autograd
from fp8graph.compat.distributed import local, number_of_ranks
from fp8graph.ir.extra_inputs import Gradient
from fp8graph.runtime.slots import Caller, Run, Slot, Store


def why_not_accumulated(parameter: Tensor, *, gathered: bool) -> str | None:
    """Why wgrad cannot add to the FP32 gradient of ``parameter``; None if it can. ``gathered``: by FSDP2."""
    if gathered:
        return "FSDP2 waits for its gradient"
    if local(parameter) is not parameter:
        return "it is a DTensor"
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        fits = isinstance(main_grad, Tensor) and main_grad.dtype == torch.float32
        fits = fits and main_grad.shape == parameter.shape and main_grad.device == parameter.device
        return None if fits and main_grad.is_contiguous() else "its main_grad is no contiguous FP32 tensor of its shape"
    if parameter.dtype != torch.float32:
        return f"its .grad is {str(parameter.dtype).removeprefix('torch.')}, and it has no main_grad in FP32"
    if autograd.has_gradient_hooks(parameter):
        return "hooks wait for its gradient"
    if number_of_ranks(None) > 1:
        return "there are other ranks, and what reduces gradients may wait for it: give it a main_grad"
    return None if parameter.is_contiguous() else "it is not contiguous"


@dataclass
class _Buffer:
    owner: weakref.ref[Tensor]
    tensor: Tensor  # what .grad or .main_grad is
    memory: Tensor  # the same memory, as graphs take it
    is_grad: bool


class MainGrads(Store):
    """The buffers of one backend. It keeps no parameter alive."""

    def __init__(self) -> None:
        self._buffers: dict[int, _Buffer] = {}  # by id of the parameter

    @property
    def bytes(self) -> int:
        """The memory of the buffers, those that are ``main_grad`` not included."""
        return sum(buffer.tensor.nbytes for buffer in list(self._buffers.values()) if buffer.is_grad)

    def slot(self, asked: Sequence[Gradient], caller: Caller) -> Slot:
        """The memory that a graph adds to."""
        positions = [gradient.parameter for gradient in asked]
        return _Added(
            tensors=[self._buffer(caller.args[i]).memory for i in positions],
            fresh=lambda args: all(self._is_known(args[i]) for i in positions),
            grads=self,
            positions=positions,
        )

    def _is_known(self, parameter: Tensor) -> bool:
        """Whether there is a buffer, and nobody has put another ``main_grad`` in its place."""
        found = self._buffers.get(id(parameter))
        if found is None or found.owner() is not parameter:
            return False
        return getattr(parameter, "main_grad", None) is (None if found.is_grad else found.tensor)

    def watch(self, results: Any, parameters: Sequence[Tensor]) -> None:
        """Make buffers the ``.grad`` of ``parameters`` when the backward of ``results`` begins."""
        functions = {x.grad_fn for x in results if isinstance(x, Tensor) and x.grad_fn is not None}
        for function in functions:
            function.register_prehook(functools.partial(self._bind, parameters))

    def _bind(self, parameters: Sequence[Tensor], *_: Any) -> None:
        for parameter in parameters:
            buffer = self._buffer(parameter)
            if buffer.is_grad and parameter.grad is not buffer.tensor:
                with torch.no_grad():
                    if parameter.grad is None:
                        buffer.tensor.zero_()
                    else:
                        buffer.tensor.copy_(parameter.grad)
                parameter.grad = buffer.tensor

    def _buffer(self, parameter: Tensor) -> _Buffer:
        found, key, buffers = self._buffers.get(id(parameter)), id(parameter), self._buffers
        if found is not None and self._is_known(parameter):
            return found
        tensor = main_grad = getattr(parameter, "main_grad", None)
        if tensor is None:
            with torch.inference_mode(False), torch.no_grad():
                tensor = torch.zeros_like(parameter)

        def gone(reference: weakref.ref[Tensor]) -> None:
            if key in buffers and buffers[key].owner is reference:  # else its heir's
                del buffers[key]

        owner = weakref.ref(parameter, gone)
        buffers[key] = made = _Buffer(owner, tensor, tensor.data, main_grad is None)
        return made


@dataclass(kw_only=True, eq=False)
class _Added(Slot):
    acts: ClassVar[bool] = True
    grads: MainGrads
    positions: Sequence[int]

    def after(self, run: Run, results: Any) -> None:
        self.grads.watch(results, [run.args[i] for i in self.positions])
