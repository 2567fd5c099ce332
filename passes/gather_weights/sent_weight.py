"""One weight that FSDP2 gathers in FP8: what is sent, and what graphs take: see ``sent_weights.py``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fp8graph.compat import autograd, fsdp
from fp8graph.compat.ops import largest_of_each
from fp8graph.ir import ops
from fp8graph.ir.nodes import nodes
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.weight_graphs import WeightGraph
from fp8graph.numerics.quantization import reducible_amax
from fp8graph.passes.gather_weights import source_of_part
from fp8graph.passes.gather_weights.gathered_copies import GatheredCopies, Memory, quantizes_rows
from fp8graph.runtime.staleness import storage_of, version
from fp8graph.runtime.stores import KeptScales, Services


class AllSent(Protocol):
    """The weights of a backend that FSDP2 gathers in FP8."""

    forwards: int

    def gathers(self, weight: SentWeight, part: int) -> None:
        """Note that ``part`` of ``weight`` is gathered, outside of backward."""
        ...


_CONVERT: Final = torch.ops.prims.convert_element_type.default


def kept_scales(weight: WeightGraph, services: Services) -> KeptScales | None:
    """The store of the weight's scale, if that outlives a step."""
    return cast(KeptScales, services.named(weight.asked[0].store)) if weight.asked else None


