"""Objects that live as long as a parameter does, and to which weak references leave torch free to swap its contents.

``model.to()`` puts converted numbers into a parameter of a wrapper subclass (the DTensors of FSDP2 and of tensor
parallelism are such) by ``torch.utils.swap_tensors``. That refuses a tensor to which anything refers weakly, and
exchanges all that the two tensors have, attributes too; only their identity stays. So weak references go to a mark
among the tensor's attributes. A swap carries the mark off, and it is freed with the other tensor: if the module that
held the tensor holds it still, the tensor gets a new mark.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8graph.compat.fakes import FakeTensor, TracingContext, wrapped_tensors

_MARK: Final = "_fp8graph_mark"
_PLAIN: Final = frozenset({Tensor, nn.Parameter})
_anchors: Final[dict[int, Anchor]] = {}  # by the id of the tensor, as long as that lives


class _Mark:
    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        """Copies and files of the tensor have a set in its place, which ``torch.load(weights_only=True)`` reads."""
        return set, ()


class Anchor:
    """Stands in for a tensor of a wrapper subclass in weak references; ends with it, whatever that is swapped with."""

    def __init__(self, tensor: Tensor) -> None:
        self._key = id(tensor)
        self.module: weakref.ref[nn.Module] | None = None  # that holds it, by which it is known again after a swap
        self._mark(tensor)

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether it is the anchor of ``tensor``, not of an earlier one with the same id."""
        if tensor.__dict__.get(_MARK) is self._reference():
            return True
        return self._renew() and tensor.__dict__.get(_MARK) is self._reference()

    def _mark(self, tensor: Tensor) -> None:
        mark = _Mark()
        self._reference = weakref.ref(mark, functools.partial(_lost, self._key))
        setattr(tensor, _MARK, mark)

    def _renew(self) -> bool:
        """Mark the tensor again, if the module holds it. While it is freed no other object has its id."""
        module = self.module() if self.module is not None else None
        for parameter in () if module is None else list(module._parameters.values()):
            if id(parameter) == self._key and parameter is not None:
                self._mark(parameter)
                return True
        return False


def _lost(key: int, reference: weakref.ref[_Mark]) -> None:
    """Drop the anchor whose mark was freed, with the tensor itself or with one that it was swapped with."""
    entry = _anchors.get(key)
    if entry is not None and entry._reference is reference and not entry._renew():
        del _anchors[key]


def anchor(tensor: Tensor | Anchor) -> Tensor | Anchor:
    """Give an object to refer to weakly in place of ``tensor``, always the same one: for a plain tensor that itself."""
    if type(tensor) in _PLAIN or isinstance(tensor, Anchor) or not is_traceable_wrapper_subclass(tensor):
        return tensor
    stand_in = _anchors.get(id(tensor))
    if stand_in is None or not stand_in.is_of(tensor):
        stand_in = _anchors[id(tensor)] = Anchor(tensor)
    return stand_in


def has_no_module(tensor: Tensor) -> bool:
    """Return whether torch swaps the contents of ``tensor``, and it is not known which module holds it."""
    stand_in = anchor(tensor)
    return isinstance(stand_in, Anchor) and stand_in.module is None


def remember_modules(*models: nn.Module) -> None:
    """Note which modules of ``models`` hold parameters that torch swaps. Those of others get a new anchor by a swap."""
    for module in (module for model in models for module in model.modules()):
        for parameter in list(module._parameters.values()):
            if parameter is not None and isinstance(stand_in := anchor(parameter), Anchor):
                stand_in.module = weakref.ref(module)


def let_torch_swap(inputs: Sequence[Any], context: TracingContext | None) -> None:
    """Drop the weak references to parameters that a graph's fake ``inputs`` and Dynamo's ``context`` hold.

    Dynamo does this for torch's own backends (``invalidate_compile_context_weakrefs``). To be called when compiled code
    runs: until then they show which fake stands for which parameter.
    """
    if not any(isinstance(x, Tensor) and is_traceable_wrapper_subclass(x) for x in inputs):
        return
    inner = [y for x in inputs if isinstance(x, Tensor) for y in (x, *wrapped_tensors(x))]
    modes: set[Any] = {x.fake_mode for x in inner if isinstance(x, FakeTensor)}
    if context is not None:
        modes.add(context.fake_mode)
        context.tensor_to_context.clear()
    for mode in modes - {None}:
        mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()
