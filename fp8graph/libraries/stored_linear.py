"""Linear layers whose weight is in FP8 or FP4: those of libraries, as ops of the dialect, and our own.

``StoredLinear`` takes weights from any checkpoint, without a library. ``StoredGroupedLinear`` is one whose groups of
rows multiply inputs of their own, and ``StoredEmbedding`` is a table whose rows are decoded as they are looked up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8graph.errors import ConfigError


@dataclass(kw_only=True)
class StoredWeight:
    """The tensors of one weight, as the dialect's ``stored_weight`` takes them."""

    data: Tensor  # [N, K], or bytes [N, K/2] of two E2M1 numbers; of experts [experts, N, K]
    scale_inv: Tensor  # it multiplies
    scaling: str
    block: Sequence[int] = ()
    global_scale_inv: Tensor | None = None
    activations: str = "dynamic"
    input_scale_inv: Tensor | None = None


def one_scale(data: Tensor, scale_inv: Tensor, *, per_token: bool, **inputs: Any) -> StoredWeight:
    """Return a weight with one scale. ``per_token``: its input has one per token, so the weight's stands for each
    row's.
    """
    scale_inv = scale_inv.detach().to(torch.float32).reshape(())
    if per_token:
        return StoredWeight(data=data, scale_inv=scale_inv.expand(data.shape[0], 1).clone(), scaling="row", **inputs)
    return StoredWeight(data=data, scale_inv=scale_inv, scaling="tensor", **inputs)