class SentWeight:
    """One weight, perhaps joined of several parameters, that FSDP2 gathers in FP8.

    Args:
        weight: as a graph takes it.
        sharded: FSDP2's objects for ``weight.parameters``.
        all_sent: knows when a forward begins.
        memory: for what stands in the place of whole parameters.
    """

    def __init__(
        self,
        weight: WeightGraph,
        sharded: Sequence[Any],
        *,
        services: Services,
        all_sent: AllSent,
        memory: Memory,
    ) -> None:
        self.weight, self.sharded = weight, list(sharded)
        self._steps, self._compile, self._tensors = services.steps, services.compile, services.tensors
        self._memory = memory
        self._all = weakref.ref(all_sent)
        (node,) = nodes(weight.quantizing, (ops.quantize,))
        self._asked, self._kind = QuantizeNode(node).asked, QuantizeNode(node).kind
        self._kept, self._scales_kept = weight.asked, kept_scales(weight, services)
        placeholders = weight.quantizing.find_nodes(op="placeholder")
        sources = [source_of_part(part) for part in self._asked.parts]
        self._parts = [(self.sharded[placeholders.index(source)], casts) for source, casts in sources]
        self._groups = [fsdp.group_of(sharded) for sharded, _ in self._parts]
        self._functions: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
        self._quantize: dict[int, Callable[..., Any]] = {}  # by part
        self.restored = False  # whole parameters are there, too: a graph reads them
        self._rows: list[dict[str, Tensor]] = []  # quantized rows of this rank, for each part
        self._made_of: list[Any] = []
        self._amaxes: list[Tensor] = []  # [] FP32 each: with delayed scaling, of the quantized rows of each part
        self._to_record: dict[int, bool] = {}  # part -> whether gradients were computed with it
        self._scales: Tensor | None = None  # [1, 2]
        self._scales_of: Any = None
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
        if self._scales_kept is not None:
            self._amaxes = [torch.zeros((), device=fsdp.shard_of(sharded).device) for sharded, _ in self._parts]
        sizes = [sharded._orig_size[0] for sharded, _ in self._parts]
        self._copies = GatheredCopies(self.weight, sizes, fsdp.shard_of(self.sharded[0]).device)
        self._functions = [self._around(part) for part in range(count)]
        for (sharded, _), functions in zip(self._parts, self._functions, strict=True):
            fsdp.attach(sharded, *functions, owner=self)
            fsdp.after_loading(sharded, self, SentWeight.attach_again)

    def attach_again(self) -> None:
        """After ``load_state_dict(assign=True)``, which has put other shards in place."""
        for (sharded, _), functions in zip(self._parts, self._functions, strict=False):
            fsdp.attach_again(sharded, *functions)

    def stand_in(self) -> None:
        """Put NaN in the place of the whole parameters, unless a graph reads them."""
        for sharded in () if self.restored else self.sharded:
            fsdp.stand_in(sharded, self._nan(sharded))

    def copies(self, weight: WeightGraph, parameters: Sequence[Any]) -> list[Tensor] | None:
        """The copies of ``weight``, which a graph takes in the place of ``parameters``; None if they are others."""
        gathered = [getattr(sharded, "_unsharded_param", None) for sharded in self.sharded]
        own, other = ((x.signature, [each.kind() for each in x.asked]) for x in (self.weight, weight))
        if own != other:
            return None
        if len(gathered) != len(parameters) or any(a is not b for a, b in zip(gathered, parameters, strict=True)):
            return None
        if not {*weight.outputs} <= {*self.weight.made}:  # of a graph for training, after one for evaluation
            if not {*self.weight.made} <= {*weight.made}:
                return None
            self.weight, backward = weight, any(map(fsdp.is_kept, self._groups))
            self._copies.widen(weight, backward=backward)
            fsdp.frees(self._parts[0][0], self._copies.kept(backward=backward))
        return [self._copies.tensors[name] for name in weight.outputs]

    @property
    def group(self) -> Any:
        """The process group that gathers."""
        return self.sharded[0].shard_mesh.get_group()

    @property
    def waits_for_amax(self) -> bool:
        """Whether its rows have changed since its scale was made of the amax of all rows."""
        return self._kind.own_scale and self._scales_of != self._state()

    def amax(self) -> Tensor:
        """[1]: of this rank's rows."""
        found: list[Tensor] = []
        with torch.no_grad():
            for sharded, casts in self._parts:
                found += largest_of_each([fsdp.shard_of(sharded).detach()])
                for dtype in (sharded.param_dtype or sharded.orig_dtype, *casts):
                    found[-1] = found[-1].to(dtype)  # rounding keeps the order
        return reducible_amax(torch.stack(found).to(torch.float32))

    def _take_scale(self, kept: KeptScales) -> None:
        """Take the scale that outlives a step, once the last step is recorded in it."""
        kept.commit()
        self._scales, self._scales_of = kept.scales_in(self._row()), self._state()

    def _row(self) -> Tensor:
        """The tensor that keeps the weight's scale."""
        owners = dict(zip(self.weight.parameters, map(fsdp.whole_of, self.sharded), strict=True))
        args = [owners.get(index) for index in range(max(owners) + 1)]
        (kept,) = self._tensors(self._kept, args)
        return kept

    def take_amaxes(self) -> tuple[Tensor, list[Tensor]] | None:
        """The tensor that keeps its scale, and the amaxes of this rank's rows that are not in it yet; None without any.

        As for kept copies, an amax is recorded once for each update of the weight, if gradients were computed with it.
        """
        parts = [part for part, used in self._to_record.items() if used]
        for part in parts:
            del self._to_record[part]
        return (self._row(), [self._amaxes[part] for part in parts]) if parts else None

    def set_amax(self, amax: Tensor) -> None:
        """``amax`` [1]: of all rows on all ranks."""
        asked = self._asked
        self._scales = ops.scales(amax, asked.dtype, asked.power_2_scale, asked.amax_epsilon)
        self._scales_of = self._state()

    def _state(self) -> tuple[Any, ...]:
        """It changes with the parameters."""
        found: list[Any] = [self._steps.refreshes, all_sent.forwards if (all_sent := self._all()) is not None else 0]
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
            # backward is about to run, or may run before the next gather
            backward = autograd.in_backward() or fsdp.is_kept(self._groups[part])
            self._copies.receive(part, outs, self._scales, backward=backward)
            if part in self._to_record:
                self._to_record[part] |= backward or torch.is_grad_enabled()
            freed = self._copies.kept(backward=backward) if part == 0 else []
            fsdp.frees(sharded, freed)
            if out is not None:
                return self._restore(part) if self.restored else None
            return self._nan(sharded), tuple(freed)

        return before, after

    def _nan(self, sharded: Any) -> Tensor:
        dtype = sharded.param_dtype or sharded.orig_dtype
        return self._memory.nan(sharded._orig_size, dtype, fsdp.shard_of(sharded).device)

    @torch.no_grad()
    def _sent(self, part: int) -> list[Tensor]:
        """The quantized rows of this rank: data, and scales of tiles."""
        if autograd.in_backward() and self._made_of[part] is not None:
            return list(self._rows[part].values())  # those of forward
        if (all_sent := self._all()) is not None:
            all_sent.gathers(self, part)
        state = self._state()
        if self._made_of[part] != state:
            if self.waits_for_amax:  # written to without a step, or the first gather is one of backward
                dist.all_reduce(amax := self.amax(), dist.ReduceOp.MAX, group=self.group)
                self.set_amax(amax)
            if self._scales_kept is not None and self._scales_of != state:
                self._take_scale(self._scales_kept)
            sharded, casts = self._parts[part]
            rows = fsdp.shard_of(sharded).detach()
            made = self._rows[part]
            if not made:
                tile_rows, tile_columns = (1, 1) if self._kind.one_scale else self._asked.block
                made["rowwise"] = torch.empty(rows.shape, dtype=self._asked.dtype, device=rows.device)
                if not self._kind.one_scale:
                    like = self.weight.made_outputs()["rowwise_scale_inv"]
                    grid = rows.shape[0] // tile_rows, -(-rows.shape[1] // tile_columns)
                    made["rowwise_scale_inv"] = torch.empty(grid, dtype=like.dtype, device=rows.device)
            buffers = {**made, **({"amax": self._amaxes[part]} if self._amaxes else {})}
            inputs = [rows, *([] if self._scales is None else [self._scales]), *buffers.values()]
            with autograd.without_autocast():
                if part not in self._quantize:
                    dtypes = (sharded.param_dtype or sharded.orig_dtype, *casts)
                    self._quantize[part] = self._compile(quantizes_rows(self._asked, dtypes, list(buffers)), inputs)
                self._quantize[part](*inputs)
            self._made_of[part] = state
            if self._amaxes:
                self._to_record[part] = False
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
