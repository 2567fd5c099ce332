"""Write FP8 checkpoints: the bytes and scales that fprop multiplies, as an engine loads them.

``export`` writes a model that was trained or called. ``export_folder`` (``fp8graph export``) quantizes a checkpoint in
high precision, from shards to shards, without the weights of its model: a tensor is read, quantized as the recipe
quantizes a weight, and written, so that no more than two shards are in memory. The model on the meta device says which
layers are linears, and the policy which of them are quantized.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8graph.backend.backend import Backend
from fp8graph.backend.entry import backend_of
from fp8graph.backend.multiplied import Multiplied, matrices_of, multiplied_by, on_all_ranks
from fp8graph.backend.sharded import whole
from fp8graph.checkpoints import LayerFormat, QuantizedWeight, Shards, write_checkpoint
from fp8graph.checkpoints.layer_format import EMBEDDING
from fp8graph.checkpoints.writing import SHARD_BYTES, check_target
from fp8graph.compat import fsdp
from fp8graph.compat.distributed import largest_over, local, mesh_of, number_of_ranks, rank
from fp8graph.compat.wrappers import name_in_original, original_module
from fp8graph.errors import CheckpointError, ConfigError, expect_batch, expect_batches, expect_path
from fp8graph.libraries.readers import as_saved, forward_of_experts, is_table, reader_of
from fp8graph.libraries.stored_linear import StoredWeight, one_scale
from fp8graph.models import extended
from fp8graph.models.general import families_of
from fp8graph.numerics import api
from fp8graph.recipes import Quantizer, Recipe, RecipeLike
from fp8graph.recipes.policy import Policy
from fp8graph.report.terminal import progress_bar
from fp8graph.runtime.policies import PolicyLike
from fp8graph.runtime.rank_groups import fail_together
from fp8graph.runtime.staleness import adapted_modules
from fp8graph.tools.forms import (
    AUTO,
    as_stored,
    chosen,
    cut,
    kind_of,
    saved_alone,
    saved_parts,
    saved_together,
    why_not,
    with_one_scale,
)
from fp8graph.tools.shards import TensorShard, shards_of_rows, shards_of_weight, whole_shard, why_scattered

_log = logging.getLogger("fp8graph")


def export(
    model: nn.Module,
    folder: Path | str,
    format: str = AUTO,  # noqa: A002  (the public name)
    *,
    calibration: Iterable[Any] | None = None,
    copy_from: Path | str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Write a compiled model as an FP8 checkpoint in a format that inference engines and transformers read.

    The bytes and scales are those that the next forward multiplies. Linears that run in high precision are written so,
    and listed in the config. The folder is there whole or not at all; a checkpoint in it stays until then.

    All ranks that share a sharded model call this, as they do :func:`quantized_state`. The first of them writes; all
    return when the folder is there, and all raise if it cannot be written.

    Args:
        model: compiled with fp8graph in any way, and called at least once: what ``torch.compile`` returned, or the
            module itself, also if it was compiled in blocks or is called by a compiled function. Merge adapters before.
        folder: must not exist, or be empty, now and at the end. Where something is by then, that stays, and the export
            is kept beside it, under the name in the message.
        format: "fp8" (Hugging Face and DeepSeek, 128x128 tiles or one scale), "compressed-tensors", "modelopt",
            "mxfp8" (Hugging Face and MiniMax, 1x32 tiles), or "auto": the first of these that has a form for every
            layer's recipe.
        calibration: batches (a tensor, a tuple of arguments, or a dict of keyword arguments) that the model is called
            with in eager, for the static scales of inputs that "nvfp4" and "tensorwise" need in some formats. Delayed
            scaling has them.
        copy_from: a folder whose other files (tokenizer, generation config, license) are copied as they are; None: that
            of ``model.config``, if it is on this machine.
        max_shard_bytes: of one file; a larger tensor gets a file of its own.
        overwrite: replace a checkpoint in ``folder``.
        progress: is called with the bytes of each file that was written.

    Returns:
        The folder.

    Raises:
        ConfigError: (a ``ValueError``) the model was not compiled with fp8graph, or not called, or has adapters of
            PEFT, merged or not; or another rank of a sharded model had an error.
        CheckpointError: no format has a form for its recipes, or the folder cannot be written.
    """
    expect_path("export", "folder", folder)
    if number_of_ranks(None) == 1:  # before a calibration. Of several ranks, all learn of errors together, below
        check_target(Path(folder), overwrite)
    plan = _Plan(model, format, calibration)
    config = getattr(plan.model, "config", None)
    source = copy_from if copy_from is not None else _folder_of(config)
    layers, others = plan.layers(), plan.others()
    with fail_together(plan.mesh):
        try:
            if plan.mesh is None or int(plan.mesh.mesh.min()) == rank():
                write_checkpoint(
                    folder,
                    layers=layers,
                    others=others,
                    quantization=plan.quantization,
                    ignore=plan.ignore(),
                    config=_written(config, plan.model),
                    copy_from=source,
                    max_shard_bytes=max_shard_bytes,
                    overwrite=overwrite,
                    progress=progress,
                )
        finally:
            for _ in itertools.chain(layers, others) if plan.mesh is not None else ():
                pass  # all ranks gather to the end, also what an error left unwritten
    return Path(folder)


