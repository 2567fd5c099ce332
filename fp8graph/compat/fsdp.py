"""FSDP2: the parameters that it gathers, and its two functions around a gather. All of it is private to torch."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8graph.compat.distributed import SHARD
from fp8graph.errors import Fp8GraphError

_BEFORE, _AFTER = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_OWNER: Final = "fp8graph_owner"
# what the functions below read and write of a ``sharded``; without one of them nothing is gathered in FP8
_NEEDED: Final = (
    *("sharded_param", "_unsharded_param", "_orig_size", "mesh_info", "post_forward_mesh_info", "fsdp_placement"),
    *("offload_to_cpu", "is_dtensor", "orig_dtype", "param_dtype", "all_gather_outputs", "_init_extensions"),
    *("init_all_gather_outputs", "free_unsharded_param", "reset_sharded_param"),
    *("sharded_state", "shard_mesh", "_module_info", "_sharded_param_data", "padded_sharded_param_size"),
    *("_unsharded_inner_tensors",),
)


class Shard(NamedTuple):
    """The facts that a graph needs of a parameter that FSDP2 gathers for it."""

    rows: int  # of each shard
    reason: str | None  # why it cannot be gathered in FP8; None if it can
    group: str = ""  # the name of the process group that gathers it
    kept: bool = False  # one gather serves forward and backward


def gathered() -> dict[int, Any]:
    """FSDP2's own objects (``FSDPParam``) for the parameters that it gathers for a call, by the whole one's id.

    FSDP2 has no public way to ask. Without the answer, whole FP8 copies of these parameters would be kept on every
    rank, so an unknown layout is an error, never a guess.

    Raises:
        Fp8GraphError: there are FSDP2 modules, but this torch keeps their parameters in another place.
    """
    by_id: dict[int, Any] = {}
    for sharded in _sharded_parameters():
        # set by the first gather; until then only declared by the class
        if hasattr(sharded, "_unsharded_param") or not _declares(sharded, "_unsharded_param"):
            by_id[id(_read(sharded, "_unsharded_param"))] = sharded
    return by_id


def whole_parameters(module: torch.nn.Module) -> dict[int, tuple[Tensor, torch.dtype]]:
    """Return the whole parameters that FSDP2 gathers for calls of ``module``, by the id of their shards, with their
    dtype.
    """
    inside, by_id = set(module.modules()), dict[int, tuple[Tensor, torch.dtype]]()
    for sharded in gathered().values():
        if sharded._module_info.module in inside:
            by_id[id(sharded.sharded_param)] = whole_of(sharded), sharded.param_dtype or sharded.orig_dtype
    return by_id


def gathers_in_fp8(module: torch.nn.Module) -> bool:
    """Return whether FSDP2 gathers a parameter of ``module`` by functions that :func:`attach` gave it."""
    inside = set(module.modules())
    return any(
        sharded._module_info.module in inside and owner_of(sharded) is not None for sharded in gathered().values()
    )


def reshard(module: torch.nn.Module) -> None:
    """Let the parameters of ``module`` be shards, also those that FSDP2 has kept whole after forward."""
    for each in module.modules():
        if (function := getattr(each, "reshard", None)) is not None and original_class(each) is not type(each):
            function()


def original_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the class of ``module`` as its author wrote it: FSDP2 gives what it shards a subclass."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not dist.is_available() or not isinstance(module, fsdp.FSDPModule):
        return type(module)
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, fsdp.FSDPModule))


def meshes(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the DeviceMesh of each parameter of ``module`` that FSDP2 shards, also while the whole ones are there."""
    inside = set(module.modules())
    for sharded in _sharded_parameters():
        if sharded._module_info.module in inside:
            yield sharded.sharded_param.device_mesh


def _sharded_parameters() -> Iterator[Any]:
    for group in _groups():
        yield from _read(group, "fsdp_params")


