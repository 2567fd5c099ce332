"""One weight that FSDP2 gathers in FP8: what is sent, and what graphs take: see ``runtime/sent_weights.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, fx

from fp8graph.analysis.sent_weights import source_of_part
from fp8graph.compat import autograd, fsdp
from fp8graph.ir import ops
from fp8graph.ir.extra_inputs import QuantizedWeight
from fp8graph.ir.nodes import aten, nodes
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.numerics.quantization import reducible_amax
from fp8graph.runtime.staleness import Steps, storage_of, version

Compile = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
_CONVERT: Final = torch.ops.prims.convert_element_type.default


class Memory:
    """NaNs, one tensor for each dtype and device, which all parameters share that are not there in high precision."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def nan(self, size: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        known = self._known.get((dtype, device))
        if known is None or known.numel() < size.numel():
            known = self._known[dtype, device] = torch.full((size.numel(),), torch.nan, dtype=dtype, device=device)
        return fsdp.view_of(known, size)


class SentWeight:
    """One weight, perhaps joined of several parameters, that FSDP2 gathers in FP8.

    Args:
        weight: as a graph takes it.
        sharded: FSDP2's objects for ``weight.parameters``.
        compile: compiles a graph of dialect nodes into a function.
        memory: for what stands in the place of whole parameters.
    """

    def __init__(
        self, weight: QuantizedWeight, sharded: Sequence[Any], steps: Steps, compile: Compile, memory: Memory
    ) -> None:
        self.weight, self.sharded = weight, list(sharded)
        self._steps, self._compile, self._memory = steps, compile, memory
        (node,) = nodes(weight.quantizing, (ops.quantize,))
        self._asked, kind = QuantizeNode(node).asked, QuantizeNode(node).kind
        self.has_one_scale: Final = kind.one_scale
        placeholders = weight.quantizing.find_nodes(op="placeholder")
        sources = [source_of_part(part) for part in self._asked.parts]
        self._parts = [(self.sharded[placeholders.index(source)], casts) for source, casts in sources]
        self._functions: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
        self._quantize: dict[int, Callable[..., Any]] = {}  # by part
        self.restored = False  # whole parameters are there, too: a graph reads them
        self._rows: list[dict[str, Tensor]] = []  # quantized rows of this rank, for each part
        self._made_of: list[Any] = []
        self._scales: Tensor | None = None  # [1, 2]
        self._scales_of: Any = None
        self.tensors: dict[str, Tensor] = {}  # the copies, by output name
        self.quantized = 0

    @property
    def bytes(self) -> int:
        """The memory of this rank's quantized rows."""
        return sum(x.nbytes for made in self._rows for x in made.values())

    @property
    def attached(self) -> bool:
        """Whether FSDP2 gathers it in FP8."""
        return all(fsdp.owner_of(sharded) is self for sharded in self.sharded)

    def attach(self) -> None:
        """From the next gather on. The whole parameters must not be there now."""
        count = len(self._parts)
        self._rows, self._made_of = [{} for _ in range(count)], [None] * count
        self.tensors = {}
        self._functions = [self._around(part) for part in range(count)]
        for (sharded, _), functions in zip(self._parts, self._functions, strict=True):
            fsdp.attach(sharded, *functions, owner=self)
            fsdp.after_loading(sharded, self, SentWeight.attach_again)

    def attach_again(self) -> None:
        """After ``load_state_dict(assign=True)``, which has put other shards in place."""
        for (sharded, _), functions in zip(self._parts, self._functions, strict=False):
            fsdp.attach_again(sharded, *functions)

    def copies(self, weight: QuantizedWeight, parameters: Sequence[Any]) -> list[Tensor] | None:
        """The copies of ``weight``, which a graph takes in the place of ``parameters``; None if they are others."""
        gathered = [getattr(sharded, "_unsharded_param", None) for sharded in self.sharded]
        alike = self.weight.signature == weight.signature and {*weight.outputs} <= {*self.weight.made}
        if not alike or len(gathered) != len(parameters):
            return None
        if any(own is not given for own, given in zip(gathered, parameters, strict=True)):
            return None
        return [self.tensors[name] for name in weight.outputs]

    @property
    def group(self) -> Any:
        """The process group that gathers."""
        return self.sharded[0].shard_mesh.get_group()

    @property
    def waits_for_amax(self) -> bool:
        """Whether its rows have changed since its scale was made."""
        return self.has_one_scale and self._scales_of != self._state()

    def amax(self) -> Tensor:
        """[1]: of this rank's rows."""
        found: list[Tensor] = []
        with torch.no_grad():
            for sharded, casts in self._parts:
                found.append(fsdp.largest(fsdp.shard_of(sharded).detach()))
                for dtype in (sharded.param_dtype or sharded.orig_dtype, *casts):
                    found[-1] = found[-1].to(dtype)  # rounding keeps the order
        return reducible_amax(torch.stack(found).to(torch.float32))

    def set_amax(self, amax: Tensor) -> None:
        """``amax`` [1]: of all rows on all ranks."""
        asked = self._asked
        self._scales = ops.scales(amax, asked.dtype, asked.power_2_scale, asked.amax_epsilon, asked.carry_overflow)
        self._scales_of = self._state()

    def _state(self) -> tuple[Any, ...]:
        """It changes with the parameters."""
        found: list[Any] = [self._steps.refreshes]
        for sharded in self.sharded:
            whole, rows = sharded.sharded_param, fsdp.shard_of(sharded)
            found += [version(whole), storage_of(rows), rows.data_ptr(), self._steps.of(whole)]
        return tuple(found)

    def _around(self, part: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The functions that FSDP2 calls before and after it gathers ``part``, with these names of arguments."""

        def before(mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
            return tuple(x.view(torch.uint8) if x.itemsize == 1 else x for x in self._sent(part)), None

        def after(outs: Sequence[Tensor], metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
            sharded, _ = self._parts[part]
            # a graph that computes gradients may run before the next gather, or is about to run backward
            gradients = torch.is_grad_enabled() or autograd.in_backward() or sharded.post_forward_mesh_info is None
            self._received(part, outs, gradients)
            if out is not None:
                return self._restore(part) if self.restored else None
            freed = [self.tensors[name] for name in ("rowwise", "columnwise") if name in self.tensors and part == 0]
            return self._memory.nan(sharded._orig_size, param_dtype, outs[0].device), tuple(freed)

        return before, after

    @torch.no_grad()
    def _sent(self, part: int) -> list[Tensor]:
        """The quantized rows of this rank: data, and scales of tiles."""
        state = self._state()
        if self._made_of[part] != state:
            if self.waits_for_amax:  # the first gather, or written to without a step
                dist.all_reduce(amax := self.amax(), dist.ReduceOp.MAX, group=self.group)
                self.set_amax(amax)
            sharded, casts = self._parts[part]
            rows = fsdp.shard_of(sharded).detach()
            made = self._rows[part]
            if not made:
                tile_rows, tile_columns = (1, 1) if self.has_one_scale else self._asked.block
                made["rowwise"] = torch.empty(rows.shape, dtype=self._asked.dtype, device=rows.device)
                if not self.has_one_scale:
                    like = self.weight.made_outputs()["rowwise_scale_inv"]
                    grid = rows.shape[0] // tile_rows, -(-rows.shape[1] // tile_columns)
                    made["rowwise_scale_inv"] = torch.empty(grid, dtype=like.dtype, device=rows.device)
            inputs = [rows, *([] if self._scales is None else [self._scales]), *made.values()]
            with autograd.without_autocast():
                if part not in self._quantize:
                    dtypes = (sharded.param_dtype or sharded.orig_dtype, *casts)
                    self._quantize[part] = self._compile(self._quantizing(dtypes, list(made)), inputs)
                self._quantize[part](*inputs)
            self._made_of[part] = state
            self.quantized += 1
        return list(self._rows[part].values())

    def restore(self) -> None:
        """Gather the whole parameters in high precision, too: a graph reads them. Undone by :meth:`detach`."""
        self.restored = True
        for part in range(len(self._parts)):
            self._restore(part)

    @torch.no_grad()
    def _restore(self, part: int) -> None:
        sharded, _ = self._parts[part]
        dtype = sharded.param_dtype or sharded.orig_dtype
        rows = fsdp.shard_of(sharded).detach().to(dtype).contiguous()
        whole = torch.empty(sharded._orig_size, dtype=dtype, device=rows.device)
        dist.all_gather([*whole.split(len(rows))], rows, group=self.group)
        sharded._unsharded_param.data = whole

    def detach(self) -> None:
        """Let FSDP2 gather in high precision again. The whole parameters must not be there now."""
        for sharded in self.sharded:
            fsdp.detach(sharded)
        self._functions, self.restored = [], False

    def _quantizing(self, dtypes: Sequence[torch.dtype], names: Sequence[str]) -> fx.GraphModule:
        """A function of rows, their scale if they have one, and buffers for the results."""
        graph, asked = fx.Graph(), self._asked
        x = graph.placeholder("rows")
        scales = graph.placeholder("scales") if self.has_one_scale else None
        buffers = [graph.placeholder(name) for name in names]
        for dtype in dtypes:
            x = graph.call_function(_CONVERT, (x, dtype))
        args = (x, asked.dtype, asked.power_2_scale, asked.amax_epsilon, [1, 1], [])
        kwargs: dict[str, Any] = {"scaling": asked.scaling, "block": list(asked.block), "scales": scales}
        made = graph.call_function(ops.quantize, args, kwargs)
        for index, buffer in enumerate(buffers):
            graph.call_function(aten.copy_.default, (buffer, graph.call_function(getitem, (made, index))))
        graph.output(())
        return fx.GraphModule(torch.nn.Module(), graph)

    @torch.no_grad()
    def _received(self, part: int, outs: Sequence[Tensor], gradients: bool) -> None:
        """Put what was gathered into the copies that graphs take; dgrad's only if ``gradients`` may be computed."""
        wanted, device = self.weight.made_outputs(), outs[0].device
        data = outs[0].view(self._asked.dtype)
        alone = len(self._parts) == 1
        for name, like in wanted.items():
            if name not in self.tensors:
                zero_copy = alone and name == "rowwise"
                self.tensors[name] = data if zero_copy else torch.empty(like.shape, dtype=like.dtype, device=device)
            fsdp.allocate(self.tensors[name])
        start = sum(sharded._orig_size[0] for sharded, _ in self._parts[:part])
        rows = slice(start, start + data.shape[0])
        writes: list[tuple[Tensor, Tensor]] = []
        if not alone:
            writes.append((self.tensors["rowwise"][rows], data))
        if "columnwise" in wanted and gradients:
            writes.append((self.tensors["columnwise"][:, rows], data.t()))
        if self.has_one_scale:
            assert self._scales is not None
            writes.append((self.tensors["scale_inv"], self._scales[0, 1].reshape(self.tensors["scale_inv"].shape)))
        else:
            first = start // self._asked.block[0]
            tiles = slice(first, first + outs[1].shape[0])
            writes.append((self.tensors["rowwise_scale_inv"][tiles], outs[1]))
            if "columnwise_scale_inv" in wanted:
                writes.append((self.tensors["columnwise_scale_inv"][:, tiles], outs[1].t()))
        with autograd.unnoticed_writes(list(self.tensors.values())):  # backward reads what was gathered again
            for target, source in writes:
                _bytes(target).copy_(_bytes(source))


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.itemsize == 1 else x
