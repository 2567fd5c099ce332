"""FX helpers that every pass uses: insert a node with its metadata, look through views, print a graph."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, SubclassGetAttrAOTInput
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_aggregate

from fp8graph import compat, ops, wire

aten = torch.ops.aten

# Matmuls that quantize rewrites, and those that are only reported.
MATMULS: Final = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
GROUPED: Final = (aten._grouped_mm.default, ops.grouped_mm)
SITES: Final = (*MATMULS, *GROUPED)

FORWARD: Final = "is_forward"
BACKWARD: Final = "is_backward"

NO_GRAD_KEY: Final = "fp8graph_no_grad"  # in node.meta["custom"]: the node runs without gradients
GEMM_KEY: Final = "fp8graph_gemm"  # node.meta: the GEMM that the node belongs to, (index of its site, its name)
PASS_KEY: Final = "fp8graph_pass"  # node.meta: the pass that made the node

# Metadata that an inserted node takes from the node it stands for. `recompute`, `ac_graph_id`: nodes inside
# torch.utils.checkpoint regions are recomputed together with their region.
_INHERITED: Final = (
    "partitioner_tag",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "seq_nr",
    "custom",
    "recompute",
    "ac_graph_id",
    "stack_trace",
    "fwd_stack_trace",
    GEMM_KEY,
)
_SAME_VALUES: Final = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_OF_ANY_STRIDES: Final = ("aten", "prims", "fp8graph")
_TRANSPOSES: Final = (aten.permute.default, aten.transpose.int, aten.t.default)
# What DTensor writes to gather shards: along another dim than the first, it moves the parts there afterwards.
_GATHERS: Final = (wire.ALL_GATHER, wire.WAIT, aten.split.Tensor, operator.getitem, aten.cat.default)
_PURE_VIEWS: Final = (  # the same elements in the same order
    *_SAME_VALUES,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.alias.default,
    aten.detach.default,
)


def value(node: fx.Node) -> torch.Tensor:
    """The fake tensor that stands for ``node``: shape, strides, dtype, device."""
    return cast(torch.Tensor, node.meta["val"])


def is_backward(node: fx.Node) -> bool:
    """Whether the joint graph's node belongs to backward."""
    return "backward" in str(node.meta.get("partitioner_tag", ""))


def runs_without_gradients(node: fx.Node) -> bool:
    """Whether the node comes from a ``torch.no_grad`` region of a graph that runs with gradients."""
    return bool((node.meta.get("custom") or {}).get(NO_GRAD_KEY))


def backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of backward: tagged so, or computed from the gradients of the outputs.

    The backward of a custom autograd function carries no backward tag.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_gradient = node.op == "placeholder" and str(node.target).startswith("tangents")
        if is_gradient or is_backward(node) or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def static_size(size: int | torch.SymInt) -> int | None:
    """The size if it is static, else None. Never adds a guard."""
    return size if isinstance(size, int) else None


def size_hint(size: int | torch.SymInt) -> int:
    """The size, or the one that a dynamic size had when it was traced. Never adds a guard."""
    return size if isinstance(size, int) else int(size.node.hint or 1)


def known_equal(a: Any, b: Any) -> bool:
    """Whether two sizes are equal in every run. Never adds a guard."""
    return isinstance(a == b, bool) and a == b or statically_known_true(a == b)


