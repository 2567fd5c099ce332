"""Add wgrad's results to FP32 gradients, without rounding them to the weights' dtype (``accumulate_wgrad=True``).

    dw = scaled_mm(qdy, qx, out_dtype=bf16)             ->      dw = scaled_mm(qdy, qx, out_dtype=f32, addend=buffer)
    return y, ..., dw.to(f32), ...                              copy_(buffer, dw);  return y, ..., None, ...

Autograd then has no gradient of the weight to add. A bf16 result that autograd casts and adds moves 20 bytes for each
number: written (2), cast (2 + 4), added (4 + 4 + 4). An FP32 result that a kernel apart adds moves 16; a GEMM that adds
it, 8. With too few spare inputs the graph is not changed; it is traced again with enough of them.

The buffer is ``weight.main_grad`` (a convention of Megatron and Transformer Engine), which whoever made it zeroes. For
an FP32 weight without one, :class:`MainGrads` keeps a buffer. It becomes the weight's ``.grad`` when backward begins:
zeroed first if there is no ``.grad`` (``zero_grad()`` may have run since forward), else with the numbers of another
``.grad``. A graph takes the memory of a buffer as another tensor: optimizers and ``zero_grad`` write to ``.grad``, and
autograd would count these writes as changes of what it saved for backward.

Refuses (leaves the gradient to autograd) weights without such a buffer, or whose gradient something waits for (hooks,
DDP, FSDP2); gradients that are a sum or a part, or transposed; wgrads that no scaled GEMM computes, or none in FP32.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, cast

import torch
from torch import Tensor, fx

from fp8graph.compat import autograd
from fp8graph.compat.distributed import local, number_of_ranks
from fp8graph.compat.inductor import erase_unused
from fp8graph.compat.ops import named_arguments
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation, Known
from fp8graph.ir.edit import insert, set_argument, set_direction, update_value
from fp8graph.ir.extra_inputs import ExtraInput
from fp8graph.ir.naming import graph_inputs
from fp8graph.ir.nodes import GEMM_KEY, aten, nodes, value
from fp8graph.ir.sites import Foreseen
from fp8graph.ir.verify import quantizers_of
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.runtime.stores import Caller, Run, Slot, Store

_STORE: Final = "gradients"
_EMULATED = "its wgrad is emulated"
_GROUPED = "it is one of experts"
_OTHERS: Final[dict[Any, str]] = {
    aten.mm.default: _EMULATED,
    aten.bmm.default: _EMULATED,
    ops.scaled_grouped_mm: _GROUPED,
    ops.grouped_mm: _GROUPED,
}
_CONVERT = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True, kw_only=True)
class Gradient(ExtraInput):
    """The FP32 gradient of a parameter, which a graph takes as an input to add wgrad's result to it."""

    store: ClassVar = _STORE
    parameter: int  # graph input
    shape: tuple[int, ...]
    device: torch.device

    def stand_ins(self) -> list[Tensor]:
        return [torch.empty(self.shape, device=self.device)]

    def titles(self, name: Callable[[int], str]) -> list[str]:
        return [f"{name(self.parameter)} gradient"]


def accumulates(graph: fx.Graph, compilation: Compilation) -> bool:
    """Whether the settings ask for it; a body of a higher-order op has no parameters."""
    return compilation.known.settings.accumulate_wgrad and not compilation.known.subgraph


def wanted_gradients(foreseen: Sequence[Foreseen], known: Known) -> int:
    """One for each parameter whose wgrad is quantized."""
    if not known.settings.accumulate_wgrad or not known.training:
        return 0
    return len({each.site.parameter for each in foreseen if each.used("wgrad")} - {None})


def accumulate_wgrad(graph: fx.Graph, compilation: Compilation) -> None:
    (output,) = graph.find_nodes(op="output")
    results = list(cast("Sequence[fx.Node | None]", output.args[0]))
    primals = [(node, index) for node, index in graph_inputs(graph) if not str(node.target).startswith("tangents")]
    first = len(results) - len(primals)  # the gradients come last, one for each input
    found: dict[fx.Node, tuple[int, Gradient]] = {}
    moved: dict[tuple[str, int, str], str] = {}  # by site and GEMM: what adding to the gradient moves
    for wgrad in nodes(graph, (ops.scaled_mm, *_OTHERS)):
        if wgrad.meta.get(GEMM_KEY, (0, ""))[1] != "wgrad":
            continue
        site = compilation.sites[wgrad.meta[GEMM_KEY][0]]
        place = _result_of(wgrad, output, results) if wgrad.target is ops.scaled_mm else _OTHERS[wgrad.target]
        reason = place if isinstance(place, str) else None
        if isinstance(place, int):
            parameter, index = primals[place - first] if place >= first else (wgrad, None)
            reason = _why_not(wgrad, parameter, index, compilation)
            if reason is None:
                shape, device = tuple(value(parameter).shape), value(parameter).device
                found[wgrad] = place, Gradient(parameter=cast(int, index), shape=shape, device=device)
                moved[site.fqn, site.index, "wgrad"] = _moves(wgrad, parameter, compilation)
        if reason is not None:
            compilation.refuse("FP32 gradient", site, reason)
    taken = compilation.take(graph, [gradient for _, gradient in found.values()])
    if not found or taken is None:
        return
    compilation.amend(moved, dtype="fp32")
    for buffer, (wgrad, (place, _)) in zip(taken, found.items(), strict=True):
        set_argument(wgrad, "out_dtype", torch.float32)
        set_argument(wgrad, "addend", buffer)
        update_value(wgrad)
        with graph.inserting_before(output):
            copy = insert(graph, aten.copy_.default, (buffer, wgrad), like=wgrad)
        set_direction(copy, "must_be_in_backward")
        results[place] = None
    output.args = (type(output.args[0])(results),)
    erase_unused(graph)


