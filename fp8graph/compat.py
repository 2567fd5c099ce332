"""Everything that depends on the version or the defects of torch, in one place, each with the reason.

tests/test_compat.py says when an entry can go.
"""

from __future__ import annotations

import logging
import platform
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar, cast

import sympy
import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.external_utils import wrap_inline
from torch._dynamo.utils import get_compilation_metrics
from torch._guards import CompileContext, TracingContext
from torch._inductor import config as inductor_config
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.ops_handler import OpsHandler
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import ops
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _triton
from torch.utils._sympy.functions import FloorDiv

# What torch._scaled_mm multiplies on a CPU: rows not up to torch 2.11 (2.12 not tried), blocks never.
CPU_SCALINGS: Final = frozenset({"tensor", "delayed"} | ({"row"} if torch.__version__ >= "2.13" else set[str]()))

# The CUDA toolkit that torch was built with; None for a CPU build, which generates code for official CUDA builds.
CUDA_VERSION: Final = (
    None if torch.version.cuda is None else tuple(int(part) for part in torch.version.cuda.split(".")[:2])
)

_DYNAMO_LOG: Final = logging.getLogger("torch._dynamo.convert_frame")  # of recompiles and their limit

P = ParamSpec("P")
R = TypeVar("R")


def source_name(node: fx.Node) -> str:
    """Dynamo's name of a graph input, like ``L['self']._parameters['w']``.

    ``Source.name`` is a method up to torch 2.11 and a property after.
    """
    name: Any = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return cast(str, name() if callable(name) else name)


def inductor_cache_folder() -> Path:
    """Where Inductor keeps its compiled code."""
    return Path(cache_dir())


def contiguous_fake(mode: FakeTensorMode, device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> FakeTensor:
    """``torch.empty(shape)`` in a fake mode, without its dispatch, which takes a hundred times as long."""
    with torch._C._DisableTorchDispatch():  # the mode may be on
        return FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), device)


def keep_parameter_sources(module: fx.GraphModule, copy: fx.GraphModule) -> None:
    """Let AOTAutograd know of a copied graph that Dynamo made it.

    Dynamo notes so on the module itself, not in ``meta``. Without the note AOTAutograd takes the graph for an exported
    one: no input is then static, and CUDA graphs copy every parameter at each replay (torch 2.11 to 2.15).
    """
    if (sources := getattr(module, "_param_name_to_source", None)) is not None:
        copy._param_name_to_source = sources  # pyright: ignore[reportAttributeAccessIssue]


def fake_input(node: fx.Node, example: Any, context: TracingContext | None) -> Any:
    """What stands for the graph input ``node`` when its graph is traced again later, in ``context``.

    With ``dynamic=True`` Dynamo turns Python floats into tensors of one element, and the graph calls ``.item()`` on
    them. A fake tensor knows that item as a symbol, but forgets it when it is taken into another fake mode.
    """
    fake = node.meta.get("example_value", example)
    if context is None or not isinstance(fake, FakeTensor) or fake.item_memo is None:
        return fake
    copy = cast(FakeTensorMode, context.fake_mode).from_tensor(fake)
    copy.item_memo = fake.item_memo
    return copy


def process_group(group: Any) -> Any:
    """The process group with a name: graphs and functional collectives know it by that, only a private function finds
    it so. A group is returned as it is."""
    return dist.distributed_c10d._resolve_process_group(cast(Any, group)) if isinstance(group, str) else group


def ranks_of(group: str | None) -> int:
    """How many ranks the process group with the name ``group`` has (None: all); 1 without torch.distributed."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size() if group is None else process_group(group).size()


def default_store() -> Any:
    """The store in which the ranks of ``init_process_group`` met. Private in torch, and used by torchrun's tools."""
    return dist.distributed_c10d._get_default_store()


def gathered_by_fsdp() -> set[int]:
    """The ids of the parameters that FSDP2 gathers for the calls of a layer and frees between them.

    FSDP2 says it nowhere in public. Without this (an empty set) their FP8 copies would be kept whole on every rank.
    """
    found: set[int] = set()
    if not dist.is_available():
        return found
    from torch.distributed import _composable_state

    for reference in list(_composable_state._module_state_mapping.values()):
        group = getattr(reference(), "_fsdp_param_group", None)
        for sharded in getattr(group, "fsdp_params", ()):
            if (parameter := getattr(sharded, "_unsharded_param", None)) is not None:
                found.add(id(parameter))
    return found


_hooks_of_the_dead: Final[list[Any]] = []


def after_optimizer_steps(owner: object, hook: Callable[..., None]) -> None:
    """Call ``hook(optimizer, args, kwargs)`` after each step of any optimizer, until ``owner`` is gone.

    Torch iterates over its dict of hooks. The garbage collector may find ``owner`` while one of them runs, and nothing
    may be removed then: it is when the next hook comes.
    """
    while _hooks_of_the_dead:
        _hooks_of_the_dead.pop().remove()
    weakref.finalize(owner, _hooks_of_the_dead.append, register_optimizer_step_post_hook(hook))


