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

Each backward is asked when it begins, since what compiling saw may have changed. Where autograd must get a gradient
(for a hook, for ``torch.autograd.grad``, since somebody kept the buffer as the gradient of an earlier backward), the
buffer is emptied for that backward, and its numbers go through a node between the parameter and the graph.

Refuses (leaves the gradient to autograd) weights without such a buffer, or whose gradient something waits for (hooks,
DDP, FSDP2); gradients that are a sum or a part, or transposed; wgrads that no scaled GEMM computes, or none in FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, cast

import torch
from torch import Tensor, fx

from fp8graph.compat import autograd
from fp8graph.compat.distributed import local, number_of_ranks
from fp8graph.compat.inductor import erase_unused
from fp8graph.compat.ops import named_arguments
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation, GraphFacts
from fp8graph.ir.edit import insert, set_argument, set_direction, update_value
from fp8graph.ir.extra_inputs import ExtraInput, Rename
from fp8graph.ir.naming import graph_inputs
from fp8graph.ir.nodes import CONVERT, GEMM_KEY, aten, nodes, value
from fp8graph.ir.sites import Foreseen
from fp8graph.ir.verify import quantizers_of
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.records import RefusalRecord
from fp8graph.runtime.parameters import ParameterTable
from fp8graph.runtime.stores import CallContext, Run, Services, Slot, Store

_STORE: Final = "gradients"
_EMULATED = "its wgrad is emulated"
_GROUPED = "it is one of experts"
_HOOKED: Final = "hooks wait for its gradient"
_RANKS: Final = "there are other ranks, and what reduces gradients may wait for it: give it a main_grad"
_COMPILED: Final = "compiled autograd runs its backward"
_VIEWS: Final = 4  # views of a compiled graph's results have nodes of their own, no more than these
_OTHERS: Final[dict[Any, str]] = {
    aten.mm.default: _EMULATED,
    aten.bmm.default: _EMULATED,
    ops.scaled_grouped_mm: _GROUPED,
    ops.grouped_mm: _GROUPED,
}


@dataclass(frozen=True, kw_only=True)
class Gradient(ExtraInput):
    """The FP32 gradient of a parameter, which a graph takes as an input to add wgrad's result to it."""

    store: ClassVar = _STORE
    parameter: int  # graph input
    shape: tuple[int, ...]
    device: torch.device
    fqn: str = ""  # of the site
    index: int = 0

    def stand_ins(self) -> list[Tensor]:
        return [torch.empty(self.shape, device=self.device)]

    def titles(self, name: Callable[[int], str]) -> list[str]:
        return [f"{name(self.parameter)} gradient"]

    def renamed(self, rename: Rename) -> Gradient:
        fqn, index = rename(self.fqn, self.index)
        return replace(self, fqn=fqn, index=index)