def insert(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    *,
    like: fx.Node,
    made_by: str,
    name: str | None = None,
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:
    """Insert ``target(*args, **kwargs)`` at the current insertion point, with a fake value and ``like``'s metadata."""
    node = graph.create_node("call_function", target, args, kwargs or {}, name=name)
    node.meta.update({key: like.meta[key] for key in _INHERITED if key in like.meta})
    node.meta[PASS_KEY] = made_by
    update_value(node)
    return node


def update_value(node: fx.Node) -> None:
    """Compute the fake value of ``node`` from those of its arguments."""
    if node.target is operator.getitem:
        source, position = cast("tuple[fx.Node, int]", node.args)
        node.meta["val"] = source.meta["val"][position]
        return
    args, kwargs = cast(Any, fx.map_arg((node.args, node.kwargs), lambda x: x.meta["val"]))
    if node.target in ops.SHAPES and (made := ops.fake_results(node.target, args, kwargs)) is not None:
        node.meta["val"] = made
        return
    with fake_mode_of(node.all_input_nodes[0]):
        node.meta["val"] = cast(Any, node.target)(*args, **kwargs)


def fake_mode_of(node: fx.Node) -> Any:
    """The FakeTensorMode that ``node``'s value lives in (several outputs share one)."""
    val = node.meta["val"]
    return cast(Any, val[0] if isinstance(val, (list, tuple)) else val).fake_mode


def trace(function: Callable[..., Any], arguments: Sequence[fx.Node]) -> fx.Graph:
    """``function(*arguments)`` as an aten graph that Inductor fuses; its placeholders are the arguments in order."""
    values = [value(argument) for argument in arguments]
    with fake_mode_of(arguments[0]), torch.no_grad():
        # fresh ones: make_fx tells its inputs apart by identity, and two nodes may share one fake tensor
        devices = {compat.without_cuda(v.device): v.device for v in values}
        fresh = [v.new_empty_strided(v.size(), v.stride(), device=compat.without_cuda(v.device)) for v in values]
        graph = make_fx(function, decomposition_table=select_decomp_table())(*fresh).graph
        if any(stand_in != device for stand_in, device in devices.items()):
            _move(graph, devices)
        return graph


def _move(graph: fx.Graph, devices: Mapping[torch.device, torch.device]) -> None:
    """Put a graph that was traced on stand-ins onto the devices that they stand for."""

    def moved(argument: Any) -> Any:
        return devices.get(argument, argument) if isinstance(argument, torch.device) else argument

    for node in graph.nodes:
        node.args, node.kwargs = (map_aggregate(x, moved) for x in (node.args, node.kwargs))
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            node.meta["val"] = val.new_empty_strided(val.size(), val.stride(), device=moved(val.device))


def inline(graph: fx.Graph, body: fx.Graph, arguments: Sequence[fx.Node], *, like: fx.Node, made_by: str) -> Any:
    """Copy ``body`` to the insertion point with ``like``'s metadata; returns what the body returns, as nodes."""
    placeholders = body.find_nodes(op="placeholder")
    copies: dict[fx.Node, fx.Node] = dict(zip(placeholders, arguments, strict=True))
    results: Any = graph.graph_copy(body, copies)
    for copy in copies.values():
        if copy not in arguments:
            copy.meta.update({key: like.meta[key] for key in _INHERITED if key in like.meta})
            copy.meta[PASS_KEY] = made_by
    return results


def swaps_last_dims(node: fx.Node) -> bool:
    """Whether ``node`` is a transpose of the last two dims: t, transpose or permute."""
    if node.target not in _TRANSPOSES:
        return False
    ndim = value(cast(fx.Node, node.args[0])).ndim
    swapped = [*range(ndim - 2), ndim - 1, ndim - 2]
    if node.target is aten.permute.default:
        return [d % ndim for d in cast(Sequence[int], node.args[1])] == swapped
    if node.target is aten.transpose.int:
        return {cast(int, d) % ndim for d in node.args[1:3]} == {ndim - 1, ndim - 2}
    return node.target is aten.t.default and ndim == 2


def look_through_transposes(node: fx.Node) -> tuple[fx.Node, bool]:
    """The tensor under any number of transposes of the last two dims, and whether it arrives transposed.

    The weight of a linear is ``permute(w)`` in forward and ``permute(permute(w))`` in dgrad.
    """
    transposed = False
    while True:
        if node.op == "call_function" and node.target in (aten.alias.default, aten.detach.default):
            node = cast(fx.Node, node.args[0])
        elif swaps_last_dims(node):
            node, transposed = cast(fx.Node, node.args[0]), not transposed
        else:
            return node, transposed


def value_key(node: fx.Node) -> Any:
    """A key equal for nodes that surely hold the same tensor: sees through views and repeated casts.

    ``view(h, [M, K])`` made once for q, once for k and once for v is one tensor; so is ``h.to(bf16)``
    that torch.autocast makes for each of them.
    """
    shape = tuple(str(size) for size in value(node).shape)
    return shape, _origin(node)


def _key(node: fx.Node) -> Any:
    return value_key(node) if isinstance(node.meta["val"], torch.Tensor) else _origin(node)  # a split has several


def _origin(node: fx.Node) -> Any:
    while node.op == "call_function" and node.target in _PURE_VIEWS:
        node = cast(fx.Node, node.args[0])
    if node.op == "call_function" and node.target is torch.ops.prims.convert_element_type.default:
        return "cast", node.args[1], _origin(cast(fx.Node, node.args[0]))
    if node.op == "call_function" and node.target is aten.permute.default:
        source = cast(fx.Node, node.args[0])
        return "permute", str(node.args[1]), value_key(source)
    if node.op == "call_function" and node.target in _GATHERS:  # q, k and v each gather the same shards
        return str((node.target, fx.map_arg(node.args, lambda n: repr(_key(n)))))
    return node


def is_view(node: fx.Node) -> bool:
    """Whether the value of ``node`` is a view of its first argument (or may be: reshape)."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    aliases = [a.alias_info for a in schema.returns if a.alias_info is not None and not a.alias_info.is_write]
    return bool(aliases) or node.target in _SAME_VALUES


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads ``node``, through views."""
    for user in node.users:
        yield from readers(user) if is_view(user) else (user,)


def strides_matter(node: fx.Node) -> bool:
    """Whether ``node`` leaves the graph, or an op that is not torch's own reads it: both expect the strides it had."""
    return any(getattr(reader.target, "namespace", "") not in _OF_ANY_STRIDES for reader in readers(node))


def take_place(result: fx.Node, node: fx.Node, made_by: str) -> fx.Node:
    """Replace ``node`` by ``result``. Returns what its users read: a copy if other strides than ``node``'s matter."""
    graph, strides = node.graph, value(node).stride()
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    of_each_size = zip(value(result).shape, value(result).stride(), strides, strict=True)
    if not all(known_equal(size, 1) or known_equal(new, old) for size, new, old in of_each_size):
        if strides_matter(result):
            with graph.inserting_after(result):
                copy = _copy(result, made_by)
            result.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
            return copy
        update_views(result, made_by)
    return result


def update_views(node: fx.Node, made_by: str) -> None:
    """Give the views of ``node`` the strides that follow from its own; one that is impossible views a copy."""
    for user in list(filter(is_view, node.users)):
        try:
            update_value(user)
        except (RuntimeError, ValueError):  # "view size is not compatible"
            with node.graph.inserting_before(user):
                copy = _copy(node, made_by)
            user.replace_input_with(node, copy)
            update_value(user)
        update_views(user, made_by)


def _copy(node: fx.Node, made_by: str) -> fx.Node:
    contiguous = {"memory_format": torch.contiguous_format}
    return insert(node.graph, aten.clone.default, (node,), like=node, made_by=made_by, kwargs=contiguous)


def module_path(node: fx.Node) -> str:
    """The FQN of the module that ``node`` was traced in, relative to the frame; "" at the root."""
    stack = cast(
        "Mapping[str, tuple[str, Any]] | None",
        node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack"),
    )
    return list(stack.values())[-1][0] if stack else ""


# model.compile() compiles a bound method: L['self'] up to torch 2.13, L['fn'].__self__ in 2.15.
# What follows in brackets leads to the model, not into it: L['args'][0] where a decorator took (*args, **kwargs), as
# accelerate's mixed precision does.
_ROOT: Final = re.compile(r"""^[LG]\[['"](?P<root>[^'"]*)['"]\](?P<more>(?:\[[^]]*\])*)(?:\.__self__)?\.?""")
# A module with a __getattr__ of its own (all of PEFT's) is read as .__dict__['_modules']['base_model'].
_OWN: Final = r"""\.(?:__dict__\[['"])?_(?:modules|parameters|buffers)(?:['"]\])?"""
_STEP: Final = re.compile(_OWN + r"""\[['"]([^'"]+)['"]\]|\[['"]?([^'"\]]+)['"]?\]""")


def split_source(text: str) -> tuple[str, str]:
    """Dynamo's name of a value -> (root variable, dotted FQN under it).

    ``L['self']._modules['model']._parameters['w']`` -> ``("self", "model.w")``;
    ``L['model'].__dict__['_modules']['layers'].0.mlp`` -> ``("model", "layers.0.mlp")``; ``L['args'][0].mlp`` ->
    ``("args.0", "mlp")``; a plain path comes back with root "".
    """
    root = ""
    if match := _ROOT.match(text):
        more = match["more"].replace("][", ".").strip("[]").replace("'", "").replace('"', "")
        root = f"{match['root']}.{more}" if more else match["root"]
        text = text[match.end() - (text[match.end() - 1] == ".") :]
    text = _STEP.sub(lambda m: "." + (m[1] or m[2]), text)
    return root, text.strip(".")


_SHARD: Final = "_local_tensor"  # of a DTensor


def graph_inputs(graph: fx.Graph) -> Iterator[tuple[fx.Node, int | None]]:
    """The placeholders with their position among Dynamo's inputs, as AOTAutograd describes them.

    None for the gradients of the outputs, and for the inputs of a subgraph (a higher-order op's body). What a graph
    takes of a DTensor is its shard (:func:`local`).
    """
    for node in graph.find_nodes(op="placeholder"):
        desc = node.meta.get("desc")
        if isinstance(desc, SubclassGetAttrAOTInput) and desc.attr == _SHARD:
            desc = desc.base
        yield node, desc.idx if isinstance(desc, PlainAOTInput) else None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What a graph takes of a tensor: a DTensor's shard."""
    return getattr(tensor, _SHARD, tensor)


def matmul_arguments(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """``(a, b)`` of a matmul node: addmm and baddbmm have the bias before them, grouped matmuls the offsets after."""
    a, b = cast(tuple[fx.Node, ...], node.args[:2] if node.target in GROUPED else node.args[-2:])
    return a, b


def nodes(graph: fx.Graph, targets: Iterable[Any]) -> Iterator[fx.Node]:
    """The call_function nodes with one of ``targets``, in order."""
    wanted = set(targets)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in wanted:
            yield node


_SHORT: Final = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


def _short(dtype: torch.dtype) -> str:
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def _type_text(val: Any) -> str:
    if isinstance(val, torch.Tensor):
        return f"{_short(val.dtype)}[{', '.join(str(size) for size in val.shape)}]"
    if isinstance(val, (list, tuple)):
        return f"({', '.join(_type_text(v) for v in cast(Sequence[Any], val))})"
    return type(val).__name__


def _argument_text(argument: Any) -> str:
    if isinstance(argument, (list, tuple)):
        items = ", ".join(_argument_text(a) for a in cast(Sequence[Any], argument))
        return f"[{items}]" if isinstance(argument, list) else f"({items})"
    return _short(argument) if isinstance(argument, torch.dtype) else str(argument)


def _argument_names(node: fx.Node) -> list[str]:
    """``name=`` for the settings of a dialect op; its tensors speak for themselves."""
    schema = cast(Any, node.target)._schema.arguments
    return ["" if str(a.type) == "Tensor" else f"{a.name}=" for a in schema]


class GraphText:
    """The text of one graph, again and again while passes change it: only what has changed is written anew."""

    def __init__(self) -> None:
        self._lines: dict[fx.Node, tuple[Any, ...]] = {}  # node -> what its line was made of, the line

    def __call__(self, graph: fx.Graph) -> str:
        """One line per node: ``name: dtype[shape] = op(args)``. Joint graphs mark where backward begins."""
        lines: list[str] = []
        in_backward = False
        for node in graph.nodes:
            if node.op == "output":
                results = [_argument_text(a) for a in cast(Sequence[Any], node.args[0])]
                lines.append(f"return {', '.join(results)}")
                continue
            if is_backward(node) and not in_backward and node.op != "placeholder":
                in_backward = True
                lines.append("# backward")
            lines.append(self._line(node))
        return "\n".join(lines)

    def _line(self, node: fx.Node) -> str:
        made_of = node.args, node.kwargs, node.meta.get("val")
        *known, line = self._lines.get(node, (None, None, None, ""))
        if not line or any(old is not new for old, new in zip(known, made_of, strict=True)):
            line = _line(node)
            self._lines[node] = (*made_of, line)
        return line


def graph_text(graph: fx.Graph) -> str:
    """One line per node: ``name: dtype[shape] = op(args)``. Joint graphs mark where backward begins."""
    return GraphText()(graph)


def _line(node: fx.Node) -> str:
    left = f"{node.name}: {_type_text(node.meta.get('val'))}"
    if node.op == "placeholder":
        return left
    target = str(node.target) if node.op == "call_function" else f"{node.op} {node.target}"
    if node.target is operator.getitem:
        return f"{left} = {node.args[0]}[{node.args[1]}]"
    target = target.removeprefix("torch.ops.").removesuffix(".default")
    names = _argument_names(node) if target.startswith("fp8graph.") else [""] * len(node.args)
    arguments = [name + _argument_text(a) for name, a in zip(names, node.args, strict=False)]  # the rest are kwargs
    arguments += [f"{key}={_argument_text(v)}" for key, v in node.kwargs.items()]
    path = split_source(module_path(node))[1] if target.endswith("mm") else ""
    return f"{left} = {target}({', '.join(arguments)})" + (f"  # {path}" if path else "")