def quantized_state(
    model: nn.Module,
    format: str = AUTO,  # noqa: A002
    *,
    calibration: Iterable[Any] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """``(name, tensor)`` of all that :func:`export` writes, one layer after the other and without a disk.

    For weight updates of an inference engine during training. Same arguments and errors as :func:`export`.

    A model that is sharded over ranks, by FSDP2, tensor parallelism or both, gives each rank whole tensors, with the
    bytes of one process that has all weights. All its ranks call this and iterate to the end: each weight is quantized
    in shards and gathered in FP8 when it is its turn. An error before the first tensor is raised on all ranks.
    :func:`quantized_shards` gathers nothing.
    """
    plan = _Plan(model, format, calibration)
    for layer, stored, weight in plan.layers():
        yield from stored.write(layer, weight)
    yield from plan.others()


def quantized_shards(
    model: nn.Module,
    format: str = AUTO,  # noqa: A002
    *,
    calibration: Iterable[Any] | None = None,
) -> Iterator[TensorShard]:
    """Yield the part of :func:`quantized_state` that this rank has: each tensor's numbers and their place, and no
    gather.

    The parts of all ranks together have the bytes of :func:`quantized_state`. Numbers that several ranks have, such as
    scales of the whole tensor, replicas, or the scale of a tile between two ranks, come to each of them. A tensor of
    which a rank has nothing does not come to it, unless the others have it as a DTensor: it is then empty.

    All ranks that share the model call this and iterate to the end. No weights are sent, only the amaxes of what
    several ranks scale together.

    Same arguments and errors as :func:`quantized_state`, and:

    Raises:
        ConfigError: a weight is quantized in one piece (experts that are not sharded by whole ones, NVFP4 with tiles
            that shards cut), or checkpoints have its rows in an order in which those of a rank do not lie together.
    """
    plan = _Plan(model, format, calibration, in_shards=True)
    yield from plan.layer_shards()
    yield from plan.other_shards()


class _Plan:
    """The tensors of a model, and the form in which each is written."""

    def __init__(
        self, model: nn.Module, name: str, calibration: Iterable[Any] | None, *, in_shards: bool = False
    ) -> None:
        given: object = model
        if not isinstance(given, nn.Module):
            raise TypeError(f"export takes the model, an nn.Module, not {given!r}: of a compiled function, its model.")
        self.model = original_module(model)
        self._class = fsdp.original_class(self.model).__name__
        fsdp.reshard(self.model)
        meshes = [mesh for p in self.model.parameters() if (mesh := mesh_of(p)) is not None]
        self.mesh = max(meshes, key=lambda mesh: mesh.size(), default=None)
        self._amaxes: dict[str, Tensor] = {}  # by layer of the model
        with fail_together(self.mesh) as lines:  # no rank waits for another's tensors before all agree
            lines += [f"format={name!r}", "no calibration" if calibration is None else "calibration"]
            written = self._find(model, lines)
            self._others = self._other_tensors()
            if in_shards:
                self._check_shards(written)
            if calibration is not None:
                expect_batches("export", "calibration", calibration)
                if fsdp.gathers_in_fp8(self.model):
                    raise ConfigError(
                        "calibration= runs the model in eager, and FSDP2 gathers its weights in FP8: take a recipe and "
                        "a format without static scales of inputs, or compile it with cache_weights=False."
                    )
        self._check_scales(written)
        if calibration is not None:
            linears = (weight.layer for weight in written if weight.data.ndim == 2 and weight.layer not in self._tables)
            layers = {layer: self._modules[layer] for layer in linears}
            self._amaxes = input_amaxes(self.model, layers, _on_all_ranks(calibration, self.mesh))
            if self.mesh is not None:  # each rank has seen its part of the inputs
                largest = largest_over(torch.stack([*self._amaxes.values()]), self.mesh)
                self._amaxes = dict(zip(self._amaxes, largest.unbind(), strict=True))
        with fail_together(self.mesh):
            self._choose(name, written)

    def _find(self, model: nn.Module, lines: list[str]) -> list[Multiplied]:
        """Return the weights that are written in FP8. ``lines``: says which."""
        if adapted := adapted_modules(self.model):
            raise ConfigError(
                f"{type(self.model).__name__} has modules of PEFT ({adapted[-1]}), whose names no engine knows. Call "
                "model.merge_and_unload() first, compile the model that it returns, and call that once."
            )
        if isinstance(self.model, nn.Linear):
            raise ConfigError(
                f"the model is one {self._class}: checkpoints name a tensor by its layer, and this layer has no name. "
                "Put it into a module, as torch.nn.Sequential(layer), and compile and call that."
            )
        self._backend: Backend = backend_of(model)
        modules = self.model.named_modules(remove_duplicate=False)
        self._modules = {name_in_original(layer): original_module(module) for layer, module in modules}
        named = self.model.named_parameters(remove_duplicate=False)
        self._parameters = {name_in_original(parameter): tensor for parameter, tensor in named}
        owners: dict[int, set[str]] = {}
        for parameter, tensor in self._parameters.items():
            owners.setdefault(id(tensor), set()).add(parameter)
        self._tied = {one for names in owners.values() if len(names) > 1 for one in names}
        self._tables = set[str]()  # embeddings, by layer of the model
        self._stored = {weight.parameter: weight for weight in self._stored_layers()}
        weights = [*multiplied_by(self._backend, self.model, data=False), *self._stored.values()]
        if not weights:
            raise ConfigError(
                f"no weight of {self._class} is multiplied in FP8 by what is compiled now. "
                + (
                    "print(fp8graph.backend_of(model).report) says why."
                    if matrices_of(self._backend, self.model)
                    else "Its compiled code has not run under the current policy: call it once."
                )
            )
        shapes = {weight.parameter: self._parameters[weight.parameter].shape for weight in weights}
        self._parts = saved_parts(self.model, shapes)
        for weight in weights:
            if reason := self._why_kept(weight):
                if weight.parameter in self._stored:  # its numbers mean nothing without their scales
                    raise ConfigError(f"{weight.layer} cannot be exported as it is stored: {reason}.")
                self._parts.pop(weight.parameter, None)
                _log.warning("%s is exported in high precision: %s", weight.parameter.removesuffix(".weight"), reason)
        if not self._parts:
            raise ConfigError(f"no linear of {self._class} can be written in FP8: see the warnings above.")
        written = [weight for weight in weights if weight.parameter in self._parts]
        self._kinds = {
            part.layer: EMBEDDING if weight.layer in self._tables else kind_of(weight)
            for weight in written
            for part in self._parts[weight.parameter]
        }
        lines += [f"{weight.parameter}: {weight.quantizer}" for weight in written]
        for weight in written:
            if weight.facts is not None and weight.facts.refused:
                raise ConfigError(
                    f"{weight.parameter} is sharded, and {weight.facts.refused}: gather the model on one rank before "
                    "it is exported."
                )
        return written

    def _check_shards(self, written: Sequence[Multiplied]) -> None:
        """Raise for the first tensor that is not handed over in shards."""
        reasons: dict[str, str | None] = {}
        for weight in written:
            if weight.facts is not None:
                scattered = why_scattered(self._parameters[weight.parameter], self._parts[weight.parameter])
                reasons[weight.parameter] = weight.facts.gathered or scattered
        for names, tensors in self._others:
            spread = [name for name in names if mesh_of(tensors[name]) is not None]
            for name in spread:
                saved = saved_alone(self.model, name, tensors[name].shape) if len(names) == 1 else None
                if saved is None:
                    reasons[name] = "checkpoints have it in other pieces"
                elif not isinstance(saved, str):
                    reasons[name] = why_scattered(tensors[name], saved)
        for name, reason in reasons.items():
            if reason is not None:
                raise ConfigError(
                    f"{name} cannot be handed over in shards: {reason}. fp8graph.quantized_state gathers it."
                )

    def _check_scales(self, written: Sequence[Multiplied]) -> None:
        """Raise on all ranks if they have different scales of earlier steps."""
        scales = {w.parameter: w.facts.scales for w in written if w.facts is not None and w.facts.scales is not None}
        if not scales:
            return
        given = torch.cat([*scales.values()])
        largest, of_inverse = largest_over(torch.stack([given, given.reciprocal()]), self.mesh)
        different = (largest.reciprocal() != of_inverse).split([len(x) for x in scales.values()])
        for parameter, differs in zip(scales, different, strict=True):
            if differs.any():
                raise ConfigError(
                    f"the ranks have different scales of {parameter}, which is sharded: a checkpoint has one. Train "
                    "with DelayedScaling(reduce_amax=True), and amax_reduction_group=None."
                )

    def _choose(self, name: str, written: Sequence[Multiplied]) -> None:
        inputs = {
            part.layer
            for weight in written
            for part in self._parts[weight.parameter]
            if weight.input_scale_inv is not None or weight.layer in self._amaxes
        }
        try:
            self.quantization, self._forms = chosen(name, self._kinds, inputs)
        except CheckpointError:  # as Hugging Face stores weights with one scale
            others = ((weight, with_one_scale(weight)) for weight in written if weight.parameter in self._stored)
            kinds = {part.layer: kind for weight, kind in others if kind for part in self._parts[weight.parameter]}
            if not kinds:
                raise
            self._kinds |= kinds
            self.quantization, self._forms = chosen(name, self._kinds, inputs)

    def _stored_layers(self) -> Iterator[Multiplied]:
        """Yield the linears and tables that arrived in FP8 or FP4: their bytes are read as they are.

        Raises:
            ConfigError: no format has a form for one of them.
        """
        for layer, module in self._modules.items():
            if forward_of_experts(module) is not None:
                kind = type(module).__name__
                raise ConfigError(
                    f"{layer} is a {kind}: experts that a library loaded in FP8 are not exported. Copy the folder that "
                    "they came from."
                )
            read = reader_of(module)
            sharded = any(mesh_of(tensor) is not None for tensor in module.parameters(recurse=False))
            if sharded and (is_table(module) or read is not None):
                raise ConfigError(
                    f"{layer} arrived in FP8 and is sharded: gather the model on one rank before it is exported."
                )
            if is_table(module):
                table = one_scale(cast(Tensor, module.weight), cast(Tensor, module.weight_scale), per_token=False)
                yield Multiplied(
                    parameter=f"{layer}.weight",
                    data=table.data.detach(),
                    scale_inv=table.scale_inv,
                    quantizer=Quantizer(dtype=table.data.dtype),
                )
                self._tables.add(layer)
                continue
            if read is None:
                continue
            stored = read(module)
            if (reason := _why_not_again(stored)) is not None:
                raise ConfigError(f"{layer} cannot be exported as it is stored: {reason}.")
            scaling, block = stored.scaling, (*stored.block,)
            if (scaling, stored.activations) == ("tensor", "static"):
                scaling = "delayed"  # the recipe whose form has a static scale
            quantizer = Quantizer(dtype=stored.data.dtype, scaling=cast(Any, scaling))
            yield Multiplied(
                parameter=f"{layer}.weight",
                data=stored.data.detach(),
                scale_inv=stored.scale_inv.detach(),
                quantizer=replace(quantizer, block=cast(Any, block)) if block else quantizer,
                global_scale_inv=stored.global_scale_inv,
                input_scale_inv=None if stored.input_scale_inv is None else stored.input_scale_inv.detach().reshape(()),
            )

    def _why_kept(self, weight: Multiplied) -> str | None:
        owner = self._modules[weight.layer]
        if weight.flipped:
            return f"its weight is [K, N] ({type(owner).__name__}), and no format has such layers"
        if weight.parameter in self._tied:
            return "another layer has the same weight, in high precision"
        table = weight.layer in self._tables
        if weight.parameter not in self._parts or (
            weight.data.ndim == 2 and not isinstance(owner, nn.Linear) and not table
        ):
            return f"no format has a {type(owner).__name__}"
        return why_not(weight, self._parts[weight.parameter])

    def layers(self) -> Iterator[tuple[str, LayerFormat, QuantizedWeight]]:
        made = multiplied_by(self._backend, self.model, wanted=self._parts)
        for weight in itertools.chain(map(on_all_ranks, made), self._stored.values()):
            yield from self._cut(weight)

    def layer_shards(self) -> Iterator[TensorShard]:
        """Yield the same, as far as this rank has them."""
        for weight in multiplied_by(self._backend, self.model, wanted=self._parts):
            if mesh_of(weight.data) is None:
                yield from self._whole_layers(weight)
                continue
            for part in self._parts.get(weight.parameter, ()):
                stored, amax = self._forms[self._kinds[part.layer]], self._amaxes.get(weight.layer)
                yield from shards_of_weight(weight, part, stored, amax)
        for weight in self._stored.values():
            yield from self._whole_layers(weight)

    def _whole_layers(self, weight: Multiplied) -> Iterator[TensorShard]:
        for layer, stored, written in self._cut(weight):
            yield from itertools.starmap(whole_shard, stored.write(layer, written))

    def _cut(self, weight: Multiplied) -> Iterator[tuple[str, LayerFormat, QuantizedWeight]]:
        for layer, part in cut(weight, self._parts.get(weight.parameter, ())):
            stored = self._forms[self._kinds[layer]]
            yield layer, stored, as_stored(part, stored, self._amaxes.get(weight.layer))

    def others(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all other tensors of the model's state dict, as they are saved; of tied ones, the first."""
        for names, tensors in self._others:
            yield from as_saved(self.model, {name: whole(tensors[name].detach()) for name in names}).items()

    def other_shards(self) -> Iterator[TensorShard]:
        """Yield the same, as far as this rank has them."""
        for names, tensors in self._others:
            if not any(mesh_of(tensors[name]) is not None for name in names):
                saved = as_saved(self.model, {name: tensors[name].detach() for name in names})
                yield from itertools.starmap(whole_shard, saved.items())
                continue
            (name,) = names
            tensor, saved = tensors[name].detach(), saved_alone(self.model, name, tensors[name].shape)
            if isinstance(saved, str):
                yield from shards_of_rows(saved, tensor, None)
            for part in saved if isinstance(saved, list) else ():
                yield from shards_of_rows(f"{part.layer}.weight", tensor, part)

    def _other_tensors(self) -> list[tuple[list[str], dict[str, Tensor]]]:
        """Return the names of tensors that are saved together, and these tensors, as the model has them."""
        seen: set[tuple[Any, ...]] = set()
        tensors: dict[str, Tensor] = {}
        for saved, tensor in self.model.state_dict().items():
            name = name_in_original(saved)
            layer, _, leaf = name.rpartition(".")
            if f"{layer}.weight" in self._stored and leaf != "bias":
                continue
            if mesh_of(tensor) is None:
                key = (tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)
            else:
                key = (id(self._parameters[name]),)  # shards may be empty, with the address of others
            if name not in self._parts and isinstance(tensor, Tensor) and (key not in seen or not tensor.numel()):
                seen.add(key)
                tensors[name] = tensor
        sharded = any(mesh_of(x) is not None for x in tensors.values())  # then one after the other is gathered
        groups = saved_together(self.model, tensors) if sharded else [list(tensors)]
        return [(names, {name: tensors[name] for name in names}) for names in groups]

    def ignore(self) -> list[str]:
        """Return the linears that are written in high precision, by the names of the model and of its checkpoints."""
        linears = [f"{name}.weight" for name, module in self._modules.items() if isinstance(module, nn.Linear)]
        kept = {*linears, *matrices_of(self._backend, self.model)} - self._parts.keys()  # routers, too
        shapes = {name: x.shape for name, x in self._parameters.items() if name in kept and x.ndim == 2}
        saved = {name: [part.layer for part in parts] for name, parts in saved_parts(self.model, shapes).items()}
        layers = [layer for name in shapes for layer in (name.removesuffix(".weight"), *saved.get(name, ()))]
        return list(dict.fromkeys(layers))


def _why_not_again(stored: StoredWeight) -> str | None:
    """Return the reason why no format stores inputs as those of ``stored`` are quantized; None if one does."""
    if stored.activations == "none":
        return "its checkpoint quantizes weights only, and every form that is written here quantizes inputs, too"
    if stored.activations == "static" and stored.scaling not in ("tensor", "nvfp4"):
        return f"its input has a static scale, and its weight scales of {stored.scaling!r}"
    return None


def _folder_of(config: Any) -> Path | None:
    """Return the folder that a model was loaded from, if it is one on this machine."""
    path = getattr(config, "_name_or_path", "")
    return Path(path) if path and Path(path).is_dir() else None


def _written(config: Any, model: nn.Module) -> dict[str, Any] | None:
    """Return the model's config as transformers writes it; None for other models."""
    if not hasattr(config, "to_diff_dict"):
        return None
    values = json.loads(config.to_json_string(use_diff=True))
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {"architectures": [fsdp.original_class(model).__name__], "dtype": dtype, **values}


def input_amaxes(model: nn.Module, layers: Mapping[str, nn.Module], batches: Iterable[Any]) -> dict[str, Tensor]:
    """FP32 []: the amax of the input of each of ``layers`` over ``batches``. The model runs in eager, in eval mode.

    Args:
        batches: each a tensor, a tuple of arguments, or a dict of keyword arguments of the model.
    """
    amaxes: dict[str, Tensor] = {}
    expect_batches("export", "calibration", batches)

    def watch(layer: str) -> Any:
        def before(_module: nn.Module, args: tuple[Any, ...]) -> None:
            amax = local(cast(Tensor, args[0]).detach()).abs().amax().to(torch.float32)
            amaxes[layer] = torch.maximum(amaxes[layer], amax) if layer in amaxes else amax

        return layers[layer].register_forward_pre_hook(before)

    training = model.training
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.callback(watch(layer).remove)
        stack.callback(model.train, training)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.no_grad())
        model.eval()
        for batch in batches:
            expect_batch("export", "calibration", batch)
            if isinstance(batch, Mapping):
                model(**batch)
            else:
                model(*(batch if isinstance(batch, tuple) else (batch,)))
    return amaxes


def _on_all_ranks(batches: Iterable[Any], mesh: Any) -> Iterator[Any]:
    """Yield the batches of this rank; an error on all ranks, if one has no more, or something else than a batch."""
    rest, end = iter(batches), object()
    while True:
        with fail_together(mesh) as lines:
            batch = next(rest, end)
            lines += ["no more batches of calibration=" if batch is end else "a batch of calibration="]
            if batch is not end:
                expect_batch("export", "calibration", batch)
        if batch is end:
            return
        yield batch


def export_folder(
    source: Path,
    folder: Path,
    *,
    recipe: RecipeLike = "blockwise",
    policy: PolicyLike | None = None,
    format: str = AUTO,  # noqa: A002  (the public name)
    max_shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Write the checkpoint in ``source`` into ``folder``, with its linears quantized.

    Args:
        source: a model of transformers in high precision: config.json and safetensors files.
        folder: must not exist, or be empty, now and at the end. Where something is by then, that stays, and the export
            is kept beside it, under the name in the message.
        recipe, policy: see :class:`fp8graph.Backend`. Recipes with a static scale of inputs need a model that runs: see
            :func:`fp8graph.export`.
        format: see :func:`fp8graph.export`.
        max_shard_bytes, overwrite: see :func:`fp8graph.checkpoints.write_checkpoint`.

    Raises:
        ConfigError, CheckpointError: ``source`` cannot be read, or no format has a form for its layers.
    """
    from fp8graph.tools.hugging_face import config_of, model_of  # imports transformers

    shards = Shards(source)
    config, _ = config_of(str(source))
    model = model_of(config)
    given = Policy(extends="default") if policy is None else Policy.coerce(policy)
    resolved = extended(given, families_of(type(module) for module in model.modules()), recipe)
    linears = dict(_linears_in(model, shards))
    recipes = {layer: one for layer, owner in linears.items() if (one := _recipe_of(owner, model, resolved))}
    if not recipes:
        raise ConfigError(f"{source}: the policy quantizes none of its linears.")
    examples = {layer: _quantized(layer, torch.zeros(256, 256), one) for layer, one in recipes.items()}
    kinds = {layer: kind_of(example) for layer, example in examples.items()}
    quantization, forms = chosen(format, kinds, inputs=())

    kept = [name for layer, owner in linears.items() if layer not in recipes for name in (owner, layer)]
    total = sum(shards.info(name).bytes for name in shards)
    with progress_bar(f"writing {folder}") as progress:
        done = 0

        def read(name: str) -> Tensor:
            nonlocal done
            done += shards.info(name).bytes
            progress(done, total)
            return shards.tensor(name)

        def layers() -> Iterator[tuple[str, LayerFormat, QuantizedWeight]]:
            for layer, one in recipes.items():
                stored = forms[kinds[layer]]
                yield layer, stored, as_stored(_quantized(layer, read(f"{layer}.weight"), one), stored, None)

        quantized = {f"{layer}.weight" for layer in recipes}
        return write_checkpoint(
            folder,
            layers=layers(),
            others=((name, read(name)) for name in shards if name not in quantized),
            quantization=quantization,
            ignore=list(dict.fromkeys(kept)),
            copy_from=source,
            max_shard_bytes=max_shard_bytes,
            overwrite=overwrite,
        )


def _linears_in(model: nn.Module, shards: Shards) -> Iterator[tuple[str, str]]:
    """Yield the linears in ``shards``, in high precision: their names there, and the modules of ``model`` that own
    them.
    """
    modules = model.named_modules()
    shapes = {f"{name}.weight": module.weight.shape for name, module in modules if isinstance(module, nn.Linear)}
    shapes |= {name: parameter.shape for name, parameter in model.named_parameters() if parameter.ndim == 3}  # experts
    for parameter, parts in saved_parts(model, shapes).items():
        for part in parts:
            if (weight := f"{part.layer}.weight") in shards:
                if shards.info(weight).dtype not in (torch.bfloat16, torch.float16, torch.float32):
                    raise CheckpointError(f"{shards.info(weight).file}: tensor {weight!r} is quantized already.")
                yield part.layer, parameter.rpartition(".")[0]


def _recipe_of(owner: str, model: Any, policy: Policy) -> Recipe | None:
    """Return the recipe with which fprop multiplies the weights of the module ``owner``."""
    module = model.get_submodule(owner)
    head = "the model's output embedding" if model.get_output_embeddings() is module else ""
    return policy.resolve(owner, "linear" if isinstance(module, nn.Linear) else "grouped_mm", head).recipes["fprop"]


def _quantized(layer: str, weight: Tensor, recipe: Recipe) -> Multiplied:
    made = api.quantize(weight, recipe, "weight", "rowwise")
    return Multiplied(
        parameter=f"{layer}.weight",
        data=made.data,
        scale_inv=made.scale_inv,
        quantizer=made.quantizer,
        global_scale_inv=made.global_scale_inv,
    )
