"""``fp8graph.lint``: says what is wrong with the low-precision products of a model, whoever made it.

The model is traced on fake tensors, forward and backward. Nothing is compiled and nothing is rewritten.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast, overload

import torch
from torch import Tensor, fx, nn

from fp8graph.analysis.products import Product, products_of, record_of, sites_of, weights_of
from fp8graph.analysis.scales.flow import faults as faults_of
from fp8graph.analysis.scales.states import Fault, Operands, Source
from fp8graph.compat import aot, dynamo, wrappers
from fp8graph.compat.fakes import watchful_fake_mode
from fp8graph.compat.products import operation_of
from fp8graph.errors import Fp8GraphError, expect
from fp8graph.ir.naming import Parameter, graph_inputs, names_of, place_of, split_source
from fp8graph.ir.nodes import backward_nodes
from fp8graph.ir.sites import Site
from fp8graph.ir.text import short
from fp8graph.libraries import adopt
from fp8graph.records import ProductRecord, percent, shares
from fp8graph.tools.explain import InputsError, fakes_of
from fp8graph.tools.findings import Finding, counted, in_order, lines
from fp8graph.tools.lint_checkpoint import CheckpointLint, lint_checkpoint
from fp8graph.tools.lint_data import DataFault, calls_of, faults_on


@dataclass(frozen=True, kw_only=True)
class ProductRow(ProductRecord):
    """One op that multiplies matrices, as in a report, whoever wrote it."""

    casts: tuple[str, ...]  #: the type of eight bits or fewer that each operand's numbers were cast to last, or ""
    scales: tuple[str, ...]  #: of a scaled product, where its scales come from
    kept: tuple[str, ...]  #: of a forward product: in which dtype backward reads each operand; "": it does not

    @property
    def decoded(self) -> bool:
        """Whether it multiplies, in high precision, numbers that were cast to low precision."""
        return not self.low and any(self.casts)


@dataclass(frozen=True, kw_only=True)
class Lint:
    """The findings of :func:`lint`, and every product of the model. It is true if there is no error."""

    findings: tuple[Finding, ...]
    products: tuple[ProductRow, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that change results."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __bool__(self) -> bool:
        return not self.errors

    def __str__(self) -> str:
        low, decoded = sum(bool(row.low) for row in self.products), sum(row.decoded for row in self.products)
        of_all = shares((), self.products)
        parts = [f"{len(self.products)} product{'s' * (len(self.products) != 1)}", f"{low} in low precision"]
        if low and of_all.total:
            parts[-1] += f" ({percent(of_all.elsewhere / of_all.total)} of the FLOPs)"
        parts += [f"{decoded} of decoded numbers"] * bool(decoded)
        parts += [f"{of_all.opaque} of unknown FLOPs"] * bool(of_all.opaque)
        first = f"{', '.join(parts)}: {counted(self.findings)}"
        return "\n".join([first, *lines(self.findings)])

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain values, for JSON."""
        return {
            "findings": [finding.to_dict() for finding in self.findings],
            "products": [dataclasses.asdict(product) for product in self.products],
        }


# What follows from each fault, and what to do.
_RULES: Final = {
    "scale-lost": (
        "results are as many times too large or too small",
        "Multiply the product by the inverse of the scale, or pass it as scale_a or scale_b.",
    ),
    "scale-constant-1": (
        "small numbers lose their bits, and large ones are cut off at 448",
        "Divide the tensor by its amax / 448 before the cast, and hand that to the product.",
    ),
    "scale-inverted": (
        "results are wrong by the square of the scale",
        "Cast x * s and multiply the product by 1 / s, or cast x / s and multiply by s.",
    ),
    "scale-twice": ("results are wrong by the scale", "Apply the scale once: in the product, or after it."),
    "scale-swapped": (
        "results are wrong by the ratio of the scales",
        "Give each operand of the product its own scale.",
    ),
    "scale-foreign": (
        "numbers are cut off, or lose their bits, where the tensors differ",
        "Compute the scale from the tensor that is cast.",
    ),
    "scale-axis": (
        "a product has no scale for a part of its sums",
        "Use scales that are constant along the contraction, or one product for each of its blocks.",
    ),
    "scale-stale": (
        "results drift as the weight trains",
        "Compute the scale and the bytes from the same weight, at the same time.",
    ),
    "no-saturation": (
        "beyond the range of the type, E4M3 may be NaN",
        "Clamp to the range of the type before the cast.",
    ),
    "format": ("the same bits are other numbers", "Read bytes as the type that they were cast to."),
    "bytes-transposed": (
        "numbers are multiplied in the wrong rows",
        "Transpose with .t(), which keeps each number's row and column.",
    ),
    "opaque": ("lint does not see its scales", "Check this op by its own library's tests."),
    "not-traced": ("these products were not looked at", "See TORCH_LOGS=graph_breaks."),
    "no-backward": ("only forward was looked at", "Pass training=False for a model that only serves."),
    "scale-value": ("no weight has such a scale", "Write the scale again, from the weight."),
    "unexplained": (
        "its operands are cut off, garbled or scaled wrongly",
        "Compare this product with that of its operands before their casts, on this batch.",
    ),
    "saturated": (
        "large numbers are cut off",
        "Compute the scale from the tensor that is cast, or calibrate it again.",
    ),
    "flushed": ("small numbers are lost", "Use scales of rows or tiles, or compute the scale from the tensor."),
}


