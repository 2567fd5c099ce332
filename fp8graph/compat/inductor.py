"""Inductor: how it is called, the options that our graphs need, its defects, and code generation without a device.

And its lowerings for our own ops: how they store, divide, reduce and read.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import platform
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, cast
from unittest import mock

import sympy
import torch
import torch._inductor
from torch import fx
from torch._guards import TracingContext
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor import config as inductor_config
from torch._inductor import ir, scheduler
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.triton import FixedTritonConfig
from torch._inductor.compile_fx import compile_fx as compile_fx
from torch._inductor.compile_fx import compile_fx_inner as compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch._inductor.decomposition import select_decomp_table as select_decomp_table
from torch._inductor.dependencies import StarDep as StarDep
from torch._inductor.dependencies import WeakDep as WeakDep
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import fallbacks, lowerings, make_pointwise, register_lowering
from torch._inductor.ops_handler import OpsHandler
from torch._inductor.pattern_matcher import stable_topological_sort as stable_topological_sort
from torch._inductor.runtime.hints import DeviceProperties, ReductionHint
from torch._inductor.virtualized import V, ops
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _triton
from torch.utils._sympy.functions import FloorDiv


def default_option(name: str) -> Any:
    """Inductor's value for the option ``name`` (like "triton.cudagraphs") if nobody sets it."""
    return functools.reduce(getattr, name.split("."), inductor_config)


def erase_unused(graph: fx.Graph) -> None:
    """``graph.eliminate_dead_code()``, which asks every node for its effects: here only those that nothing reads."""
    random: Any = TracingContext.try_get() is None or default_option("fallback_random")

    def acts(node: fx.Node) -> bool:
        if node.users or not node.is_impure(random):
            return bool(node.users)
        if not isinstance(node.target, torch._ops.OpOverload):
            return True
        named = zip((argument.name for argument in node.target._schema.arguments), node.args, strict=False)
        given: dict[str, Any] = {**dict(named), **node.kwargs}
        return given.get("dropout_p") != 0.0  # attention: without dropout it draws nothing

    graph.eliminate_dead_code(is_impure_node=acts)


def draws_as_eager() -> tuple[dict[str, Any], dict[Any, Callable[..., Any]]]:
    """Return the options and decompositions of ``compile_fx`` for a graph that draws the random numbers of the eager
    program.

    Inductor's own choices draw others, at other places: ``rand(...) < p`` for a mask, seeds for its kernels; on a CPU
    its table has ``bernoulli`` and ``rrelu`` even under ``fallback_random``.
    """
    with inductor_config.patch(fallback_random=True):
        table = select_decomp_table()
    drawn = torch.Tag.nondeterministic_seeded
    return {"fallback_random": True}, {op: to for op, to in table.items() if drawn not in getattr(op, "tags", ())}