def _moves(wgrad: fx.Node, parameter: fx.Node, compilation: Compilation) -> str:
    own, other = value(wgrad).dtype, value(parameter).dtype
    cast_bytes = own.itemsize + other.itemsize if own != other else 0
    before = own.itemsize + cast_bytes + 3 * other.itemsize
    gemm = SCALINGS[named_arguments(wgrad)["scaling"]].gemm
    after = 8 if compilation.hardware_of(wgrad).adds(gemm) else 16
    return f"added to an FP32 gradient: {after} bytes moved for each number, {before} through autograd"


def _result_of(wgrad: fx.Node, output: fx.Node, results: Sequence[fx.Node | None]) -> int | str:
    """The place of ``wgrad`` among the graph's results, behind casts and transpositions; else why there is none."""
    node, transposed = wgrad, False
    while True:
        users = [user for user in node.users if user.users or user is output]
        if len(users) != 1:
            return "its wgrad is read by several"
        (user,) = users
        if user is output:
            break
        if user.target is aten.permute.default:
            transposed = not transposed
        elif user.target is not _CONVERT:
            return f"its wgrad is not its gradient yet: {user.name} follows"
        node = user
    if transposed:
        return "it is stored transposed"
    places = [place for place, result in enumerate(results) if result is node]
    return places[0] if len(places) == 1 else "its wgrad is the gradient of several weights"


def _why_not(wgrad: fx.Node, parameter: fx.Node, index: int | None, compilation: Compilation) -> str | None:
    reasons = compilation.known.facts.get(_STORE, {})
    if index is None or index not in reasons:
        return "it is no parameter"
    if (reason := reasons[index]) is not None:
        return reason
    given: dict[str, Any] = named_arguments(wgrad)
    if value(parameter).shape != value(wgrad).shape:
        return "it is padded"
    return compilation.hardware_of(wgrad).obstacle(*quantizers_of(given), torch.float32)


def why_not_accumulated(parameter: Tensor, *, gathered: bool) -> str | None:
    """Reason why wgrad cannot add to the FP32 gradient of ``parameter``; None if it can. ``gathered``: by FSDP2."""
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
    tensor: Tensor  # what .grad or .main_grad is
    memory: Tensor  # the same memory, as graphs take it
    is_grad: bool


class MainGrads(Store):
    """The buffers of one backend. It keeps no parameter alive."""

    name: ClassVar = _STORE

    def __init__(self) -> None:
        self._buffers: dict[int, _Buffer] = {}  # by the id of a parameter, until that is freed; read in each call

    @staticmethod
    def fact(parameter: Tensor, *, sharded: Any) -> str | None:
        return why_not_accumulated(parameter, gathered=sharded is not None)

    def report(self) -> Mapping[str, int]:
        """The memory of the buffers, those that are ``main_grad`` not included."""
        buffers = list(self._buffers.values())
        return {"gradient_bytes": sum(buffer.tensor.nbytes for buffer in buffers if buffer.is_grad)}

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
        return found is not None and getattr(parameter, "main_grad", None) is (None if found.is_grad else found.tensor)

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
        found = self._buffers.get(id(parameter))
        if found is not None and self._is_known(parameter):
            return found
        tensor = main_grad = getattr(parameter, "main_grad", None)
        if tensor is None:
            with torch.inference_mode(False), torch.no_grad():
                tensor = torch.zeros_like(parameter)
        if found is None:
            weakref.finalize(parameter, MainGrads._forget, weakref.ref(self), id(parameter)).atexit = False
        self._buffers[id(parameter)] = made = _Buffer(tensor, tensor.data, main_grad is None)
        return made

    @staticmethod
    def _forget(reference: weakref.ref[MainGrads], key: int) -> None:
        if (grads := reference()) is not None:
            del grads._buffers[key]


@dataclass(kw_only=True, eq=False)
class _Added(Slot):
    acts: ClassVar[bool] = True
    grads: MainGrads
    positions: Sequence[int]

    def after(self, run: Run, results: Any) -> None:
        self.grads.watch(results, [run.args[i] for i in self.positions])
