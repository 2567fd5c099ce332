"""``fp8graph inspect``: the contents of an FP8 checkpoint, as text, with progress where it takes long.

The names in it are compared with those of the model that its config.json describes, which transformers builds on the
meta device, without weights. Where it cannot, the reason is all there is to say.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from fp8graph.checkpoints import Checkpoint
from fp8graph.checkpoints.inspect import Inspection, LayerSummary, inspect
from fp8graph.errors import ConfigError, printable
from fp8graph.libraries.readers import as_saved
from fp8graph.report.tables import aligned, any_layer, size_text
from fp8graph.report.terminal import progress_bar

# of layers and scales that a format adds to the model: ``quantization_config`` says what they are
_ADDED: Final = re.compile(r"(_scale|_scale_inv|_scale_2|_zero_point|_g_idx|\.scale|_shape)$")
_COUNTS: Final = re.compile(r"(layers|blocks|experts|depth|depths|layer_types)$")


def inspected(folder: Path) -> Inspection:
    """:func:`inspect`, with a bar on a terminal, and a comparison of the names with those of the config's model."""
    with progress_bar(f"reading {folder}") as progress:
        found = inspect(folder, progress=progress)
    names, problems = compared(Checkpoint(folder))
    return dataclasses.replace(found, architecture=names, problems=[*found.problems, *problems])


def text(found: Inspection) -> str:
    """The contents of a checkpoint, for people."""
    share = f"{100 * found.quantized_share:.1f} % of the numbers"
    files = f"{found.files} file{'s' * (found.files != 1)}"
    parts = [
        [f"{found.folder}: {found.format}, {files}, {size_text(found.bytes)}. {_layers(found)} quantized: {share}."],
        aligned(
            [
                ("scheme", "layers", "one scale per", "scales", "inputs"),
                *((one.name, str(one.layers), one.tile, one.scales, one.input) for one in found.schemes),
            ],
            ruled=True,
        ),
        aligned(
            [
                ("dtype", "tensors", "size"),
                *((name, str(count), size_text(size)) for name, (count, size) in found.dtypes.items()),
            ],
            ruled=True,
        ),
        [f"in high precision: {_some(found.high_precision)}", f"ignore list: {_some(found.ignore)}"],
        *([[printable(f"key-value cache: {found.kv_cache}")]] if found.kv_cache is not None else []),
    ]
    if found.layers:
        rows = [_outlier(one) for one in found.outliers()]
        header = ("layers that stand out", "shape", "scales max/min", "max scale", "saturated", "zero", "not finite")
        parts.append(aligned([header, *rows], ruled=True))
    parts.append([found.architecture])
    some = [f"  {printable(problem)}" for problem in found.problems[:50]]
    more = [f"  and {len(found.problems) - 50} more"] if len(found.problems) > 50 else []
    wrong = [f"{len(found.problems)} things do not fit together:", *some, *more]
    parts.append(wrong if found.problems else ["Nothing is missing, left over or of a wrong shape."])
    return "\n\n".join("\n".join(lines) for lines in parts)


def _layers(found: Inspection) -> str:
    count = sum(one.layers for one in found.schemes)
    return f"{count} layer{'s' * (count != 1)}"


def _outlier(one: LayerSummary) -> tuple[str, ...]:
    shape = " x ".join(map(str, one.shape))
    shares = (f"{100 * share:.2f} %" for share in (one.saturated, one.zero))
    return printable(one.layer), shape, f"{one.scale_ratio:.3g}", f"{one.largest_scale:.3g}", *shares, str(one.nan)


def _some(names: list[str]) -> str:
    """Names, with one entry for layers that differ only in their numbers."""
    kinds = list(dict.fromkeys(printable(any_layer(f"{name}.").removesuffix(".")) for name in names))
    return ", ".join(kinds[:12]) + (f" and {len(kinds) - 12} more" if len(kinds) > 12 else "") or "none"


def compared(checkpoint: Checkpoint) -> tuple[str, list[str]]:
    """The class that the names were compared with, or why they were not; and what is missing or left over.

    Returns:
        A sentence, and problems in sentences without their full stop.
    """
    try:
        model = _model(checkpoint)
    except ConfigError as error:
        return f"The names were not compared with those of a model: {error}", []
    title = type(model).__name__
    saved, tied = _names(model)
    found = set(_tensors(checkpoint, saved, getattr(model, "base_model_prefix", "")))
    missing = [name for name in saved if name not in found and not tied[name] & found]
    unknown = [name for name in found if name not in saved and not _ADDED.search(name)]
    missing = _without(missing, getattr(model, "_keys_to_ignore_on_load_missing", None))
    unknown = _without(unknown, getattr(model, "_keys_to_ignore_on_load_unexpected", None))
    file = checkpoint.folder / "config.json"
    texts = ((missing, "is not in the checkpoint"), (unknown, "is in the checkpoint, and not in that model"))
    problems = [f"{file}: of {title}, {name!r} {text}" for names, text in texts for name in sorted(names)]
    return f"The names were compared with those of {title} in transformers.", problems


def _model(checkpoint: Checkpoint) -> Any:
    """
    Raises:
        ConfigError: transformers has no such model, or cannot build it.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("transformers is not installed.")
    from fp8graph.tools.hugging_face import config_of, model_of

    config, _ = config_of(str(checkpoint.folder))
    name = next(iter(getattr(config, "architectures", None) or ()), None)
    if not isinstance(name, str):
        raise ConfigError("config.json names no architecture.")
    if not hasattr(importlib.import_module("transformers"), name):
        raise ConfigError(f"transformers has no architecture {name!r}, which config.json names.")
    if (large := next(_too_many(config.to_dict(), len(checkpoint.shards)), None)) is not None:
        raise ConfigError(f"config.json says {large}, and there are {len(checkpoint.shards)} tensors.")
    try:
        return model_of(config)
    except ConfigError:
        raise
    except Exception as error:  # of sizes that no model has: each class fails in its own way
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"transformers cannot build {name}: {reason}") from None


def _too_many(config: Mapping[str, Any], tensors: int) -> Iterator[str]:
    """Counts of modules in a config for which there are not enough tensors: to build them could take for ever."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _too_many(value, tensors)
        elif _COUNTS.search(str(name)):
            count = value if isinstance(value, int) else len(value) if isinstance(value, list) else 0
            if count > max(tensors, 1):
                yield f"{name} = {count}"


def _names(model: Any) -> tuple[list[str], dict[str, set[str]]]:
    """The names under which ``model`` is saved; and for each, those of the same tensor, of which one is in a file."""
    model.tie_weights()
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    owners: dict[int, set[str]] = {}
    for name, tensor in state.items():
        owners.setdefault(id(tensor), set()).add(name)
    saved = list(as_saved(model, {name: tensor.detach() for name, tensor in state.items()}))
    return saved, {name: owners[id(state[name])] if name in state else set[str]() for name in saved}


def _tensors(checkpoint: Checkpoint, saved: Sequence[str], prefix: str) -> Iterator[str]:
    """The tensors of the model in the checkpoint. transformers takes the names of the model without its head, too."""
    known = set(saved)
    layers = checkpoint.layers.items()
    weights = (layer if stored.names(layer)["weight"] == layer else f"{layer}.weight" for layer, stored in layers)
    for name in (*weights, *checkpoint.others):
        longer = f"{prefix}.{name}"
        yield longer if name not in known and longer in known else name


def _without(names: Sequence[str], patterns: Sequence[str] | None) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]