@overload
def lint(
    model: nn.Module, *args: Any, training: bool | None = None, data: Iterable[Any] | None = None, **kwargs: Any
) -> Lint: ...


@overload
def lint(model: str | Path) -> CheckpointLint: ...


def lint(
    model: nn.Module | str | Path,
    *args: Any,
    training: bool | None = None,
    data: Iterable[Any] | None = None,
    **kwargs: Any,
) -> Lint | CheckpointLint:
    """Trace ``model(*args, **kwargs)`` on fake tensors and say what is wrong with its low-precision products.

    The model may be anybody's: torchao's, a library's FP8 layers, ``torch._scaled_mm`` by hand. Every scale is followed
    from the cast to the product that undoes it. Nothing is compiled, and a GPU is not needed. Of the model's numbers,
    only stored FP8 weights and their scales are read, and a model on the meta device has none.

    Args:
        model: any module; a compiled one is unwrapped. Or the folder of a checkpoint, which is judged as by
            ``fp8graph lint FOLDER``.
        args, kwargs: the inputs of one call; only the shapes and dtypes of tensors matter.
        training: trace forward and backward, or forward alone under ``no_grad``. Default: training if gradients are
            enabled here and some parameter requires one; forward alone, and a finding, if backward cannot be traced.
        data: batches on which a copy of the model also runs, on its device, one after the other: each a tensor, a tuple
            of arguments, or a dict of keyword arguments, instead of ``args`` and beside ``kwargs``. The first product
            whose result differs from that of its unquantized operands in float64 by more than rounding is an error.
            Two batches show what depends on the step before. A model's own keyword ``data`` goes into such a dict.

    Raises:
        ConfigError: (a ``ValueError``) for inputs or batches with which the model does not run, or cannot be traced.
    """
    if isinstance(model, (str, Path)) and not args and not kwargs and training is None and data is None:
        return lint_checkpoint(model)
    expect("lint", "model", model, nn.Module, "a model, an nn.Module, or the folder of a checkpoint alone")
    model = wrappers.original_module(cast(nn.Module, model))
    calls = [] if data is None else calls_of(data, kwargs)
    if calls and not args:
        args, kwargs = calls[0]
    findings: list[Finding] = []
    products: list[ProductRow] = []
    outside: Counter[str] = Counter()

    def tell(op: Any) -> None:
        if operation_of(op) is not None:
            outside[str(op).removesuffix(".default")] += 1

    possible = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
    trains = possible if training is None else training
    try:
        graphs = traced(model, args, kwargs, trains, tell)
    except InputsError as error:
        if training is not None or not possible or not isinstance(error.__cause__, dynamo.NOT_TRACED):
            raise
        outside.clear()
        graphs, trains = traced(model, args, kwargs, training=False, tell=tell), False
        reason = str(error.__cause__).splitlines()[1:2] or [""]
        findings.append(_no_backward(model, f"backward cannot be traced: {reason[0]}"))
    if trains and graphs and not any(backward_nodes(graph) for graph, _ in graphs):
        findings.append(_no_backward(model, "no gradient is computed in the graphs that Dynamo traced"))
    for graph, sources in graphs:
        stored, backward = [node for node, source in sources.items() if source.stored], backward_nodes(graph)
        listed = products_of(graph, stored)
        faults, operands = faults_of(graph, sources, listed)
        parameters = _parameters(graph, sources)
        sites = sites_of(listed, weights_of(graph, stored), parameters)
        for fault in faults:
            site = sites.get(fault.node)
            layer = _layer(fault.node, parameters) if site is None else site.fqn
            findings.append(_of_fault(fault, sources, layer, fault.node in backward))
        products += [_row(product, sites[product.node], operands[product.node]) for product in listed]
    for op, count in outside.items():
        text = f"{count} {op} outside of the graphs that Dynamo traced"
        findings.append(_finding("not-traced", "info", type(model).__name__, text))
    if calls:
        findings += [_of_fault(each, {}, each.layer, each.backward) for each in faults_on(model, calls, trains, _read)]
    return Lint(findings=tuple(in_order(dict.fromkeys(findings))), products=tuple(products))