def _groups() -> Iterator[Any]:
    """Yield the sets of parameters that FSDP2 gathers together."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: nobody uses it
    if fsdp is None or not dist.is_available():
        return
    from torch.distributed import _composable_state

    states = getattr(_composable_state, "_module_state_mapping", None)
    if states is None:
        # FSDP2 gives each class of modules that it shards a subclass
        if any(issubclass(kind, torch.nn.Module) for kind in fsdp.FSDPModule.__subclasses__()):
            raise _unknown("torch.distributed._composable_state._module_state_mapping")
        return
    for module, reference in list(states.items()):
        if isinstance(module, fsdp.FSDPModule) and (state := reference()) is not None:
            yield from _parameter_groups(state)


def why_not_in_fp8(sharded: Any) -> str | None:
    """Return the reason for which FSDP2 cannot gather a parameter through our functions, or None. The same on all
    ranks.
    """
    if missing := _missing(sharded):
        return f"torch {torch.__version__} has no FSDPParam.{missing}"
    if hasattr(shard_of(sharded), _BEFORE) and owner_of(sharded) is None:
        return f"a {type(shard_of(sharded)).__name__} is gathered by functions of its own"
    if not sharded.sharded_param.requires_grad:
        return "it is frozen, and gathers in FP8 begin with a step of its optimizer"
    if sharded._module_info.shared_modules:
        return "another module has the same parameter"
    if sharded.is_dtensor:
        return "it is sharded by tensor parallelism, too"
    if sharded.fsdp_placement.dim != 0:
        return f"it is sharded along dim {sharded.fsdp_placement.dim}"
    ranks, rows = sharded.shard_mesh.size(), sharded._orig_size[0]
    if ranks == 1:
        return "one rank has all of it"
    if rows % ranks:
        return f"its {rows} rows do not fall into {ranks} equal shards"
    if sharded.offload_to_cpu:
        return "its shards are on the CPU (CPUOffloadPolicy)"
    after = sharded.post_forward_mesh_info
    if after is not None and after is not sharded.mesh_info:
        return "it is resharded to fewer ranks after forward (reshard_after_forward=<int>), which takes no FP8"
    return None


def facts(sharded: Any) -> Shard:
    rows, reason = shard_of(sharded).shape[0] if shard_of(sharded).ndim else 0, why_not_in_fp8(sharded)
    if reason is not None:
        return Shard(rows, reason)
    kept = all(is_kept(group) for group in _groups() if sharded in group.fsdp_params)
    return Shard(rows, None, sharded.shard_mesh.get_group().group_name, kept)


def shard_of(sharded: Any) -> Tensor:
    """Return the rows of this rank."""
    return getattr(sharded.sharded_param, SHARD)


def whole_of(sharded: Any) -> Tensor:
    """Give the whole parameter, whether it is there now or not: an object that stays the same from gather to gather."""
    return sharded._unsharded_param


def group_of(sharded: Any) -> Any:
    """Return the tensors that FSDP2 gathers together with the parameter."""
    return next(group for group in _groups() if sharded in group.fsdp_params)


def is_kept(group: Any) -> bool:
    """Return whether the whole parameters of ``group`` stay after forward: backward does not gather them again.

    That is the default for the last module that ``fully_shard`` wrapped. The parameters do not know it.
    """
    return group.post_forward_mesh_info is None


def is_for_backward(group: Any) -> bool:
    """Return whether the gather of ``group`` that begins now is for backward. A forward that is run again is none."""
    return _read(group, "_training_state").name == "PRE_BACKWARD"


def is_gathered(sharded: Any) -> bool:
    """Return whether the whole parameter is there now."""
    return sharded.sharded_state.name != "SHARDED"


def owner_of(sharded: Any) -> Any:
    """Return the object for which :func:`attach` was called; None if FSDP2 gathers the parameter as it is."""
    return getattr(getattr(shard_of(sharded), _BEFORE, None), _OWNER, None)


def attach(sharded: Any, before: Callable[..., Any], after: Callable[..., Any], owner: Any) -> None:
    """From the next gather on, FSDP2 sends what ``before`` returns, and gives what is gathered to ``after``.

    The functions are attributes of the plain shard: no class of tensors, and ``state_dict()`` stays as it is. A shard
    that takes its place (``model.to()``, ``load_state_dict(assign=True)``) gets them, too; FSDP2 keeps ``owner`` alive,
    as they do. The whole parameter stays the same object, by which names and scaling state are found; its
    memory is up to the caller (:func:`stand_in`).
    """
    setattr(before, _OWNER, owner)
    reference, take_over = weakref.ref(sharded), type(sharded).reset_sharded_param

    def reset_sharded_param() -> None:
        if (alive := reference()) is not None:
            take_over(alive)
            _set_functions(alive, before, after)

    _set_functions(sharded, before, after)
    sharded.reset_sharded_param = reset_sharded_param
    _begin_anew(sharded)


def _set_functions(sharded: Any, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    tensor: Any = shard_of(sharded)
    for name, function in ((_BEFORE, before), (_AFTER, after)):
        setattr(tensor, name, function)


def gather_as_stored(modules: Collection[torch.nn.Module]) -> None:
    """Let FSDP2 gather the frozen parameters of ``modules``, but biases, in the dtype in which they are stored.

    ``MixedPrecisionPolicy(param_dtype=...)`` would cast FP8 codes as if they were numbers, and gloo sends no FP8, only
    bytes. Parameters that FSDP2 has gathered before, keeps on the CPU or on fewer ranks after forward are left alone.

    Raises:
        Fp8GraphError: there are such parameters, but this torch has another FSDP2.
    """
    for sharded in _sharded_parameters() if modules else ():
        if missing := _missing(sharded):
            raise _unknown(f"FSDPParam.{missing}")
        module, name = sharded._module_info.module, sharded._module_info.param_name
        after = sharded.post_forward_mesh_info
        if (
            module in modules
            and name != "bias"
            and not sharded.sharded_param.requires_grad
            and not hasattr(sharded, "_unsharded_param")
            and not hasattr(shard_of(sharded), _BEFORE)
            and not sharded.offload_to_cpu
            and (after is None or after is sharded.mesh_info)
        ):
            attach(sharded, *_as_stored(sharded), owner=None)


def _as_stored(sharded: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the two functions of :func:`attach` that send the rows of this rank, padded to those of the first, as
    bytes.
    """
    dtype = shard_of(sharded).dtype

    def before(mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor], None]:
        rows = sharded._sharded_param_data.view(sharded.padded_sharded_param_size)
        return (rows.view(torch.uint8) if dtype.itemsize == 1 else rows,), None

    def after(gathered: Sequence[Tensor], _: Any, param_dtype: Any, *, out: Tensor | None = None) -> Any:
        return None if out is not None else (gathered[0].view(dtype), ())  # out has the memory of what is gathered

    return before, after


