"""``fp8graph lint FOLDER``: judge an FP8 checkpoint by what its numbers mean.

:mod:`fp8graph.tools.inspect_checkpoint` says what fits together. A scale that is inverted, squared or of another layer
fits: its layer is 10^7 times too large, and the model talks nonsense. The rules here compare each layer with its
siblings, the same layer of other blocks; its codes with those that scales from amaxes make; and the config with the
tensors.

Headers are read first, then one layer at a time. Nothing is compiled, and a GPU is not needed.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fp8graph.checkpoints import WHOLE, Checkpoint, Shards
from fp8graph.checkpoints.hugging_face_fp8 import HuggingFaceFP8
from fp8graph.checkpoints.layer_format import EMBEDDING
from fp8graph.checkpoints.modelopt import FILE
from fp8graph.checkpoints.shards import read_json
from fp8graph.errors import CheckpointError, ConfigError
from fp8graph.report.tables import any_layer
from fp8graph.report.terminal import progress_bar
from fp8graph.tools.findings import Finding, counted, in_order, lines
from fp8graph.tools.inspect_checkpoint import model_of_checkpoint, named_problems, shapes_of
from fp8graph.tools.lint_layers import Layer, read_layer

_AT_ONCE: Final = 1 << 24  # numbers of a tensor in high precision that are looked at at once
_SIBLINGS: Final = 10.0  # times the median of its siblings, or one such part of it
_GAIN: Final = (3e-3, 1e3)  # RMS of a weight times sqrt(K): by how much it changes the RMS of what it multiplies
_UNSCALED: Final = {False: 8.0, True: 2.0}  # the largest code of a layer, FP8 and FP4, that no amax made
_CLIPPED: Final = {False: 0.05, True: 0.5}  # the share of numbers that are the largest code
_FEW: Final = 3  # absolute codes, of weights that have so few values, as ternary ones: many are the largest
_SEVERAL: Final = 16  # tiles of a layer whose largest codes say something
_E5M2_TOP, _FNUZ_TOP = 352.0, 240.0  # the largest numbers of E5M2, and of AMD's E4M3, that tiles have, read as E4M3
_SHORT: Final = 0.1  # the share of tiles whose largest code is below half of the largest number
_SWAPPED: Final = 2.5  # times its siblings, and one such part of them, are two layers with each other's scales
_INPUTS: Final = (1e-8, 1e4)  # scale of an input: of amaxes between 4e-6 and 4e6
_SAME_INPUT: Final = 2.0  # times: between the scales of layers that read one tensor
_CACHE: Final = re.compile(r"(?:(?:^|\.)[kv]_proj)?(?:^|[._])[qkv](_cache)?_scale$|\.[qkv]_proj\.output_scale$")
# of names that recipes quantize: DeepSeek's eh_proj and weights_proj may stay in high precision without being listed
_LINEAR: Final = re.compile(
    r"(?:^|\.)(?:(?:q|k|v|o|qkv|q_a|q_b|kv_b|gate|up|down|gate_up)_proj|kv_a_proj_with_mqa|fc\d?|dense|qkv|query|key|"
    r"value|w[123okqv])$"
)
_READ_ONE: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))  # one input
_CROSS: Final = re.compile(r"cross|encoder_attn|enc_?dec", re.IGNORECASE)  # attention, whose q reads another tensor
_OF_TILES: Final = "weight_scale_inv"
_TRAINED: Final = re.compile(r"(?:^|\.)(?:weight|bias)$")  # others may be masks, with -inf
_MANY: Final = 100  # layers that are wrong: no cause is looked for among pairs of more


@dataclass(frozen=True, kw_only=True)
class CheckpointLint:
    """The findings of :func:`fp8graph.lint` in a folder. It is true if there is no error.

    ``compared``: with which model names and shapes were compared, or why not.
    """

    folder: str
    layers: int
    findings: tuple[Finding, ...]
    compared: str

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(each for each in self.findings if each.severity == "error")

    def __bool__(self) -> bool:
        return not self.errors

    def __str__(self) -> str:
        head = f"{self.folder}: {self.layers} quantized layers, {counted(self.findings)}"
        return "\n".join([head, *lines(self.findings), self.compared])

    def to_dict(self) -> dict[str, Any]:
        """For JSON. ``version`` changes when a field goes or changes its meaning."""
        findings = [each.to_dict() for each in self.findings]
        return {
            "version": 1, "folder": self.folder, "layers": self.layers, "compared": self.compared, "findings": findings,
        }  # fmt: skip


def lint_checkpoint(folder: Path | str, *, progress: Callable[[int, int], None] | None = None) -> CheckpointLint:
    """Judge the checkpoint in a folder.

    Args:
        folder: with config.json and safetensors files.
        progress: is called with the layers that were read, and all.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or one of a format that is not known.
    """
    if (damage := _damage(folder)) is not None:
        return CheckpointLint(folder=str(folder), layers=0, findings=(damage,), compared="Nothing was compared.")
    checkpoint = Checkpoint(folder)
    try:
        model, compared = model_of_checkpoint(checkpoint), ""
    except ConfigError as error:
        model, compared = None, f"Names and shapes were not compared with those of a model: {error}"
    findings = [*_form(checkpoint), *_of_model(checkpoint, model), *_unlisted(checkpoint, model)]
    findings += [*_scale_names(checkpoint), *_of_cache(checkpoint), *_tied(checkpoint), *_finite(checkpoint)]
    layers: list[Layer] = []
    tensors = checkpoint.shards.tensors
    for count, (name, stored) in enumerate(checkpoint.layers.items(), 1):
        if not any(stored.problems(name, tensors)):
            wrong = [
                _scale_problem(name, text) for text in stored.wrong_scales(name, tensors, checkpoint.shards.tensor)
            ]
            findings += wrong
            layer = read_layer(name, stored, checkpoint.weight(name))
            findings += [each for rule in _OF_ONE_LAYER for each in rule(layer, checkpoint)]
            if not wrong:
                layers.append(layer)
        if progress is not None:
            progress(count, len(checkpoint.layers))
    findings += [each for rule in _OF_ALL_LAYERS for each in rule(layers, checkpoint)]
    if model is not None:
        compared = f"Names and shapes were compared with those of {type(model).__name__} in transformers."
    return CheckpointLint(
        folder=str(folder), layers=len(checkpoint.layers), findings=tuple(in_order(findings)), compared=compared
    )


def linted(folder: Path) -> CheckpointLint:
    """:func:`lint_checkpoint`, with a bar on a terminal."""
    with progress_bar(f"reading {folder}") as progress:
        return lint_checkpoint(folder, progress=progress)


# Of headers and the config.


def _damage(folder: Path | str) -> Finding | None:
    """Return the reason why files that are there cannot be read as a checkpoint."""
    path = Path(folder)
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        return None  # Checkpoint says what is there
    try:
        shards = Shards(path)
    except CheckpointError as error:
        return Finding(
            rule="damaged", severity="error", where=str(path), what=str(error).removesuffix("."),
            why="whoever loads it stops there, or reads other numbers", todo="Download or write the checkpoint again.",
        )  # fmt: skip
    values = read_json(path / "config.json") if (path / "config.json").exists() else {}
    if any(values.get(name) for name in ("quantization_config", "compression_config")) or (path / FILE).exists():
        return None
    eight = [name for name, info in shards.tensors.items() if info.stored_as.startswith("F8")]
    if not eight:
        return None
    return Finding(
        rule="no-config", severity="error", where=str(path / "config.json"),
        what=f"there is no quantization_config, and {len(eight)} tensors are in FP8, like {eight[0]!r}",
        why="whoever loads it reads codes without their scales",
        todo="Add the quantization_config of the checkpoint that was converted.",
    )  # fmt: skip


def _scale_names(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find scales under a name that no loader of the format looks for."""
    if not isinstance(checkpoint.quantization, HuggingFaceFP8):
        return
    spelled: dict[str, list[str]] = {}
    for layer, stored in checkpoint.layers.items():
        if stored.suffixes.weight == ".weight" and stored.part is None and stored.scheme != EMBEDDING[0]:
            spelled.setdefault(stored.suffixes.scale.removeprefix("."), []).append(layer)
    usual = max(spelled, key=lambda name: (len(spelled[name]), name == _OF_TILES), default="")
    # engines read scales of whole tensors as "weight_scale", too
    right = _OF_TILES if checkpoint.quantization.block is not None and usual == "weight_scale" else usual
    for name, layers in spelled.items():
        if name != right:
            more = f", as are {len(layers) - 1} more" * (len(layers) > 1)
            yield Finding(
                rule="scale-name", severity="error", where=layers[0],
                what=f"its scale is called {name!r}{more}", why=f"loaders of this format look for {right!r} here",
                todo=f"Rename it. It must multiply, as {right!r} does.",
            )  # fmt: skip


