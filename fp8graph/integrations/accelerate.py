"""accelerate: ``mixed_precision="fp8"`` by fp8graph, and so Trainer and what is built on it.

    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[FP8GraphRecipeKwargs(recipe="rowwise")])
    model, optimizer = accelerator.prepare(model, optimizer)  # compiles the model, then prepares it in bf16

A program that makes its ``Accelerator`` itself, such as a trainer: ``python -m fp8graph.integrations.accelerate
train.py ...``, or ``... -m trainer.cli ...``.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, cast

import torch
from accelerate import Accelerator, utils
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn

from fp8graph.backend.backend import Backend
from fp8graph.backend.entry import backend_of, compile, find_backend
from fp8graph.errors import ConfigError, expect

__all__ = ["FP8GraphRecipeKwargs", "install"]

_log = logging.getLogger("fp8graph")
_NAME: Final = "FP8GRAPH"
_HANDLER: Final = "fp8_backend_recipe_handler"  # of an Accelerator
# A class of accelerate that calls such handlers, as docs/patches/accelerate-1.15.0-fp8-backends.patch adds it.
_BASE: Final[type[Any]] = getattr(utils, "FP8BackendKwargs", utils.KwargsHandler)
_THEIRS: Final = (utils.AORecipeKwargs, utils.TERecipeKwargs, utils.MSAMPRecipeKwargs, utils.FP8RecipeKwargs)
_REACHED: Final = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)
_REGISTERED: Final = "ACCELERATE_FP8_"  # begins the names of the environment variables of accelerate's handlers


@dataclass
class FP8GraphRecipeKwargs(_BASE):
    """Lets ``Accelerator(mixed_precision="fp8")`` compile with fp8graph, as its other handlers choose theirs.

    The fields that are left out come from the environment: ``ACCELERATE_FP8_RECIPE``, a recipe's name, and
    ``ACCELERATE_FP8_POLICY``, a policy file. With neither, the device decides.

    Raises:
        ConfigError, UnsupportedRecipeError: (``ValueError``) for arguments that :func:`fp8graph.compile` refuses.
    """

    recipe: Any = None  #: a recipe, or its name
    policy: Any = None  #: a policy, a dict, or the path of a policy file
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The other arguments of :func:`fp8graph.compile`. ``regions`` is "auto" if it is left out."""

    backend = _NAME  # not a field: what accelerator.fp8_backend returns

    def __post_init__(self) -> None:
        expect("FP8GraphRecipeKwargs", "options", self.options, Mapping, "a dict of arguments of fp8graph.compile")
        if self.recipe is None and self.policy is None:
            self.recipe = os.environ.get(f"{_REGISTERED}RECIPE") or None
            self.policy = os.environ.get(f"{_REGISTERED}POLICY") or None
        others = ("regions", *inspect.signature(torch.compile).parameters)
        arguments = {name: value for name, value in self.options.items() if name not in others}
        Backend(self.policy, recipe=self.recipe, **arguments)  # whatever it refuses, it refuses here
        _connect()

    def prepare(self, accelerator: Accelerator, *objects: Any) -> tuple[Any, ...]:
        """Compile the models among what ``Accelerator.prepare`` gets, in place, before they are wrapped or sharded.

        The scaling state, if there is any, goes into the accelerator's checkpoints.

        Raises:
            ConfigError: accelerate would compile the models again, or shard them in a way that loses their names.
        """
        models = [each for each in objects if isinstance(each, nn.Module)]
        if models:
            _check(accelerator)
        for model in models:
            if find_backend(model) is None:  # not prepared, nor compiled by the program
                arguments: dict[str, Any] = {"regions": "auto", **self.options}
                compile(model, self.policy, recipe=self.recipe, **arguments)
            backend = backend_of(model)
            has_state = backend.policy.scheduled or any(recipe.has_state for recipe in backend.policy.recipes())
            if has_state and not any(each is backend for each in accelerator._custom_objects):
                accelerator.register_for_checkpointing(backend)
        return objects


