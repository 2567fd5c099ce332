"""Hugging Face models for the commands, without weights from a config or with them from a folder, and their inputs."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import math
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from torch.nn.modules import module

from fp8graph.errors import ConfigError, did_you_mean
from fp8graph.hardware import current_device
from fp8graph.recipes.policy import text_of_file

# What a config without "architectures" is taken for, whole models before parts of them: Whisper and BART have a
# causal LM too, which is their decoder alone.
_TASKS: Final = (
    "SPEECH_SEQ_2_SEQ",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MASKED_LM",
    "CAUSAL_LM",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
)
_LAYERS: Final = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers", "depth")
_DENSE: Final = "first_k_dense_replace"


def config_of(name: str, layers: int | None = None) -> tuple[Any, str]:
    """Return the config in a file or a folder, or the defaults of a model type, and a sentence on what was cut of it.

    Args:
        name: a config.json, a folder that holds one, or a model type.
        layers: the layers of every stack; None: all of a file's, 2 of a model type's.
    """
    path = Path(name)
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        try:
            values: Any = json.loads(text_of_file(file))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file}: not a config ({error}).") from None
        if not isinstance(values, dict) or "model_type" not in values:
            raise ConfigError(f"{file}: not a config of transformers: it has no model_type.")
        _check_type(values["model_type"], f"{file}: transformers {transformers.__version__} has")
        try:
            config, cut = transformers.AutoConfig.from_pretrained(file), layers
        except Exception as error:  # values of other types than its class wants; what is raised is huggingface_hub's
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"{file}: not a config that transformers reads: {reason}") from None
    else:
        if path.suffix or len(path.parts) > 1:
            raise ConfigError(f"{name}: no such file or folder. Of a model on the Hub, download config.json first.")
        _check_type(name, f"no file or folder {name!r}, and transformers {transformers.__version__} has")
        config, cut = transformers.AutoConfig.for_model(name), 2 if layers is None else layers
    if cut is None:
        return config, ""
    cuts = ", ".join(dict.fromkeys(text for part in _parts(config) for text in _cut(part, cut)))
    return (
        config,
        f"cut to {cut} layer{'s' * (cut != 1)} per stack ({cuts}); --layers N for another number" if cuts else "",
    )


def _check_type(name: str, who: str) -> None:
    if name not in transformers.CONFIG_MAPPING:
        raise ConfigError(f"{who} no model type {name!r}.{did_you_mean(name, transformers.CONFIG_MAPPING.keys())}")


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", {}):
        if (part := getattr(config, name, None)) is not None:
            yield from _parts(part)


def _cut(config: Any, layers: int) -> Iterator[str]:
    for name in _LAYERS if not hasattr(config, "depths") else ():  # Swin's stages: four of them, not four layers
        number = getattr(config, name, None)
        if isinstance(number, int) and number > layers:
            setattr(config, name, layers)
            for key, value in vars(config).items():  # layer_types and the like: one entry per layer
                if isinstance(value, list) and len(value) == number:
                    setattr(config, key, value[:layers])
            yield f"{name}: {number}"
            dense = getattr(config, _DENSE, 0)  # DeepSeek's and GLM's: layers before the first one with experts
            if isinstance(dense, int) and dense >= layers:
                setattr(config, _DENSE, layers - 1)
                yield f"{_DENSE}: {dense}"


def positions_of(config: Any) -> int | None:
    """Return the tokens for which each part of a model has positions; None where a config does not say."""
    numbers = (getattr(part, "max_position_embeddings", None) for part in _parts(config))
    return min((number for number in numbers if isinstance(number, int)), default=None)


def model_of(config: Any, name: str | None = None, *, most: int | None = None) -> Any:
    """Return the model of ``config`` on the meta device, in bf16.

    Args:
        config: of transformers.
        name: a class of transformers, ``AutoModelFor...`` too. Default: the config's architecture, or the whole model
            with a head if there is one.
        most: so many modules and parameters are built, and no more.

    Raises:
        ConfigError: the class cannot be built from this config, or has more.
    """
    for part in _parts(config):  # both draw numbers that shapes depend on, in training
        for key in vars(part):
            if key == "apply_spec_augment" or key.endswith("layerdrop"):
                setattr(part, key, False if key == "apply_spec_augment" else 0.0)
    try:
        with in_bf16(torch.device("meta")), _at_most(most):
            made = _class_of(config, name)
            return made.from_config(config) if name and name.startswith("Auto") else made(config)
    except (ValueError, OSError, KeyError, AttributeError, TypeError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ConfigError(f"cannot build {name or 'a model'} from a config of {config.model_type}: {reason}") from None


@contextlib.contextmanager
def in_bf16(device: torch.device) -> Generator[None]:
    """Build modules on ``device`` in bf16 at once: in FP32 first, they would need twice the memory."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(default)


