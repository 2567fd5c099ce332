"""Load an FP8 checkpoint of any format into a model that was made in high precision, without the format's library."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from fp8graph.checkpoints import WHOLE, Checkpoint, LayerFormat, QuantizedWeight
from fp8graph.checkpoints.layer_format import E8M0, EMBEDDING
from fp8graph.checkpoints.shards import TensorInfo
from fp8graph.compat.wrappers import name_in_original, original_module, submodule
from fp8graph.errors import CheckpointError, did_you_mean, expect, expect_path, printable
from fp8graph.libraries.stored_linear import (
    StoredEmbedding,
    StoredGroupedLinear,
    StoredLinear,
    StoredWeight,
    groups_of,
    one_scale,
)

_log = logging.getLogger("fp8graph")
_UPDATE: Final = Path("update")  # of a server: in messages it stands where a file would
_Model = TypeVar("_Model", bound=nn.Module)


def load_checkpoint(
    model: _Model, folder: Path | str, *, strict: bool = True, progress: Callable[[int], None] | None = None
) -> _Model:
    """Load an FP8 checkpoint of Hugging Face, compressed-tensors or ModelOpt into ``model``, in place.

    Each linear layer that the checkpoint quantizes becomes a ``StoredLinear``, which keeps bytes and scales as
    they are stored, and each embedding a ``StoredEmbedding``; all other tensors are copied. One tensor is read at a
    time. Compile the model afterwards.

    Args:
        model: of the checkpoint's architecture and with its names, in high precision, compiled or not. Weights may be
            on the meta device: those are loaded to the CPU, all others to where they are.
        folder: with config.json and safetensors.
        strict: False: tensors that only the model or only the checkpoint has are logged, not refused.
        progress: is called with the bytes of each tensor that was read.

    Returns:
        ``model``.

    Raises:
        CheckpointError: the checkpoint is damaged, of no known format, or does not fit ``model``. All headers and
            scales are checked first, so that ``model`` is unchanged; it is not if a file becomes unreadable later.
    """
    expect("load_checkpoint", "model", model, nn.Module, "a model, an nn.Module")
    expect_path("load_checkpoint", "folder", folder)
    checkpoint = Checkpoint(folder)
    checkpoint.check()
    targets = _targets(model)
    _compare(checkpoint, model, targets, strict)
    checkpoint.check_scales()
    shards = checkpoint.shards
    for name in checkpoint.others:
        if name in targets:
            _put(model, targets, name, shards.tensor(name))
            if progress is not None:
                progress(shards.info(name).bytes)
    for layer, stored in checkpoint.layers.items():
        module: Any = submodule(model, layer)
        device = torch.device("cpu") if module.weight.is_meta else module.weight.device
        made = _made(module, stored, checkpoint.weight(layer)).to(device)
        if isinstance(made, StoredLinear):
            made.layer_format = replace(stored, part=None)
            for x in (made.weight, *made.buffers()):  # torch's memory, not safetensors': q's, k's and v's may be joined
                x.data = x.data.clone()
        owner, _, leaf = layer.rpartition(".")
        setattr(submodule(model, owner), leaf, made.train(module.training))
        if progress is not None:
            progress(sum(shards.info(name).bytes for name in stored.names(layer).values()))
    shards.close()
    return model


def _made(module: Any, stored: LayerFormat, weight: QuantizedWeight) -> nn.Module:
    """Return the layer that takes the place of ``module``."""
    if isinstance(module, nn.Embedding):
        dtype, padding = module.weight.dtype, module.padding_idx
        return StoredEmbedding(weight.data, weight.scales(), dtype=dtype, padding_idx=padding)
    if (groups := groups_of(module)) is not None:
        return StoredGroupedLinear(_stored(stored, weight), module.bias, n_groups=groups)
    return StoredLinear(_stored(stored, weight), module.bias)


def _why_not_in(module: nn.Module, stored: LayerFormat) -> str | None:
    """Return the reason why no layer in FP8 can take the place of ``module``; None if one can."""
    kind, one_scale = type(module), stored.block == (WHOLE, WHOLE)
    if isinstance(module, nn.Embedding):
        if not one_scale or stored.packed:
            return f"its scales are of {_tile(stored.block)}, and a table in FP8 has one scale"
        if kind.forward is not nn.Embedding.forward or module.max_norm is not None:
            return f"{kind.__name__} computes more than rows of its table"
        return None
    if isinstance(module, nn.Linear):
        if stored.scheme == EMBEDDING[0]:
            return "it is stored as an embedding is, and in the model it is a linear"
        if kind.forward is not nn.Linear.forward and groups_of(module) is None:
            return f"{kind.__name__} multiplies in a way of its own"
        return _why_not(stored)
    return (
        f"in the model it is a {kind.__name__}: only nn.Linear and nn.Embedding can be loaded this way. Load it with "
        "the library of the format, and call fp8graph.compile"
    )


def update_weights(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], *, strict: bool = True) -> None:
    """Write new values into a model that :func:`load_checkpoint` loaded, in place: a server's update during training.

    The tensors come one by one under the names and in the dtypes of that checkpoint, as :func:`quantized_state` gives
    them. Bytes and scales are stored as they come. Parameters and buffers stay the same objects at the same addresses,
    so that compiled code and CUDA graphs stay, too. Each layer is written when the last of its tensors has come: no
    more than one layer waits, if tensors come in that order.

    Args:
        model: compiled or not, and not in use meanwhile.
        tensors: ``(name, tensor)``, on any device.
        strict: False: tensors that do not come leave the model's as they are, and are not an error.

    Raises:
        CheckpointError: a tensor has no place in ``model``, or another shape or dtype; a scale is NaN, infinite or
            negative; a tensor is missing. The message names it. What came before it is written.
    """
    expect("update_weights", "model", model, nn.Module, "a model, an nn.Module")
    expect("update_weights", "tensors", tensors, Iterable, "an iterable of (name, tensor)")
    targets = _targets(model)
    layers: dict[str, tuple[StoredLinear, LayerFormat]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        linear = original_module(module)
        if isinstance(linear, StoredLinear) and isinstance(linear.layer_format, LayerFormat):
            layers[name_in_original(name)] = linear, linear.layer_format
    owners = {name: layer for layer, (_, stored) in layers.items() for name in stored.names(layer).values()}
    waiting: dict[str, dict[str, Tensor]] = {}  # the tensors of layers that have not come whole
    came: set[str] = set()
    for name, x in tensors:
        came.add(name)
        if (layer := owners.get(name)) is None:
            _put_update(model, targets, name, x)
            continue
        held = waiting.setdefault(layer, {})
        held[name] = x
        linear, stored = layers[layer]
        if held.keys() == {*stored.names(layer).values()}:
            _write(layer, linear, stored, waiting.pop(layer))
    own = {id(x) for linear, _ in layers.values() for x in (linear.weight, *linear.buffers())}
    there = own | {id(targets[name]) for name in came if name in targets}  # tied weights come once
    missing = [name for name, layer in owners.items() if name not in came and (strict or layer in waiting)]
    missing += [name for name, x in targets.items() if strict and id(x) not in there]
    if missing:
        raise CheckpointError(f"{_UPDATE}: there is no tensor {missing[0]!r}, which the model has.")


def _put_update(model: nn.Module, targets: Mapping[str, Tensor], name: str, x: Tensor) -> None:
    if name not in targets:
        raise CheckpointError(
            f"{_UPDATE}: the model has no place for {printable(name)!r}.{did_you_mean(name, targets)}"
        )
    if (reason := _why_not_to(_info(name, x), targets[name])) is not None:
        raise CheckpointError(reason)
    if x.dtype != targets[name].dtype and any(each.itemsize == 1 for each in (x.dtype, targets[name].dtype)):
        raise CheckpointError(
            f"{_UPDATE}: tensor {name!r} is {x.dtype}, and that of the model is {targets[name].dtype}: the update "
            "quantizes other layers than the checkpoint that was loaded. Load one of the same layers first."
        )
    _put(model, targets, name, x)


def _write(layer: str, linear: StoredLinear, stored: LayerFormat, held: Mapping[str, Tensor]) -> None:
    """Copy the tensors of one layer to where its weight is."""
    infos = {name: _info(name, x) for name, x in held.items()}
    for problem in stored.problems(layer, infos):
        raise CheckpointError(f"{problem}.")
    for problem in stored.wrong_scales(layer, infos, held.__getitem__):
        raise CheckpointError(f"{problem}.")
    new, now = _stored(stored, stored.read(layer, infos, held.__getitem__)), linear.stored()
    pairs = [
        (now.data, new.data),
        (now.scale_inv, new.scale_inv),
        (now.global_scale_inv, new.global_scale_inv),
        (now.input_scale_inv, new.input_scale_inv),
    ]
    with torch.no_grad():
        for there, x in pairs:
            if there is None or x is None:
                continue
            if (there.shape, there.dtype) != (x.shape, x.dtype):
                raise CheckpointError(
                    f"{_UPDATE}: layer {layer!r} has {x.dtype} {list(x.shape)} in the update, and {there.dtype} "
                    f"{list(there.shape)} in the model."
                )
            there.copy_(x)


def _info(name: str, x: Tensor) -> TensorInfo:
    """Return the entry that a file would have for a tensor."""
    kind = str(x.dtype).removeprefix("torch.")
    return TensorInfo(name=name, file=_UPDATE, dtype=x.dtype, stored_as=kind, shape=(*x.shape,), bytes=x.nbytes)


def _targets(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of ``model`` by their names in a checkpoint."""
    state = original_module(model).state_dict(keep_vars=True)
    return {name_in_original(name): x for name, x in state.items()}