def install(recipe: Any = None, policy: Any = None, *, in_place_of: str = "", **options: Any) -> None:
    """Let each later ``Accelerator(mixed_precision="fp8")`` that gets no other FP8 handler compile with fp8graph.

    This is for programs that make their Accelerator themselves. Trainer's checkpoints then hold the scaling state. It
    changes methods of accelerate, once, until accelerate takes such backends itself. A warning says so of each
    Accelerator that does not compile with fp8graph.

    Args:
        recipe, policy, options: the fields of :class:`FP8GraphRecipeKwargs`.
        in_place_of: "torchao" replaces torchao's handler too, which axolotl always passes for ``fp8: true``. Without a
            recipe or a policy, its recipe is taken, by the name that both libraries have for it.

    Raises:
        ConfigError, UnsupportedRecipeError: (``ValueError``) as for these fields; and by the Accelerator, if the
            replaced handler's casts are those of no recipe of torchao's.
    """
    if in_place_of not in ("", "torchao"):
        raise ConfigError(f"install(in_place_of=...) must be 'torchao' or '', not {in_place_of!r}.")
    handler = FP8GraphRecipeKwargs(recipe=recipe, policy=policy, options=options)
    _connect().default = (handler, in_place_of)


@dataclass
class _Connection:
    """The connection of this process: the handler of accelerators that get none, and whether one has it."""

    default: tuple[FP8GraphRecipeKwargs, str] | None = None
    used: bool = False

    def choose(self, precision: str, handlers: list[Any]) -> tuple[FP8GraphRecipeKwargs | None, list[Any]]:
        """Return the handler of an accelerator, if it is ours, and the others that it gets."""
        own = [each for each in handlers if isinstance(each, FP8GraphRecipeKwargs)]
        theirs = [each for each in handlers if isinstance(each, _THEIRS)]
        if own and (theirs or len(own) > 1):
            names = ", ".join(type(each).__name__ for each in (*own, *theirs))
            raise ConfigError(f"Accelerator(kwargs_handlers=...) has {names}: pass one FP8 handler.")
        if own and precision != "fp8":
            raise ConfigError(f"FP8GraphRecipeKwargs needs mixed_precision='fp8', and it is {precision!r}.")
        if self.default is not None and not own:
            handler, in_place_of = self.default
            replaced = [each for each in theirs if in_place_of and isinstance(each, utils.AORecipeKwargs)]
            # LlamaFactory's fp8_backend, which Trainer does not pass on
            named = os.environ.get("FP8_BACKEND", "").upper() == _NAME
            others = [type(each).__name__ for each in theirs if each not in replaced]
            elsewhere = os.environ.get(f"{_REGISTERED}BACKEND", "")
            if named or precision == "fp8" and not others and elsewhere.upper() in ("", "NO", _NAME):
                own = [_with_recipe_of(handler, replaced[0]) if replaced else handler]
                if others:
                    _log.warning(_LEFT_OUT, ", ".join(others))
            else:
                reason = f"mixed_precision={precision!r}" if precision != "fp8" else ", ".join(others) or elsewhere
                _log.warning(_NOT_OURS, reason)
        rest = [each for each in handlers if not isinstance(each, (FP8GraphRecipeKwargs, *_THEIRS))]
        return (own[0], rest) if own else (None, handlers)


_LEFT_OUT: Final = "FP8_BACKEND names fp8graph, and this Accelerator got %s, too, whose settings are left out."
_NOT_OURS: Final = (
    "fp8graph.integrations.accelerate is installed, and this Accelerator does not use it (%s): nothing of it compiles "
    "with fp8graph. It takes mixed_precision='fp8' without another FP8 handler."
)
_UNUSED: Final = (
    "The program ended, and none of its Accelerators compiled with fp8graph: it made none with mixed_precision='fp8' "
    "after fp8graph.integrations.accelerate was installed."
)


def _with_recipe_of(handler: FP8GraphRecipeKwargs, replaced: Any) -> FP8GraphRecipeKwargs:
    """Return the handler, with the recipe of torchao's handler that it replaces if it has none."""
    if handler.recipe is not None or handler.policy is not None:
        return handler
    from torchao.float8 import Float8LinearConfig, Float8LinearRecipeName

    casts = [each.name for each in fields(Float8LinearConfig) if each.name.startswith("cast_config_")]
    for name in Float8LinearRecipeName:
        theirs = Float8LinearConfig.from_recipe_name(name)
        if all(getattr(replaced.config, cast) == getattr(theirs, cast) for cast in casts):
            return replace(handler, recipe=name.value)
    raise ConfigError(
        "the replaced AORecipeKwargs has casts of no recipe of torchao's: name one by install(recipe=...) or "
        f"{_REGISTERED}RECIPE."
    )