def multiplied(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """``F.linear`` with a frozen weight: no tensor of ``weight`` gets a gradient, even if it requires one."""
    return functional.linear(x, high_precision(weight, _dtype_of_products(x)), bias)


def _dtype_of_products(x: Tensor) -> torch.dtype:
    """Return the dtype in which autocast multiplies ``x``, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def groups_of(module: nn.Module) -> int | None:
    """Return the number of groups of a linear whose inputs are [..., groups, k] (DeepSeek-V4); None for any other
    layer.
    """
    grouped = isinstance(module, nn.Linear) and "GroupedLinear" in type(module).__name__
    return cast(int, module.n_groups) if grouped and hasattr(module, "n_groups") else None


def multiplied_in_groups(x: Tensor, weight: StoredWeight, bias: Tensor | None, groups: int) -> Tensor:
    """Return the products of [..., groups, k] with ``groups`` matrices [n, k], which are one weight: [..., groups, n].

    Each is a linear of its own bytes. Where a tile of scales reaches over two of them, they are decoded first.
    """
    rows, parts = x.flatten(0, -3), _groups(weight, groups)
    if parts is None:
        matrices = high_precision(weight, _dtype_of_products(x)).unflatten(0, (groups, -1)).transpose(1, 2)
        y = torch.bmm(rows.transpose(0, 1), matrices).transpose(0, 1)
    else:
        # of two dims each: a matmul of three that are not contiguous would be batched
        y = torch.stack([multiplied(rows.select(1, i), part, None) for i, part in enumerate(parts)], 1)
    y = y.unflatten(0, x.shape[:-2])
    return y if bias is None else y + bias.view(groups, -1)


def _groups(weight: StoredWeight, groups: int) -> list[StoredWeight] | None:
    """Return the parts of ``weight``; None if a tile of scales belongs to two of them."""
    scales = weight.scale_inv
    if scales.numel() == 1:
        scales_of = [scales] * groups
    else:
        rows = weight.data.shape[0] // groups
        height = weight.block[0] if weight.block else 1
        if rows % height:
            return None
        scales_of = scales.chunk(groups)
    return [replace(weight, data=d, scale_inv=s) for d, s in zip(weight.data.chunk(groups), scales_of, strict=True)]


def high_precision(weight: StoredWeight, dtype: torch.dtype) -> Tensor:
    """Return the dialect's ``stored_weight``.

    Raises:
        ConfigError: FSDP2 has cast the weight.
    """
    if weight.data.element_size() > 1:
        raise ConfigError(
            f"a weight in FP8 arrives in {weight.data.dtype}: FSDP2 has cast its codes, without their scales "
            "(MixedPrecisionPolicy(param_dtype=...)). Call fp8graph.adopt(model), or fp8graph.compile, after "
            "fully_shard and before the first call, without CPUOffloadPolicy and reshard_after_forward=<int>."
        )
    return torch.ops.fp8graph.stored_weight(
        weight.data.detach(),
        weight.scale_inv.detach(),
        dtype,
        scaling=weight.scaling,
        block=[*weight.block],
        global_scale_inv=None if weight.global_scale_inv is None else weight.global_scale_inv.detach(),
        activations=weight.activations,
        input_scale_inv=None if weight.input_scale_inv is None else weight.input_scale_inv.detach(),
    )


@functools.cache  # Dynamo guards a forward by its identity: layers that share it share compiled code
def forward_of(read: Callable[[Any], StoredWeight], in_eager: bool) -> Callable[[Any, Tensor], Tensor]:
    """Return the ``forward`` of layers that ``read`` reads.

    Args:
        in_eager: it runs in eager, too; else the library's does.
    """

    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002  (its name in nn.Linear)
        if not in_eager and not torch.compiler.is_compiling():
            return type(self).forward(self, input)
        if (groups := groups_of(self)) is not None:
            return multiplied_in_groups(input, read(self), self.bias, groups)
        return multiplied(input, read(self), self.bias)

    return forward


def _refuse(name: str) -> None:
    raise ConfigError(
        f"{name} is called to train, and fp8graph.quantize_weights has dropped its weight in high precision, for "
        "serving. Call model.eval() to serve it. To train, load the model in high precision."
    )


# Dynamo of torch 2.11 fails on an exception of a class like this one
_refuse_training: Any = torch.compiler.disable(_refuse)


class StoredLinear(nn.Linear):  # PEFT adapts what is an nn.Linear
    """``nn.Linear`` with a frozen weight that is kept as it is stored.

    Compiled with fp8graph, its bytes and scales are multiplied as they are, forward and backward. In eager, and by
    other compilers, the weight is dequantized for each call. The parameter is ``weight``: FP8 [N, K], or bytes
    [N, K / 2] of two E2M1 numbers. The buffers are ``weight_scale_inv`` and, where the format has them,
    ``weight_global_scale_inv`` and ``input_scale_inv``; all multiply.
    """

    weight_scale_inv: Tensor
    weight_global_scale_inv: Tensor | None
    input_scale_inv: Tensor | None
    layer_format: object = None  # how its checkpoint stores it: an update comes in the same form
    served_as: str = (
        ""  # its name, if ``quantize_weights`` dropped a weight in high precision: it is not trained through
    )

    def __init__(self, stored: StoredWeight, bias: nn.Parameter | None = None) -> None:
        nn.Module.__init__(self)  # nn.Linear's would make a weight in high precision
        self.out_features, packed = stored.data.shape
        self.in_features = packed * (2 if stored.data.dtype == torch.uint8 else 1)
        self.scaling, self.block, self.activations = stored.scaling, [*stored.block], stored.activations
        self.weight = nn.Parameter(stored.data, requires_grad=False)
        self.register_parameter("bias", bias)
        self.register_buffer("weight_scale_inv", stored.scale_inv)
        self.register_buffer("weight_global_scale_inv", stored.global_scale_inv)
        self.register_buffer("input_scale_inv", stored.input_scale_inv)

    def stored(self) -> StoredWeight:
        """Its tensors, as they are."""
        return StoredWeight(
            data=self.weight,
            scale_inv=self.weight_scale_inv,
            scaling=self.scaling,
            block=self.block,
            global_scale_inv=self.weight_global_scale_inv,
            activations=self.activations,
            input_scale_inv=self.input_scale_inv,
        )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (its name in nn.Linear)
        if self.served_as and self.training and torch.is_grad_enabled():
            _refuse_training(self.served_as)
        return multiplied(input, self.stored(), self.bias)

    def extra_repr(self) -> str:
        tiles = f" {self.block[0]}x{self.block[1]}" if self.block else ""
        bias = "" if self.bias is None else ", bias=True"
        return f"{self.in_features}, {self.out_features}, {self.scaling}{tiles}, activations={self.activations}{bias}"


class StoredGroupedLinear(StoredLinear):
    """A :class:`StoredLinear` of ``n_groups`` matrices: [..., n_groups, k] to [..., n_groups, n].

    ``weight`` has the matrices below each other, as in transformers' ``FP8GroupedLinear`` (DeepSeek-V4).
    """

    def __init__(self, stored: StoredWeight, bias: nn.Parameter | None = None, *, n_groups: int) -> None:
        super().__init__(stored, bias)
        self.n_groups = n_groups

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (its name in nn.Linear)
        return multiplied_in_groups(input, self.stored(), self.bias, self.n_groups)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, n_groups={self.n_groups}"


class StoredEmbedding(nn.Embedding):
    """``nn.Embedding`` with a frozen table in FP8 and one scale: the rows that are looked up are decoded, no others.

    The parameter is ``weight``, FP8 [rows, columns], and the buffer ``weight_scale``, FP32 [1], multiplies: the names
    of transformers' ``FP8Embedding``. A row is multiplied in FP32 and rounded once to the dtype of the table that this
    one replaces.
    """

    weight_scale: Tensor

    def __init__(self, data: Tensor, scale_inv: Tensor, *, dtype: torch.dtype, padding_idx: int | None = None) -> None:
        nn.Module.__init__(self)  # nn.Embedding's would make a table in high precision
        self.num_embeddings, self.embedding_dim = data.shape
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, None, 2.0
        self.scale_grad_by_freq = self.sparse = False
        self.dtype = dtype
        self.weight = nn.Parameter(data, requires_grad=False)
        self.register_buffer("weight_scale", scale_inv.to(torch.float32).reshape(1))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (its name in nn.Embedding)
        rows = functional.embedding(input, self.weight)
        return (rows.to(torch.float32) * self.weight_scale).to(self.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.weight.dtype}, rows decoded to {self.dtype}"
