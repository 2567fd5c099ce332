"""``fp8graph.lint(model, data=[...])``: runs a model on real batches, and each low-precision product beside a shadow.

A copy of the model runs, so that the model's own state stays as it is. Its graphs are those of torch.compile, node by
node, with nothing compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fp8graph import hardware
from fp8graph.analysis.scales.shadow import Lost, ShadowRun, Unexplained, run_plainly
from fp8graph.analysis.scales.states import Source
from fp8graph.backend.entry import uncompiled_copy
from fp8graph.compat import aot, dynamo
from fp8graph.errors import ConfigError, Fp8GraphError, expect_batch, expect_batches
from fp8graph.libraries import adopt
from fp8graph.tools.explain import InputsError

Call = tuple[tuple[Any, ...], dict[str, Any]]
Read = Callable[[aot.KeptGraph, nn.Module], tuple[dict[fx.Node, Source], Callable[[fx.Node], str]]]


@dataclass(frozen=True)
class DataFault:
    """One fault that shows on real numbers: its rule and severity, the node with which it starts, and the text."""

    rule: str
    severity: str
    node: fx.Node
    layer: str
    backward: bool
    text: str


def calls_of(data: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Call]:
    """Return the arguments of the model for each batch: a tensor, a tuple of arguments, or a dict of keyword arguments.

    Raises:
        ConfigError: ``data`` holds no batches.
    """
    expect_batches("lint", "data", data)
    calls: list[Call] = []
    for batch in data:
        expect_batch("lint", "data", batch)
        if isinstance(batch, Mapping):
            calls.append(((), {**kwargs, **batch}))
        else:
            calls.append((tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), dict(kwargs)))
    if not calls:
        raise ConfigError("lint(data=[]): data must have at least one batch; two show scales of the step before.")
    return calls


@torch.inference_mode(False)
def faults_on(model: nn.Module, calls: Sequence[Call], training: bool, read: Read) -> list[DataFault]:
    """Return the first product that rounding does not explain, and the casts that cut off numbers.

    Args:
        read: the inputs of a graph, and the layers of its nodes.

    Raises:
        ConfigError: the model has no numbers, or does not run on a batch.
    """
    name = type(model).__name__
    if any(x.device.type == "meta" for x in (*model.parameters(), *model.buffers())):
        raise ConfigError(f"lint(data=...): {name} is on the meta device, without numbers. Load it, or leave data out.")
    copied = uncompiled_copy(model, _clone)
    adopt(copied)
    errors: list[tuple[bool, int, int, Unexplained]] = []
    lost: list[tuple[bool, Lost]] = []
    layers: dict[fx.Node, str] = {}
    count = 0

    def start(module: fx.GraphModule, kept: aot.KeptGraph) -> Callable[[Sequence[Any]], Any]:
        order = {node: i for i, node in enumerate(module.graph.nodes)}
        runs: list[tuple[ShadowRun, Callable[[fx.Node], str]]] = []

        def watch(inputs: Sequence[Any]) -> Any:
            nonlocal count
            count += 1
            if not runs:  # not before: a graph is traced on fakes
                sources, layer_of = read(kept, copied)
                runs.append((ShadowRun(module, sources), layer_of))
            ((run, layer_of),) = runs
            results = run([*inputs, *_gradients(module.graph, len(inputs))])
            errors.extend((x.node in run.backward, count, order[x.node], x) for x in run.unexplained)
            lost.extend((x.node in run.backward, x) for x in run.lost)
            layers.update((x.node, layer_of(x.node)) for x in (*run.unexplained, *run.lost))
            run.unexplained.clear()
            run.lost.clear()
            return results

        return watch

    kind = hardware.current_device().type
    devices = () if kind == "cpu" else range(torch.accelerator.device_count())
    faults: dict[tuple[str, fx.Node], DataFault] = {}
    with (
        torch.random.fork_rng(devices, device_type=kind),
        torch.set_grad_enabled(training),
        dynamo.as_if_called_first(),
        dynamo.forgetting_compiled_code(),
    ):
        compiled = torch.compile(copied, backend=aot.watching(start, run_plainly), dynamic=False)
        with aot.backward_at_once():
            for i, (args, kwargs) in enumerate(calls):
                try:
                    compiled(*args, **kwargs)
                except Fp8GraphError:
                    raise
                except Exception as error:  # of the model, or of tracing it
                    reason = " ".join(str(error).split())[:400]
                    raise InputsError(f"lint(data=...): {name} does not run with batch {i + 1}. {reason}") from error
                for backward, each in lost:
                    text = f"{_loss(each)} (batch {i + 1})"
                    fault = DataFault(each.rule, "warning", each.node, layers[each.node], backward, text)
                    faults.setdefault((each.rule, each.node), fault)
                lost.clear()
                if errors:
                    backward, _, _, first = min(errors, key=lambda x: x[:3])
                    fault = DataFault(
                        "unexplained",
                        "error",
                        first.node,
                        layers[first.node],
                        backward,
                        _text(first, i + 1, len(errors) - 1),
                    )
                    return [fault, *faults.values()]
    return list(faults.values())


def _loss(lost: Lost) -> str:
    largest, name = torch.finfo(lost.dtype).max, str(lost.dtype).removeprefix("torch.")
    what = f"beyond {largest:g} in {name}" if lost.rule == "saturated" else f"0 in {name}"
    return f"{100 * lost.share:.3g} % of the numbers are {what}"


def _text(error: Unexplained, batch: int, later: int) -> str:
    size = f"relative error {error.error:.2g}" if error.error < math.inf else "infinite or NaN"
    more = f"; {later} later product{'s' * (later > 1)} as well" if later else ""
    return f"{size}{error.part}, where rounding explains {error.expected:.2g} (batch {batch}){more}"


def _clone(x: Tensor) -> Tensor:
    copied = x.detach().clone()
    if not isinstance(x, nn.Parameter):
        return copied
    parameter: Any = nn.Parameter(copied, x.requires_grad)
    parameter.__dict__.update(x.__dict__)  # a library's own, such as the scales of its bytes
    return parameter


def _gradients(graph: fx.Graph, given: int) -> list[Tensor]:
    """Made-up gradients of the results, for the inputs of a joint graph that its forward has not: 1 for a loss."""
    generator, gradients = torch.Generator().manual_seed(0), list[Tensor]()
    for node in graph.find_nodes(op="placeholder")[given:]:
        val = node.meta["val"]
        numbers = torch.randn(val.shape, generator=generator) if val.ndim else torch.ones(())
        gradients.append(numbers.to(val.device, val.dtype))
    return gradients
