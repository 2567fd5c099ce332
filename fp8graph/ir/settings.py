"""The user's settings, beside the policy, in one object for every reader."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypedDict

from fp8graph import hardware
from fp8graph.compat import inductor
from fp8graph.errors import ConfigError, did_you_mean, expect
from fp8graph.hardware import Hardware
from fp8graph.hardware.speed import launches_are_replayed

_DECIDES: Final = {"decides": True}  # metadata of a field: ranks agree on it, and compiled code depends on it

# Inductor's options under which its C++ computes a row alike in graphs of other sizes and other fusions: each operation
# rounds, and a row is not summed by several threads where there are few rows (``LoopNest.max_parallel_depth``).
_SAME_CODE: Final = {"emulate_precision_casts": True, "cpp.threads": 1}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of a :class:`~fp8graph.Backend`, and the options of ``torch.compile(backend="fp8graph")``.

    To add an option, add a field here and in ``SettingsArguments``, and read it where it matters.

    Args:
        strict: raise :class:`~fp8graph.Fp8CoverageError` when a GEMM that a user's rule names is not in FP8 (while
            compiling), when Dynamo's recompile limit is reached (new shapes would run in eager), and when a rule
            matched nothing (once the first step is over) or a frame fell back to eager (at the next call). No rule
            names a product that fp8graph never rewrites (:class:`~fp8graph.ProductRecord`): it raises nothing.
        compiler: "inductor" generates code; "eager" runs the rewritten graph node by node, for debugging and
            fast tests.
        inductor_options: options of Inductor, as for ``torch.compile(options=...)``.
        target: the hardware to decide for, such as "cpu", "sm_90" or "gfx942"; default: the device of the tensors.
        cache_weights: True keeps FP8 copies of the weights where no gradients are computed, and looks whether they are
            still those of the weights (see ``passes/hoist_weights/``); where gradients are computed, each forward and
            each backward quantizes the weights that it reads. "update" keeps copies there too, over the micro-batches
            of gradient accumulation, until an update of the weights is noticed: call ``backend.refresh_weights()``
            after writing to ``.data``. False keeps none. Copies take one byte per element and layout: half of the
            memory of bf16 weights in inference, with "update" as much as they.
        save: "speed" keeps FP8 columnwise copies of activations for backward, which makes those of large weights again
            from the weights; "memory" lets backward quantize activations again, too, from tensors that are kept anyway.
        save_activations_in_fp8: with "memory", keep the inputs of activation functions (SwiGLU, GELU) in FP8, too.
            Backward then reads them rounded; forward does not.
        fuse_linears: fuse linears of one module that share their input into one GEMM (q, k and v; gate and up).
            With per-tensor recipes, the fused weights (and the fused gradients) share a single scale. Formerly
            ``group``.
        accumulate_wgrad: add wgrad's FP32 result to a buffer, without rounding it to bf16: ``weight.main_grad`` if the
            weight has one (FP32, as Megatron's and Transformer Engine's have), else the ``.grad`` of an FP32 weight.
            With torch 2.15 on an NVIDIA GPU the GEMM itself adds.
        small_tiles: where no gradients are computed, and at most 128 rows are multiplied (decoding), let operands with
            a scale per row be multiplied as they are, in smaller tiles, and their scales multiply the FP32 result. It
            rounds in another order than the GEMM does. On NVIDIA GPUs of sm_90.
        batch_invariant: give each token the same bits whatever the batch that it is in: its size, order and padding,
            packed sequences, prefill or decoding, training or inference, forward and the gradients of inputs. Products
            and attention are slower (``passes/batch_invariance``), linears are not fused, GEMMs are in FP8 also where
            that is slower, and generated code rounds as eager code does (on a CPU on one thread). On CPUs and, not run
            there yet, NVIDIA GPUs from sm_89 on. Raises while it compiles for what cannot be: scales of a whole batch,
            dropout, and others.

    Raises:
        ConfigError: (a ``ValueError``) for a value that cannot be used.
    """

    strict: bool = False
    compiler: Literal["inductor", "eager"] = "inductor"
    inductor_options: Mapping[str, Any] | None = field(default=None, repr=False)
    target: str | None = field(default=None, metadata=_DECIDES)
    cache_weights: bool | Literal["update"] = field(default=True, metadata=_DECIDES)
    save: Literal["speed", "memory"] = field(default="speed", metadata=_DECIDES)
    save_activations_in_fp8: bool = field(default=False, metadata=_DECIDES)
    fuse_linears: bool = field(default=True, metadata=_DECIDES)
    accumulate_wgrad: bool = field(default=False, metadata=_DECIDES)
    small_tiles: bool = field(default=False, metadata=_DECIDES)
    batch_invariant: bool = field(default=False, metadata=_DECIDES)

    def __post_init__(self) -> None:
        for name, values in {"compiler": ("inductor", "eager"), "save": ("speed", "memory")}.items():
            if (value := getattr(self, name)) not in values:
                raise ConfigError(f"{name} must be one of {', '.join(values)}, not {value!r}.")
        if self.save_activations_in_fp8 and self.save != "memory":
            raise ConfigError('save_activations_in_fp8 trades speed for memory: it needs save="memory".')
        if type(self.cache_weights) is not bool and self.cache_weights != "update":
            raise ConfigError(f'cache_weights must be True, False or "update", not {self.cache_weights!r}.')
        for name in (each.name for each in dataclasses.fields(self) if each.type == "bool"):
            if type(value := getattr(self, name)) is not bool:
                raise ConfigError(f"{name} must be True or False, not {value!r}.")
        if self.batch_invariant and self.small_tiles:
            raise ConfigError("small_tiles=True multiplies few rows in another order: not with batch_invariant=True.")
        _ = self.hardware, self.inductor  # raises for an unknown target

    @staticmethod
    def taken_from(arguments: dict[str, Any]) -> dict[str, Any]:
        """Take the settings out of the keyword ``arguments`` of a function, and return them."""
        return {name: arguments.pop(name) for name in Settings.names() if name in arguments}

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Return the defaults of all settings, by name."""
        return {field.name: field.default for field in dataclasses.fields(Settings)}

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the names of all settings, in order."""
        return tuple(field.name for field in dataclasses.fields(Settings))

    @functools.cached_property
    def hardware(self) -> Hardware | None:
        """The target; None: the device of the tensors."""
        return hardware.from_target(self.target) if self.target is not None else None

    @functools.cached_property
    def inductor(self) -> dict[str, Any]:
        """Inductor's options under the names that Inductor's config has."""
        options = dict(self.inductor_options or {})
        names = inductor.option_names()
        if unknown := sorted(name for name in options if name.replace("-", "_") not in names):
            raise ConfigError(f"Inductor has no option {unknown[0]!r} (see torch._inductor.list_options()).")
        options = {name.replace("-", "_"): value for name, value in options.items()}
        for name, value in _SAME_CODE.items() if self.batch_invariant else ():
            if options.setdefault(name, value) != value:
                raise ConfigError(
                    f"batch_invariant=True needs Inductor's option {name}={value!r}, not {options[name]!r}."
                )
        return options

    @property
    def refuses_eager(self) -> str | None:
        """The setting by which no frame of a model may run in eager because Dynamo gave it up; None: it may."""
        return "strict mode" if self.strict else "batch_invariant=True" if self.batch_invariant else None

    @property
    def fuses_linears(self) -> bool:
        """Whether linears are fused: a fused GEMM has another shape, and another order of sums."""
        return self.fuse_linears and not self.batch_invariant

    @property
    def cuda_graphs(self) -> bool:
        """Whether launches cost the host nothing, because Inductor records CUDA graphs."""
        return launches_are_replayed(self.inductor)

    @property
    def pipelines_gathers(self) -> bool:
        """Whether Inductor splits a gather and its GEMM into parts that overlap (asynchronous tensor parallelism)."""
        name = "_micro_pipeline_tp"
        return bool(self.inductor.get(name, inductor.default_option(name)))

    def keeps_weights(self, *, training: bool) -> bool:
        """Return whether a graph takes kept FP8 copies of its weights. ``training``: it has a backward."""
        return self.cache_weights == "update" or (self.cache_weights and not training)

    def decisions(self) -> dict[str, Any]:
        """Return the settings that decide how graphs are rewritten: equal on all ranks, part of compiled code's key."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.metadata}


class SettingsArguments(TypedDict, total=False):
    """The fields of :class:`Settings` as keyword arguments, for editors and type checkers."""

    strict: bool
    compiler: Literal["inductor", "eager"]
    inductor_options: Mapping[str, Any] | None
    target: str | None
    cache_weights: bool | Literal["update"]
    save: Literal["speed", "memory"]
    save_activations_in_fp8: bool
    fuse_linears: bool
    accumulate_wgrad: bool
    small_tiles: bool
    batch_invariant: bool


def show_arguments(function: Any, arguments: Any, defaults: Mapping[str, Any]) -> None:
    """Give a function or class a signature that names its keyword arguments, for help() and the completion of IPython.

    Both show ``**kwargs: Unpack[arguments]`` as ``kwargs``.

    Args:
        arguments: a TypedDict. Its keys take the place of ``**kwargs``, which stay if they have another type.
        defaults: by key; keys without one are left out.
    """
    signature = inspect.signature(function)
    shown = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults[name],
            annotation=getattr(hint, "__forward_arg__", hint),
        )
        for name, hint in arguments.__annotations__.items()
        if name in defaults
    ]
    *own, last = signature.parameters.values()
    rest = [] if str(last.annotation).startswith("Unpack[") else [last]
    function.__signature__ = signature.replace(parameters=[*own, *shown, *rest])


def choices(what: str, name: str, names: Sequence[str]) -> str:
    """Return the rest of a message about an unknown ``name``: the name that was probably meant, and all known names."""
    return f".{did_you_mean(name, names)} {what}: {', '.join(names)}."


# Backend's arguments, and two of torch's own under short names
_OPTIONS: Final = (
    *("policy", "recipe", "observe", "guard"),
    *(name for name in Settings.names() if name != "inductor_options"),
    *("mode", "inductor"),
)


def arguments_of(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a backend for ``torch.compile(..., mode=, options=)``.

    Raises:
        ConfigError: for an option that does not exist, or that is none of Inductor's.
    """
    given = dict(options)
    given |= Settings.taken_from(given)
    if unknown := sorted(given.keys() - set(_OPTIONS)):
        raise ConfigError(
            f"fp8graph has no option {unknown[0]!r}{choices('Options', unknown[0], _OPTIONS)} "
            'Inductor\'s own options go into a dict: options={"inductor": {...}}.'
        )
    mode, own = given.pop("mode", mode), given.pop("inductor", None) or {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"option 'inductor' must be a dict of Inductor options, not {own!r}.")
    of_mode: Mapping[str, Any] = {}
    if mode is not None:
        expect("torch.compile", "mode", mode, str, "the name of a mode")
        try:
            of_mode = inductor.options_of_mode(mode)
        except KeyError as error:
            raise ConfigError(f"mode must be one of {error.args[0]}, not {mode!r}.") from None
    return {**given, "inductor_options": {**of_mode, **own}}
