"""Generate Inductor's GPU code on a machine without that GPU, for ``explain(target="sm_90").kernels``.

AOTAutograd and the passes run on fake CPU tensors; each graph is then moved to a fake CUDA device and given to
Inductor, which generates Triton text for that GPU. Nothing is executed. A kernel is compiled to a cubin only when its
machine code is read (``ptxas`` comes with triton).

The scheduler knows bytes and nodes, and the text knows launches; they are matched by the buffers that a launch writes.
A combo node of the scheduler (``ForeachKernelSchedulerNode``) may become several launches, each with the bytes of the
parts that it runs.

Torch has no switch for code generation without a device. Two of its hooks are official (the device interface, and
triton's active driver); two functions are replaced while a graph is generated, and put back after:
``torch.cuda.get_device_properties``, which Inductor's heuristics call directly, and
``GraphLowering.compile_to_module``, which would load the text.
tests/offline/test_fake_gpu.py says when the latter can go.
"""

from __future__ import annotations

import ast
import re
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import fx
from torch.fx.node import map_aggregate

from fp8graph.compat import fakes, inductor
from fp8graph.compat.inductor import StarDep, WeakDep
from fp8graph.compat.ops import pytree
from fp8graph.errors import Fp8GraphError
from fp8graph.offline.fake_gpu import capability, fake_gpu
from fp8graph.offline.kernels import Direction, KernelRecord

_DEVICE: Final = torch.device("cuda:0")
_CALL: Final = re.compile(
    r"^\s+(?:(?P<triton>\w+\.run\(.*\))$|.*?(?P<extern>extern_kernels\.\w+|torch\.ops\.[\w.]+)\()"
)
_ORIGIN: Final = re.compile(r"Original ATen: \[([^\]]*)\]")
_RESULT: Final = re.compile(r"^\s+(\w+) = |out=(?:reinterpret_tensor\()?(\w+)")
_DEFINITION: Final = re.compile(r"(\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str=", re.DOTALL)
_LIBRARY: Final = "ExternKernelSchedulerNode"
_NO_KERNEL: Final = "NopKernelSchedulerNode"


def available() -> bool:
    """Return whether triton, which is not part of torch's CPU wheels, is installed."""
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
            self.kernels += _launches(code, lowering.scheduler, self._names, direction, self.target)
            return types.SimpleNamespace(call=_never, __file__="generated, never run")

        moved, cuda_inputs = _on_cuda(module, inputs)
        with fake_gpu(self.target), inductor.without_loading(keep), fakes.without_device_guards():
            with inductor.with_options({"force_disable_caches": True, "compile_threads": 1}):
                inductor.compile_fx_inner(moved, cuda_inputs, **kwargs)
        return self._run(module, inputs)


def _never(_arguments: Any) -> Any:
    raise Fp8GraphError("this code was generated for a GPU that is not present: it cannot be run")


