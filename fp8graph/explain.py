"""``fp8graph.explain``: what would be rewritten, without weights, without a GPU, without compiling code."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from fp8graph.backend import Backend, PolicyLike
from fp8graph.report import Report


def explain(
    model: nn.Module,
    *args: Any,
    policy: PolicyLike | None = None,
    training: bool | None = None,
    target: str | None = None,
    **kwargs: Any,
) -> Report:
    """Trace ``model(*args, **kwargs)`` on fake tensors and report what fp8graph does with every GEMM.

    Nothing is computed and no weight is read: a model on the meta device, and inputs on it, work as well. The
    model is not changed.

    Args:
        model: any module; a compiled one is unwrapped.
        args, kwargs: the inputs of one call; only shapes and dtypes of tensors matter.
        policy: see :class:`Backend`.
        training: trace forward and backward together, or forward only under ``no_grad``. Default: training if
            gradients are enabled here and some parameter requires one.
        target: the hardware to decide for, "cpu" or like "sm_90"; default: that of the tensors (meta: CPU).

    Raises:
        PolicyError, UnsupportedRecipeError: (``ValueError``) for a policy or target that cannot be used.
    """
    backend = Backend(policy, compiler="eager", target=target)
    model = getattr(model, "_orig_mod", model)
    if training is None:
        training = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}  # deepcopy takes these in place of the real tensors: no weight is copied
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = _fake(tensor, mode)
    fake_model = copy.deepcopy(model, memo)
    fake_model._compiled_call_impl = None  # a model that was compiled in place is traced as it was before
    fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, lambda x: _fake(x, mode), (args, kwargs))
    # A model that was called before with other shapes must not be traced with dynamic ones here.
    static = torch._dynamo.config.patch({"automatic_dynamic_shapes": False})
    with mode, torch.set_grad_enabled(training), static:
        torch.compile(fake_model, backend=backend)(*fake_args, **fake_kwargs)
    return backend.report


def _fake(x: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    if isinstance(x, FakeTensor):
        return x
    # a meta model does not trace like a real one (attention decomposes, caches fail): trace it as a CPU model
    device = torch.device("cpu") if x.device.type == "meta" else x.device
    with mode:
        fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    if isinstance(x, nn.Parameter):
        return nn.Parameter(fake, requires_grad=x.requires_grad)
    return fake.requires_grad_(x.requires_grad and x.is_leaf)
