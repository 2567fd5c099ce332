"""Models that libraries loaded from FP8 checkpoints: their layers are multiplied as they are stored.

A layer of a library keeps its weight in FP8 and multiplies it with kernels of the library's own, which do not trace or
dequantize. ``adopt`` gives each such layer a ``forward`` of its own, an attribute of the instance: while Dynamo traces
it, it is ``F.linear`` with the dialect's ``stored_weight``; in eager it is the library's. No module is swapped and no
parameter is replaced: names, ``state_dict`` and files stay.

``readers.py`` has a function per library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any, Final, TypeVar

import torch
from torch import nn

from fp8graph.compat import fsdp
from fp8graph.compat.fakes import wrapped_tensors
from fp8graph.errors import expect
from fp8graph.libraries.adapters import adopt_adapters
from fp8graph.libraries.readers import (
    forward_of_codes,
    forward_of_experts,
    is_table,
    keep_compressed,
    of_compressed_tensors,
    of_torchao,
    of_transformers,
    reader_of,
)
from fp8graph.libraries.stored_linear import StoredWeight, forward_of

_Model = TypeVar("_Model", bound=nn.Module)

_OF_TRANSFORMERS: Final = "transformers.integrations."
# The function that reads a layer's weight (None if the layer is of another library), and whether it runs in eager, too.
_READERS: Final[tuple[tuple[Callable[[Any], Callable[[Any], StoredWeight] | None], bool], ...]] = (
    (of_transformers, False),
    (of_torchao, False),
    (of_compressed_tensors, True),
)


def adopt(model: _Model) -> _Model:
    """Let the FP8 layers of ``model``, which a library loaded, compile to FP8 GEMMs. Returns the model.

    ``fp8graph.compile`` does this itself. ``torch.compile(model, backend="fp8graph")`` does it before the first call is
    traced, but for compressed-tensors, which has decompressed its layers by then: call it before, and once more for a
    model that was unpickled or got new layers. The FP8 weights are frozen: they get no gradient, whatever
    ``requires_grad`` says.

    Raises:
        ConfigError: adapters of PEFT change a parameter in FP8 itself, such as that of fused experts.
    """
    expect("adopt", "model", model, nn.Module, "a model, an nn.Module")
    for module in model.modules():
        if (forward := _forward(module)) is not None:
            module.__dict__["forward"] = MethodType(forward, module)
    keep_compressed(model)
    adopt_adapters(model)
    predicates = (reader_of, forward_of_experts, is_table)
    fsdp.gather_as_stored({module for module in model.modules() if any(each(module) for each in predicates)})
    return model


def converted_for_training(layers: Iterable[tuple[str, str]]) -> str:
    """Return the first of ``layers`` (name, full name of its class) that torchao's conversions for training made, or
    "".
    """
    for name, kind in layers:
        if kind.startswith("torchao.") and kind.rpartition(".")[2] in ("Float8Linear", "MXLinear"):
            return f"{name or 'the model'} ({kind})"
    return ""


def left_to_kernels(model: nn.Module) -> Iterator[tuple[str, str, torch.dtype]]:
    """Yield the layers of transformers whose weights nothing here reads: name, class, and the dtype of the weights."""
    for name, module in model.named_modules():
        kind = fsdp.original_class(module)
        if kind.__module__.startswith(_OF_TRANSFORMERS) and _forward(module) is None and not is_table(module):
            held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            bytes_each = [x.dtype for x in held if x.ndim > 1 and x.dtype.itemsize == 1 and x.dtype != torch.bool]
            if bytes_each:
                yield name or "the model", kind.__name__, bytes_each[0]


def dequantized_in_forward(model: nn.Module) -> Iterator[tuple[str, str, torch.dtype]]:
    """Yield the layers whose weight, a tensor subclass, holds one byte or less per number in a form that nothing here
    reads: their forward dequantizes it. Name, class of the tensor, and the dtype of its numbers.
    """
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            held = [x.dtype for x in wrapped_tensors(parameter) if x.ndim > 1 and x.dtype.itemsize == 1]
            if held and held[0] != torch.bool and _forward(module) is None:
                yield name, type(parameter).__name__, held[0]


def not_adopted(model: nn.Module) -> list[nn.Module]:
    """Return the FP8 layers of ``model`` that :func:`adopt` has not seen."""
    forwards = ((module, _forward(module), module.__dict__.get("forward")) for module in model.modules())
    return [
        m for m, forward, given in forwards if forward is not None and getattr(given, "__func__", None) is not forward
    ]


def _forward(module: nn.Module) -> Callable[..., Any] | None:
    """Give the ``forward`` that :func:`adopt` gives to ``module``; None for any layer but those in FP8 of a library."""
    for reader, in_eager in _READERS:
        if (read := reader(module)) is not None:
            return forward_of(read, in_eager)
    return forward_of_experts(module) or forward_of_codes(module)
