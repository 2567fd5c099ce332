"""Say, or in strict mode raise, what was compiled without what the user wants, and which frames Dynamo gave up."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import nn

from fp8graph.compat import dynamo, wrappers
from fp8graph.errors import Fp8CoverageError
from fp8graph.ir.settings import Settings
from fp8graph.libraries import (
    adopt,
    adopt_adapters,
    converted_for_training,
    dequantized_in_forward,
    left_to_kernels,
    not_adopted,
)
from fp8graph.libraries.readers import of_compressed_tensors
from fp8graph.records import OtherRecord, SiteRecord
from fp8graph.report import Report

_log = logging.getLogger("fp8graph")


class Reports(Protocol):
    """The part of a backend that knows its compiled graphs.

    Attributes:
        runs: a graph of it was called, or it was said why there is none.
        said: the warnings that it gives once.
        dequantized: by name, the layers that dequantize their weights themselves, and the weights' class.
    """

    runs: bool
    said: set[str]
    dequantized: dict[str, str]

    @property
    def settings(self) -> Settings:
        """The settings: strict or not."""
        ...

    @property
    def report(self) -> Report:
        """A report on every graph so far."""
        ...


def check_compiled(backend: Reports, model: nn.Module | None) -> None:
    """After the first call of ``model``: warn if no GEMM of it was compiled, once for each backend.

    Args:
        model: None for code whose calls nobody watches: it is then called again, after its first step.

    Raises:
        Fp8CoverageError: in strict mode.
    """
    report = backend.report
    others = any(row.recipe is not None or row.required for row in report.others)
    if report.gemms or others:
        return
    graphs = f"{len(report.graphs)} graph(s) without a matmul" if report.graphs else "no graph"
    because = [f"{r.fqn or 'the model'}: {r.reason}" for r in report.refusals] + report.skipped_frames
    because += dynamo.switched_off(model) if model is not None else []
    who = "Compiled code" if model is None else type(model).__name__
    lines = [f"{who} was called, and no GEMM of it was compiled: Dynamo made {graphs}.", *because[:4]]
    warn_or_raise_once(backend, "\n  ".join(lines), key="compiled nothing")


class AfterFirstCall:
    """Call it after each call of ``module``, until it returns True: it has then checked that GEMMs were compiled.

    Args:
        part: of a model that is compiled in parts. Those with GEMMs may come later in the outermost call: a part is
            checked when it is called once more, after that.
    """

    def __init__(self, backend: Reports, module: nn.Module, *, part: bool) -> None:
        self._backend, self._module, self._part = backend, weakref.ref(module), part
        self._runs: Callable[[], object] | None = None  # the outermost call

    def __call__(self) -> bool:
        self._backend.runs = True
        if self._part and self._runs is None:
            self._runs = dynamo.outermost_call()
        if self._runs is not None and self._runs() is not None:
            return False
        check_compiled(self._backend, self._module())
        return True


def check_rules(backend: Reports) -> None:
    """After the first step: warn, once for each backend, of rules that matched nothing."""
    if lines := backend.report.unmatched():
        more = f"\n  and {len(lines) - 4} more" if lines[4:] else ""
        warn_or_raise_once(
            backend,
            "\n  ".join(["The first step is over.", *lines[:4]])
            + f"{more}\n  Layers that these rules are for run as the policy has it without them. A rule that may match "
            "nothing needs optional=True.",
            key="rules",
        )


def check_faster(backend: Reports) -> None:
    """After the first step: warn, once for each backend, if every GEMM is left as it is since FP8 would be slower."""
    gemms = backend.report.gemms
    slow = [gemm for gemm in gemms if gemm.by_profitability]
    if slow and all(gemm.recipe is None for gemm in gemms) and "nothing is faster" not in backend.said:
        backend.said.add("nothing is faster")
        first = max(slow, key=lambda gemm: gemm.speedup or 0.0)
        text = (
            f"None of the {len(gemms)} GEMMs runs in FP8: the speed model predicts no gain. {first.name} "
            f"{first.part}: {first.reason}. Larger batches gain more; Policy(min_speedup=0) puts them into FP8 anyway."
        )
        _log.warning("%s", text)  # in strict mode, too: a policy may ask for speed alone


def note_dequantized(backend: Reports, layers: Iterable[tuple[str, str, torch.dtype]]) -> None:
    """Remember layers for :func:`check_dequantized`: name, class of the weight, dtype of its numbers."""
    backend.dequantized.update((name, f"{kind}, {dtype}") for name, kind, dtype in layers)


def check_dequantized(backend: Reports) -> None:
    """After the first step: warn, once for each backend, of weights that arrived quantized, and are now in FP8."""
    classes = backend.dequantized
    in_fp8 = dict.fromkeys(gemm.fqn for gemm in backend.report.gemms if gemm.recipe is not None) if classes else ()
    if layers := [fqn for fqn in in_fp8 if fqn in classes]:
        more = f", and so it is with {len(layers) - 1} more" if layers[1:] else ""
        warn_or_raise_once(
            backend,
            f"The weight of {layers[0] or 'the model'} arrives quantized ({classes[layers[0]]}), in a form that "
            "fp8graph does not read: its forward dequantizes it, and the result is quantized a second time, to FP8"
            f"{more}. A rule with recipe None leaves such layers alone.",
            key="quantized before",
        )


def check_quantized_once(backend: Reports, layers: Iterable[tuple[str, str]]) -> None:
    """Before layers are compiled: warn, once for each backend, if some quantize their operands themselves.

    Args:
        layers: the name and the full name of the class of each.

    Raises:
        Fp8CoverageError: in strict mode.
    """
    if layer := converted_for_training(layers):
        warn_or_raise_once(
            backend,
            f"{layer} quantizes its operands itself, and so do layers like it: some of their GEMMs are then quantized "
            "twice, the others are not in the report. Compile the model without that conversion.",
            key="quantized twice",
        )


def check_read(backend: Reports, model: nn.Module) -> None:
    """Before ``model`` is compiled: warn, once for each backend, if some quantized layers stay with transformers.

    Raises:
        Fp8CoverageError: in strict mode.
    """
    note_dequantized(backend, dequantized_in_forward(model))
    if layers := list(left_to_kernels(model)):
        name, kind, dtype = layers[0]
        more = f", and so it is with {len(layers) - 1} more" if layers[1:] else ""
        warn_or_raise_once(
            backend,
            f"{name} ({kind}) has weights in {dtype} of a form that fp8graph does not read: they are left to the "
            f"kernels of transformers{more}. Load the model with dequantize=True of its quantization config, and they "
            "are compiled.",
            key="left to kernels",
        )


def adopt_before_tracing(backend: object, model: nn.Module) -> None:
    """Before Dynamo traces a frame that has ``model``: adopt its FP8 layers, of which some cannot be traced.

    transformers' kernels cannot where they are not installed, on a CPU for one. compressed-tensors is too late here.
    """
    if not wrappers.is_fp8graph(backend):
        return
    layers = not_adopted(model)
    if layers and not any(of_compressed_tensors(layer) for layer in layers):
        adopt(model)


def adopt_in_time(backend: Reports, model: nn.Module) -> None:
    """While Dynamo compiles a frame that has ``model``: adopt its FP8 layers, and let Dynamo trace them once more.

    compressed-tensors decompresses its layers in the first call, which is this one: it is too late for them.

    Raises:
        Fp8CoverageError: in strict mode, if it is too late.
    """
    adopt_adapters(model)
    layers = not_adopted(model)
    if not layers:
        return
    if not any(of_compressed_tensors(layer) for layer in layers):
        adopt(model)
        dynamo.trace_again(f"fp8graph adopts the FP8 layers of {type(model).__name__}")
    warn_or_raise_once(
        backend,
        f"compressed-tensors decompresses the layers of a model in this call ({type(layers[0]).__name__} and the "
        "like), so that they have lost their FP8 weights. Load the model anew, and call fp8graph.adopt(model) "
        "before torch.compile, or fp8graph.compile(model).",
        key="too late to adopt",
    )


def check_records(records: Sequence[SiteRecord]) -> None:
    """In strict mode, raise if a rule or region asks for FP8 for rows of one graph that are in high precision."""
    if missing := [record for record in records if record.missing]:
        lines = "\n  ".join(f"{r.name} {r.part}: {r.reason}" for r in missing)
        what = " and ".join(dict.fromkeys(["GEMMs", *(r.plural for r in missing if isinstance(r, OtherRecord))]))
        raise Fp8CoverageError(
            f"strict mode: {len(missing)} {what} that a rule asks for cannot run in FP8:\n  {lines}\n"
            "Give these layers recipe None, or compile without strict."
        )


def warn_or_raise(backend: Reports, text: str) -> None:
    """Log a warning, or in strict mode raise :class:`Fp8CoverageError`."""
    if backend.settings.strict:
        raise Fp8CoverageError(f"strict mode: {text}")
    _log.warning("%s", text)


def warn_or_raise_once(backend: Reports, text: str, key: str | None = None) -> None:
    """:func:`warn_or_raise`, with one warning for each ``key`` (None: for each text)."""
    if backend.settings.strict or (key or text) not in backend.said:
        backend.said.add(key or text)
        warn_or_raise(backend, text)


class _Compiles(Protocol):
    settings: Final[Settings]


class EagerFrames:
    """Collects the frames that Dynamo gives up on: at its recompile limit, or where it fails.

    Args:
        backend: that compiles the frames. It is not kept alive.
    """

    def __init__(self, backend: _Compiles) -> None:
        self.created: Final = time.time_ns() // 1000  # microseconds
        self._frames: set[str] = set()  # Dynamo's ids of the frames compiled here
        self._at_limit: list[str] = []  # frames that reached the recompile limit
        reference, texts = weakref.ref(backend), self._at_limit

        def at_limit(compiles: Any, text: str) -> None:
            backend = reference()
            backends = wrappers.fp8graph_backends(compiles)
            if backend is None or (backends is not backend and backend not in getattr(backends, "backends", ())):
                return
            if (why := backend.settings.refuses_eager) is not None:
                raise Fp8CoverageError(
                    f"{why}: {text}. TORCH_LOGS=recompiles shows what changes from call to call; compile with "
                    "dynamic=True if it is a size, or raise torch._dynamo.config.recompile_limit."
                )
            texts.append(text)

        dynamo.on_recompile_limit(backend, at_limit)

    def compiled(self, frame: str) -> None:
        """Remember that a frame ("" outside of Dynamo) was compiled here."""
        if frame:
            self._frames.add(frame)

    def texts(self) -> list[str]:
        """Return the frames that Dynamo runs in eager, each once."""
        return list(dict.fromkeys([*self._at_limit, *dynamo.failed_frames(self._frames, self.created)]))

    def reset(self) -> None:
        """``torch._dynamo.reset()``: the compiled code is gone, and Dynamo counts frames anew."""
        self._at_limit[:] = self.texts()
        self._frames.clear()
