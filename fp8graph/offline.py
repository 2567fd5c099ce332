"""Inductor's GPU code on a machine without that GPU: what ``explain(target="sm_90").kernels`` reads.

AOTAutograd and the passes run on fake CPU tensors; each graph is then moved to a fake CUDA device and given to
Inductor, which generates its Triton text as for that GPU. Nothing is executed. A kernel is compiled to a cubin only
when what it compiles to is asked for (``ptxas`` comes with triton).

Torch has no switch for code generation without a device. Two of its hooks are official (the device interface, and
triton's active driver); two functions are replaced while a graph is generated, and put back after:
``torch.cuda.get_device_properties``, which Inductor's heuristics call directly, and
``GraphLowering.compile_to_module``, which would load the text.
tests/test_offline.py says when the latter can go.
"""

from __future__ import annotations

import contextlib
import functools
import re
import tempfile
import types
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast
from unittest import mock

import torch
import torch.cuda
from torch import fx
from torch._dynamo import device_interface
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._python_dispatch import _disable_current_modes

from fp8graph import compat, cubin
from fp8graph.cubin import Compiled
from fp8graph.errors import Fp8GraphError
from fp8graph.launches import launches

Direction = Literal["forward", "backward", "weights"]
_DEVICE: Final = torch.device("cuda:0")
# What Inductor reads of torch.cuda.get_device_properties: H100/H200 SXM and B200.
_MULTIPROCESSORS: Final = {8: 142, 9: 132, 10: 148}


@dataclass(frozen=True, kw_only=True)
class KernelRecord:
    """One kernel launch of a generated graph."""

    name: str
    graph: Direction  # "weights": runs once per update of the weights
    kind: str  # "triton": generated; "extern": a GEMM or another library call
    ops: tuple[str, ...]  # the ATen ops that it fuses
    bytes: int  # read and written, as Inductor counts buffers; 0 for library calls
    source: str = ""  # the generated module of a Triton kernel
    target: str = ""

    @property
    def compiled(self) -> Compiled | None:
        """What the first configuration that Inductor would try compiles to; None for a library call."""
        return _first(self.source, self.target) if self.source else None

    @property
    def registers(self) -> int | None:
        """Registers per thread of the first configuration; None for a library call."""
        return self.compiled.registers if self.compiled else None

    @property
    def spills(self) -> int | None:
        """Bytes of stack per thread, which is where ptxas spills registers to; None for a library call."""
        return self.compiled.spills if self.compiled else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, those of :attr:`compiled` included: this compiles the kernel."""
        compiled = self.compiled
        costs = ("registers", "spills", "shared", "instructions", "loads", "stores", "fp8_store")
        return {
            "name": self.name,
            "graph": self.graph,
            "kind": self.kind,
            "ops": list(self.ops),
            "bytes": self.bytes,
            **{cost: getattr(compiled, cost, None) for cost in costs},
        }


def available() -> bool:
    """Whether triton, which is not part of torch's CPU wheels, is installed."""
    try:
        import triton  # noqa: F401  # pyright: ignore[reportUnusedImport, reportMissingImports]
    except ImportError:
        return False
    return True


class OfflineInductor:
    """``inner_compile`` of compile_fx: generates each graph for ``target`` and then runs it as it is."""

    def __init__(self, target: str, run: Callable[..., Any]) -> None:
        if not available():
            raise Fp8GraphError(
                f"generating kernels for {target} needs triton: install it, or use a CUDA build of torch."
            )
        self.target = target
        self._run = run
        self.kernels: list[KernelRecord] = []
        self.code: list[tuple[Direction, str]] = []  # Inductor's whole text

    def __call__(
        self, module: fx.GraphModule, inputs: Sequence[Any], *, direction: Direction | None = None, **kwargs: Any
    ) -> Callable[..., Any]:
        direction = direction or ("backward" if kwargs.get("is_backward") else "forward")

        def keep(lowering: GraphLowering) -> Any:
            code = cast(Any, lowering.codegen()[0]).value
            self.code.append((direction, code))
            for launch in launches(code, lowering.scheduler):
                self.kernels.append(KernelRecord(graph=direction, target=self.target, **vars(launch)))
            return types.SimpleNamespace(call=_never, __file__="generated, never run")

        moved, cuda_inputs = _on_cuda(module, inputs)
        with pretend(self.target), mock.patch.object(GraphLowering, "compile_to_module", keep):
            with inductor_config.patch({"force_disable_caches": True, "compile_threads": 1}):
                compile_fx_inner(moved, cuda_inputs, **kwargs)
        return self._run(module, inputs)


def _never(_arguments: Any) -> Any:
    raise Fp8GraphError("generated for a GPU that is not here: nothing to run")