def _form(checkpoint: Checkpoint) -> Iterator[Finding]:
    for problem in checkpoint.problems:
        yield Finding(
            rule="form", severity="error", where=str(checkpoint.folder), what=problem,
            why="the tensors do not fit the config, or each other",
            todo="Write the checkpoint again with the library that owns its format.",
        )  # fmt: skip


def _of_model(checkpoint: Checkpoint, model: Any) -> Iterator[Finding]:
    if model is None:
        return
    for problem in named_problems(checkpoint, model):
        yield Finding(
            rule="names", severity="error", where=str(checkpoint.folder), what=problem,
            why="a loader leaves out a tensor that it does not expect, and makes up one that it misses",
            todo="Save the model under the names of its class, or correct `architectures` in config.json.",
        )  # fmt: skip
    for name, (stored, expected) in shapes_of(checkpoint, model).items():
        if stored != expected:
            yield Finding(
                rule="shape", severity="error", where=name,
                what=f"it is {list(stored)}, and by config.json {list(expected)}",
                why="the config is of another model, or the tensor is",
                todo="Correct the sizes in config.json, or take the tensors of the model that it describes.",
            )  # fmt: skip


def _unlisted(checkpoint: Checkpoint, model: Any) -> Iterator[Finding]:
    """Find linear layers that are in high precision, and that the config does not leave so."""
    tensors, leaves = checkpoint.shards.tensors, {name.rpartition(".")[2] for name in checkpoint.layers}
    modules = {} if model is None else dict(model.named_modules())
    head = None if model is None else model.get_output_embeddings()
    for name in checkpoint.others:
        layer, _, ending = name.rpartition(".")
        info = tensors[name]
        if ending != "weight" or len(info.shape) != 2 or info.stored_as not in ("BF16", "F16", "F32"):
            continue
        module = modules.get(layer) or modules.get(layer.partition(".")[2])
        if module is not None and (module is head or not isinstance(module, torch.nn.Linear)):
            continue
        is_linear = module is not None or layer.rpartition(".")[2] in leaves
        if not is_linear and not _LINEAR.search(layer):
            continue
        if checkpoint.quantization.layer_formats(layer):
            yield Finding(
                rule="not-listed", severity="error" if is_linear else "warning", where=layer,
                what=f"its weight is {info.stored_as}, and by the config it is quantized",
                why="whoever loads it will read the numbers as codes, or look for a scale",
                todo="Add the layer to the config's list of layers that stay in high precision.",
            )  # fmt: skip