@contextlib.contextmanager
def _at_most(most: int | None) -> Generator[None]:
    """Stop this thread from building more modules and parameters than ``most``."""
    built, thread = itertools.count(1), threading.get_ident()

    def registered(_module: Any, _name: str, _part: Any) -> None:
        if most is not None and threading.get_ident() == thread and next(built) > most:
            raise ConfigError(f"it has more than {most} modules and parameters.")

    hooks = (
        module.register_module_module_registration_hook(registered),
        module.register_module_parameter_registration_hook(registered),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _class_of(config: Any, name: str | None) -> Any:
    wanted = name or next(iter(getattr(config, "architectures", None) or ()), None)
    model_class = getattr(transformers, wanted, None) if wanted else None
    if model_class is not None:
        return model_class
    if name is not None:
        meant = did_you_mean(name, [one for one in dir(transformers) if one[0].isupper()])
        raise ConfigError(f"transformers {transformers.__version__} has no class {name!r}.{meant}")
    for mapping in (*(f"MODEL_FOR_{task}_MAPPING" for task in _TASKS), "MODEL_MAPPING"):
        classes: Mapping[Any, Any] = getattr(transformers, mapping)
        if type(config) in classes:
            made = classes[type(config)]
            return made[0] if isinstance(made, tuple) else made
    raise ConfigError(f"transformers has no model for {config.model_type}, or none that an AutoModel class builds.")


def inputs_of(model: Any, batch: int, seq: int, *, training: bool) -> tuple[dict[str, Any], str]:
    """Arguments of one call of ``model``, by name, and what they leave out. Only their shapes matter.

    ``seq``: tokens of a text, and of a wave after its convolutions; images and spectrograms have the config's size.
    """
    config, takes = model.config, inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {}
    images = 0
    by_value = "image_grid_thw" in takes  # Qwen2-VL: how many patches an image has is a value, and there are none
    if "pixel_values" in takes and not by_value:
        inputs["pixel_values"], images = _images(config, batch)
    if "input_values" in takes:
        inputs["input_values"] = _sound(config, batch, seq)
    if "input_features" in takes:
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", 80)
        inputs["input_features"] = torch.zeros(batch, bins, 2 * getattr(config, "max_source_positions", seq))
    if "input_ids" in takes:
        image: Any = getattr(config, "image_token_id", None)
        images = images if image is not None else 0
        inputs["input_ids"] = torch.zeros(batch, seq + images, dtype=torch.long)
        if image is not None:
            inputs["input_ids"][:, :images] = image
    if "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = torch.zeros(batch, seq, dtype=torch.long)
    kind = type(model).__name__
    if training and "labels" in takes:
        if kind.endswith(("CausalLM", "ConditionalGeneration", "MaskedLM", "LMHeadModel", "TokenClassification")):
            inputs["labels"] = inputs["decoder_input_ids" if "decoder_input_ids" in takes else "input_ids"]
        elif kind.endswith(("SequenceClassification", "ImageClassification", "AudioClassification")):
            inputs["labels"] = torch.zeros(batch, dtype=torch.long)
    given = {name: x.bfloat16() if x.is_floating_point() else x for name, x in inputs.items()}
    return given, "without images: the sizes of its vision tower depend on values" if by_value else ""


def _images(config: Any, batch: int) -> tuple[torch.Tensor, int]:
    """Return one image for each of ``batch``, and how many tokens a language model has for it."""
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", 224)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    patch = getattr(vision, "patch_size", 16)
    patch_height, patch_width = patch if isinstance(patch, (list, tuple)) else (patch, patch)
    tokens = getattr(config, "mm_tokens_per_image", None) or (height // patch_height) * (width // patch_width)
    return torch.zeros(batch, getattr(vision, "num_channels", 3), height, width), tokens


def _sound(config: Any, batch: int, seq: int) -> torch.Tensor:
    """Return a spectrogram if the config has its size, else a wave of ``seq`` tokens."""
    if (bins := getattr(config, "num_mel_bins", None)) and (length := getattr(config, "max_length", None)):
        return torch.zeros(batch, length, bins)
    samples = seq * math.prod(getattr(config, "conv_stride", (320,)))
    return torch.zeros(batch, samples + math.prod(getattr(config, "conv_kernel", ())))


def language_model(folder: Path) -> tuple[Any, Any]:
    """Return the model in bf16, on the GPU if there is one, in the mode for training; and its tokenizer.

    Raises:
        ConfigError: the folder has no such model, or no tokenizer.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no such folder, or no config.json in it. tune() needs a model with its weights.")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        made: Any = transformers.AutoModelForCausalLM
        model = made.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:200]
        raise ConfigError(f"{folder}: transformers cannot load a causal language model from it: {reason}") from None
    return model.to(current_device()).train(), tokenizer


def batches_of(
    tokenizer: Any, files: Sequence[Path], batches: int, batch: int, length: int, seed: int = 0
) -> list[Tensor]:
    """``batches`` tensors of tokens [batch, length], from places of the text that ``seed`` chooses.

    Raises:
        ConfigError: a file cannot be read as text, or all of them are too short for one sequence.
    """
    texts: list[str] = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot be read as text ({error}).") from None
    tokens = tokenizer("\n".join(texts), return_tensors="pt", verbose=False)["input_ids"][0]
    if (last := len(tokens) - length) < 0:
        raise ConfigError(
            f"the text has {len(tokens)} tokens, fewer than one sequence of {length}. Give more text, or less --seq."
        )
    starts = torch.randint(0, last + 1, (batches, batch), generator=torch.Generator().manual_seed(seed))
    return [torch.stack([tokens[start : start + length] for start in row]) for row in starts.tolist()]