@contextlib.contextmanager
def pretend(target: str) -> Generator[None]:
    """Inductor and triton find a GPU of kind ``target``; undone on exit."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    match = cast("re.Match[str]", re.fullmatch(r"sm_(\d+)(\d)a?", target))
    major, minor = int(match[1]), int(match[2])
    properties = types.SimpleNamespace(
        name=target,
        major=major,
        minor=minor,
        multi_processor_count=_MULTIPROCESSORS.get(major, 132),
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        total_memory=80 << 30,
        L2_cache_size=50 << 20,
        gcnArchName="",
    )

    def answer(result: Any) -> Any:
        return staticmethod(lambda *_, **__: result)  # pyright: ignore[reportUnknownLambdaType]

    class Worker(device_interface.CudaInterface.Worker):
        current_device: Any = answer(0)
        get_device_properties: Any = answer(properties)

    members = {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_properties": properties,
        "get_compute_capability": 10 * major + minor,
        "is_bf16_supported": True,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
    }
    functions = {name: answer(result) for name, result in members.items()}
    interface = type("OfflineCuda", (device_interface.CudaInterface,), {**functions, "Worker": Worker})

    class Driver(CudaDriver):  # knows its target; cannot load or launch anything
        def __init__(self) -> None: ...

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 10 * major + minor, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: Any = None) -> int:
            return 0

    from torch._inductor.runtime import triton_helpers

    device_interface.get_interface_for_device("cuda")  # the lazy registration comes first
    interfaces = {name: device_interface.device_interfaces.get(name) for name in ("cuda", "cuda:0")}
    driver = triton.runtime.driver
    active = driver._active
    with contextlib.ExitStack() as stack:
        replacements = {
            "get_device_properties": properties,
            "get_device_capability": (major, minor),
            "get_device_name": target,
        }
        for name, result in replacements.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer(result)))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", answer(None)))
        try:
            for name in interfaces:
                device_interface.register_interface_for_device(name, interface)
            driver.set_active(Driver())
            compat.forget_device_facts()
            yield
        finally:
            for name, original in interfaces.items():
                if original is None:
                    device_interface.device_interfaces.pop(name, None)
                else:
                    device_interface.register_interface_for_device(name, original)
            driver._active = active
            compat.forget_device_facts()


def _on_cuda(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """A copy of a graph that was traced on fake CPU tensors, on a fake CUDA device."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, copies)
    output = graph.output(result)
    (original,) = module.graph.find_nodes(op="output")
    output.meta.update(original.meta)
    for node in graph.nodes:
        node.args, node.kwargs = (map_aggregate(x, _to_cuda) for x in (node.args, node.kwargs))
        for key in ("val", "tensor_meta"):
            node.meta.pop(key, None)
    mode = next(x.fake_mode for x in inputs if isinstance(x, FakeTensor))
    with mode:
        moved = [
            torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=_DEVICE)
            if isinstance(x, torch.Tensor)
            else x
            for x in inputs
        ]
    copy = fx.GraphModule(module, graph)
    copy.meta.update(module.meta)
    with _disable_current_modes():
        FakeTensorProp(copy, mode).propagate_dont_convert_inputs(*moved)
    return copy, moved


def _to_cuda(argument: Any) -> Any:
    return _DEVICE if isinstance(argument, torch.device) else argument


@functools.cache
def _first(source: str, target: str) -> Compiled:
    return compile_kernel(source, target, configuration="first")[0]


def compile_kernel(source: str, target: str, *, configuration: str = "all") -> list[Compiled]:
    """Compile a generated kernel for ``target``.

    Args:
        source: the module that Inductor generated.
        target: like "sm_90".
        configuration: "all" that Inductor's autotuner would try on the GPU, the "first" of them, or one of them,
            as :attr:`Compiled.configuration` names it.

    Returns:
        In the order of the autotuner; nothing if it does not try that configuration.
    """
    with pretend(target), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.py"
        path.write_text(source, encoding="utf-8")
        (name,) = re.findall(r"^def (triton_\w+)\(", source, re.MULTILINE)[:1]
        namespace: dict[str, Any] = {"__file__": str(path), "__name__": f"fp8graph_offline_{name}"}
        exec(compile(source, str(path), "exec"), namespace)
        tuner = namespace[name]
        if configuration == "first":
            tuner.configs = tuner.configs[:1]
        elif configuration != "all":
            tuner.configs = [c for c in tuner.configs if cubin.text_of(c) == configuration]
        if not tuner.configs:
            return []
        with inductor_config.patch(use_static_cuda_launcher=False):  # keep triton's object: it has the code
            tuner.precompile(warm_cache_only=True)
        signature = [kind for kind in tuner.triton_meta["signature"].values() if kind != "constexpr"]
        return [
            cubin.read(
                result.kernel.asm["cubin"],
                result.kernel.asm["ptx"],
                signature,
                shared=int(result.kernel.metadata.shared),
                configuration=cubin.text_of(result.config),
            )
            for result in tuner.compile_results
        ]