def _compare(checkpoint: Checkpoint, model: nn.Module, targets: Mapping[str, Tensor], strict: bool) -> None:
    """
    Raises:
        CheckpointError: ``checkpoint`` does not fit ``model``, whose state dict is ``targets``.
    """
    folder = checkpoint.folder
    for layer, stored in checkpoint.layers.items():
        weight = checkpoint.shards.info(stored.names(layer)["weight"])
        shape = (*weight.shape[:-1], weight.shape[-1] * (1 + stored.packed))
        try:
            module: Any = submodule(model, layer)
        except AttributeError:
            text = "the model has no such layer. Was it made from the config of this checkpoint?"
            raise CheckpointError(f"{folder}: layer {layer!r} is quantized, and {text}") from None
        if (reason := _why_not_in(module, stored)) is not None:
            raise CheckpointError(f"{folder}: layer {layer!r} ({stored.scheme}) cannot be loaded: {reason}.")
        if tuple(module.weight.shape) != shape:
            raise CheckpointError(
                f"{weight.file}: {weight.name!r} is a weight {list(shape)}, and {layer!r} of the model has "
                f"{list(module.weight.shape)}."
            )
        own = f"{layer}.weight"
        if tied := [name for name, x in targets.items() if x is targets.get(own) and name != own]:
            raise CheckpointError(
                f"{folder}: layer {layer!r} ({stored.scheme}) cannot be loaded: {tied[0]} is the same weight in the "
                "model. Make the model with tie_word_embeddings=False, and give each its own weight."
            )
    for name in checkpoint.others:
        info = checkpoint.shards.info(name)
        if name in targets and (reason := _why_not_to(info, targets[name])) is not None:
            raise CheckpointError(reason)
    loaded = {*checkpoint.others, *(f"{layer}.weight" for layer in checkpoint.layers)}
    there = {id(targets[name]) for name in loaded if name in targets}  # tied weights are in one file once
    missing = [name for name, x in targets.items() if name not in loaded and id(x) not in there]
    unknown = [name for name in checkpoint.others if name not in targets]
    for names, text in ((missing, "the checkpoint does not have"), (unknown, "the model has no place for")):
        if names:
            shown = ", ".join(map(printable, names[:3])) + (f" and {len(names) - 3} more" if names[3:] else "")
            if strict:
                raise CheckpointError(f"{folder}: {text} {shown}. With strict=False that is a warning.")
            _log.warning("%s: %s %s", folder, text, shown)
    buffers = ((name_in_original(name), x) for name, x in model.named_buffers())
    kept = [name for name, x in buffers if x.is_meta and name not in targets]
    if kept or any(targets[name].is_meta for name in missing):
        name = kept[0] if kept else next(name for name in missing if targets[name].is_meta)
        raise CheckpointError(
            f"{folder}: {name} is on the meta device, and not in the checkpoint. Make the model on a real device, or "
            "put only the saved tensors on meta."
        )


