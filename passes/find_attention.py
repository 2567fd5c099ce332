"""Find every attention of the program, with its name and its FLOPs: a site of a second kind, beside matmuls.

    o, logsumexp = _scaled_dot_product_flash_attention(q, k, v, ...)        ->      attention "layers.0.self_attn"
    o, logsumexp, _ = flex_attention(q, k, v, score_mod, ...)               ->      the same
    o = bmm(softmax(bmm(q, permute(k)) + mask), v)                          ->      the same; the two matmuls stay sites

The graph is not changed. Attentions are not counted as GEMMs: the report has rows of their own for them
(``Report.attention``). They stay in high precision.
"""

from __future__ import annotations

from typing import Final

from torch import fx

from fp8graph.analysis.attention import attention_ops
from fp8graph.analysis.naming import names_of
from fp8graph.analysis.written_attention import written_attentions
from fp8graph.ir.attention import Attention
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.nodes import backward_nodes
from fp8graph.ir.sites import Decision
from fp8graph.recipes import GEMMS
from fp8graph.recipes.rules import Resolution

LEFT_ALONE: Final = "attention stays in high precision"


def find_attention(graph: fx.Graph, compilation: Compilation) -> None:
    order = {node: position for position, node in enumerate(graph.nodes)}
    found = [*attention_ops(graph, backward_nodes(graph)), *written_attentions(compilation.sites)]
    found.sort(key=lambda attention: order[attention.result])
    names = names_of([attention.site.place for attention in found], compilation.known.parameters.values())
    for attention, (fqn, index) in zip(found, names, strict=True):
        attention.site.fqn, attention.site.index = fqn, index
        attention.decision = _decide(attention, compilation)
    compilation.attention = found


def _decide(attention: Attention, compilation: Compilation) -> Decision:
    resolution = Resolution(dict.fromkeys(GEMMS), source=LEFT_ALONE)
    return Decision(recipe=None, reason=LEFT_ALONE, execution="high precision", resolution=resolution)
