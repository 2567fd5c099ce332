"""Generate Inductor's GPU code on a machine without that GPU, for ``explain(target="sm_90").kernels``.

AOTAutograd and the passes run on fake CPU tensors; each graph is then moved to a fake CUDA device and given to
Inductor, which generates Triton text for that GPU. Nothing is executed. A kernel is compiled to a cubin only when its
machine code is asked for (``ptxas`` comes with triton).

Torch has no switch for code generation without a device. Two of its hooks are official (the device interface, and
triton's active driver); two functions are replaced while a graph is generated, and put back after:
``torch.cuda.get_device_properties``, which Inductor's heuristics call directly, and
``GraphLowering.compile_to_module``, which would load the text.
tests/offline/test_pretend.py says when the latter can go.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import fx
from torch.fx.node import map_aggregate

from fp8graph.compat import fakes, inductor
from fp8graph.compat.ops import pytree
from fp8graph.errors import Fp8GraphError
from fp8graph.offline.kernels import Direction, KernelRecord
from fp8graph.offline.launches import launches
from fp8graph.offline.pretend import capability, pretend

_DEVICE: Final = torch.device("cuda:0")


def available() -> bool:
    """Whether triton, which is not part of torch's CPU wheels, is installed."""
    try:
        import triton  # noqa: F401  # pyright: ignore[reportUnusedImport, reportMissingImports]
    except ImportError:
        return False
    return True


class OfflineInductor:
    """An ``inner_compile`` for compile_fx: generates code of each graph for ``target``, but runs the graph itself."""

    def __init__(
        self,
        target: str,
        run: Callable[..., Any],
        names: Callable[[fx.Node], Sequence[str]] = lambda node: (node.name,),
    ) -> None:
        """``names``: of the nodes that a node of the code's graph computes, in the graph that people look at."""
        capability(target)  # or raises
        if not available():
            raise Fp8GraphError(
                f"generating kernels for {target} needs triton: install it, or use a CUDA build of torch."
            )
        self.target = target
        self._run = run
        self._names = names
        self.kernels: list[KernelRecord] = []
        self.code: list[tuple[Direction, str]] = []  # Inductor's whole text

    def __call__(
        self, module: fx.GraphModule, inputs: Sequence[Any], *, direction: Direction | None = None, **kwargs: Any
    ) -> Callable[..., Any]:
        direction = direction or ("backward" if kwargs.get("is_backward") else "forward")

        def keep(lowering: Any) -> Any:
            code = lowering.codegen()[0].value
            self.code.append((direction, code))
            for launch in launches(code, lowering.scheduler, self._names):
                self.kernels.append(KernelRecord(graph=direction, target=self.target, **vars(launch)))
            return types.SimpleNamespace(call=_never, __file__="generated, never run")

        moved, cuda_inputs = _on_cuda(module, inputs)
        with pretend(self.target), inductor.without_loading(keep), fakes.without_device_guards():
            with inductor.with_options({"force_disable_caches": True, "compile_threads": 1}):
                inductor.compile_fx_inner(moved, cuda_inputs, **kwargs)
        return self._run(module, inputs)


def _never(_arguments: Any) -> Any:
    raise Fp8GraphError("this code was generated for a GPU that is not present: it cannot be run")


def _on_cuda(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """A copy of a graph that was traced on fake CPU tensors, on a fake CUDA device."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, copies)
    output = graph.output(result)
    (original,) = module.graph.find_nodes(op="output")
    output.meta.update(original.meta)
    mode = next(x.fake_mode for x in inputs if isinstance(x, fakes.FakeTensor))
    for node in graph.nodes:
        node.args, node.kwargs = (map_aggregate(x, _to_cuda) for x in (node.args, node.kwargs))
        # As they were traced. To run the nodes again is no way: a torch without CUDA indexes no fake CUDA tensor.
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map_only(torch.Tensor, lambda x: _moved(x, mode), node.meta["val"])
        node.meta.pop("tensor_meta", None)
    moved = [_moved(x, mode) if isinstance(x, torch.Tensor) else x for x in inputs]
    copy = fx.GraphModule(module, graph)
    copy.meta.update(module.meta)
    return copy, moved


def _moved(x: torch.Tensor, mode: fakes.FakeTensorMode) -> torch.Tensor:
    with mode:
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=_DEVICE)


def _to_cuda(argument: Any) -> Any:
    return _DEVICE if isinstance(argument, torch.device) else argument