def accumulates(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether the settings ask for it; a body of a higher-order op has no parameters."""
    return compilation.facts.settings.accumulate_wgrad and not compilation.facts.subgraph


def wanted_gradients(foreseen: Callable[[], Sequence[Foreseen]], facts: GraphFacts) -> int:
    """Return one for each parameter whose wgrad is quantized."""
    if not facts.settings.accumulate_wgrad or not facts.training:
        return 0
    return len({each.site.parameter for each in foreseen() if each.used("wgrad")} - {None})


def accumulate_wgrad(graph: fx.Graph, compilation: Compilation) -> None:
    (output,) = graph.find_nodes(op="output")
    results = list(cast("Sequence[fx.Node | None]", output.args[0]))
    primals = [(node, index) for node, index in graph_inputs(graph) if not str(node.target).startswith("tangents")]
    first = len(results) - len(primals)  # the gradients come last, one for each input
    gradients: dict[fx.Node, tuple[int, Gradient]] = {}
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
                own = Gradient(parameter=cast(int, index), shape=shape, device=device, fqn=site.fqn, index=site.index)
                gradients[wgrad] = place, own
                moved[site.fqn, site.index, "wgrad"] = _moves(wgrad, parameter, compilation)
        if reason is not None:
            compilation.refuse("FP32 gradient", site, reason)
    buffers = compilation.take(graph, [gradient for _, gradient in gradients.values()])
    if not gradients or buffers is None:
        return
    compilation.amend(moved, dtype="fp32")
    for buffer, (wgrad, (place, _)) in zip(buffers, gradients.items(), strict=True):
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
    """Get the place of ``wgrad`` among the graph's results, behind casts and transpositions; else why there is none."""
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
        elif user.target is not CONVERT:
            return f"its wgrad is not its gradient yet: {user.name} follows"
        node = user
    if transposed:
        return "it is stored transposed"
    places = [place for place, result in enumerate(results) if result is node]
    return places[0] if len(places) == 1 else "its wgrad is the gradient of several weights"


def _why_not(wgrad: fx.Node, parameter: fx.Node, index: int | None, compilation: Compilation) -> str | None:
    reasons = compilation.facts.parameter_facts.get(_STORE, {})
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
    if (reason := _unfit(parameter)) is not None or getattr(parameter, "main_grad", None) is not None:
        return reason
    if autograd.has_gradient_hooks(parameter):
        return _HOOKED
    return _RANKS if number_of_ranks(None) > 1 else None


def _unfit(parameter: Tensor) -> str | None:
    """Reason why neither the ``main_grad`` nor the ``.grad`` of ``parameter`` takes FP32 results; None if one does."""
    if local(parameter) is not parameter:
        return "it is a DTensor"
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        fits = isinstance(main_grad, Tensor) and main_grad.dtype == torch.float32
        fits = fits and main_grad.shape == parameter.shape and main_grad.device == parameter.device
        return None if fits and main_grad.is_contiguous() else "its main_grad is no contiguous FP32 tensor of its shape"
    if parameter.dtype != torch.float32:
        return f"its .grad is {str(parameter.dtype).removeprefix('torch.')}, and it has no main_grad in FP32"
    return None if parameter.is_contiguous() else "it is not contiguous"


@dataclass
class _Buffer:
    tensor: Tensor  # what .grad or .main_grad is
    memory: Tensor  # the same memory, as graphs take it
    main_grad: Any  # of the parameter, None without one
    unfit: str | None  # reason why it is neither: all that graphs add to it goes to autograd
    unused: tuple[int, ...] = ()  # the count of its uses while nobody has it as a gradient
    aside: tuple[Tensor, int] | None = None  # its numbers and version, while a backward runs that may not change them

    @property
    def is_grad(self) -> bool:
        return self.tensor is not self.main_grad

    def is_unused(self) -> bool:
        """Return whether nobody has it as a gradient, or memory of it."""
        return self.is_grad and autograd.uses(self, "tensor") == self.unused

    def set_aside(self, *, restored: bool) -> None:
        """Empty it for one backward. ``restored``: whoever has it as a gradient finds its numbers there again."""
        with torch.no_grad():
            if restored:
                self.aside = self.tensor.clone(), autograd.version(self.tensor)
            self.tensor.data.zero_()

    def take_out(self) -> Tensor:
        """Return the numbers that one backward added."""
        with torch.no_grad():
            added = self.tensor.clone()
        self.restore()
        return added

    def restore(self) -> None:
        """Give it its numbers back, unless somebody has written others since (after a backward that failed)."""
        if self.aside is not None:
            numbers, version = self.aside
            self.aside = None
            if autograd.version(self.tensor) == version:
                with torch.no_grad():
                    self.tensor.data.copy_(numbers)


class MainGrads(Store):
    """The buffers of one backend."""

    name: ClassVar = _STORE

    def __init__(self, services: Services) -> None:
        self._buffers = ParameterTable[_Buffer]()  # by the ids of parameters; read in each call
        self._left: dict[RefusalRecord, None] = {}  # gradients that a backward gave to autograd, and why

    @staticmethod
    def fact(parameter: Tensor, *, sharded: Any) -> str | None:
        return why_not_accumulated(parameter, gathered=sharded is not None)

    def report(self) -> Mapping[str, Any]:
        """Return the memory of the buffers, those that are ``main_grad`` not included, and the gradients left to
        autograd.
        """
        held = sum(buffer.tensor.nbytes for buffer in self._buffers.values() if buffer.is_grad)
        return {"gradient_bytes": held, "refusals_of_calls": list(self._left)}

    def slot(self, extra_inputs: Sequence[Gradient], context: CallContext) -> Slot:
        """Return the memory that a graph adds to."""
        positions = [gradient.parameter for gradient in extra_inputs]
        return _Added(
            tensors=[self.buffer(context.args[i]).memory for i in positions],
            fresh=lambda args: all(self._is_known(args[i]) for i in positions),
            grads=self,
            requests=extra_inputs,
        )

    def _is_known(self, parameter: Tensor) -> bool:
        """Return whether there is a buffer, and nobody has put another ``main_grad`` in its place."""
        buffer = self._buffers.get(id(parameter))
        return buffer is not None and getattr(parameter, "main_grad", None) is buffer.main_grad

    def buffer(self, parameter: Tensor) -> _Buffer:
        """Return the buffer of ``parameter``: its ``main_grad``, or one that becomes its ``.grad``."""
        buffer = self._buffers.get(id(parameter))
        if buffer is not None and self._is_known(parameter):
            same = buffer.tensor.shape == parameter.shape and buffer.tensor.device == parameter.device
            if same and (buffer.unfit is None or buffer.unfit == _unfit(parameter)):
                return buffer
        unfit, main_grad = _unfit(parameter), getattr(parameter, "main_grad", None)
        if (tensor := main_grad) is None or unfit is not None:
            with torch.inference_mode(False), torch.no_grad():
                tensor = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        buffer = self._buffers.keep(id(parameter), _Buffer(tensor, tensor.data, main_grad, unfit), [parameter])
        del tensor, main_grad  # they would count
        buffer.unused = autograd.uses(buffer, "tensor")
        return buffer

    def leave(self, gradient: Gradient, reason: str) -> None:
        """Say in the report that autograd got this gradient."""
        self._left[RefusalRecord(what="FP32 gradient", fqn=gradient.fqn, index=gradient.index, reason=reason)] = None


@dataclass(kw_only=True, eq=False)
class _Added(Slot):
    acts: ClassVar[bool] = True
    grads: MainGrads
    requests: Sequence[Gradient]

    def before(self, run: Run) -> Sequence[Tensor]:
        backward = _Backward(self.grads, self.requests, [run.args[each.parameter] for each in self.requests])
        run.notes[_STORE], inputs = backward, list(run.inputs)
        for place, alias in backward.aliases().items():
            inputs[self.requests[place].parameter] = alias
        run.inputs = inputs
        if autograd.saved_tensors_hooks():  # a copy that offloading makes would get the sum
            run.enter(autograd.saved_as_they_are(self.tensors))
        return self.tensors

    def after(self, run: Run, results: Any) -> None:
        """Decide when the backward of ``results`` begins."""
        backward: _Backward = run.notes[_STORE]
        behind = backward.behind()
        functions = {x.grad_fn for x in results if isinstance(x, Tensor) and x.grad_fn is not None}
        for _ in range(_VIEWS):
            if leading := [f for f in functions if any(other is behind for other, _ in f.next_functions)]:
                leading[0].register_prehook(backward.begin)  # it may not hold the node: nobody would free the two
                return
            functions = {other for f in functions for other, _ in f.next_functions if other is not None}


class _Backward:
    """One run's backward, which may run several times: its wgrads are added to gradients, or given to autograd."""

    def __init__(self, grads: MainGrads, requests: Sequence[Gradient], parameters: Sequence[Tensor]) -> None:
        self.grads, self.requests, self.parameters = grads, requests, parameters
        self.buffers = [grads.buffer(parameter) for parameter in parameters]
        self.returned: dict[int, Tensor] = {}  # by place: the gradients that go through autograd
        self._through = [place for place, buffer in enumerate(self.buffers) if buffer.is_grad]  # they may
        self._first: Any = None  # a result of that node, until the run is over
        self._left: list[int] = []  # the places of gradients that the backward which runs leaves to autograd
        self._end: Any = None  # the hook behind the compiled node

    def aliases(self) -> dict[int, Tensor]:
        """Give the tensors that the graph gets for parameters, by place: of a node that can return their gradients."""
        if not self._through:
            return {}
        aliases = _Parameters.apply(self, *(self.parameters[place] for place in self._through))
        self._first = aliases[0]
        return dict(zip(self._through, aliases, strict=True))

    def behind(self) -> Any:
        """Give the node that the backward of the graph leads to: that of the aliases, or of a parameter. Asked once."""
        first, self._first = self._first, None  # it holds this object
        return autograd.accumulator(self.parameters[0]) if first is None else first.grad_fn

    def begin(self, *_: Any) -> None:
        """Decide for each gradient, when all is known: before the compiled backward runs."""
        self.returned.clear()
        self._left.clear()
        if self._end is not None:  # it failed the last time
            self._end.remove()
            self._end = None
        node, of_all = autograd.running_node(), None
        if node is None:
            of_all = _COMPILED
        elif number_of_ranks(None) > 1:
            of_all = _RANKS
        elif torch.is_grad_enabled():
            of_all = "a backward had create_graph=True"
        for place, (parameter, buffer) in enumerate(zip(self.parameters, self.buffers, strict=True)):
            buffer.restore()  # the same
            reason = _why_left(parameter, buffer, of_all)
            if reason is not None:
                self.grads.leave(self.requests[place], reason)
                buffer.set_aside(restored=node is None or not buffer.is_unused())
                self._left.append(place)
            elif buffer.is_grad and parameter.grad is not buffer.tensor:
                with torch.no_grad():
                    if parameter.grad is None:
                        buffer.tensor.zero_()
                    else:
                        buffer.tensor.copy_(parameter.grad)
                parameter.grad = buffer.tensor
        if self._left and node is not None:
            self._end = node.register_hook(self.end)

    def end(self, *_: Any) -> None:
        """Take the gradients for autograd out of the buffers, right after it."""
        if self._end is not None:
            self._end.remove()
            self._end = None
        for place in self._left:
            self.returned[place] = self.buffers[place].take_out().to(self.parameters[place].dtype)
        self._left.clear()

    def take(self) -> list[Tensor | None]:
        """Return the gradients for autograd, None for the others."""
        self.end()  # compiled autograd has called no hook behind the node
        return [self.returned.pop(place, None) for place in self._through]


class _Parameters(torch.autograd.Function):
    """Stands between parameters and a compiled graph that adds to their gradients, for those that autograd must get."""

    @staticmethod
    def forward(ctx: Any, backward: _Backward, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.backward_of_run = backward
        ctx.set_materialize_grads(False)
        return tuple(parameter.detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.backward_of_run.take())


def _why_left(parameter: Tensor, buffer: _Buffer, of_all: str | None) -> str | None:
    """Reason why wgrad may not add to the buffer in the backward that runs; None if it may.

    Args:
        of_all: the reason for every ``.grad``.
    """
    if not autograd.accumulates(parameter):
        return "a backward was for other tensors (inputs=...), or torch.autograd.grad returned it"
    if buffer.unfit is not None or not buffer.is_grad:
        return buffer.unfit
    if autograd.has_tensor_hooks(parameter):
        return _HOOKED
    if of_all is not None or parameter.grad is buffer.tensor:
        return of_all
    if not buffer.is_unused():
        return "its gradient of an earlier backward was kept"
    if parameter.grad is None:
        return None
    if parameter.grad.dtype != buffer.tensor.dtype or autograd.uses(parameter, "grad") != autograd.uses_of_a_grad():
        return "something else has its .grad, too"
    return None