def _of_cache(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find scales of keys and values that are none, or without their counterpart."""
    names = {name: match for name in checkpoint.others if (match := _CACHE.search(name)) is not None}
    cache = checkpoint.quantization.kv_cache
    strategy = cache.get("strategy", "tensor") if isinstance(cache, Mapping) else "tensor"
    todo = "Calibrate the key-value cache again, or remove its scales."
    for name, match in names.items():
        scales = checkpoint.shards.tensor(name).to(torch.float32)
        if cache is None and scales.numel() != 1:
            continue  # a parameter of the model's attention may be called so
        if bad := int((~scales.isfinite() | (scales <= 0)).sum()):
            text = f"{bad} of its {scales.numel()} numbers are no scale: {_shown(scales)}"
            why = "keys and values are NaN, infinite or zero once they were stored"
            yield Finding(rule="cache-scale", severity="error", where=name, what=text, why=why, todo=todo)
        elif scales.numel() != 1 and strategy == "tensor":
            text = f"it has {scales.numel()} numbers, and by the config the tensor has one scale"
            why = "engines read one of them, or refuse it"
            yield Finding(rule="cache-scale", severity="warning", where=name, what=text, why=why, todo=todo)
        missing = name[: match.start()] + re.sub(r"[kv](?=_)", lambda one: {"k": "v", "v": "k"}[one[0]], match[0])
        if missing not in checkpoint.shards:
            text, why = f"there is no {missing!r}", "keys and values have a scale each"
            yield Finding(rule="cache-scale", severity="error", where=name, what=text, why=why, todo=todo)


def _shown(numbers: Tensor) -> str:
    return ", ".join(f"{x:.3g}" for x in numbers.flatten()[:4].tolist()) + ", ..." * (numbers.numel() > 4)


def _tied(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Compare the head with the embedding where the config says that they are one."""
    config = json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    heads = [name for name in checkpoint.others if name.endswith("lm_head.weight")]
    tables = [name for name in checkpoint.others if name.endswith("embed_tokens.weight")]
    if config.get("tie_word_embeddings") is True and len(heads) == len(tables) == 1:
        head, table = map(checkpoint.shards.tensor, (*heads, *tables))
        if head.shape != table.shape or not torch.equal(head, table):
            yield Finding(
                rule="tied", severity="warning", where=heads[0],
                what=f"config.json ties it to {tables[0]!r}, and its numbers are others", why="who ties them drops it",
                todo="Set tie_word_embeddings to false, or remove the tensor.",
            )  # fmt: skip


def _finite(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find numbers in high precision that are none."""
    for name in checkpoint.others:
        info = checkpoint.shards.tensors[name]
        if info.dtype is None or not info.dtype.is_floating_point or info.dtype.itemsize == 1:
            continue
        if not _TRAINED.search(name):
            continue
        tensor = checkpoint.shards.tensor(name)
        if bad := sum(int((~part.isfinite()).sum()) for part in tensor.flatten().split(_AT_ONCE)):
            yield Finding(
                rule="not-finite", severity="error", where=name,
                what=f"{bad} of {tensor.numel()} numbers are not finite",
                why="they were so before, or they were cast beyond the range of their type",
                todo="Take the tensor from the model that was quantized.",
            )  # fmt: skip


def _scale_problem(layer: str, text: str) -> Finding:
    return Finding(
        rule="scale",
        severity="error",
        where=layer,
        what=text,
        why="no weight has such a scale",
        todo="Quantize the layer again.",
    )


# Of one layer's numbers.


def _codes(layer: Layer, _checkpoint: Checkpoint) -> Iterator[Finding]:
    """Compare the largest codes with those that scales from amaxes make."""
    again = "Quantize the weight again: divide each tile by its amax / 448 (FP4: 6) before the cast."
    if layer.nan:
        yield Finding(
            rule="nan", severity="error", where=layer.name,
            what=f"{layer.nan} of its numbers are NaN",
            why="they were cast beyond the range, or the bytes are another type's (AMD's E4M3 has 240 where E4M3 has "
            "NaN)",
            todo=again,
        )  # fmt: skip
    if not layer.tops.numel():
        yield Finding(
            rule="zeros",
            severity="warning",
            where=layer.name,
            what="all of its numbers are zero",
            why="it was never written, or its scale was zero before the cast",
            todo=again,
        )
        return
    top = float(layer.tops.max())
    shared = layer.stored.block == (WHOLE, WHOLE) and layer.most != 1
    if top < _UNSCALED[layer.packed]:
        yield Finding(
            rule="unscaled", severity="warning" if shared else "error", where=layer.name,
            what=f"its largest code is {top:.3g}",
            why="it shares a scale with much larger weights"
            if shared
            else "it was cast without a scale, and most of its bits are lost",
            todo=again,
        )  # fmt: skip
    elif layer.saturated > _CLIPPED[layer.packed] and layer.kinds > _FEW:
        yield Finding(
            rule="clipped", severity="error", where=layer.name,
            what=f"{100 * layer.saturated:.1f} % of its numbers are the largest code",
            why="it was multiplied by too large a scale before the cast",
            todo=again,
        )  # fmt: skip
    elif not layer.packed and layer.fractions and len(layer.tops) >= _SEVERAL:
        most = float(layer.tops.mode().values)
        share = float((layer.tops == most).to(torch.float32).mean())
        kinds = {_E5M2_TOP: "E5M2", _FNUZ_TOP: "AMD's E4M3 (fnuz)"}
        if share > 0.6 and most in kinds:
            yield Finding(
                rule="other-type", severity="error", where=layer.name,
                what=f"{100 * share:.0f} % of its tiles end at {most:.0f}, where E4M3 ends at 448",
                why=f"its bytes are {kinds[most]}",
                todo="Cast the weight to E4M3, or correct the tensor's type.",
            )  # fmt: skip


def _short(layer: Layer, _checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find tiles whose scale is not that of their amax. One tile, and FP4's one-byte scales, may have a larger one."""
    if layer.packed or len(layer.tops) < 2 or float(layer.tops.max()) < _UNSCALED[False]:
        return
    share = float((layer.tops < layer.top / 2).to(torch.float32).mean())
    if share > _SHORT:
        yield Finding(
            rule="range", severity="warning", where=layer.name,
            what=f"in {100 * share:.0f} % of its tiles no code reaches {layer.top / 2:.0f}, half of the range",
            why="their scales are of another tensor, or of an older weight",
            todo="Quantize the weight again: divide each tile by its amax / 448 before the cast.",
        )  # fmt: skip


def _fractions(layer: Layer, checkpoint: Checkpoint) -> Iterator[Finding]:
    if checkpoint.quantization.powers_of_two and layer.fractions:
        yield Finding(
            rule="not-ue8m0", severity="error", where=layer.name,
            what=f'{layer.fractions} of its {layer.scales} scales are no powers of two, and scale_fmt is "ue8m0"',
            why="a GPU that takes exponents alone drops the rest, up to half of each scale",
            todo='Round the scales up and quantize again, or set scale_fmt to "float".',
        )  # fmt: skip


_OF_ONE_LAYER: Final[tuple[Callable[[Layer, Checkpoint], Iterator[Finding]], ...]] = (_codes, _short, _fractions)


# Of layers beside each other.


def _families(layers: Sequence[Layer]) -> Iterator[list[Layer]]:
    """Yield the layers that differ in the numbers of their names alone."""
    families: dict[str, list[Layer]] = {}
    for layer in layers:
        families.setdefault(any_layer(f"{layer.name}."), []).append(layer)
    yield from families.values()


def _sizes(layers: Sequence[Layer], _checkpoint: Checkpoint) -> Iterator[Finding]:
    """Compare the RMS of decoded weights with those of siblings, and with what trained weights have."""
    usual: dict[str, float] = {}  # RMS of each layer
    wrong: dict[str, tuple[Layer, str]] = {}
    for family in _families([layer for layer in layers if layer.rms > 0]):
        of_family = math.exp(statistics.median(math.log(layer.rms) for layer in family))
        columns = family[0].shape[-1]
        plain = _GAIN[0] <= of_family * math.sqrt(columns) <= _GAIN[1]
        for layer in family:
            usual[layer.name] = of_family if plain else 1 / math.sqrt(columns)
            if plain and not _is_near(layer.rms, of_family, _SIBLINGS):
                text = f"decoded, its RMS is {layer.rms:.2g}, and that of its siblings {of_family:.2g}"
                wrong[layer.name] = layer, text
            elif not plain and not _GAIN[0] <= layer.gain <= _GAIN[1]:
                text = f"decoded, its RMS is {layer.rms:.2g}, which no trained weight of K = {columns} has"
                wrong[layer.name] = layer, text
    todo = "Compare the scales with those of the layer's siblings, and write those that it was quantized with."
    for name, (layer, text) in wrong.items():
        others = [other for other, _ in wrong.values() if other is not layer] if len(wrong) <= _MANY else []
        cause = _cause(layer, others, usual)
        yield Finding(rule="decoded-size", severity="error", where=name, what=text, why=cause, todo=todo)


def _cause(layer: Layer, others: Sequence[Layer], usual: Mapping[str, float]) -> str:
    """Return the likely one: what would make the layer as large as its siblings. ``others``: layers that are wrong,
    too.
    """
    wanted = usual[layer.name]
    inverse, root = layer.code_rms / layer.scale, layer.code_rms * math.sqrt(layer.scale)
    if layer.least == layer.most == 1:
        return "its scales are 1"
    for other in others:
        exchanged = _is_near(layer.code_rms * other.scale, wanted) and not _is_near(inverse, wanted)
        if exchanged and _is_near(other.code_rms * layer.scale, usual[other.name]):
            return f"it has the scales of {other.name!r}, and that one has its"
    if _is_near(inverse, wanted, 30.0):
        return "its scales are inverted, 1 / scale_inv"
    if _is_near(root, wanted, 30.0):
        return "its scales are squared, or were applied twice"
    return "its scales are not those that it was quantized with"


def _is_near(rms: float, usual: float, within: float = 3.0) -> bool:
    return usual / within <= rms <= usual * within


def _exchanged(layers: Sequence[Layer], _checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find two layers of one block that are off by one factor, in opposite directions.

    A factor that is less than what ``_sizes`` sees: alone, it would say nothing.
    """
    off: dict[str, list[tuple[str, float]]] = {}  # by block: the layer, and the logarithm of the factor
    for family in _families([layer for layer in layers if layer.rms > 0]):
        usual = statistics.median(math.log(layer.rms) for layer in family)
        far = [(layer, math.log(layer.rms) - usual) for layer in family]
        far = [one for one in far if math.log(_SWAPPED) < abs(one[1]) <= math.log(_SIBLINGS)]
        if len(family) > 2 and 3 * len(far) <= len(family):
            for layer, factor in far:
                number = re.search(r"\.\d+\.", layer.name)
                off.setdefault(layer.name[: number.end()] if number else "", []).append((layer.name, factor))
    for of_block in off.values():
        for (first, factor), (second, other) in itertools.combinations(of_block[:_MANY], 2):
            if abs(factor + other) < 0.2 * max(abs(factor), abs(other)):
                yield Finding(
                    rule="exchanged", severity="warning", where=first,
                    what=f"its RMS is {math.exp(factor):.2g} times that of its siblings, and that of {second!r} "
                    f"{math.exp(other):.2g} times",
                    why="each may have the other's scales",
                    todo="Compare the scales of the two layers with those that they were quantized with.",
                )  # fmt: skip


def _copies(layers: Sequence[Layer], checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find siblings with the same bytes."""
    for family in _families([layer for layer in layers if layer.tops.numel()]):
        first: dict[object, Layer] = {}
        for layer in family:
            other = first.setdefault((layer.shape, layer.code_rms), layer)
            names = [checkpoint.layers[each.name].names(each.name)["weight"] for each in (layer, other)]
            if other is not layer and torch.equal(*(checkpoint.shards.tensor(n).view(torch.uint8) for n in names)):
                yield Finding(
                    rule="same-bytes", severity="warning", where=layer.name,
                    what=f"it has the bytes of {other.name!r}",
                    why="one weight was written twice, or the model is merged of copies",
                    todo="Write each layer's own weight.",
                )  # fmt: skip


def _inputs(layers: Sequence[Layer], _checkpoint: Checkpoint) -> Iterator[Finding]:
    """Compare static scales of inputs with those of siblings."""
    given = [layer for layer in layers if layer.input_scale is not None]
    todo = "Calibrate again, with text like what the model will read."
    if len(given) > 1 and all(layer.input_scale == 1.0 for layer in given):
        text, why = f"the scales of the inputs of all {len(given)} layers are 1", "nothing was calibrated"
        yield Finding(rule="input-scale", severity="warning", where=given[0].name, what=text, why=why, todo=todo)
        return
    least, most = _INPUTS
    odd = {layer.name for layer in given if not least <= (layer.input_scale or math.nan) <= most}
    for layer in given:
        if layer.name in odd and 0 < (layer.input_scale or 0.0) < math.inf:
            text, why = (
                f"the scale of its input is {layer.input_scale:.2g}",
                "inverted, or memory that was never written",
            )
            yield Finding(rule="input-scale", severity="error", where=layer.name, what=text, why=why, todo=todo)
    given = [layer for layer in given if layer.name not in odd]
    for of_module in _by_input(given):
        numbers = [layer.input_scale or 0.0 for layer in of_module]
        if max(numbers) > _SAME_INPUT * min(numbers):
            shown = ", ".join(f"{layer.name.rpartition('.')[2]} {layer.input_scale:.3g}" for layer in of_module)
            usual = statistics.median(numbers)
            far = max(of_module, key=lambda layer: abs(math.log((layer.input_scale or usual) / usual)))
            yield Finding(
                rule="input-scale", severity="error", where=far.name, todo=todo,
                what=f"the layers of one module that read one tensor have other scales for it, {shown}",
                why="they were calibrated apart, or one is another layer's",
            )  # fmt: skip
    for family in _families(given):
        usual = statistics.median(layer.input_scale or 0.0 for layer in family)
        for layer in family:
            scale = layer.input_scale or 0.0
            if len(family) > 2 and not usual / 1e3 <= scale <= usual * 1e3:
                yield Finding(
                    rule="input-scale", severity="warning", where=layer.name, todo=todo,
                    what=f"the scale of its input is {scale:.2g}, and that of its siblings {usual:.2g}",
                    why="it was calibrated with other text, or is another layer's",
                )  # fmt: skip


def _by_input(layers: Sequence[Layer]) -> Iterator[list[Layer]]:
    """Yield the layers of one module that read the same tensor."""
    groups: dict[tuple[str, tuple[str, ...]], list[Layer]] = {}
    for layer in layers:
        module, _, last = layer.name.rpartition(".")
        if kind := next((kind for kind in _READ_ONE if last in kind), None):
            if last != "q_proj" or not _CROSS.search(module):
                groups.setdefault((module, kind), []).append(layer)
    yield from groups.values()


_OF_ALL_LAYERS: Final[tuple[Callable[[Sequence[Layer], Checkpoint], Iterator[Finding]], ...]] = (
    _sizes,
    _exchanged,
    _copies,
    _inputs,
)