def called_to_trace(args: Sequence[Any]) -> bool:
    """Whether compiled code is called on fake tensors, while Dynamo still compiles: DDPOptimizer does that."""
    return TracingContext.try_get() is not None and any(isinstance(x, FakeTensor) for x in args)


def is_fake_of(fake: FakeTensor, tensor: torch.Tensor) -> bool:
    """Whether Dynamo made ``fake`` of ``tensor``: what DDPOptimizer hands a backend in place of parameters.

    The fake mode remembers, in both directions; only privately.
    """
    return cast(Any, fake.fake_mode).fake_tensor_converter._get_memo(tensor) is fake


def codegen_patches(target: Any, example_inputs: Sequence[Any]) -> dict[str, Any]:
    """The Inductor options that rewritten graphs need on the target, or on the device of the inputs."""
    devices = {x.device.type for x in example_inputs if isinstance(x, torch.Tensor)}
    on_gpu = "cuda" in devices if target is None else target.name != "cpu"
    return gpu_codegen_patches() if on_gpu else cpu_codegen_patches(example_inputs)


def cpu_codegen_patches(example_inputs: Sequence[Any]) -> dict[str, Any]:
    """Inductor options that keep its C++ right on this CPU.

    GCC 12 at -O3 miscompiles Inductor's AVX-512 ``transpose_mxn`` for 16-bit types as soon as one kernel
    transposes two tensors (a relative of pytorch#182016, which fixes the AArch64 version): plain
    ``(x.t().contiguous(), w.t().contiguous())`` in bf16 comes back wrong on torch 2.11 to 2.15. A
    columnwise copy is such a transpose, so rewritten CPU graphs use 256-bit vectors, which are not affected.
    """
    on_cpu = all(x.device.type == "cpu" for x in example_inputs if isinstance(x, torch.Tensor))
    if on_cpu:
        fix_cpu_loop_split()
    if on_cpu and platform.machine() in ("x86_64", "AMD64") and torch.cpu._is_avx512_supported():
        return {"cpp.simdlen": 256}
    return {}


def gpu_codegen_patches() -> dict[str, Any]:
    """Inductor options for GPU code: the fusions that are off by default.

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
    known = inductor_config.get_config_copy()
    return {name: value for name, value in patches.items() if name in known}


def exact_quotient(a: Any, b: Any) -> Any:
    """``a / b`` in Inductor's GPU code, FP32, rounded to nearest. Torch 2.11 has no operation for it."""
    if hasattr(OpsHandler, "div_rn"):
        return ops.div_rn(a, b)
    return ops.inline_asm_elementwise(a, b, asm="div.rn.f32 $0, $1, $2;", constraints="=f,f,f", dtype=torch.float32)


def without_cuda(device: torch.device) -> torch.device:
    """``device``, or meta in place of a CUDA device that this build of torch knows by name only.

    Indexing, ``.contiguous()`` and other Python-level methods of a fake CUDA tensor need a device guard, which a
    CPU build does not have (torch 2.11 to 2.15). Meta tensors follow CUDA's rules.
    """
    return torch.device("meta") if device.type == "cuda" and not torch.backends.cuda.is_built() else device


def forget_device_facts() -> None:
    """Clear what torch remembers of the machine's GPU and triton."""
    for function in (
        DeviceProperties.create,
        _triton.has_triton,
        _triton.triton_backend,
        _triton.triton_hash_with_backend,
    ):
        getattr(getattr(function, "__func__", function), "cache_clear", lambda: None)()


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread: a forward that is called now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def saved_tensors_hooks() -> bool:
    """Whether hooks for saved tensors are set, as torch.utils.checkpoint (not the reentrant one) does."""
    return cast(Any, torch._C)._autograd._top_saved_tensors_default_hooks(True) is not None


def fix_cpu_loop_split() -> None:
    """Keep Inductor's C++ backend from splitting a loop into parts that do not fill it.

    ``CppScheduling.try_loop_split`` (pytorch#132389) turns a loop over n that reads ``x[i // 32]`` into n // 32 loops
    of 32: for n = 40 the last 8 elements are never written (one scale per tile with a ragged edge), and two nodes
    of different sizes fail its assertion (both layouts of one tensor). Torch has no switch for it; it is an
    optimization, so it is left out where it would go wrong. Idempotent.
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


def compile_in_place(module: torch.nn.Module, **kwargs: Any) -> None:
    """``module.compile(...)``, also of modules of torch.nn.

    Dynamo does not compile code of torch.nn that is called first: ``nn.Linear(...).compile()`` runs in eager, and says
    nothing. ``torch.compile(module)`` wraps the call for that reason; so does this.
    """
    if type(module).__module__.startswith("torch.nn."):
        call = torch.compile(wrap_inline(module._call_impl), **kwargs)
        module._compiled_call_impl = call  # pyright: ignore[reportAttributeAccessIssue]
    else:
        module.compile(**kwargs)


def orig_backend(compiled: Any) -> Any:
    """The backend callable behind a compiled module or function, or None.

    torch keeps it in a chain of wrappers: OptimizedModule -> context -> callback -> ... -> backend.
    """
    if isinstance(compiled, torch.nn.Module):
        context = getattr(compiled, "dynamo_ctx", None)  # torch.compile(module)
        implementation = getattr(compiled, "_compiled_call_impl", None)  # module.compile()
        if context is None and implementation is None:
            implementation = compiled.forward  # module.forward = torch.compile(module.forward)
        candidates: list[Any] = [getattr(context, "callback", None), *_closure(implementation)]
    else:
        candidates = list(_closure(compiled))
    for candidate in candidates:
        if hasattr(candidate, "_torchdynamo_orig_backend"):
            return innermost_backend(candidate)
    return None


def innermost_backend(wrapper: Any) -> Any:
    """The backend in a chain of Dynamo's wrappers."""
    while hasattr(wrapper, "_torchdynamo_orig_backend"):
        wrapper = wrapper._torchdynamo_orig_backend
    return wrapper


