"""Hand graphs to AOTAutograd and Inductor: copies of Dynamo's with spare inputs, and graphs of dialect nodes alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from fp8graph.backend.inductor_passes import LowerPass, code_identity
from fp8graph.compat import dynamo, inductor
from fp8graph.compat.autograd import unnoticed_writes
from fp8graph.compat.fakes import TracingContext, assert_sizes, detect_fake_mode
from fp8graph.compat.inductor import compile_fx
from fp8graph.ir import ops
from fp8graph.ir.keys import NO_GRAD_KEY, TAKEN_KEY
from fp8graph.ir.settings import Settings
from fp8graph.passes import WEIGHT_LOWERING
from fp8graph.runtime.slots import accelerator_of


def run_eagerly(module: fx.GraphModule, inputs: Sequence[Any], **_kwargs: Any) -> Callable[..., Any]:
    """``compiler="eager"``: run the partitioned graph, dialect included, in place of compile_fx_inner."""
    assert_sizes(module, inputs)
    placeholders = module.graph.find_nodes(op="placeholder")
    copies = module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = [placeholders.index(copy.args[0]) for copy in copies if copy.args[0] in placeholders]

    def run(args: list[Any]) -> Any:
        values = list(args)
        args.clear()  # boxed calling convention: drop the caller's references
        # a page may be saved for the backward of another call, which must read the values that this one writes
        with unnoticed_writes([values[index] for index in written]):
            return module(*values)

    return inductor.boxed(run)


def compile_dialect(
    module: fx.GraphModule, inputs: list[Any], settings: Settings, inner_compile: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Generate code for a graph of dialect nodes that has no gradients."""
    options = {**inductor.codegen_patches(settings.hardware, inputs), **settings.inductor}
    options["triton.cudagraphs"] = False  # the graph writes into tensors that stay: torch would skip them and warn
    options["post_grad_custom_pre_pass"] = LowerPass(code_identity(), passes=WEIGHT_LOWERING)
    extra: dict[str, Any] = {} if inner_compile is None else {"inner_compile": inner_compile}
    return cast(Callable[..., Any], compile_fx(module, inputs, config_patches=options, **extra))


def compile_backward(
    module: fx.GraphModule, inputs: Sequence[Any], settings: Settings, inner_compile: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Generate code for a backward that compiled autograd traced. Its GEMMs were decided, and reported, with forward.

    Those in FP8 are dialect nodes, which are lowered. A matmul that is left was left by the policy, or belongs to a
    forward that was not compiled.
    """
    decided = any(node.target in ops.DIALECT for node in module.graph.nodes)
    options = {**(inductor.codegen_patches(settings.hardware, inputs) if decided else {}), **settings.inductor}
    first = options.pop("post_grad_custom_pre_pass", inductor.default_option("post_grad_custom_pre_pass"))
    options["post_grad_custom_pre_pass"] = LowerPass(code_identity(), first)
    extra: dict[str, Any] = {} if inner_compile is None else {"inner_compile": inner_compile}
    copy = copy_dynamo_graph(module, gradients=False)  # Dynamo reads the original again
    return cast(Callable[..., Any], compile_fx(copy, list(inputs), config_patches=options, **extra))


def copy_dynamo_graph(module: fx.GraphModule, gradients: bool = True) -> fx.GraphModule:
    """Copy Dynamo's graph so that AOTAutograd accepts the copy as the original.

    Nodes inside ``torch.no_grad`` regions are marked (``NO_GRAD_KEY``): they cannot be recognized later otherwise.
    """
    graph, copies = fx.Graph(), cast("dict[fx.Node, fx.Node]", {})
    graph.output(graph.graph_copy(module.graph, copies))
    enabled = gradients
    for original, copy in copies.items():
        dynamo.copy_source(original, copy)
        if original.target is dynamo.SET_GRAD_ENABLED:
            enabled = cast(bool, original.args[0])
        elif gradients and not enabled:
            copy.meta["custom"] = {**(original.meta.get("custom") or {}), NO_GRAD_KEY: True}
    result = fx.GraphModule(module, graph)
    result.meta = module.meta
    dynamo.keep_parameter_sources(module, result)
    return result


def add_spare_inputs(module: fx.GraphModule, number: int, inputs: Sequence[Any]) -> list[Any]:
    """Append graph inputs for passes to take (``extra_inputs.SpareInputs``); returns the fake tensors to trace with."""
    if not number:
        return []
    mode = detect_fake_mode(list(inputs)) or TracingContext.get().fake_mode
    assert mode is not None
    device = accelerator_of(inputs)  # an unused tensor on the CPU would keep CUDA graphs off
    with mode:
        fakes = [torch.empty(0, device=device) for _ in range(number)]
    last = module.graph.find_nodes(op="placeholder")[-1] if inputs else None
    for index, fake in enumerate(fakes):
        with module.graph.inserting_after(last):
            last = module.graph.placeholder(f"fp8graph_input_{index}")
        dynamo.describe_own_input(last)
        last.meta["example_value"] = fake
    module.recompile()
    return fakes


def with_taken_inputs(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
    """An ``inner_compile`` for compile_fx that passes on the tensors which the spare inputs stand for by now.

    AOTAutograd itself passes on the empty tensors that it traced with.
    """

    @functools.wraps(inner_compile)
    def compile(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        placeholders = module.graph.find_nodes(op="placeholder")
        became = [
            node.meta["val"] if TAKEN_KEY in node.meta else x for node, x in zip(placeholders, inputs, strict=True)
        ]
        return inner_compile(module, became, **kwargs)

    return compile
