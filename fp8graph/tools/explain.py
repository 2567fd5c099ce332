"""``fp8graph.explain``: shows what would be rewritten, without weights, without a GPU, without compiling code."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fp8graph.backend.backend import Backend
from fp8graph.backend.entry import uncompiled_copy
from fp8graph.backend.inductor_passes import compile_dialect, run_eagerly
from fp8graph.compat import aot, dynamo, fakes, wrappers
from fp8graph.compat.fakes import FakeTensor, FakeTensorMode
from fp8graph.compat.ops import pytree
from fp8graph.errors import ConfigError, expect
from fp8graph.ir.nodes import NAMES_KEY, TEXT_KEY
from fp8graph.ir.settings import Settings, SettingsArguments, show_arguments
from fp8graph.offline import KernelRecord, OfflineInductor
from fp8graph.recipes import RecipeLike
from fp8graph.report import Report
from fp8graph.runtime.policies import PolicyLike


def explain(
    model: nn.Module,
    *args: Any,
    policy: PolicyLike | None = None,
    recipe: RecipeLike = None,
    training: bool | None = None,
    backend: Backend | None = None,
    **kwargs: Any,
) -> Report:
    """Trace ``model(*args, **kwargs)`` on fake tensors and report what fp8graph does with every GEMM.

    Nothing is computed and no weight is read: a model on the meta device, and inputs on it, work as well. The
    model is not changed.

    Args:
        model: any module; a compiled one is unwrapped.
        args, kwargs: the inputs of one call; only the shapes and dtypes of tensors matter. Arguments of
            :class:`Backend` among them (``target="sm_90"``, ``save="memory"``, ...) are settings: the report describes
            the program that a backend with these settings runs.
        policy, recipe: see :class:`Backend`.
        training: trace forward and backward together, or forward only under ``no_grad``. Default: training if
            gradients are enabled here and some parameter requires one.
        backend: use its policy and settings instead of all of these.

    Raises:
        ConfigError, UnsupportedRecipeError: (``ValueError``) for an invalid policy or setting, or inputs with which the
            model does not run.
    """
    expect("explain", "model", model, nn.Module, "a model, an nn.Module")
    arguments: dict[str, Any] = Settings.taken_from(kwargs)
    if backend is not None:
        given = [name for name, value in (("policy", policy), ("recipe", recipe)) if value is not None]
        if given or arguments:
            raise ConfigError(
                f"explain(backend=...) has its own {', '.join([*given, *arguments])}: give one or the other."
            )
        arguments = backend.arguments()
    else:
        Settings(**arguments)  # raises for a setting that cannot be used, including those that explain ignores
        arguments |= {"policy": policy, "recipe": recipe}
    arguments |= {"compiler": "eager", "strict": False}
    tracing = Backend(**arguments)
    model = wrappers.original_module(model)
    if training is None:
        training = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
    try:
        report = trace(tracing, model, args, kwargs, training)
    except dynamo.ERRORS_OF_MODELS as error:
        name, reason = type(wrappers.original_module(model)).__name__, " ".join(str(error).split())[:400]
        raise InputsError(f"explain(model, ...): {name} does not run with these inputs. {reason}") from error

    def kernels() -> list[KernelRecord]:
        generating = Generating(**arguments)
        trace(generating, model, args, kwargs, training)
        return generating.kernels(report)

    target = tracing.settings.hardware
    on_gpu = target is not None and target.is_gpu
    return dataclasses.replace(report, load_kernels=kernels if on_gpu else None)


show_arguments(explain, SettingsArguments, Settings.defaults())


class InputsError(ConfigError):
    """The code of the model raised an error for the inputs of :func:`explain`."""


class Generating(Backend):
    """A backend that generates code for a GPU that may be absent, and runs the graphs eagerly."""

    def __init__(self, policy: PolicyLike | None = None, **settings: Any) -> None:
        super().__init__(policy, **settings)
        assert self.settings.hardware is not None
        self.generator = OfflineInductor(
            self.settings.hardware.name, run_eagerly, names=lambda node: node.meta.get(NAMES_KEY, ())
        )
        self._graphs: dict[int, tuple[str, int]] = {}  # by the position of a kernel: its graph's text, which one of it
        self._seen: Counter[tuple[str, bool]] = Counter()  # graphs with the same text and direction

    def kernels(self, report: Report) -> list[KernelRecord]:
        """Return the kernels of all graphs, in order, each with the number that its graph has in ``report``."""
        numbers: dict[str, list[int]] = {}
        for number, view in enumerate(report.graphs):
            numbers.setdefault(view.after, []).append(number)
        records: list[KernelRecord] = []
        for position, kernel in enumerate(self.generator.kernels):
            text, which = self._graphs.get(position, ("", 0))
            number = numbers[text][min(which, len(numbers[text]) - 1)] if text in numbers else None
            there = {} if number is None else report.graphs[number].origins
            reads, nodes, writes = (
                tuple(name for name in names if name in there) for names in (kernel.reads, kernel.nodes, kernel.writes)
            )
            records.append(dataclasses.replace(kernel, number=number, nodes=nodes, reads=reads, writes=writes))
        return records

    def compile_weights(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        generate = functools.partial(self.generator, direction="weights")
        return compile_dialect(module, inputs, self.settings, generate)

    @property
    def inner_compile(self) -> Callable[..., Any]:
        def generate(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
            start, text = len(self.generator.kernels), module.meta[TEXT_KEY]
            compiled = self.generator(module, inputs, **kwargs)
            same = text, bool(kwargs.get("is_backward"))
            self._graphs |= dict.fromkeys(range(start, len(self.generator.kernels)), (text, self._seen[same]))
            self._seen[same] += 1
            return compiled

        return generate


@torch.inference_mode(False)  # whatever runs around explain(), or around what its report loads later
def trace(backend: Backend, model: nn.Module, args: Any, kwargs: Any, training: bool) -> Report:
    """Compiled code is freed with the model on fake tensors; the report keeps the rows and texts that it shows."""
    with fakes_of(model, args, kwargs, training) as (fake_model, fake_args, fake_kwargs), aot.backward_at_once():
        torch.compile(fake_model, backend=backend)(*fake_args, **fake_kwargs)
    return backend.report


@contextlib.contextmanager
def fakes_of(
    model: nn.Module, args: Any, kwargs: Any, training: bool, mode: FakeTensorMode | None = None
) -> Generator[tuple[nn.Module, Any, Any]]:
    """A copy of a model and its inputs on fake tensors, and around them what a compilation needs that only traces."""
    mode = mode or FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fake_model = uncompiled_copy(model, lambda x: _fake(x, mode))
    fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, lambda x: _fake(x, mode), (args, kwargs))
    with mode, torch.set_grad_enabled(training), dynamo.as_if_called_first():
        yield fake_model, fake_args, fake_kwargs


def _fake(x: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    if isinstance(x, FakeTensor):
        return x
    if fakes.wrapped_tensors(x) and x.device.type != "meta":
        return mode.from_tensor(x, static_shapes=True)
    # a meta model does not trace like a real one (attention decomposes, caches fail): trace it as a CPU model
    device = torch.device("cpu") if x.device.type == "meta" else x.device
    with mode:
        fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    if isinstance(x, nn.Parameter):
        parameter: Any = nn.Parameter(fake, requires_grad=x.requires_grad)
        for name, value in x.__dict__.items():  # a library's own, such as scales and sizes beside bytes
            parameter.__dict__[name] = _fake(value, mode) if isinstance(value, torch.Tensor) else value
        return parameter
    return fake.requires_grad_(x.requires_grad and x.is_leaf)
