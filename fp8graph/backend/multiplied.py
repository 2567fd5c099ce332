"""The weights of a compiled model as its forward multiplies them: bytes and scales, for a checkpoint.

They are made by the very graph that quantizes a weight before a call (``ir/weight_graphs.py``): linears that are
multiplied as one GEMM share their scales, and a delayed scale is the one that the next forward takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, fx, nn

from fp8graph.backend.backend import Backend
from fp8graph.compat.fakes import wrapped_tensors
from fp8graph.compat.wrappers import name_in_original
from fp8graph.ir import ops
from fp8graph.ir.nodes import look_through_transposes, nodes, value
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.weight_graphs import WeightGraph
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import Quantizer
from fp8graph.runtime.stores import KeptScales

_CONVERT: Final = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True, kw_only=True)
class Multiplied:
    """One weight, rowwise.

    ``parameter``: its full name. ``data`` [N, K] (or packed), ``scale_inv``, ``global_scale_inv``: as
    :func:`fp8graph.numerics.quantize` returns them; of experts, one matrix after the other in dim 0.
    ``input_scale_inv``: FP32 [], of delayed scaling. ``flipped``: the parameter is [K, N].
    """

    parameter: str
    data: Tensor
    scale_inv: Tensor
    quantizer: Quantizer
    global_scale_inv: Tensor | None = None
    input_scale_inv: Tensor | None = None
    flipped: bool = False

    @property
    def layer(self) -> str:
        """The full name of its module."""
        return self.parameter.rpartition(".")[0]


def multiplied_by(backend: Backend, model: nn.Module, *, data: bool = True) -> Iterator[Multiplied]:
    """The weights that fprop multiplies in FP8, each once, in the order in which they were compiled.

    ``data``: False: the tensors of the weights are fake ones, and nothing is computed.
    """
    names, seen = _names(model), set[str]()
    calls = [call for program in backend.programs for call in program.calls()]
    for called, findings in calls:
        for weight in findings.of(WeightGraph):
            parameters = [called[index] for index in weight.parameters]
            if "rowwise" in weight.outputs and all(id(x) in names for x in parameters):
                for made in _made(weight, parameters, names, backend.services.kept_scales(weight.asked), data):
                    if made.parameter not in seen:
                        seen.add(made.parameter)
                        yield made


def matrices_of(backend: Backend, model: nn.Module) -> list[str]:
    """The names of the parameters that are the weights of sites, in FP8 or not."""
    names = _names(model)
    calls = [call for program in backend.programs for call in program.calls()]
    indices = [(called, {site.parameter for site in findings.sites}) for called, findings in calls]
    found = (names.get(id(x), "") for called, of_sites in indices for index, x in called.items() if index in of_sites)
    return list(dict.fromkeys(filter(None, found)))


def _names(model: nn.Module) -> dict[int, str]:
    """The names of a model's parameters, and of the tensors that they wrap, by identity."""
    named = ((name_in_original(name), p) for name, p in model.named_parameters())
    return {id(x): name for name, p in named for x in (p, *wrapped_tensors(p))}


def _made(
    weight: WeightGraph,
    parameters: Sequence[Tensor],
    names: Mapping[int, str],
    kept: KeptScales | None,
    data: bool,
) -> Iterator[Multiplied]:
    """The linears of ``weight``, of which several may be joined, without padding and without their neighbours."""
    (node,) = nodes(weight.quantizing, (ops.quantize,))
    asked = QuantizeNode(node).asked
    called = dict(zip(weight.quantizing.find_nodes(op="placeholder"), parameters, strict=False))  # then ``asked``
    sources = [_source(part, called) for part in asked.parts]
    owners = [source for source, _ in sources if source is not None]
    if not owners:
        return
    made = weight.made_outputs()
    if data:
        inputs = [parameter.detach() for parameter in parameters]
        inputs += [kept.peek(each, owners) for each in weight.asked] if kept is not None else []
        with torch.no_grad():
            results = fx.GraphModule(nn.Module(), weight.quantizing)(*inputs)
        made = dict(zip(weight.made, results, strict=True))
    scales: Tensor = made["scale_inv"] if "scale_inv" in made else made["rowwise_scale_inv"]
    kind, block, start = SCALINGS[asked.scaling], asked.block, 0
    quantizer = Quantizer(
        dtype=asked.dtype,
        scaling=cast(Any, asked.scaling),
        block=cast(Any, tuple(block) or Quantizer.block),
        power_2_scale=asked.power_2_scale,
        amax_epsilon=asked.amax_epsilon,
    )
    for (source, flipped), part in zip(sources, asked.parts, strict=True):
        rows, columns = value(part).shape[-2:]
        numbers, scale_inv = made["rowwise"][..., start : start + rows, : columns // kind.packed], scales
        if (grid := kind.scale_shape(rows, columns, block)) is not None:
            first = start * grid[0] // rows
            scale_inv = scales[..., first : first + grid[0], : grid[1]]
        start += rows
        if source is not None:
            yield Multiplied(
                parameter=names[id(source)],
                data=numbers.contiguous(),
                scale_inv=scale_inv.contiguous(),
                quantizer=quantizer,
                global_scale_inv=made.get("rowwise_global_scale_inv"),
                input_scale_inv=None if kept is None else kept.input_scale_inv(weight.asked[0], source),
                flipped=flipped,
            )


def _source(part: fx.Node, called: Mapping[fx.Node, Tensor]) -> tuple[Tensor | None, bool]:
    """The parameter that ``part`` is, perhaps cast, and whether it is transposed; None for a computed one."""
    flipped = False
    while part not in called:
        part, transposed = look_through_transposes(part)
        flipped ^= transposed
        if part.target is _CONVERT:
            part = cast(fx.Node, part.args[0])
        elif part not in called:
            return None, flipped
    return called[part], flipped