def _check(accelerator: Accelerator) -> None:
    kind, compiled_with = accelerator.distributed_type, cast(Any, accelerator.state.dynamo_plugin).backend
    if compiled_with != DynamoBackend.NO:
        raise ConfigError(
            f"mixed_precision='fp8' by fp8graph compiles the model, and accelerate would again, with {compiled_with}: "
            "leave out dynamo_backend and torch_compile."
        )
    if kind not in _REACHED or (kind == DistributedType.FSDP and not accelerator.is_fsdp2):
        raise ConfigError(
            f"mixed_precision='fp8' by fp8graph was not tried with {kind.value}"
            f"{' 1' * (kind == DistributedType.FSDP)}: use DDP or FSDP 2, or see docs/trainers.md."
        )


@functools.cache
def _connect() -> _Connection:
    """Let accelerate call the handlers of this module.

    accelerate 1.15 knows its own three by their classes: docs/patches has the change that lets others register. Until
    it is there, four methods of Accelerator are wrapped; then ``__init__`` alone, for :func:`install`.
    """
    connection, cls = _Connection(), cast(Any, Accelerator)
    original, signature = cls.__init__, inspect.signature(cls.__init__)
    calls_handlers = _BASE is not utils.KwargsHandler

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind_partial(self, *args, **kwargs).arguments
        precision = str(bound.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")).lower()
        handler, rest = connection.choose(precision, list(bound.get("kwargs_handlers") or []))
        if handler is None:
            original(self, *args, **kwargs)
            return
        if calls_handlers:
            bound |= {"mixed_precision": "fp8", "kwargs_handlers": [*rest, handler]}
        else:
            bound |= {"mixed_precision": "bf16", "kwargs_handlers": rest or None}
        try:
            original(**bound)
        except ValueError as error:
            if "already been initialized" not in str(error):
                raise
            raise ConfigError(_INITIALIZED) from error
        if not calls_handlers:
            setattr(self, _HANDLER, handler)
            self.fp8_enabled = True
        connection.used = True
        _keep_state_in_checkpoints_of_trainer()

    cls.__init__ = init
    if calls_handlers:
        return connection
    cls.fp8_backend = property(functools.partial(_backend_name, cls.fp8_backend.fget))
    for name in ("prepare", "prepare_model"):
        setattr(cls, name, _preparing_first(getattr(cls, name)))
    return connection


_INITIALIZED: Final = (
    "Accelerator(mixed_precision='fp8'): this process has made an Accelerator with another precision, and accelerate "
    "keeps the first one's. Make the one with mixed_precision='fp8' first."
)


def _backend_name(original: Callable[[Accelerator], Any], accelerator: Accelerator) -> Any:
    return original(accelerator) if getattr(accelerator, _HANDLER, None) is None else _NAME


def _preparing_first(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def prepare(self: Accelerator, *objects: Any, **kwargs: Any) -> Any:
        handler = getattr(self, _HANDLER, None)
        if handler is not None:
            handler.prepare(self, *objects)
        return method(self, *objects, **kwargs)

    return prepare


def _keep_state_in_checkpoints_of_trainer() -> None:
    """Add our callback to those of each later Trainer; one makes its Accelerator before it reads their list."""
    trainer = sys.modules.get("transformers.trainer")
    if trainer is not None:
        from fp8graph.integrations.transformers import ScalingStateIfCompiled

        if ScalingStateIfCompiled not in trainer.DEFAULT_CALLBACKS:
            trainer.DEFAULT_CALLBACKS.append(ScalingStateIfCompiled)


def main() -> None:
    """Run a script or ``-m`` a module whose FP8 accelerators compile with fp8graph."""
    usage = "usage: python -m fp8graph.integrations.accelerate [--in-place-of torchao] (script.py | -m module) ..."
    arguments, in_place_of = sys.argv[1:], ""
    if arguments[:1] == ["--in-place-of"] and len(arguments) > 1:
        in_place_of, arguments = arguments[1], arguments[2:]
    if not arguments or arguments[0] == "-m" and len(arguments) < 2:
        raise SystemExit(usage)
    install(in_place_of=in_place_of)
    try:
        _run(arguments)
    finally:
        if not _connect().used:
            _log.warning(_UNUSED)


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    # this file is loaded twice, as __main__ and by its name: accelerators know the second
    from fp8graph.integrations import accelerate

    accelerate.main()
