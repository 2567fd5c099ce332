"""What several commands take: a Hugging Face model by its config, and the hardware and policy to decide with."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[argparse.Namespace], int]


def command(commands: Any, name: str, run: Run, description: str) -> argparse.ArgumentParser:
    """The parser of one command; ``description`` is its line among all commands, too."""
    found = commands.add_parser(name, help=description, description=f"{description[0].upper()}{description[1:]}.")
    found.set_defaults(run=run)
    return found


def positive(text: str) -> int:
    """A number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def writable(path: Path, *endings: str) -> None:
    """Raise ConfigError, before any work is done, if a file cannot be written there."""
    from fp8graph.errors import ConfigError

    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path}: cannot be written. Is there such a folder?")
    if endings and path.suffix not in endings:
        raise ConfigError(f"{path}: must end in {', '.join(endings)}.")


def check_recipe(name: str | None) -> None:
    """Raise UnsupportedRecipeError before anything large is imported."""
    from fp8graph.recipes import resolve_recipe

    resolve_recipe(name)


def add_model(parser: argparse.ArgumentParser) -> None:
    """A model without weights, and the inputs that it is traced with."""
    parser.add_argument("model", help="a config.json, a folder that holds one, or a model type like 'llama'")
    parser.add_argument(
        "--class", dest="name", metavar="NAME", help="a class of transformers, like AutoModelForSequenceClassification"
    )
    parser.add_argument("--layers", type=positive, help="layers per stack (default: all of a config, 2 of a type)")
    parser.add_argument("--batch", type=positive, default=1, help="sequences per replica (default 1)")
    parser.add_argument("--seq", type=positive, default=128, help="tokens per sequence (default 128)")


def add_policy(parser: argparse.ArgumentParser) -> None:
    """What decides about each GEMM."""
    parser.add_argument("--policy", help="a policy file (.toml or .json)")
    parser.add_argument("--recipe", help="the recipe of the default policy")
    parser.add_argument("--target", help="the hardware to decide for: cpu, sm_90, sm_100, gfx942, ...")


def meta_model(options: argparse.Namespace, *, training: bool) -> tuple[Any, dict[str, Any]]:
    """The model that was asked for, without weights, and inputs for it. Says what was left out."""
    from fp8graph.tools.from_config import config_of, inputs_of, model_of

    config, cut = config_of(options.model, options.layers)
    model = model_of(config, options.name)
    inputs, left_out = inputs_of(model, options.batch, options.seq, training=training)
    print(f"fp8graph: {', '.join(filter(None, (type(model).__name__, left_out, cut)))}", file=sys.stderr)
    return model, inputs


def traced(model: Any, inputs: dict[str, Any], **settings: Any) -> Any:
    """The report of ``model`` on ``inputs`` that were made for it."""
    from fp8graph.cli.terminal import working
    from fp8graph.errors import ConfigError, Fp8GraphError
    from fp8graph.tools.explain import InputsError, explain
    from fp8graph.tools.from_config import positions_of

    try:
        with working(f"tracing {type(model).__name__}"):
            return explain(model, **settings, **inputs)
    except Exception as error:  # made-up inputs may not be what the model takes, and its code says anything then
        if isinstance(error, Fp8GraphError) and not isinstance(error, InputsError):
            raise
        cause = error.__cause__ if isinstance(error, InputsError) and error.__cause__ is not None else error
        reason = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0][:200]}"
        positions, tokens = positions_of(model.config), inputs.get("input_ids")
        too_long = positions is not None and tokens is not None and tokens.shape[1] > positions
        raise ConfigError(
            f"cannot trace {type(model).__name__} with inputs made from its config ({reason}). "
            f"{f'Try --seq {positions}, or call' if too_long else 'Call'} fp8graph.explain(model, ...) with inputs of "
            "your own."
        ) from error
