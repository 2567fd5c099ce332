"""``fp8graph.package``: ahead of time, one file with a model's code and its FP8 weights, which torch alone runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from fp8graph.backend.backend import Backend
from fp8graph.backend.coverage import check_compiled
from fp8graph.backend.entry import find_backend, uncompiled_copy
from fp8graph.compat import inductor, torch_build, wrappers
from fp8graph.compat.ops import OpOverload, pytree, schema
from fp8graph.errors import ConfigError, expect, expect_path
from fp8graph.files import new_file
from fp8graph.ir.naming import split_source
from fp8graph.ir.nodes import module_path
from fp8graph.libraries import adopt
from fp8graph.passes.lower import lower_for_torch_alone
from fp8graph.recipes import RecipeLike
from fp8graph.report import Report
from fp8graph.runtime.policies import PolicyLike


@torch.no_grad()
def package(
    model: nn.Module,
    path: Path | str,
    *args: Any,
    policy: PolicyLike | None = None,
    recipe: RecipeLike = None,
    **kwargs: Any,
) -> Report:
    """Compile ``model(*args, **kwargs)`` ahead of time into one ``.pt2`` file, for inference.

    ``torch._inductor.aoti_load_package(path)`` loads it in a process that never imports fp8graph, and returns a
    callable with the inputs and outputs of ``model``. Quantized weights are in it once, in FP8. It runs on the kind of
    device that the model is on now, with inputs of the sizes of ``args`` and ``kwargs``.

    Args:
        model: in eval mode. If it was compiled with fp8graph, and no policy or recipe is given, its policy, settings
            and scaling state are used.
        path: of the file, with the ending ``.pt2``. It is replaced at the end; after an error it is as it was.
        args, kwargs: of one call. Values that are not tensors are fixed.
        policy, recipe: see :class:`Backend`.

    Returns:
        The report on what the file computes.

    Raises:
        ConfigError: (a ``ValueError``) the model is in training mode, it writes into its inputs or buffers, it returns
            what no file can hold, some of it needs an op of fp8graph (experts whose GEMMs are emulated), or the file
            cannot be written.
    """
    expect("package", "model", model, nn.Module, "a model, an nn.Module")
    expect_path("package", "path", path)
    if Path(path).suffix != ".pt2":
        raise ConfigError(f"{path}: the name of a package ends with .pt2.")
    original = wrappers.original_module(model)
    if original.training:
        raise ConfigError(f"{type(original).__name__} is in training mode: call model.eval() before it is packaged.")
    on_cpu = next((p.device.type == "cpu" for p in original.parameters()), True)
    if on_cpu and not torch_build.PACKAGES_FP8_ON_CPU:
        raise ConfigError(f"torch {torch.__version__} cannot compile FP8 ahead of time for a CPU: 2.13 and later can.")
    backend = _backend(model, policy, recipe)
    with new_file(path, f"package(path={str(path)!r})") as file:
        copy = adopt(uncompiled_copy(original, lambda x: x))
        backend.bind(copy)
        result = torch.compile(copy, backend=backend, fullgraph=True, dynamic=False)(*args, **kwargs)
        if len(backend.calls) != 1:
            raise ConfigError(f"{type(original).__name__} has nothing to compile: it makes no tensor from its inputs.")
        check_compiled(backend, original)
        inductor.package(_Packaged(backend.calls[0], (args, kwargs), _plain(result)), args, kwargs, file)
    return backend.report


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A rewritten graph with the values that it was called with, and what it returned."""

    module: fx.GraphModule
    inputs: list[Any]
    outputs: list[Any]


class _Catching(Backend):
    """A backend that keeps the calls of its rewritten graphs."""

    def __init__(self, policy: PolicyLike | None = None, **settings: Any) -> None:
        super().__init__(policy, **settings)
        self.calls: list[_Call] = []

    @property
    def inner_compile(self) -> Callable[..., Any]:
        def compile(module: fx.GraphModule, _inputs: Sequence[Any], **_kwargs: Any) -> Callable[..., Any]:
            def run(values: list[Any]) -> Any:
                inputs = list(values)
                outputs = module(*values)
                self.calls.append(_Call(module, inputs, list(outputs)))
                return outputs

            return inductor.boxed(run)

        return compile