def _why_not_to(info: TensorInfo, target: Tensor) -> str | None:
    """Return the reason why a tensor cannot be copied to ``target``; None if it can."""
    where = f"{info.file}: tensor {info.name!r}"
    if tuple(target.shape) != info.shape:
        return f"{where} has shape {list(info.shape)}, and that of the model has {list(target.shape)}."
    if info.dtype is None or _kind(info.dtype) != _kind(target.dtype):
        return f"{where} is {info.stored_as}, and that of the model is {target.dtype}."
    return None


def _kind(dtype: torch.dtype) -> str:
    """Return the kind of numbers that a dtype holds: a copy to one of another kind would change their meaning."""
    if dtype == torch.bool:
        return "bool"
    return "floating" if dtype.is_floating_point else "complex" if dtype.is_complex else "whole"


def _put(model: nn.Module, targets: Mapping[str, Tensor], name: str, x: Tensor) -> None:
    """Copy ``x`` to what is called ``name``; a tensor on the meta device is replaced, wherever it is."""
    there = targets[name]
    if not there.is_meta:
        with torch.no_grad():
            there.copy_(x)
        return
    new = x.to(there.dtype)
    if isinstance(there, nn.Parameter):
        new = nn.Parameter(new, requires_grad=there.requires_grad)
    for other, one in targets.items():
        if one is there:
            owner, _, leaf = other.rpartition(".")
            setattr(submodule(model, owner), leaf, new)


