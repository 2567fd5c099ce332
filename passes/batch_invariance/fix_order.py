"""Let every token get the same bits whatever the batch: products and attention add up in an order of their own.

    y = mm(x, permute(w))                       ->      y = ordered_mm(x, permute(w), None)
    y = scaled_mm(qx, qw, sx, sw, ...)          ->      y = ordered_scaled_mm(qx, qw, sx, sw, ...)
    y = scaled_grouped_mm(qx, qw, ..., offs)    ->      y = ordered_scaled_grouped_mm(qx, qw, ..., offs)
    o, logsumexp = flash_for_cpu(q, k, v, ...)  ->      o, logsumexp = ordered_attention(q, k, v, mask, causal, scale)

With ``batch_invariant=True``. The ops (``numerics/invariant.py``) are loops over GEMMs of one shape, and on GPUs
Triton kernels of one configuration: fprop and dgrad, in FP8 or not, and attention, forward and backward. wgrad adds up
all tokens and stays. ``fix_sums`` is next, for what else a GPU adds up.

``refuse_batches`` runs as soon as the decisions are there, and raises for what has no such order, by layer: scales of a
whole batch, products of activations, attention that is written out (on a CPU with dropout it is), in FP8 or in another
form, other products (convolutions, ops of other libraries), sums over more than two ranks, random numbers, and devices
for which there are no such products.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

import torch
from torch import Tensor, fx

from fp8graph.compat import inductor, torch_build
from fp8graph.compat.attention import FORMS
from fp8graph.compat.distributed import number_of_ranks
from fp8graph.compat.ops import named_arguments
from fp8graph.errors import ConfigError
from fp8graph.hardware import Hardware
from fp8graph.ir import collectives, ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import insert, take_place, update_value, update_views
from fp8graph.ir.naming import split_source
from fp8graph.ir.nodes import (
    GEMM_KEY,
    GROUPED,
    PASS_KEY,
    aten,
    known_equal,
    matmul_arguments,
    module_path,
    nodes,
    value,
)
from fp8graph.ir.ops import define
from fp8graph.ir.sites import Gemm, Site
from fp8graph.ir.text import short
from fp8graph.numerics import invariant
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import GEMM_OPERANDS, GemmName, Recipe
from fp8graph.records import AttentionRecord, ProductRecord

_LINES: Final = 8  # of an error
_FORMS: Final = ("CPU flash", "flash", "memory-efficient", "cuDNN")  # of attention that have an order
_ATTENTION: Final = [op for op, form in FORMS.items() if form.name in _FORMS]
_BACKWARDS: Final = [FORMS[op].backward for op in _ATTENTION]
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_TILES: Final = frozenset((32, 64, 128))  # elements along k that share a scale: one step of a kernel


def is_batch_invariant(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether the user wants it."""
    return compilation.facts.settings.batch_invariant


def refuse_batches(graph: fx.Graph, compilation: Compilation) -> None:
    refuse(_obstacles(graph, compilation))


def fix_order(graph: fx.Graph, compilation: Compilation) -> None:
    left = weight_gradients(graph, compilation)
    for node in list(nodes(graph, _ORDERED)):
        if node not in left:
            with graph.inserting_before(node):
                target, args, kwargs = _ORDERED[node.target](node)
                take_place(insert(graph, target, args, like=node, kwargs=kwargs), node)
    for node in [*nodes(graph, _BACKWARDS), *nodes(graph, _ATTENTION)]:
        _replace_attention(graph, node, is_backward=node.target in _BACKWARDS)


