"""List every product of matrices that is neither a GEMM of a site nor an attention: shares of FLOPs are of all.

    y = _scaled_mm(x, w, scale_a, scale_b)                ->      product "mlp.up", a scaled matmul in e4m3
    y = convolution(x, w, ...)                            ->      product "stem", a convolution
    y = library.gemm(x, w)                                ->      product "mlp.down", a custom op of unknown FLOPs

The graph is not changed. The report has rows of their own for them (``Report.products``). No rule names them, and no
pass rewrites them: each row has the reason. A backward product has the name of the forward one with its ``seq_nr``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

from torch import fx

from fp8graph.analysis.products import (
    CUSTOM,
    Product,
    Whole,
    may_be_product,
    products_of,
    record_of,
    sites_of,
    weights_of,
)
from fp8graph.compat.attention import FORMS
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.naming import graph_inputs, parameters_of
from fp8graph.ir.nodes import SITES, backward_nodes, nodes
from fp8graph.ir.text import short
from fp8graph.records import AttentionRecord, ProductRecord

_MODULES: Final = ("_modules[", "_parameters[", "_buffers[")  # in the name of an input that a module holds


def has_other_products(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether a node may be such a product."""
    attended = _attended(graph, compilation)
    return any(may_be_product(node) and node.target not in SITES and node not in attended for node in graph.nodes)


def account(graph: fx.Graph, compilation: Compilation) -> None:
    listed, facts = _attended(graph, compilation), compilation.facts
    stored = [node for node, index in graph_inputs(graph) if index is not None and _is_stored(index, compilation)]
    products = [p for p in products_of(graph, stored) if p.node.target not in SITES and p.node not in listed]
    sites = sites_of(products, weights_of(graph, stored), parameters_of(graph, facts.parameters))
    whole = {each.node: each for each in compilation.results(Whole)}
    for node in whole.keys() & sites.keys():  # a policy leaves it whole: another one may not
        sites[node] = dataclasses.replace(whole[node].site, fqn=sites[node].fqn, index=sites[node].index)
    compilation.others[ProductRecord] = list(dict.fromkeys(sites.values()))
    for product in products:
        more = [whole[product.node].reason] if product.node in whole else []
        reason = "; ".join((*_reasons(product), *more))
        compilation.rows.append(record_of(product, sites[product.node], reason))


def _attended(graph: fx.Graph, compilation: Compilation) -> set[fx.Node]:
    """Return the attentions that have rows: not those that backward runs again."""
    if AttentionRecord not in compilation.others:
        return set()
    backward = backward_nodes(graph)
    forms = {node for node in nodes(graph, FORMS) if node not in backward}
    return {*forms, *nodes(graph, [form.backward for form in FORMS.values()])}


def _is_stored(index: int, compilation: Compilation) -> bool:
    """Return whether a module holds the input: a parameter, a buffer, scales and codes beside them."""
    facts = compilation.facts
    source = facts.sources[index] if index < len(facts.sources) else ""
    return index in facts.parameters or index in facts.buffers or any(part in source for part in _MODULES)


def _reasons(product: Product) -> Iterator[str]:
    if product.low is not None:
        yield f"the program multiplies {short(product.low)} itself"
    elif product.kind == CUSTOM:
        yield "an op of another library"
    elif product.taken_apart:
        yield "torch takes it apart into products of elements and their sum"
    else:
        yield f"{product.op} is not among the ops that fp8graph rewrites"
    if product.flops is None:
        yield "nobody can count its FLOPs: register_flop_formula would"