@torch.inference_mode(False)
def traced(
    model: nn.Module, args: Any, kwargs: Any, training: bool, tell: Callable[[Any], object] = id
) -> list[tuple[fx.Graph, dict[fx.Node, Source]]]:
    """Return the graphs of a model, forward and backward in one if it trains, and the tensors of the model in each.

    Args:
        tell: called with each op that runs outside of them.
    """
    graphs: list[aot.KeptGraph] = []
    try:
        mode = watchful_fake_mode(tell)
        with (
            fakes_of(model, args, kwargs, training, mode) as (fake_model, fake_args, fake_kwargs),
            aot.backward_at_once(),
            dynamo.forgetting_compiled_code(),
        ):
            adopt(fake_model)  # layers whose kernels run on a GPU alone are traced as what they compute
            torch.compile(fake_model, backend=aot.keeping(graphs))(*fake_args, **fake_kwargs)
            names = {id(x): name for name, x in reversed(_tensors(fake_model).items())}
    except Fp8GraphError:
        raise
    except Exception as error:  # of the model, or of tracing it: each class fails in its own way
        name, reason = type(model).__name__, " ".join(str(error).split())[:400]
        what = "does not run" if isinstance(error, dynamo.ERRORS_OF_MODELS) else "cannot be traced"
        raise InputsError(f"lint(model, ...): {name} {what} with these inputs. {reason}") from error
    return [(kept.graph, _sources(kept, names, _tensors(model))) for kept in graphs]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def _sources(kept: aot.KeptGraph, full_names: dict[int, str], tensors: dict[str, Tensor]) -> dict[fx.Node, Source]:
    """Return the inputs of a graph by node. ``full_names``: of the model's tensors that it was traced with, by
    identity.
    """
    updates = aot.updated_inputs(kept.graph)
    sources: dict[fx.Node, Source] = {}
    for node in kept.graph.find_nodes(op="placeholder"):
        part = aot.input_part(node)
        if part is None or part[0] >= len(kept.names):
            continue
        position, attributes = part
        traced_as, argument = kept.names[position], kept.inputs[position] if kept.inputs else None
        name = full_names.get(id(argument)) or split_source(traced_as)[1] or traced_as
        name = ".".join([name, *attributes])
        tensor = _tensor_at(name, tensors)
        trains = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        stored, update = isinstance(tensor, Tensor), updates.get(position)
        sources[node] = Source(name, stored, trains, update, _readable(tensor), traced_as)
    return sources


def _parameters(graph: fx.Graph, sources: dict[fx.Node, Source]) -> dict[fx.Node, Parameter]:
    """Return the placeholders that modules hold, as those that name a product."""
    return {
        node: Parameter(source=sources[node].traced_as, index=index, bound=sources[node].name)
        for node, index in graph_inputs(graph)
        if index is not None and node in sources and sources[node].stored
    }


def _tensor_at(name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a parameter or buffer, or one that such a tensor holds as an attribute."""
    if name in tensors or "." not in name:
        return tensors.get(name)
    whole, _, attribute = name.rpartition(".")
    return getattr(_tensor_at(whole, tensors), attribute, None)


def _readable(tensor: Tensor | None) -> Tensor | None:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor is not None and tensor.device.type != "meta"
    return tensor.detach() if plain and tensor is not None else None


def _layer(node: fx.Node, parameters: dict[fx.Node, Parameter]) -> str:
    """Return the full name of the module that a node was traced in."""
    ((fqn, _),) = names_of([place_of(node, None, parameters)], parameters.values())
    return fqn


def _read(kept: aot.KeptGraph, model: nn.Module) -> tuple[dict[fx.Node, Source], Callable[[fx.Node], str]]:
    """Return the inputs of a graph that runs on the tensors of ``model``, and the layers of its nodes."""
    tensors = _tensors(model)
    sources = _sources(kept, {id(x): name for name, x in reversed(tensors.items())}, tensors)
    parameters = _parameters(kept.graph, sources)
    return sources, lambda node: _layer(node, parameters)


def _of_fault(fault: Fault | DataFault, sources: dict[fx.Node, Source], layer: str, backward: bool) -> Finding:
    where = f"{layer or 'the model'}, {fault.node.name}" + (" (backward)" if backward else "")
    if fault.node in sources:
        where = sources[fault.node].name
    return _finding(fault.rule, fault.severity, where, fault.text)


def _no_backward(model: nn.Module, what: str) -> Finding:
    return _finding("no-backward", "info", type(model).__name__, what)


def _finding(rule: str, severity: str, where: str, text: str) -> Finding:
    why, todo = _RULES[rule]
    return Finding(rule=rule, severity=severity, where=where, what=text, why=why, todo=todo)


def _row(product: Product, site: Site, operands: Operands) -> ProductRow:
    record = record_of(product, site, "")
    casts, kept = (tuple("" if x is None else short(x) for x in each) for each in (operands.casts, operands.kept))
    return ProductRow(**vars(record), casts=casts, scales=operands.scales, kept=kept)
