"""The state that torch's compile cache reads into its keys, made from its source, and ways to vary it."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import textwrap
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails


def must_differ(names: str) -> bool:
    """Whether keys differ with the installed torch if the state is another that it reads under ``names``."""
    return bool({_OURS, *read_by_torch()} & {*names.split()})


def _dotted(node: ast.AST) -> str:
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.insert(0, node.attr)
        node = node.value
    return ".".join([node.id, *path]) if isinstance(node, ast.Name) else ""


@functools.cache
def read_by_torch() -> frozenset[str]:
    """The names that the key's details have ("self.gm"), and those of torch and of its configs that they read."""
    found: set[str] = set()
    for kind in AOTAutogradCacheDetails.__mro__[:-1]:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
        for node in ast.walk(tree):
            name = _dotted(node) if isinstance(node, ast.Attribute) else ""
            if name.startswith("self.") and isinstance(getattr(node, "ctx", None), ast.Store):
                found.add(name)
            elif name.split(".")[0] in ("torch", "config", "cconfig", "config_comms"):
                found.add(name)
    whole = {name for name in found if not any(other.startswith(f"{name}.") for other in found)}
    types = ("Tensor", "dtype", "device", "OpOverload", "OpOverloadPacket", "GraphModule", "Node")
    return frozenset(name for name in whole if not name.endswith(("_like", *types)))


@contextlib.contextmanager
def _setting(get: Callable[[], Any], set_: Callable[[Any], Any], value: Any) -> Generator[None]:
    before = get()
    assert before != value
    set_(value)
    try:
        yield
    finally:
        set_(before)


def _attribute(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    return _setting(lambda: getattr(owner, name), lambda x: setattr(owner, name, x), value)


def _config(module: str, **values: Any) -> AbstractContextManager[None]:
    return importlib.import_module(module).patch({name.replace("__", "."): value for name, value in values.items()})


@contextlib.contextmanager
def _autocast(device: str, dtype: torch.dtype) -> Generator[None]:
    """Autocast on a device that may not be there: ``torch.autocast`` then warns, and does nothing."""
    before = torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)
        torch.set_autocast_dtype(device, before)


@contextlib.contextmanager
def _deterministic(warn_only: bool) -> Generator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


_MATMUL: Final[Any] = torch.backends.cuda.matmul
_INDUCTOR: Final = "torch._inductor.config"
_OURS: Final = "ours"  # our passes' identity reads it, with any torch
_AUTOCAST: Final = f"{_OURS} self.autocast_state torch.is_autocast_enabled torch.get_autocast_dtype self.disable_amp"
_DETERMINISTIC: Final = "self.deterministic_algorithms_settings"