def _closure(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        yield cell.cell_contents


def failed_frames(frame_ids: set[str], since: int) -> list[str]:
    """Frames that Dynamo gave up on and runs in eager, silently; from its compilation metrics (the last 64).

    Args:
        frame_ids: the frames that the caller compiled. Such a frame falls back to eager when it meets the
            recompile limit: looked for here only while :func:`on_recompile_limit`, which is exact, sees nothing
            because Dynamo's warnings are off. A frame whose autocast region contains a graph break never reaches a
            backend; it is recognised by Dynamo's message.
        since: time in microseconds; older failures belong to other models, whose frame ids may be the same.
    """
    found: list[str] = []
    unseen = not _DYNAMO_LOG.isEnabledFor(logging.WARNING)
    for metrics in get_compilation_metrics():
        if metrics.fail_type is None or (metrics.start_time_us or 0) < since:
            continue
        reason = (metrics.fail_reason or "").splitlines()[0]
        frame = (metrics.compile_id or "").split("/")[0]
        if "fx.traceback.annotate" in reason:
            found.append(
                f"{metrics.co_name}: a graph break inside an fp8graph.autocast region; the frame runs in eager"
            )
        elif unseen and frame in frame_ids and "recompile" in reason:
            found.append(_at_recompile_limit(frame))
    return found


def skipped_frames(since: int) -> list[str]:
    """Functions that Dynamo could not trace and runs in eager, with its reason; what they call, it compiles again.

    From the last 64 compilations after ``since`` (time in microseconds), which may be another model's.
    """
    found: list[str] = []
    for metrics in get_compilation_metrics():
        if metrics.fail_type == "Unsupported" and (metrics.start_time_us or 0) >= since:
            name = re.sub(r"^torch_dynamo_resume_in_(\w+)_at_\d+$", r"\1", metrics.co_name or "")
            place = f"{Path(metrics.co_filename or '').name}:{metrics.co_firstlineno}"
            found.append(f"{name} ({place}): {(metrics.fail_reason or '').splitlines()[0].rstrip('.')}")
    return list(dict.fromkeys(found))


def on_recompile_limit(owner: object, callback: Callable[[Any, str], None]) -> None:
    """Call ``callback(backend, text)`` when a frame meets Dynamo's recompile limit, for as long as ``owner`` lives.

    From then on Dynamo runs that frame in eager for new shapes and values, and calls no backend. It says so nowhere
    but in its log, so this is a filter of that log (with warnings switched off: :func:`failed_frames`, later). What
    ``callback`` raises leaves Dynamo where the error of ``config.fail_on_recompile_limit_hit``, a switch for every
    model, would, and reaches the user. Whose frame it is is a variable of the function that logs: ids of frames do
    not tell, they start again after ``torch._dynamo.reset()``.
    """

    def watch(record: logging.LogRecord) -> bool:
        if "torch._dynamo hit config" in str(record.msg):
            frame: Any = sys._getframe()
            while frame is not None and "compiler_fn" not in frame.f_locals:
                frame = frame.f_back
            if frame is not None:
                callback(innermost_backend(frame.f_locals["compiler_fn"]), _at_recompile_limit(current_frame_id()))
        return True

    _DYNAMO_LOG.addFilter(watch)
    weakref.finalize(owner, _DYNAMO_LOG.removeFilter, watch)


def _at_recompile_limit(frame: str) -> str:
    return f"frame {frame}: Dynamo's recompile limit is exceeded; new shapes or values run in eager"


def never_a_root_frame(function: Callable[P, R]) -> Callable[P, R]:
    """Let Dynamo inline ``function`` into the code that calls it, but never compile it on its own.

    When a frame falls back to eager, Dynamo compiles the functions that it calls one by one. A function that
    returns a ``torch.fx.traceback.annotate`` context cannot be compiled so: Dynamo then hands back the function
    ``annotate`` in place of the context (torch 2.11 to 2.15).
    """
    skip_code(function.__code__)  # pyright: ignore[reportFunctionMemberAccess]
    return function


def current_frame_id() -> str:
    """The id of the frame that Dynamo is compiling, "" outside a compile."""
    compile_id = CompileContext.current_compile_id()
    return str(compile_id).split("/")[0] if compile_id is not None else ""
