"""List every product of matrices that is neither a GEMM of a site nor an attention: shares of FLOPs are of all.

    y = _scaled_mm(x, w, scale_a, scale_b)                ->      product "mlp.up", a scaled matmul in e4m3
    y = convolution(x, w, ...)                            ->      product "stem", a convolution
    y = library.gemm(x, w)                                ->      product "mlp.down", a custom op of unknown FLOPs

The graph is not changed. The report has rows of their own for them (``Report.products``). No rule names them, and no
pass rewrites them: each row has the reason. A backward product has the name of the forward one with its ``seq_nr``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torch import fx

from fp8graph.analysis.products import CUSTOM, Product, may_be_product, products_of, weights_of
from fp8graph.compat.attention import FORMS
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.naming import Parameter, graph_inputs, names_of, parameters_of, place_of, sources_of
from fp8graph.ir.nodes import SITES, backward_nodes, nodes, value
from fp8graph.ir.sites import Site
from fp8graph.ir.text import short
from fp8graph.records import OPAQUE, AttentionRecord, ProductRecord

_MODULES: Final = ("_modules[", "_parameters[", "_buffers[")  # in the name of an input that a module holds


def has_other_products(graph: fx.Graph, compilation: Compilation) -> bool:
    """Whether a node may be such a product."""
    attended = _attended(graph, compilation)
    return any(may_be_product(node) and node.target not in SITES and node not in attended for node in graph.nodes)


def account(graph: fx.Graph, compilation: Compilation) -> None:
    listed, facts = _attended(graph, compilation), compilation.facts
    stored = [node for node, index in graph_inputs(graph) if index is not None and _is_stored(index, compilation)]
    products = [p for p in products_of(graph, stored) if p.node.target not in SITES and p.node not in listed]
    parameters, weights = parameters_of(graph, facts.parameters), weights_of(graph, stored)
    forward = {p.node.meta.get("seq_nr"): p for p in products if not p.backward}
    owners: dict[fx.Node, Site] = {}
    for product in products:
        first = forward.get(product.node.meta.get("seq_nr"), product) if product.backward else product
        if first.node not in owners:
            owners[first.node] = _site(first, weights, parameters)
        owners[product.node] = owners[first.node]
    sites = list(dict.fromkeys(owners.values()))
    names = names_of([site.place for site in sites], facts.parameters.values())
    for site, (fqn, index) in zip(sites, names, strict=True):
        site.fqn, site.index = fqn, index
    compilation.others[ProductRecord] = sites
    compilation.rows += [_row(product, owners[product.node]) for product in products]


def _attended(graph: fx.Graph, compilation: Compilation) -> set[fx.Node]:
    """The attentions that have rows: not those that backward runs again."""
    if AttentionRecord not in compilation.others:
        return set()
    backward = backward_nodes(graph)
    forms = {node for node in nodes(graph, FORMS) if node not in backward}
    return {*forms, *nodes(graph, [form.backward for form in FORMS.values()])}


def _is_stored(index: int, compilation: Compilation) -> bool:
    """Whether a module holds the input: a parameter, a buffer, scales and codes beside them."""
    facts = compilation.facts
    source = facts.sources[index] if index < len(facts.sources) else ""
    return index in facts.parameters or index in facts.buffers or any(part in source for part in _MODULES)


def _site(product: Product, weights: set[fx.Node], parameters: dict[fx.Node, Parameter]) -> Site:
    held = (x for x in product.operands if x in weights and sources_of(x, parameters))
    return Site(place=place_of(product.node, next(held, None), parameters), op="product", region=None)


def _row(product: Product, site: Site) -> ProductRecord:
    low = "" if product.low is None else short(product.low)
    return ProductRecord(
        fqn=site.fqn,
        index=site.index,
        kind=product.kind,
        op=product.op,
        direction="backward" if product.backward else "forward",
        shapes=tuple(f"[{', '.join(map(str, value(x).shape))}]" for x in product.operands),
        dtypes=tuple(short(dtype) for dtype in product.dtypes),
        low=low,
        flops=product.flops or 0,
        reason="; ".join(_reasons(product, low)),
        execution=OPAQUE if product.flops is None else "low precision" if low else "high precision",
    )


def _reasons(product: Product, low: str) -> Iterator[str]:
    if low:
        yield f"the program multiplies {low} itself"
    elif product.kind == CUSTOM:
        yield "an op of another library"
    else:
        yield f"{product.op} is not among the ops that fp8graph rewrites"
    if product.flops is None:
        yield "nobody can count its FLOPs: register_flop_formula would"