# The state by name: what of the key it varies, and how.
STATES: Final[dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]]] = {
    "no_grad": ("self.grad_enabled torch.is_grad_enabled", torch.no_grad),
    "inference_mode": ("", torch.inference_mode),
    **{
        f"autocast {device} {dtype}": (
            f"{_AUTOCAST} torch._C._autocast_supported_devices torch._C._is_any_autocast_enabled",
            functools.partial(_autocast, device, dtype),
        )
        for device in ("cpu", "cuda")
        for dtype in (torch.bfloat16, torch.float16)
    },
    "deterministic": (
        f"{_DETERMINISTIC} self.deterministic_algorithms torch.are_deterministic_algorithms_enabled",
        lambda: _deterministic(False),
    ),
    "deterministic or a warning": (
        f"{_DETERMINISTIC} torch.is_deterministic_algorithms_warn_only_enabled",
        lambda: _deterministic(True),
    ),
    "memory is not filled": (
        f"{_DETERMINISTIC} torch.utils.deterministic.fill_uninitialized_memory",
        lambda: _attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
    ),
    "two threads": (
        "self.cpp_runtime_thread_count",
        lambda: _setting(torch.get_num_threads, torch.set_num_threads, 2),
    ),
    "a default dtype": (
        f"{_OURS} self.default_dtype torch.get_default_dtype",
        lambda: _setting(torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16),
    ),
    "TF32": (
        "self.cuda_matmul_settings torch.backends.cuda.matmul.fp32_precision",
        lambda: _attribute(_MATMUL, "fp32_precision", "tf32"),
    ),
    "sums in FP16": (
        "self.cuda_matmul_settings torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
        lambda: _attribute(_MATMUL, "allow_fp16_reduced_precision_reduction", False),
    ),
    "sums in bf16": (
        "self.cuda_matmul_settings torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
        lambda: _attribute(_MATMUL, "allow_bf16_reduced_precision_reduction", False),
    ),
    "an option of Inductor": (
        "self.inductor_config config.save_config_portable",
        lambda: _config(_INDUCTOR, epilogue_fusion=False),
    ),
    "CUDA graphs": ("self.fx_kwargs config.triton.cudagraphs", lambda: _config(_INDUCTOR, triton__cudagraphs=True)),
    "provenance": (
        "self.provenance_tracking_level config.trace.provenance_tracking_level "
        "config.effective_provenance_tracking_level",
        lambda: _config(_INDUCTOR, trace__provenance_tracking_level=1),
    ),
    "an option of AOTAutograd": (
        "self.autograd_config config.save_config",
        lambda: _config("torch._functorch.config", activation_memory_budget=0.9),
    ),
    "entries with the code inside": (
        "self.precompile_enabled torch._functorch.config.bundled_autograd_cache",
        lambda: _config("torch._functorch.config", bundled_autograd_cache=True),
    ),
    "a tag": (
        "self.cache_key_tag cconfig.cache_key_tag",
        lambda: _config("torch.compiler.config", cache_key_tag="another"),
    ),
}

if importlib.util.find_spec("torch._inductor.config_comms"):  # not in torch 2.11
    STATES["an option for communication"] = (
        "self.inductor_config_comms config_comms.save_config_portable",
        lambda: _config("torch._inductor.config_comms", reorder_iterative_use_runtime_estimations=True),
    )

# Whatever else the key reads, and why no test varies it by itself.
NOT_VARIED: Final = {
    "the graph, its inputs and their sources": "self.gm self.example_inputs self.inputs_to_check self.aot_config "
    "self.act_input_paths self.var_to_hint_override",
    "metadata of the graph that only other backends and annotations set": "self.sac_context_fn_hashes "
    "self.saved_tensors_hooks_fx_wrap_cache_hashes self.region_activation_memory_budget self.cudagraph_override "
    "self.cudagraph_annotation self.nested_inductor_config_patches self.region_activation_memory_budget_annotations",
    "user-defined triton kernels, which have no CPU code": "self.user_defined_triton_source "
    "self.triton_kernel_source_codes torch._library.triton.get_triton_kernels_for_op",
    "the installation and the machine": "self.torch_version self.system_info self.default_cuda_device_index "
    "torch.accelerator.is_available torch.accelerator.current_device_index torch.get_default_device",
    "passes: ours, and the user's, which have identities": "self.pre_grad_custom_pass config.pre_grad_custom_pass "
    "self.post_grad_custom_pre_pass config.post_grad_custom_pre_pass self.post_grad_custom_post_pass "
    "config.post_grad_custom_post_pass self.joint_custom_pre_pass config.joint_custom_pre_pass "
    "self.joint_custom_post_pass config.joint_custom_post_pass self._pre_fusion_custom_pass "
    "config._pre_fusion_custom_pass self._post_fusion_custom_pass config._post_fusion_custom_pass "
    "self._fuse_ddp_communication_passes config._fuse_ddp_communication_passes self._custom_partitioner_fn "
    "config.custom_partitioner_fn self.custom_estimator_solver_uuids self.custom_backend_passes "
    "self.custom_backend_codegen_configs self.custom_backend_codegen_implications",
    "whether the number of threads matters": "config.cpp.threads config.cpp.dynamic_threads",
    "reports of torch's own, and ranks": "self.provenance_tracking_to_timeline "
    "config.trace.provenance_tracking_to_timeline self.compile_on_one_rank",
}