def _on_cuda(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """Return a copy of a graph that was traced on fake CPU tensors, on a fake CUDA device."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, copies)
    output = graph.output(result)
    (original,) = module.graph.find_nodes(op="output")
    output.meta.update(original.meta)
    mode = next(x.fake_mode for x in inputs if isinstance(x, fakes.FakeTensor))
    for node in graph.nodes:
        node.args, node.kwargs = (map_aggregate(x, _to_cuda) for x in (node.args, node.kwargs))
        # As they were traced. The nodes cannot be run again: a torch without CUDA does not index a fake CUDA tensor.
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


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A part that is in one kernel as a whole: a node of the scheduler, or one of the nodes that a combo node joins."""

    node: int  # index in the scheduler's list
    makes: frozenset[str]  # new buffers
    overwrites: frozenset[str]  # tensors that existed before
    reads: frozenset[str]
    moved: dict[str, int]  # buffer -> bytes; nothing is known of a library call
    nodes: frozenset[str] = field(default=frozenset())
    writes: frozenset[str] = field(default=frozenset())


def _launches(
    code: str, scheduler: Any, names: Callable[[fx.Node], Iterable[str]], graph: Direction, target: str
) -> Iterator[KernelRecord]:
    """Yield the launches in ``code``, the text of one graph, in order; ``scheduler`` is that of its
    ``GraphLowering``.
    """
    sources: dict[str, str] = dict(_DEFINITION.findall(code))
    waiting, calls = list(_parts(scheduler, names)), list(_parts(scheduler, names, of_libraries=True))
    made = frozenset(scheduler.name_to_buf)
    ops: tuple[str, ...] = ()
    for line in code[code.index("def call(") :].splitlines():
        if origin := _ORIGIN.search(line):
            ops = tuple(op for op in origin[1].split(", ") if op)
        elif call := _CALL.match(line):
            source, size, parts = "", 0, list[_Part]()
            if call["triton"]:
                name, arguments = _read_call(call["triton"])
                source = sources.get(name, "")
                parts = _parts_of(arguments, _results(name, source, arguments), waiting)
                waiting = [part for part in waiting if part not in parts]
                # what is made and not stored stays in registers
                inner = frozenset[str]().union(*(part.makes for part in parts)) - _stored(name, source, arguments)
                moved = {name: size for part in parts for name, size in part.moved.items() if name not in inner}
                size = sum(moved.values())
            else:
                name = call["extern"]
            if not parts and (part := _library_call(line, calls)):  # or the launch of a Triton kernel written by hand
                parts, size = [part], sum(part.moved.values())
                calls.remove(part)
            yield KernelRecord(
                name=name,
                graph=graph,
                kind="triton" if call["triton"] else "extern",
                ops=ops,
                bytes=size,
                nodes=_sorted(part.nodes for part in parts),
                reads=_sorted(part.reads - made for part in parts),
                writes=_sorted(part.writes for part in parts),
                source=source,
                target=target,
            )
            ops = ()


def _parts(scheduler: Any, names: Callable[[fx.Node], Iterable[str]], *, of_libraries: bool = False) -> Iterator[_Part]:
    """Yield the parts in the order of their code. Bytes are the whole node's: a tensor that two parts read counts once.

    ``of_libraries``: the calls of libraries instead, of which bytes are not counted, and the launches of Triton kernels
    that are written by hand. Several launches that write parts of a tensor share its bytes.
    """
    was: dict[str, str] = scheduler.mutation_real_name  # a buffer that overwrites a tensor -> that tensor
    by_hand = [node for node in scheduler.nodes if _by_hand(node)]
    writers = Counter(was[name] for node in by_hand for name in node.get_buffer_names() if name in was)
    for index, node in enumerate(scheduler.nodes):
        if (kind := type(node).__name__) == _NO_KERNEL or (kind == _LIBRARY) != of_libraries:
            continue
        sizes: dict[str, int] = {}
        if not of_libraries or _by_hand(node):
            sizes = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
            if of_libraries:
                sizes |= {name: sizes[name] // writers[was[name]] for name in node.get_buffer_names() if name in was}
        for part in node.snodes if node.is_foreach() else [node]:
            buffers = frozenset(part.get_buffer_names())
            overwrites = frozenset(was[buffer] for buffer in buffers if buffer in was)
            reads: set[str] = set()
            for dependency in part.read_writes.reads:
                # these two only order nodes, but Inductor counts them: no memory is read to overwrite it
                is_order = isinstance(dependency, StarDep) and was.get(dependency.name, dependency.name) in overwrites
                if not is_order and not isinstance(dependency, WeakDep):
                    reads.add(dependency.name)
            yield _Part(
                node=index,
                makes=buffers - was.keys(),
                overwrites=overwrites,
                reads=frozenset(was.get(name, name) for name in reads),
                moved={name: size for name, size in sizes.items() if name in reads | buffers},
                nodes=frozenset(name for one in part.get_nodes() for node in _computed(one) for name in names(node)),
                writes=frozenset(name for one in part.get_nodes() for node in _made(one) for name in names(node)),
            )


def _sorted(names: Iterable[frozenset[str]]) -> tuple[str, ...]:
    return tuple(sorted(frozenset[str]().union(*names)))


def _computed(part: Any) -> Iterable[fx.Node]:
    """Return the nodes of the graph that a node of the scheduler computes.

    Inductor counts those that made the scales of a GEMM as the GEMM's own, though other kernels compute them.
    """
    made = _made(part)
    if part.node is None or (made and part.is_extern()):
        return made
    return [*part.node.get_origins(), *made]


def _by_hand(node: Any) -> bool:
    """Return whether a node of the scheduler launches a Triton kernel that Inductor did not write."""
    return type(node.node).__name__ == "UserDefinedTritonKernel"


def _made(part: Any) -> list[fx.Node]:
    """Return the node of the graph whose value a node of the scheduler makes, if that is known."""
    if _by_hand(part):
        origins = part.node.get_origins()  # those of its arguments, too
        return [node for node in origins if not any(user in origins for user in node.users)]
    origin = part.node.get_origin_node() if part.node else None
    return [] if origin is None else [origin]


def _library_call(line: str, waiting: Sequence[_Part]) -> _Part | None:
    """Return the part that a line like ``extern_kernels.mm(buf0, buf1, out=buf2)`` or ``buf2 = torch.ops.<op>(buf0)``
    runs.
    """
    made = {name for names in _RESULT.findall(line) for name in names if name}
    given = set() if made else set(re.findall(r"\w+", line))
    return next((part for part in waiting if part.makes & made or part.overwrites & given), None)


def _read_call(call: str) -> tuple[str, list[str]]:
    """``kernel.run(buf0, reinterpret_tensor(buf1, ...), 8, stream=...)`` -> "kernel", ["buf0", "buf1", ""]."""
    parsed = cast(ast.Call, ast.parse(call, mode="eval").body)
    name = cast(ast.Name, cast(ast.Attribute, parsed.func).value).id
    arguments: list[str] = []
    for argument in parsed.args:
        while isinstance(argument, ast.Call):
            argument = argument.args[0]
        arguments.append(argument.id if isinstance(argument, ast.Name) else "")
    return name, arguments


def _results(name: str, source: str, arguments: Sequence[str]) -> set[str]:
    """Return the arguments that are results of the kernel: Inductor calls their parameters out_ptr0, in_out_ptr0."""
    return {a for a, parameter in _parameters(name, source, arguments) if "out_ptr" in parameter}


def _stored(name: str, source: str, arguments: Sequence[str]) -> set[str]:
    """Return those of the arguments that it writes: it may be given memory for a result that it needs in registers
    alone.
    """
    stored = {*re.findall(r"tl\.(?:store|atomic_\w+)\((\w+)", source)}
    return {a for a, parameter in _parameters(name, source, arguments) if parameter in stored}


def _parameters(name: str, source: str, arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the arguments, each with the parameter of the kernel that it is given for."""
    definition = re.search(rf"^def {name}\(([^)]*)\)", source, re.MULTILINE)
    return zip(arguments, definition[1].split(", ") if definition else [], strict=False)


def _parts_of(arguments: Sequence[str], written: set[str], waiting: Sequence[_Part]) -> list[_Part]:
    """Return the parts, all of one node, that a launch with these arguments runs.

    A new buffer is written by one launch. A tensor may be overwritten by several launches, which read different ones.
    """
    parts = [
        part
        for part in waiting
        if part.makes & written or (part.overwrites & written and part.reads - part.makes <= set(arguments))
    ]
    return [part for part in parts if part.node == parts[0].node]