def _why_not(stored: LayerFormat) -> str | None:
    """Return the reason why no scaled matmul multiplies weights of this format; None if one does."""
    inputs = {(WHOLE, WHOLE): [(WHOLE, WHOLE), (1, WHOLE)], (1, WHOLE): [(1, WHOLE)]}
    rows, columns = stored.block
    e8m0 = all(dtype in E8M0 for dtype in stored.scale_dtypes)
    if stored.packed:
        if stored.block != (1, 16):
            return f"no GEMM multiplies 4-bit numbers in tiles of {rows}x{columns}"
    elif stored.block not in inputs and rows != columns and not (e8m0 and stored.block == (1, 32)):
        return f"no GEMM multiplies weights in tiles of {rows}x{columns}"
    activation = stored.activation
    if activation is None or activation.scale != "dynamic":
        return None
    if activation.block not in inputs.get(stored.block, [(1, columns)]):
        return f"no GEMM takes a weight with scales of {_tile(stored.block)} and an input of {_tile(activation.block)}"
    return None


def _tile(block: Sequence[int]) -> str:
    return "x".join(str(size) if size != WHOLE else "all" for size in block)


def _stored(stored: LayerFormat, weight: QuantizedWeight) -> StoredWeight:
    """``weight`` in the words of the dialect."""
    scale, (rows, columns) = weight.scale_inv, weight.block
    activation = stored.activation
    inputs: dict[str, Any] = {
        "activations": "none" if activation is None else "dynamic" if activation.scale == "dynamic" else "static",
        "input_scale_inv": _factor(weight.input_scale_inv, weight.input_scale),
    }
    if stored.block == (WHOLE, WHOLE):
        per_token = activation is not None and activation.block == (1, WHOLE)
        return one_scale(weight.data, scale, per_token=per_token, **inputs)
    if stored.block == (1, WHOLE):
        return StoredWeight(data=weight.data, scale_inv=scale.to(torch.float32), scaling="row", **inputs)
    if weight.packed:
        return StoredWeight(
            data=weight.data.view(torch.uint8),
            scale_inv=scale,
            scaling="nvfp4",
            block=[rows, columns],
            global_scale_inv=_factor(weight.global_scale_inv, weight.global_scale),
            **inputs,
        )
    if scale.dtype not in E8M0:
        scaling, scale = "block", scale.to(torch.float32)
    else:
        scaling, scale = "mxfp8" if (rows, columns) == (1, 32) else "block_e8m0", scale.view(torch.uint8)
    return StoredWeight(data=weight.data, scale_inv=scale, scaling=scaling, block=[rows, columns], **inputs)


def _factor(factor: Tensor | None, divisor: Tensor | None) -> Tensor | None:
    if factor is None and divisor is not None:
        factor = divisor.to(torch.float32).reciprocal()
    return None if factor is None else factor.to(torch.float32).reshape(())