def detach(sharded: Any) -> None:
    """Let FSDP2 gather the parameter as it is again."""
    for owner, name in ((shard_of(sharded), _BEFORE), (shard_of(sharded), _AFTER), (sharded, "reset_sharded_param")):
        vars(owner).pop(name, None)
    _begin_anew(sharded)
    if hasattr(sharded, "_unsharded_param"):
        rows, ranks = shard_of(sharded), sharded.shard_mesh.size()
        dtype = sharded.param_dtype or sharded.orig_dtype
        sharded.init_all_gather_outputs([rows.numel()], [dtype], ranks, rows.device)
        stand_in(sharded, view_of(sharded.all_gather_outputs[0], sharded._orig_size))
        sharded.free_unsharded_param()


def stand_in(sharded: Any, whole: Tensor) -> None:
    """Let the whole parameter, if it was gathered once, have the memory of ``whole``."""
    if hasattr(sharded, "_unsharded_param"):
        sharded._unsharded_param.data = whole


def frees(sharded: Any, tensors: Sequence[Tensor]) -> None:
    """Let FSDP2 free the memory of ``tensors`` with the whole parameter."""
    sharded._unsharded_inner_tensors = list(tensors)


def allocate(x: Tensor) -> None:
    """Give the tensor its memory back, which FSDP2 has freed."""
    storage, size = x.untyped_storage(), x.numel() * x.itemsize
    if storage.size() < size:
        storage.resize_(size)


def free(x: Tensor) -> None:
    """Free the tensor's memory, which :func:`allocate` gives back."""
    x.untyped_storage().resize_(0)


def view_of(memory: Tensor, size: torch.Size) -> Tensor:
    """Return a tensor of this size at the beginning of ``memory``, without autograd's knowledge of views."""
    strides = torch.empty(size, device="meta").stride()
    return torch.empty(0, dtype=memory.dtype, device=memory.device).set_(memory.untyped_storage(), 0, size, strides)


def _begin_anew(sharded: Any) -> None:
    """Forget the buffers of earlier gathers; FSDP2 makes new ones."""
    sharded._init_extensions()
    sharded.all_gather_outputs = []


def _parameter_groups(state: Any) -> Sequence[Any]:
    if hasattr(state, "_fsdp_param_groups"):  # torch 2.13 has one group per mesh, 2.11 a single one
        return state._fsdp_param_groups
    group = _read(state, "_fsdp_param_group")
    return [] if group is None else [group]  # None: a module without parameters of its own


def _read(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise _unknown(f"{type(owner).__name__}.{name}")
    return getattr(owner, name)


def _missing(sharded: Any) -> str:
    """Get the first attribute that this torch's parameters lack, "" if none; some are declared, and set by a gather."""
    return next((name for name in _NEEDED if not hasattr(sharded, name) and not _declares(sharded, name)), "")


def _declares(owner: Any, name: str) -> bool:
    return any(name in inspect.get_annotations(kind) for kind in type(owner).__mro__)


def _unknown(missing: str) -> Fp8GraphError:
    return Fp8GraphError(
        f"torch {torch.__version__} has no {missing}: fp8graph cannot tell which weights FSDP2 gathers and in which "
        "dtype, and would keep whole FP8 copies of them on every rank. Install a torch version that fp8graph supports "
        "(`fp8graph doctor` names them), or do not compile modules under fully_shard with fp8graph."
    )
