"""The weights of a compiled model as its forward multiplies them: bytes and scales, for a checkpoint.

They are made by the very graph that quantizes a weight before a call (``ir/weight_graphs.py``): linears that are
multiplied as one GEMM share their scales, and a delayed scale is the one that the next forward takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from fp8graph.backend.backend import Backend
from fp8graph.backend.sharded import Piece, QuantizedPiece, Touched, cut_out, quantize_pieces, whole, why_gathered
from fp8graph.compat import fsdp
from fp8graph.compat.distributed import local, mesh_of
from fp8graph.compat.fakes import wrapped_tensors
from fp8graph.compat.wrappers import name_in_original
from fp8graph.ir import ops
from fp8graph.ir.compilation import Findings
from fp8graph.ir.nodes import CONVERT, look_through_transposes, nodes, value
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.weight_graphs import WeightGraph
from fp8graph.numerics.scalings import SCALINGS, QuantizeArguments
from fp8graph.recipes import Quantizer
from fp8graph.runtime.stores import KeptScales


@dataclass(frozen=True, kw_only=True)
class Multiplied:
    """One weight, rowwise.

    ``parameter``: its full name. ``data`` [N, K] (or packed), ``scale_inv``, ``global_scale_inv``: as
    :func:`fp8graph.numerics.quantize` returns them; of experts, one matrix after the other in dim 0.
    ``input_scale_inv``: FP32 [], of delayed scaling. ``flipped``: the parameter is [K, N].

    Of a sharded model ``data`` and ``scale_inv`` are DTensors; ``touched``: the latter has the scales of this rank.
    ``facts``: of a weight of such a model that was made without data.
    """

    parameter: str
    data: Tensor
    scale_inv: Tensor
    quantizer: Quantizer
    global_scale_inv: Tensor | None = None
    input_scale_inv: Tensor | None = None
    flipped: bool = False
    touched: Touched | None = None
    facts: Facts | None = None

    @property
    def layer(self) -> str:
        """The full name of its module."""
        return self.parameter.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The answers of a weight that is spread over ranks, before anything is computed.

    ``refused``: the reason why it cannot be quantized as it is spread. ``gathered``: the reason why it is gathered in
    high precision, and then quantized. ``scales``: FP32 [tensors], those of earlier steps.
    """

    refused: str | None = None
    gathered: str | None = None
    scales: Tensor | None = None


def multiplied_by(
    backend: Backend, model: nn.Module, *, data: bool = True, wanted: Collection[str] | None = None
) -> Iterator[Multiplied]:
    """Yield the weights that fprop multiplies in FP8, each once, in the order in which they were compiled.

    Those of a model that is spread over ranks are as those of the whole model, in DTensors: all ranks iterate.

    Args:
        data: False: the tensors of the weights are fake ones, and nothing is computed.
        wanted: the parameters whose weights are made; None: all.
    """
    owners, seen = _owners(model), set[str]()
    for called, findings in _calls(backend):
        for weight in findings.of(WeightGraph):
            if "rowwise" in weight.outputs and all(called[index] in owners for index in weight.parameters):
                owned = [owners[called[index]] for index in weight.parameters]
                new = {owner.name for owner in owned if wanted is None or owner.name in wanted} - seen
                kept = backend.services.kept_scales(weight.extra_inputs)
                for made in _made(weight, owned, kept, new, data) if new else ():
                    seen.add(made.parameter)
                    yield made


def on_all_ranks(weight: Multiplied) -> Multiplied:
    """``weight`` in tensors that each rank has whole. All ranks call it."""
    scales = whole(weight.scale_inv) if weight.touched is None else weight.touched.whole(weight.scale_inv)
    return dataclasses.replace(weight, data=whole(weight.data), scale_inv=scales, touched=None)


def matrices_of(backend: Backend, model: nn.Module) -> list[str]:
    """Return the names of the parameters that are the weights of sites, in FP8 or not."""
    owners = _owners(model)
    indices = [(called, {site.parameter for site in findings.sites}) for called, findings in _calls(backend)]
    of_matrices = (owners.get(x) for called, of_sites in indices for index, x in called.items() if index in of_sites)
    return list(dict.fromkeys(owner.name for owner in of_matrices if owner is not None))


def _calls(backend: Backend) -> list[tuple[dict[int, int], Findings]]:
    return [call for program in backend.programs for call in program.calls()]


class _Owner(NamedTuple):
    """A parameter as the model has it, and as a graph was called with it.

    ``dtype``: that in which FSDP2 gathers it, if it does.
    """

    name: str
    parameter: Tensor
    called: Tensor
    dtype: torch.dtype


def _owners(model: nn.Module) -> dict[int, _Owner]:
    """Return a model's parameters, by the ids of the tensors with which graphs are called, and of those that these
    wrap.
    """
    gathered, owners = fsdp.whole_parameters(model), dict[int, _Owner]()
    for name, p in model.named_parameters():
        q, dtype = gathered.get(id(p), (p, p.dtype))
        for x in (p, *wrapped_tensors(p), q, *wrapped_tensors(q)):
            owners[id(x)] = _Owner(name_in_original(name), p, x, dtype)
    return owners