def refuse(reasons: Iterable[str]) -> None:
    """Raise for ``reasons``, "layer: why", if there are any."""
    if lines := list(dict.fromkeys(reasons)):
        more = [f"... and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
        raise ConfigError("\n  ".join(["batch_invariant=True cannot hold for", *lines[:_LINES], *more]))


def weight_gradients(graph: fx.Graph, compilation: Compilation) -> set[fx.Node]:
    """Return the GEMMs that add up all tokens."""
    left = {gemm.node for site in compilation.sites for gemm in site.gemms if gemm.gemm == "wgrad"}
    return left | {node for node in graph.nodes if node.meta.get(GEMM_KEY, (0, ""))[1] == "wgrad"}


def why_of_batch(recipe: Recipe, gemm: GemmName) -> str:
    """Return why the scales of an operand of ``gemm`` are those of a batch; "" if each row or tile has its own."""
    for operand in GEMM_OPERANDS[gemm]:
        quantizer = recipe.quantizer(operand)
        kind = SCALINGS[quantizer.scaling]
        if operand != "weight" and (kind.one_scale or (kind.scale_of_layout and not quantizer.row_scaled)):
            return f"{recipe.name} scales {operand} by all tokens of a batch; rowwise, blockwise and mxfp8 do not"
    return ""


def _obstacles(graph: fx.Graph, compilation: Compilation) -> Iterator[str]:
    """Give the reasons why some token would not get the same bits, by layer."""
    if compilation.facts.settings.compiler == "inductor" and not torch_build.CPP_ROUNDS_BETWEEN:
        if any(not compilation.hardware_of(gemm.node).is_gpu for site in compilation.sites for gemm in site.gemms):
            yield (
                "the model: before torch 2.13, code that Inductor generates for a CPU rounds otherwise where it fuses "
                'otherwise; compiler="eager" does not'
            )
    attentions = [row for row in compilation.rows if isinstance(row, AttentionRecord)]
    written_out = {row.fqn for row in attentions if row.written_out}
    for site in compilation.sites:
        if site.op == "matmul" and site.fqn in written_out:
            continue
        for gemm in site.gemms:
            if gemm.gemm != "wgrad" and (why := _why_not(site, gemm, compilation)):
                yield f"{_named(site.fqn)}: {why}"
                break
    for row in attentions:
        if why := _why_not_attention(row):
            yield f"{_named(row.fqn)}: {why}"
    for row in compilation.rows:
        if isinstance(row, ProductRecord):
            yield f"{_named(row.fqn)}: the order of sums in {row.op} is not fp8graph's"
    for node in graph.nodes:
        if why := _why_not_other(node):
            yield f"{_named(split_source(module_path(node))[1])}: {why}"


def _why_not_other(node: fx.Node) -> str:
    attends = node.target in FORMS or node.target in _BACKWARDS  # their dropout stands in the rows
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not attends:
        return f"{node.target} draws numbers by the place in the batch"
    if node.target in (collectives.ALL_REDUCE, collectives.REDUCE_SCATTER) and node.args[1] in ("sum", "avg"):
        if (ranks := number_of_ranks(cast(str, node.args[-1]))) > 2:
            return f"{node.target} adds up what {ranks} ranks have in an order that depends on the size"
    if node.target in _BACKWARDS and any(user.users and cast(int, user.args[1]) > 2 for user in node.users):
        return "the gradient of an attention mask has no order of fp8graph's"
    return ""


def _named(fqn: str) -> str:
    return fqn or "the model"


def _why_not(site: Site, gemm: Gemm, compilation: Compilation) -> str:
    device, recipe = compilation.hardware_of(gemm.node), compilation.decisions[gemm.node].recipe
    if not device.fixes_order:
        return f"on {device.name} the library chooses a GEMM's kernel by the number of rows; fp8graph has none for it"
    if device.is_gpu and (why := _why_no_kernel(gemm, recipe, device)):
        return why
    if recipe is not None and (why := why_of_batch(recipe, gemm.gemm)):
        return why
    a, _ = matmul_arguments(gemm.node)
    if site.op == "matmul" and not known_equal(value(a).shape[-1], 1):
        return "a product of activations adds up tokens, or its shape is that of the batch"
    if gemm.node.target in (aten.bmm.default, aten.baddbmm.default) and site.op != "matmul":
        return "a batch of products has no order; experts have one as grouped_mm"
    if gemm.node.kwargs.get("alpha", 1) != 1 or gemm.node.kwargs.get("beta", 1) != 1:
        return f"{gemm.node.target} with alpha or beta"
    return ""


def _why_no_kernel(gemm: Gemm, recipe: Recipe | None, device: Hardware) -> str:
    """Return why no Triton kernel of one configuration multiplies these operands; "" if one does."""
    x = value(gemm.node)
    if x.device.type != "cpu" and not inductor.has_triton():
        return "the GPU's products need triton, which is not installed"
    if x.dtype not in _DTYPES:
        return f"the GPU's products are of {', '.join(map(short, _DTYPES))}, not of {short(x.dtype)}"
    quantizers = [device.quantizer(recipe, operand) for operand in GEMM_OPERANDS[gemm.gemm]] if recipe else []
    sizes = {quantizer.block[1] for quantizer in quantizers if SCALINGS[quantizer.scaling].tiled}
    if any(SCALINGS[quantizer.scaling].packed > 1 for quantizer in quantizers) or sizes - _TILES or len(sizes) > 1:
        some = ", ".join(map(str, sorted(_TILES)))
        return f"the GPU's products are of FP8 with a scale per row, or per {some} elements"
    return ""


def _why_not_attention(row: AttentionRecord) -> str:
    if row.written_out:
        return 'attention is written out as matmuls: attn_implementation="sdpa" without attention dropout has an order'
    if row.dropout:
        return "attention with dropout draws numbers by the place in the batch"
    if row.recipe is not None:
        return "attention in FP8 has a scale for all tokens of a head"
    return "" if row.form in _FORMS else f"{row.form} attention has no order of fp8graph's"


def _of_mm(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    given = named_arguments(node)
    bias = given.get("input", given.get("self")) if node.target is aten.addmm.default else None
    return ordered_mm, (*matmul_arguments(node), bias), {}


def _of_grouped(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return ordered_grouped_mm, node.args[:3], {}


def _of_scaled(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    target = ordered_scaled_mm if node.target is ops.scaled_mm else ordered_scaled_grouped_mm
    return target, node.args, dict(node.kwargs)


def _replace_attention(graph: fx.Graph, node: fx.Node, *, is_backward: bool) -> None:
    """Let the node be the ordered op, whose first results are those of every form: the others serve backward alone."""
    given = named_arguments(node)
    names = ("query", "key", "value", "out", "logsumexp") if is_backward else ("query", "key", "value")
    gradients = [given.get("grad_out", given.get("grad_out_"))] if is_backward else []
    mask = given.get("attn_mask", given.get("attn_bias"))  # [batch, heads, queries, keys]
    node.target = ordered_attention_backward if is_backward else ordered_attention
    node.args = (*gradients, *(given[name] for name in names), mask, given["is_causal"], given.get("scale"))
    node.kwargs, node.meta[PASS_KEY] = {}, ""
    update_value(node)
    for user in list(node.users):
        if user.users:
            update_value(user)
            update_views(user)
        else:
            graph.erase_node(user)


# Fakes, see ``ir/ops.py``.


def _shape_of_mm(a: Tensor, b: Tensor, _bias: Tensor | None) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


def _shape_of_attention(q: Tensor, _k: Tensor, v: Tensor, *_arguments: Any) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = q.shape
    out = q.new_empty((batch, queries, heads, v.shape[3])).transpose(1, 2)
    return out, q.new_empty((batch, heads, queries), dtype=torch.float32)


def _shape_of_gradients(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_arguments: Any) -> list[Tensor]:
    sizes = ((x.shape[0], x.shape[2], x.shape[1], x.shape[3]) for x in (q, k, v))
    return [q.new_empty(size).transpose(1, 2) for size in sizes]


def _schema_of(op: Any) -> str:
    """Return the arguments and results of an op of the dialect."""
    return str(op._schema).removeprefix(op.name())


ordered_mm = define(
    "ordered_mm",
    reference=invariant.mm,
    fake=_shape_of_mm,
    lowered=False,
)
ordered_scaled_mm = define(
    "ordered_scaled_mm",
    _schema_of(ops.scaled_mm),
    reference=invariant.scaled_mm,
    fake=ops.SHAPES[ops.scaled_mm],
    lowered=False,
)
ordered_grouped_mm = define(
    "ordered_grouped_mm",
    reference=invariant.grouped_mm,
    fake=ops.SHAPES[ops.grouped_mm],
    lowered=False,
)
ordered_scaled_grouped_mm = define(
    "ordered_scaled_grouped_mm",
    _schema_of(ops.scaled_grouped_mm),
    reference=invariant.scaled_grouped_mm,
    fake=ops.SHAPES[ops.scaled_grouped_mm],
    lowered=False,
)
ordered_attention = define(
    "ordered_attention",
    reference=invariant.attend,
    fake=_shape_of_attention,
    lowered=False,
    contiguous=False,
)
ordered_attention_backward = define(
    "ordered_attention_backward",
    reference=invariant.attend_backward,
    fake=_shape_of_gradients,
    lowered=False,
    contiguous=False,
)

# The ops that have an ordered form, and the function that gives its op and arguments for a node.
_ORDERED: Final = {
    aten.mm.default: _of_mm,
    aten.addmm.default: _of_mm,
    **dict.fromkeys(GROUPED, _of_grouped),
    ops.scaled_mm: _of_scaled,
    ops.scaled_grouped_mm: _of_scaled,
}
