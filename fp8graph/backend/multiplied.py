"""The weights of a compiled model as its forward multiplies them: bytes and scales, for a checkpoint.

They are made by the very graph that quantizes a weight before a call (``passes/hoist_weights.py``): linears that are
multiplied as one GEMM share their scales, and a delayed scale is the one that the next forward takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, fx, nn

from fp8graph.analysis.same_value import look_through_transposes
from fp8graph.backend.backend import Backend
from fp8graph.ir import ops
from fp8graph.ir.extra_inputs import PageLayout, QuantizedWeight
from fp8graph.ir.nodes import nodes, value
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.numerics import history
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import Quantizer
from fp8graph.runtime.state_dict import recipe_text

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
    parameters = {name: p for name, p in model.named_parameters(remove_duplicate=False)}
    state = dict(backend.state_dict())
    seen: set[str] = set()
    kept = [weight for program in backend.programs for weight in program.kept_weights()]
    for weight, names in kept:
        if "rowwise" not in weight.outputs or not all(name in parameters for name in names):
            continue
        for made in _made(weight, names, parameters, state, data):
            if made.parameter not in seen:
                seen.add(made.parameter)
                yield made


def _made(
    weight: QuantizedWeight,
    names: Sequence[str],
    parameters: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    data: bool,
) -> Iterator[Multiplied]:
    """The linears of ``weight``, of which several may be joined, without padding and without their neighbours."""
    (node,) = nodes(weight.quantizing, (ops.quantize,))
    asked = QuantizeNode(node).asked
    called = dict(zip(weight.quantizing.find_nodes(op="placeholder"), names, strict=False))  # a page comes last
    sources = [_source(part, called) for part in asked.parts]
    made = weight.made_outputs()
    if data:
        inputs = [parameters[name].detach() for name in names]
        if weight.page is not None:
            inputs.append(_page(weight.page, [name for name, _ in sources], state, inputs[0].device))
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
    for (name, flipped), part in zip(sources, asked.parts, strict=True):
        rows, columns = value(part).shape[-2:]
        numbers, scale_inv = made["rowwise"][..., start : start + rows, : columns // kind.packed], scales
        if (grid := kind.scale_shape(rows, columns, block)) is not None:
            first = start * grid[0] // rows
            scale_inv = scales[..., first : first + grid[0], : grid[1]]
        start += rows
        if name:
            yield Multiplied(
                parameter=name,
                data=numbers.contiguous(),
                scale_inv=scale_inv.contiguous(),
                quantizer=quantizer,
                global_scale_inv=made.get("rowwise_global_scale_inv"),
                input_scale_inv=_input_scale(weight.page, name, state),
                flipped=flipped,
            )


def _source(part: fx.Node, called: Mapping[fx.Node, str]) -> tuple[str, bool]:
    """The parameter that ``part`` is, perhaps cast, and whether it is transposed; "" for a computed one."""
    flipped = False
    while part not in called:
        part, transposed = look_through_transposes(part)
        flipped ^= transposed
        if part.target is _CONVERT:
            part = cast(fx.Node, part.args[0])
        elif part not in called:
            return "", flipped
    return called[part], flipped


def _page(page: PageLayout, parameters: Sequence[str], state: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """A page of scaling state with the scale of a weight, which the linears in it share."""
    made = history.new_page(page.recipe.amax_history_len, 1, device)
    names = (f"{_site(name)}.weight|{recipe_text(page.recipe)}|scale" for name in parameters)
    scale = next((state[name] for name in names if name in state), None)
    if scale is not None:
        made[0, 0], made[0, 1] = scale, scale.reciprocal()
    return made


def _site(parameter: str) -> str:
    return parameter.removesuffix(".weight")


def _input_scale(page: PageLayout | None, parameter: str, state: Mapping[str, Tensor]) -> Tensor | None:
    """FP32 []: the delayed scale of its layer's input; it multiplies. None before training has recorded any amax."""
    name = f"{_site(parameter)}.input|{recipe_text(page.recipe)}" if page is not None else ""
    if f"{name}|scale" not in state or not state[f"{name}|amax_history"].any():
        return None
    return state[f"{name}|scale"].reshape(()).reciprocal()