def _made(
    weight: WeightGraph,
    owners: Sequence[_Owner],
    kept: KeptScales | None,
    wanted: Collection[str],
    data: bool,
) -> Iterator[Multiplied]:
    """Yield the linears of ``weight``, of which several may be joined, without padding and without their neighbours."""
    (node,) = nodes(weight.quantizing, (ops.quantize,))
    arguments, placeholders = QuantizeNode(node).arguments, weight.quantizing.find_nodes(op="placeholder")
    places = {placeholder: place for place, placeholder in enumerate(placeholders[: len(owners)])}
    sources = [_source(part, places) for part in arguments.parts]
    called = [owners[place].called for place, _ in sources if place is not None]
    if not called:
        return
    spread = any(mesh_of(owner.parameter) is not None for owner in owners)
    peeked: list[Tensor] = []
    if kept is not None and (data or spread):
        parameters = [owners[place].parameter for place, _ in sources if place is not None]
        peeked = [kept.peek(each, called, parameters) for each in weight.extra_inputs]
    wants = [place is not None and owners[place].name in wanted for place, _ in sources]
    facts = None
    with torch.no_grad():
        if spread:
            owned = [None if place is None else owners[place] for place, _ in sources]
            scales = dict(zip(placeholders[len(owners) :], peeked, strict=False))
            if data:
                shards = [local(owner.parameter.detach()).to(owner.dtype) for owner in owners]
                pieces = _of_shards(
                    arguments, owned, {**dict(zip(placeholders, shards, strict=False)), **scales}, wants
                )
            else:
                pieces, facts = _fakes(weight, arguments, owned), _facts(arguments, owned, scales)
        else:
            made = weight.made_outputs()
            if data:
                inputs = [*(owner.called.detach() for owner in owners), *peeked]
                made = dict(zip(weight.made, fx.GraphModule(nn.Module(), weight.quantizing)(*inputs), strict=True))
            pieces = cut_out(made, arguments, [value(part).shape for part in arguments.parts])
        quantizer = Quantizer(
            dtype=arguments.dtype,
            scaling=cast(Any, arguments.scaling),
            block=cast(Any, tuple(arguments.block) or Quantizer.block),
            power_2_scale=arguments.power_2_scale,
            amax_epsilon=arguments.amax_epsilon,
        )
        for (place, flipped), want, piece in zip(sources, wants, pieces, strict=True):
            if place is not None and want and piece is not None:
                yield Multiplied(
                    parameter=owners[place].name,
                    data=piece.data,
                    scale_inv=piece.scale_inv,
                    quantizer=quantizer,
                    global_scale_inv=piece.global_scale_inv,
                    input_scale_inv=None
                    if kept is None
                    else kept.input_scale_inv(weight.extra_inputs[0], owners[place].called),
                    flipped=flipped,
                    touched=piece.touched,
                    facts=facts,
                )


def _of_shards(
    arguments: QuantizeArguments[fx.Node],
    owners: Sequence[_Owner | None],
    given: Mapping[fx.Node, Tensor],
    wanted: Sequence[bool],
) -> Iterator[QuantizedPiece | None]:
    """Yield the parts of a weight whose parameters are spread over ranks.

    Args:
        given: this rank's shards of parameters, and scales of earlier steps.
    """
    all_owners = [owner for owner in owners if owner is not None]  # see _facts
    pieces = [
        Piece(name=owner.name, parameter=owner.parameter, shard=_computed(part, given))
        for part, owner in zip(arguments.parts, all_owners, strict=True)
    ]
    scales = None if arguments.scales is None else _computed(arguments.scales, given)
    yield from quantize_pieces(dataclasses.replace(cast(Any, arguments), scales=scales), pieces, wanted)


def _facts(
    arguments: QuantizeArguments[fx.Node], owners: Sequence[_Owner | None], given: Mapping[fx.Node, Tensor]
) -> Facts:
    """``given``: scales of earlier steps."""
    pieces: list[Piece] = []
    for part, owner in zip(arguments.parts, owners, strict=True):
        if owner is None:
            return Facts(refused="it is multiplied together with a weight that is computed from parameters")
        shard = torch.empty(value(part).shape, device="meta")
        pieces.append(Piece(name=owner.name, parameter=owner.parameter, shard=shard))
    scales = None if arguments.scales is None else _computed(arguments.scales, given)[:, 0].contiguous()
    return Facts(gathered=why_gathered(arguments, pieces), scales=scales)


def _fakes(
    weight: WeightGraph, arguments: QuantizeArguments[fx.Node], owners: Sequence[_Owner | None]
) -> Iterator[QuantizedPiece | None]:
    dtype, packed = weight.made_outputs()["rowwise"].dtype, SCALINGS[arguments.scaling].packed
    for owner in owners:
        if owner is not None:
            *leading, columns = owner.parameter.shape
            data = torch.empty((*leading, columns // packed), dtype=dtype, device="meta")
            yield QuantizedPiece(data=data, scale_inv=data.new_empty(()), global_scale_inv=None)
        else:
            yield None


def _computed(node: fx.Node, given: Mapping[fx.Node, Tensor]) -> Tensor:
    """Return the tensor of ``node``, of a graph that reads ``given``."""
    if node in given:
        return given[node]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _computed(n, given))
    return cast(Any, node.target)(*args, **kwargs)


def _source(part: fx.Node, places: Mapping[fx.Node, int]) -> tuple[int | None, bool]:
    """Return the place of the parameter that ``part`` is, cast or not, and whether it is transposed; None: computed."""
    flipped = False
    while part not in places:
        part, transposed = look_through_transposes(part)
        flipped ^= transposed
        if part.target is CONVERT:
            part = cast(fx.Node, part.args[0])
        elif part not in places:
            return None, flipped
    return places[part], flipped
