"""A causal language model from a folder, and batches of somebody's text for it, for ``fp8graph tune``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from fp8graph.errors import ConfigError


def language_model(folder: Path) -> tuple[Any, Any]:
    """The model in bf16, on the GPU if there is one, in the mode for training; and its tokenizer.

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
    return model.to("cuda" if torch.cuda.is_available() else "cpu").train(), tokenizer


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