def with_options(options: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Set Inductor's options inside a ``with``."""
    return cast(AbstractContextManager[None], inductor_config.patch(dict(options)))


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Tell torch that ``function`` takes its arguments as one list, which it empties."""
    function._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def codegen_patches(target: Any, example_inputs: Sequence[Any]) -> dict[str, Any]:
    """Return the Inductor options that rewritten graphs need on the target, or on the device of the inputs.

    A graph for a GPU may run on a CPU, and then gets the options of both.
    """
    devices = {x.device.type for x in example_inputs if isinstance(x, torch.Tensor)}
    on_gpu = bool(devices - {"cpu", "meta"}) if target is None else target.is_gpu
    return {**cpu_codegen_patches(example_inputs), **(gpu_codegen_patches() if on_gpu else {})}


def cpu_codegen_patches(example_inputs: Sequence[Any]) -> dict[str, Any]:
    """Inductor options that keep its C++ right on this CPU.

    GCC 12 at -O3 miscompiles Inductor's AVX-512 ``transpose_mxn`` for 16-bit types as soon as one kernel
    transposes two tensors (a relative of pytorch#182016, which fixes the AArch64 version): plain
    ``(x.t().contiguous(), w.t().contiguous())`` in bf16 gives wrong results on torch 2.11 to 2.15. A
    columnwise copy is such a transpose, so rewritten CPU graphs use 256-bit vectors, which are not affected.

    Vectors of 256 bits alone are not enough. With the AVX-512 instructions that ``-march=native`` allows, GCC 12 also
    inverts ``(a != b) & c`` of integer vectors: ``where((a != b) & (c != 0), ...)`` of int32 is wrong on torch 2.11
    and 2.13, and on 2.11 so is integer floor division, which Inductor writes with such masks.
    """
    on_cpu = all(x.device.type == "cpu" for x in example_inputs if isinstance(x, torch.Tensor))
    if on_cpu:
        fix_cpu_loop_split()
        fix_flex_attention_packing()
    if on_cpu and platform.machine() in ("x86_64", "AMD64") and torch.cpu._is_avx512_supported():
        return {"cpp.simdlen": 256, **_no_avx512_instructions()}
    return {}


def _no_avx512_instructions() -> dict[str, str]:
    """``cpp.march``, or, before torch had it, the one option whose text torch copies into the compiler's command."""
    if "cpp.march" in option_names():
        return {"cpp.march": "x86-64-v3"}
    option = "enable_floating_point_contract_flag"
    return {f"cpp.{option}": f"{getattr(inductor_config.cpp, option)} -mno-avx512f"}


def gpu_codegen_patches() -> dict[str, Any]:
    """Inductor options for GPU code that turn on fusions which are off by default.

    ``nested_reduction`` (torch 2.13) makes a norm and the amax of its tiles one kernel. A cast with a scale per tile is
    more than the 30 operations after which Inductor writes a value to memory in FP32.

    ``combo_kernels`` puts independent small kernels into one launch, those of scales. Reductions are left out: torch
    2.11 and 2.13 would join the amaxes of the rows and of the columns of a whole activation into one looped kernel
    with the blocks and the registers of the larger one (pytorch#171671 gives each its own blocks, off by default;
    pytorch#186668, after 2.13, leaves very large reductions out).
    """
    patches = {
        "triton.nested_reduction": True,
        "combo_kernels": True,
        "combo_kernels_pointwise_only": True,
        "realize_opcount_threshold": 200,
    }
    fix_nested_scatter()
    fix_large_casts()
    options = inductor_config.get_config_copy()
    return {name: value for name, value in patches.items() if name in options}


def without_loading(load: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """Let Inductor generate its text and call ``load(lowering)``, with a GraphLowering, instead of loading the text."""
    return mock.patch.object(GraphLowering, "compile_to_module", load)


def without_triton_driver() -> AbstractContextManager[Any]:
    """Keep Inductor from giving triton the driver of the GPU, which need not be present."""
    from torch._inductor.runtime import triton_helpers

    def leave_it() -> None: ...

    return mock.patch.object(triton_helpers, "set_driver_to_gpu", leave_it)


def forget_device_facts() -> None:
    """Clear torch's caches of facts about the machine's GPU and triton."""
    for function in (
        DeviceProperties.create,
        _triton.has_triton,
        _triton.triton_backend,
        _triton.triton_hash_with_backend,
    ):
        getattr(getattr(function, "__func__", function), "cache_clear", lambda: None)()


def fix_cpu_loop_split() -> None:
    """Keep Inductor's C++ backend from splitting a loop into parts that do not fill it.

    ``CppScheduling.try_loop_split`` (pytorch#132389) turns a loop over n that reads ``x[i // 32]`` into n // 32 loops
    of 32: for n = 40 the last 8 elements are never written (one scale per tile with a ragged edge): pytorch#195582,
    which pytorch#196119 would mend. Two nodes of different sizes fail its assertion (both layouts of one tensor):
    pytorch#183370, which pytorch#183715 mends. Torch has no switch for it; it is an optimization, so it is left out
    where it would go wrong. Idempotent.
    """
    original = CppScheduling.try_loop_split
    if hasattr(original, "_fp8graph_original"):
        return

    def try_loop_split(self: Any, nodes: list[Any]) -> list[Any]:
        sizes: set[Any] = set()
        for node in nodes:
            (index_size, _), body, _ = node.node.get_default_sizes_body()
            sizes.add(tuple(index_size))
            for expression in body.indexing_exprs.values():
                for division in expression.find(FloorDiv) if isinstance(expression, sympy.Expr) else ():
                    variable, divisor = division.args
                    if body.var_ranges.get(variable, 0) % divisor != 0:
                        return nodes
        return original(self, nodes) if len(sizes) == 1 else nodes

    try_loop_split._fp8graph_original = original  # pyright: ignore[reportFunctionMemberAccess]
    CppScheduling.try_loop_split = try_loop_split


def fix_nested_scatter() -> None:
    """Keep Inductor from putting a store to computed places behind the amaxes of tiles of a norm, in one kernel.

    ``nested_reduction`` (pytorch#182896) computes the places for all elements of a row, and stores one for each tile:
    the code is not generated, or does not compile (torch 2.13). Without the store, the norm is a kernel of its own.
    Torch 2.15 compiles the plainest case, with one kernel less; its numbers were not checked. Idempotent.

    No issue of it was found. One to file has the function of this defect's test: ``index_put`` of the amaxes of tiles
    of 32 behind a norm, under ``triton.nested_reduction``. The rules of pytorch#182896 have to refuse a Scatter.
    """
    for owner, method in nested_fusions():
        original = getattr(owner, method)
        if hasattr(original, "_fp8graph_original"):
            continue

        def fuses(*nodes: Any, _original: Any = original, **settings: Any) -> Any:
            if any(isinstance(part, scheduler.BaseSchedulerNode) and _stores_to_places(part) for part in nodes):
                return None
            return _original(*nodes, **settings)

        fuses._fp8graph_original = original  # pyright: ignore[reportFunctionMemberAccess]
        setattr(owner, method, staticmethod(fuses) if method in ("can_fuse", "plan") else fuses)


def nested_fusions() -> list[tuple[Any, str]]:
    """Return the class and the name of each method of Inductor that decides on fusing with a reduction of tiles."""
    methods = (
        *(("NestedReduction", "can_fuse"), ("FusedNestedReductions", "can_fuse_with")),  # torch 2.13
        *(("NestedReduction", "plan"), ("FusedNestedReductions", "_plan_fusion_with")),  # torch 2.15
    )
    owners = [(getattr(scheduler, name, None), method) for name, method in methods]
    return [(owner, method) for owner, method in owners if hasattr(owner, method)]


LARGE: Final = 2**22  # elements: a GPU takes longer over them than over a launch
LONG: Final = 2**14  # elements of a row that a loop reduces
TILE: Final = 64
LOOPS: Final = 128  # programs that go along rows: as many as such a GPU has multiprocessors
MEASURED: Final = (90,)  # compute capabilities: blocks were measured on an H200, whose chip an H100 has, too
# Options of a user's: they try more blocks, or let several programs share a row.
TUNING: Final = (
    "max_autotune", "max_autotune_pointwise", "coordinate_descent_tuning",
    "triton.cooperative_reductions", "triton.force_cooperative_reductions",
)  # fmt: skip


def fix_large_casts() -> None:
    """Keep Inductor from joining large loops with others; give those that quantize the blocks that were fastest.

    A combo kernel has blocks of 32 x 32, with 4 warps, and as many programs for each part as the largest part needs: on
    an H200 those of weights moved 1.0 to 2.0 TB/s, and the same casts, each in a kernel of its own, 2.7 to 2.9; the
    rotary embedding's backward took twice as long as in kernels of its own.

    Of 26 blocks for tiles, 64 x 64 with 8 warps was within 2 % of the fastest there for a plain cast and SwiGLU's
    backward; with 4 warps the fastest for a norm; 128 x 128 with 16 the fastest for SwiGLU. Loops along rows that also
    store them transposed (an amax of rows, or one that is kept) took up to twice as long with the best of the five to
    seven blocks that Inductor tries as with those here: lower or higher ones, with more warps; with many results, or
    rows across the order in memory, 32 warps have too few registers (benchmarks/results/blocks_h200.jsonl). Graphs
    without the options of :func:`gpu_codegen_patches` are compiled as before, and with options that tune more, all
    blocks. Idempotent.

    GPUs of a kind that was not measured (``MEASURED``) keep the blocks that Inductor tries; their loops are in kernels
    of their own, too, since combo kernels have the same blocks everywhere.

    Upstream, pytorch#130015 is about casts that are also stored transposed, and pytorch#171671 and pytorch#172527 let
    the parts of a combo kernel have blocks and programs of their own. ``InductorChoices`` has a handler for such
    choices, but per thread, which another thread's backward does not have, and one for all libraries: pytorch#194097
    would let several be registered for a process.
    """
    if hasattr(InductorChoices.triton_kernel_kwargs, "_fp8graph_original"):
        return
    combinable = scheduler.ForeachKernelSchedulerNode.combinable_nodes
    original = InductorChoices.triton_kernel_kwargs

    def combinable_nodes(nodes: list[Any]) -> list[Any]:
        ours = inductor_config.combo_kernels_pointwise_only
        return [node for node in combinable(nodes) if not (ours and any(map(_is_large, _stored(node))))]

    def triton_kernel_kwargs(
        self: Any, kernel_cls: type[Any], features: Any, groups: list[Any], kernel_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        chosen = original(self, kernel_cls, features, groups, kernel_kwargs)
        fixed = inductor_config.combo_kernels_pointwise_only and not any(map(default_option, TUNING))
        if not fixed or "fixed_config" in chosen or kernel_kwargs.get("override_persistent_reduction"):
            return chosen
        measured = all(_capability(node.get_device()) in MEASURED for node in features.scheduler_nodes())
        blocks = _blocks(features, groups[0]) if measured else {}
        return chosen | {"fixed_config": FixedTritonConfig(blocks)} if blocks else chosen

    triton_kernel_kwargs._fp8graph_original = original  # pyright: ignore[reportFunctionMemberAccess]
    InductorChoices.triton_kernel_kwargs = triton_kernel_kwargs
    scheduler.ForeachKernelSchedulerNode.combinable_nodes = staticmethod(combinable_nodes)


def _stored(node: Any) -> list[Any]:
    """Return the buffers that the loops of a scheduler's node write."""
    return [buffer.node for part in node.get_nodes() for buffer in part.get_outputs()]


def _is_large(each: Any) -> bool:
    """Return whether a buffer, or a dependency on one, is of ``LARGE`` elements or more."""
    return V.graph.sizevars.optimization_hint(each.get_numel(), fallback=0) >= LARGE


def _is_cast(buffer: Any) -> bool:
    return buffer.get_dtype().is_floating_point and buffer.get_dtype().itemsize == 1


def _blocks(features: Any, tiling: Mapping[str, Any]) -> dict[str, int]:
    """Return the blocks of a kernel; nothing: Inductor is to try some."""
    stored = [buffer for node in features.scheduler_nodes() for buffer in _stored(node)]
    casts = sum(_is_cast(buffer) and _is_large(buffer) for buffer in stored)
    if not features.is_reduction():
        return _of_tiles(features, tiling, casts) if casts else {}
    return _of_loop(features, tiling, casts) if casts else _of_amax(features, tiling)


def _of_amax(features: Any, tiling: Mapping[str, Any]) -> dict[str, int]:
    """Return the blocks of a loop that takes amaxes of long rows; nothing: it is another one.

    Inductor has one configuration for it: 4 numbers for each thread, loads of 8 bytes, and too few bytes under way.
    Each thread gets 8 of bf16 here, 16 bytes. A loop that reads three tensors (SwiGLU's gradient) has more registers
    than 2048 threads of a multiprocessor may have: fewer warps, of as many numbers each. Counted in code for sm_90; no
    GPU has timed it.
    """
    columns = tiling.get("r0_")
    if len(tiling) > 2 or not isinstance(columns, int | sympy.Integer) or columns < LONG:
        return {}
    kinds = {getattr(getattr(node.node, "data", None), "reduction_type", None) for node in features.reduction_nodes()}
    if kinds != {"max"} or features.get_reduction_hint() != ReductionHint.INNER:
        return {}
    reads = _reads(features)
    width, warps = (2048, 8) if sum(map(_is_large, reads)) > 2 else (4096, 16)
    return {"XBLOCK": 1, "R0_BLOCK": width, "num_warps": warps, "num_stages": 1}


def _of_tiles(features: Any, tiling: Mapping[str, Any], casts: int) -> dict[str, int]:
    """Return the blocks of a kernel without reductions; nothing: Inductor is to try some.

    A norm reads a number for each row and one for each column, too: half as many warps. SwiGLU reads two tensors and
    makes one: larger tiles.
    """
    sizes = [V.graph.sizevars.optimization_hint(tiling.get(dim, 0), fallback=0) for dim in "xy"]
    numels = [V.graph.sizevars.optimization_hint(each.get_numel(), fallback=0) for each in _reads(features)]
    wide = 2 * TILE
    if sum(1 < numel < LARGE and numel in sizes for numel in numels) > 1:
        tile, warps = TILE, 4
    elif casts <= 2 and sum(numel >= LARGE for numel in numels) == 2 and _is_tiled(tiling, wide):
        tile, warps = wide, 16
    else:
        tile, warps = TILE, 8
    return {"XBLOCK": tile, "YBLOCK": tile, "num_warps": warps, "num_stages": 1} if _is_tiled(tiling, tile) else {}


def _reads(features: Any) -> set[Any]:
    """Return the reads of a kernel: one tensor at several places is several."""
    return {dependency for node in features.scheduler_nodes() for dependency in node.read_writes.reads}


def _of_loop(features: Any, tiling: Mapping[str, Any], casts: int) -> dict[str, int]:
    """Return the blocks of a loop along rows that stores them transposed, too; nothing: Inductor is to try some."""
    rows, columns = tiling.get("x"), tiling.get("r0_")
    if len(tiling) > 2 or not isinstance(rows, int | sympy.Integer) or not isinstance(columns, int | sympy.Integer):
        return {}
    across = any(node.node.data.reduction_hint != ReductionHint.INNER for node in features.reduction_nodes())
    height = next((each for each in ((64, 32) if across else (32, 16)) if rows >= LOOPS * each), None)
    if height is None or columns < 1024 or features.get_reduction_hint() != ReductionHint.DEFAULT:
        return {}
    warps = 16 if across or casts > 2 else 32
    return {"XBLOCK": height, "R0_BLOCK": 128 if across else 256 * warps // height, "num_warps": warps, "num_stages": 1}


def _is_tiled(tiling: Mapping[str, Any], tile: int) -> bool:
    """Return whether a kernel's programs are tiles of two dimensions that can be ``tile`` wide and high."""
    y, x = tiling.get("y"), tiling.get("x")
    if "z" in tiling or not isinstance(y, int | sympy.Integer) or not isinstance(x, int | sympy.Integer):
        return False
    return min(x, y) >= tile and y <= tile * (2**16 - 1)  # the grid's limit


def _stores_to_places(node: Any) -> bool:
    """Return whether some loop of a scheduler's node stores to places that it computes."""
    return any(isinstance(getattr(part.node, "data", None), ir.Scatter) for part in node.get_nodes())


def fix_flex_attention_packing() -> None:
    """Keep Inductor's flex_attention for CPUs from packing keys and values where its code has no AVX-512 vectors.

    The template asks the CPU whether oneDNN multiplies packed operands, which a CPU with AMX answers with yes. It packs
    with ``pack_vnni2``, which raises in code for narrower vectors: ours (``cpp.simdlen``), and plain torch's under
    ``ATEN_CPU_CAPABILITY=avx2``. Idempotent.

    No issue of it was found. One to file has flex_attention of bf16 on a CPU with AMX, under the option
    ``{"cpp.simdlen": 256}``: ``need_pack``, from pytorch#151530, has to ask for the vectors that the code is compiled
    with, as pytorch#191780 does for instructions of AMX.
    """
    from torch._inductor.codegen import cpp_flex_attention_template  # imported first, it would import itself

    asks, with_vectors = "at::native::cpublas::could_pack(", "at::vec::Vectorized<float>::size() == 16 && "
    template = cpp_flex_attention_template.FLEX_ATTENTION_TEMPLATE
    if with_vectors not in template:
        cpp_flex_attention_template.FLEX_ATTENTION_TEMPLATE = template.replace(asks, with_vectors + asks)


def option_names() -> set[str]:
    """Return the names of all options of Inductor."""
    return set(torch._inductor.list_options())


def options_of_mode(mode: str) -> dict[str, Any]:
    """Return the options that a mode of ``torch.compile`` stands for.

    Raises:
        KeyError: for another mode, with the names of all.
    """
    modes = torch._inductor.list_mode_options()
    if mode not in modes:
        raise KeyError(", ".join(modes))
    return modes[mode]


def package(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], file: Any) -> None:
    """Compile ``module(*args, **kwargs)`` ahead of time, and write what a ``.pt2`` file holds into ``file``, an IOBase.

    Not into a path: torch's writer raises in a destructor when the disk is full, which ends the process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # torch copies what it has deprecated
        program = torch.export.export(module, tuple(args), dict(kwargs))
        options = codegen_patches(None, [*program.constants.values(), *program.state_dict.values()])
        torch._inductor.aoti_compile_and_package(program, package_path=file, inductor_configs=options)


def lower_to_stored(op: Any) -> None:
    """``op(x)`` is x, written to memory in the shape that x has at this point.

    Contiguous where the data decide a size: GraphLowering.run_node keeps the strides of a graph's results, but not
    those that hold such a size, and backward, which was traced with the strides, would read others.
    """

    def stored(x: Any) -> Any:
        x.realize()
        return ir.ExternKernel.require_contiguous(x) if free_unbacked_symbols(x.get_size()) else x

    register_lowering(op, type_promotion_kind=None)(stored)


def lower_to_join(op: Any) -> None:
    """``op(parts, dim)`` is their ``torch.cat``; each part that takes arithmetic is computed by its own loop."""

    def join(parts: Sequence[Any], dim: int) -> Any:
        if parts[0].get_device().type == "cpu" or not any(map(_is_computed, parts)):
            return lowerings[torch.ops.aten.cat.default](parts, dim)
        return ir.TensorBox(ir.ConcatKernel.create(parts, dim % len(parts[0].get_size())))

    register_lowering(op, type_promotion_kind=None)(join)


def _is_computed(x: Any) -> bool:
    """Return whether ``x`` is an expression that is not in memory, and more than a cast."""
    while isinstance(x, (ir.TensorBox, ir.StorageBox, ir.BaseView)):
        x = x.data
    return isinstance(x, ir.Pointwise) and x.inner_fn_opcount().num_ops > 2


def lower_to_arranged(op: Any) -> None:
    """``op(parts, dim)`` is parts joined along dim, in memory in the order of its dims, whatever that of its loops.

    A part is computed in its place if Inductor may still choose its strides.
    """

    def arranged(parts: Sequence[Any], dim: int) -> Any:
        copies = [lowerings[torch.ops.aten.clone.default](part) for part in parts]
        for copy in copies:
            copy.realize()
        joined = lowerings[torch.ops.aten.cat.default](copies, dim) if len(copies) > 1 else copies[0]
        return ir.ExternKernel.require_contiguous(joined)

    register_lowering(op, type_promotion_kind=None)(arranged)


def lower_to_written(op: Any) -> None:
    """``op(target, x)`` is ``target.copy_(x)``; a loop that computes x writes it there.

    ``copy_`` first stores an expression that reads several tensors, in an order of its own, and then copies that.
    """

    def written(target: Any, x: Any) -> None:
        if x.get_device().type == "cpu":
            lowerings[torch.ops.aten.copy_.default](target, x)
            return
        loop = ir.Pointwise.create(
            device=x.get_device(), dtype=x.get_dtype(), inner_fn=x.make_loader(), ranges=x.get_size()
        )
        ir.MutationLayoutSHOULDREMOVE.realize_into(loop, target, unsafe_alias=True)

    register_lowering(op, type_promotion_kind=None)(written)


def lower_to_exact_quotient(op: Any) -> None:
    """``op(a, b)`` is a / b, elementwise, one IEEE division on every device."""

    def quotient(a: Any, b: Any) -> Any:
        return make_pointwise(ops.truediv if a.get_device().type == "cpu" else _rounded_to_nearest)(a, b)

    register_lowering(op, type_promotion_kind=None, broadcast=True)(quotient)


def lower_to_maximum(op: Any, few: int) -> None:
    """``op(x)`` is ``x.amax()``; a reduction of at most ``few`` elements is not split into several kernels."""

    def maximum(x: Any) -> Any:
        is_small = V.graph.sizevars.statically_known_leq(x.get_numel(), few)
        with inductor_config.patch(split_reductions=inductor_config.split_reductions and not is_small):
            return lowerings[torch.ops.aten.amax.default](x)

    register_lowering(op, type_promotion_kind=None)(maximum)


def replaces(op: Any) -> bool:
    """Give whether Inductor's code computes ``op`` without calling it: it also keeps those that it had to call once."""
    return op in lowerings and op not in fallbacks


def lower_to_kernel(op: Any, kernel: Any, *settings: Any) -> None:
    """``op(*args)`` is torch's own kernel behind ``kernel(*args, *settings)``, also where Inductor would tune that."""

    def call(*args: Any) -> Any:
        with inductor_config.patch(max_autotune=False, max_autotune_gemm=False):
            return lowerings[kernel](*args, *settings)

    register_lowering(op, type_promotion_kind=None)(call)


def lower_to_placed(op: Any) -> None:
    """``op(x, places, size, filled)`` writes each element of x to its place in a new [size], not ``filled``: of zeros.

    ``aten.index_put`` would copy what it writes into.
    """

    def placed(x: Any, places: Any, size: Any, filled: bool) -> Any:
        aten, made = torch.ops.aten, {"dtype": x.get_dtype(), "device": x.get_device()}
        empty, full = lowerings[aten.empty.memory_format], lowerings[aten.full.default]
        out = empty([size], **made) if filled else full([size], 0, **made)
        return lowerings[aten.index_put_.default](out, [places], x)

    register_lowering(op, type_promotion_kind=None)(placed)


def lower_to_saturating_cast(op: Any, largest: Mapping[torch.dtype, float]) -> None:
    """``op(x, dtype)`` is x, FP32, in FP8; other casts than those of ``SATURATING`` need a clamp."""

    def cast(x: Any, dtype: torch.dtype) -> Any:
        if dtype not in SATURATING or not _has_fp8_casts(x.get_device()):
            x = lowerings[torch.ops.aten.clamp_min.default](x, -largest[dtype])
            x = lowerings[torch.ops.aten.clamp_max.default](x, largest[dtype])
        return lowerings[torch.ops.prims.convert_element_type.default](x, dtype)

    register_lowering(op, type_promotion_kind=None)(cast)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """The shape and the strides of a tensor in memory."""

    shape: Sequence[int]
    stride: Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch of a Triton kernel that is written by hand.

    ``reads``, ``writes``: the parameters that are tensors, each with the index of that input or result. ``constants``:
    the other parameters.
    """

    kernel: Any
    grid: tuple[int, int, int]
    reads: Mapping[str, int]
    writes: Mapping[str, int]
    constants: Mapping[str, Any]


# The shapes and dtypes of the results, which of them are to be zeros before, and the launches.
Launches = tuple[Sequence[tuple[Sequence[int], torch.dtype]], Collection[int], Sequence[Launch]]


def has_triton() -> bool:
    """Return whether triton is installed, which is not part of torch's CPU wheels."""
    return importlib.util.find_spec("triton") is not None


def writes_tiles(device: torch.device) -> bool:
    """Return whether Triton kernels that are written by hand run there: on GPUs of the kinds that were measured."""
    return _capability(device) in MEASURED and has_triton()


def rounds_between() -> bool:
    """Return whether generated code rounds to the narrow types between fused operations, as eager code does."""
    return bool(default_option("emulate_precision_casts"))


def lower_to_launches(op: Any, plan: Callable[..., Launches]) -> None:
    """``op(inputs, *settings)`` is new tensors, written by the launches of ``plan(described inputs, *settings)``."""

    def launched(inputs: Sequence[Any], *settings: Any) -> list[Any]:
        inputs = list(map(_with_rows_in_memory, inputs))
        described = [Described(shape=[*map(int, x.get_size())], stride=[*map(int, x.get_stride())]) for x in inputs]
        shapes, zeros, launches = plan(described, *settings)
        results: list[Any] = []
        for index, (shape, dtype) in enumerate(shapes):
            made = {"dtype": dtype, "device": inputs[0].get_device()}
            full, empty = lowerings[torch.ops.aten.full], lowerings[torch.ops.aten.empty.memory_format]
            results.append(full(shape, 0.0, **made) if index in zeros else empty(shape, **made))
        for launch in launches:
            tensors = {name: inputs[index] for name, index in launch.reads.items()}
            tensors |= {name: results[index] for name, index in launch.writes.items()}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an error while it reads the kernel: all inputs would count as written
                lowerings[triton_kernel_wrap.triton_kernel_wrapper_mutation](
                    kernel_idx=triton_kernel_wrap.kernel_side_table.add_kernel(launch.kernel),
                    constant_args_idx=triton_kernel_wrap.kernel_side_table.add_constant_args(dict(launch.constants)),
                    grid=[launch.grid],
                    tma_descriptor_metadata={},
                    kwargs=tensors,
                )
        return results

    register_lowering(op, type_promotion_kind=None)(launched)


def _with_rows_in_memory(x: Any) -> Any:
    """``x``, its last dim contiguous: a copy where it is not."""
    x.realize()
    x.freeze_layout()
    return x if x.get_stride()[-1] == 1 else ir.ExternKernel.require_contiguous(x)


def lower_to_logistic(op: Any) -> None:
    """``op(x)`` is the sigmoid of x, FP32: on a GPU Inductor's own, on a CPU ``1 / (exp(-x) + 1)``."""

    def logistic(x: Any) -> Any:
        return make_pointwise(_one_by_one_plus_exp if x.get_device().type == "cpu" else ops.sigmoid)(x)

    register_lowering(op, type_promotion_kind=None)(logistic)


def lower_to_visible(op: Any) -> None:
    """``op(x)`` is x, FP32, and NaN where it is infinite. x is read once."""

    def visible(x: Any) -> Any:
        cheap = _has_fp8_casts(x.get_device())
        return make_pointwise(_plus_zero_times_itself if cheap else _nan_where_infinite)(x)

    register_lowering(op, type_promotion_kind=None)(visible)


SATURATING: Final = (torch.float8_e4m3fn, torch.float8_e5m2)  # in PTX, where it has casts to them


def _has_fp8_casts(device: torch.device) -> bool:
    """Return whether Triton casts to FP8 by PTX's ``cvt.rn.satfinite``: from compute capability 8.9 on."""
    return _capability(device) >= 89


def _capability(device: torch.device) -> int:
    """Return the compute capability of an NVIDIA GPU, 90 for 9.0; 0 for other devices."""
    capability = None if device.type == "cpu" else DeviceProperties.create(device).cc
    return capability if isinstance(capability, int) else 0


def _one_by_one_plus_exp(x: Any) -> Any:
    one = ops.constant(1.0, torch.float32)
    return ops.truediv(one, ops.add(ops.exp(ops.neg(x)), one))


def _plus_zero_times_itself(x: Any) -> Any:
    """x + x * 0: zeros keep their sign, inf becomes NaN. One multiply-add, no comparison and no selection."""
    return ops.add(x, ops.mul(x, ops.constant(0.0, torch.float32)))


def _nan_where_infinite(x: Any) -> Any:
    largest, nan = (ops.constant(value, torch.float32) for value in (torch.finfo(torch.float32).max, math.nan))
    return ops.where(ops.le(ops.abs(x), largest), x, nan)


def _rounded_to_nearest(a: Any, b: Any) -> Any:
    """``a / b`` in Inductor's GPU code, FP32, rounded to nearest. Torch 2.11 has no operation for it."""
    if hasattr(OpsHandler, "div_rn"):
        return ops.div_rn(a, b)
    return ops.inline_asm_elementwise(a, b, asm="div.rn.f32 $0, $1, $2;", constraints="=f,f,f", dtype=torch.float32)