def _backend(model: nn.Module, policy: PolicyLike | None, recipe: RecipeLike) -> _Catching:
    settings: dict[str, Any] = {"compiler": "eager", "cache_weights": True}
    compiled = find_backend(model) if policy is None and recipe is None else None
    if compiled is None:
        return _Catching(policy, recipe=recipe, **settings)
    backend = _Catching(**compiled.arguments() | settings)
    backend.load_state_dict(compiled.state_dict())
    return backend


def _plain(x: Any) -> Any:
    """``x`` with dicts in place of transformers' outputs, whose classes a process may not know."""
    if isinstance(x, Mapping):
        return {key: _plain(value) for key, value in x.items()}
    return type(x)(map(_plain, x)) if type(x) in (list, tuple) else x


class _Packaged(nn.Module):
    """A rewritten graph, in aten, with its weights as buffers; takes and returns what the model does."""

    def __init__(self, call: _Call, given: Any, result: Any) -> None:
        super().__init__()
        leaves = pytree.tree_leaves(given)
        placeholders = call.module.graph.find_nodes(op="placeholder")
        copies = call.module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        if any(copy.args[0] in placeholders for copy in copies):
            raise ConfigError("the model writes into its inputs or buffers, and a package keeps no state.")
        results, spec = pytree.tree_flatten(result)
        self.returned = [_returned(x, call.outputs, leaves) for x in results]

        def arrange(values: list[Any]) -> Any:
            return pytree.tree_unflatten(values, spec)

        self.arrange = arrange  # not the spec: torch.export copies attributes, and a spec's copy warns
        lower_for_torch_alone(call.module.graph)
        _check_torch_alone(call.module.graph)
        call.module.recompile()
        self.graph_module = call.module
        self.sources: list[int | str | None] = []  # for each placeholder: an input of the model, a buffer, nothing
        for index, (node, value) in enumerate(zip(placeholders, call.inputs, strict=True)):
            source: int | str | None = _index(value, leaves)
            if source is None and node.users:
                source = f"constant_{index}"
                self.register_buffer(source, value.detach().clone())
            self.sources.append(source)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        values = [leaves[x] if isinstance(x, int) else getattr(self, x) if x else None for x in self.sources]
        by_place = {"output": self.graph_module(*values), "input": leaves}
        return self.arrange([by_place[x[0]][x[1]] if isinstance(x, tuple) else x for x in self.returned])


def _check_torch_alone(graph: fx.Graph) -> None:
    """Refuse a graph with an op of fp8graph that Inductor does not replace: a process with torch alone has none."""
    for node in graph.nodes:
        target = node.target
        if isinstance(target, OpOverload) and target.namespace.startswith("fp8graph") and not inductor.replaces(target):
            layer, name = split_source(module_path(node))[1], schema(target).name.replace("::", ".")
            left = f" The GEMMs of bf16 experts stay in high precision with Rule({layer or '*'!r}, None, op='*')."
            raise ConfigError(
                f"{layer or 'the model'} computes {name}, an op of fp8graph: a package runs with torch alone, which "
                f"does not have it.{left if 'grouped_mm' in name else ''}"
            )


def _index(x: Any, among: Sequence[Any]) -> int | None:
    return next((i for i, other in enumerate(among) if other is x), None)


def _returned(x: Any, outputs: Sequence[Any], inputs: Sequence[Any]) -> Any:
    """Return the place that one of the values comes from that a model returns; the value if it is a constant."""
    if not isinstance(x, Tensor | int | float | str | None):
        hint = " A cache is left out with use_cache=False." if "Cache" in type(x).__name__ else ""
        raise ConfigError(f"the model returns a {type(x).__name__}, which no package can hold.{hint}")
    if not isinstance(x, Tensor):
        return x
    indices = {"output": _index(x, outputs), "input": _index(x, inputs)}
    place = next(((of, index) for of, index in indices.items() if index is not None), None)
    if place is None:
        raise ConfigError("the model returns a view of one of its inputs or buffers: return a copy of it.")
    return place
