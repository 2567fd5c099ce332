"""The error and the time of each GEMM under each recipe, for ``tune``: measured on a few batches, and predicted."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, fx, nn

from fp8graph import hardware
from fp8graph.backend.backend import Backend
from fp8graph.backend.dynamo_graph import DynamoGraph
from fp8graph.backend.entry import uncompiled_copy
from fp8graph.compat import wrappers
from fp8graph.errors import ConfigError, expect_batch
from fp8graph.files import obstacle, write_file
from fp8graph.hardware import Hardware
from fp8graph.hardware.speed import Operand, gemm_seconds
from fp8graph.libraries import adopt
from fp8graph.numerics.gemm_error import ERROR_PARTS
from fp8graph.recipes import GEMM_LAYOUTS, GEMM_OPERANDS, GemmName, Recipe
from fp8graph.recipes.policy import Policy
from fp8graph.records import GemmRecord

_log = logging.getLogger("fp8graph")
_VERSION: Final = 1  # of the file with what was measured
_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}  # as in a report
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class GemmScore:
    """The change that one candidate would make in one GEMM, summed over all batches."""

    site: str  # FQN
    op: str
    group: str  # the first of the linears that read one tensor: they are decided together
    gemm: str
    candidate: int
    m: int
    n: int
    k: int
    dtype: torch.dtype  # of the result in high precision
    weighted_error: float  # of the change times the gradient of the result, squared (fprop)
    square_error: float
    square_reference: float
    upstream: int = 0  # the linears that come before the tensor that this one reads

    @property
    def error(self) -> float:
        """fprop: sum((dL/dY * change)^2); dgrad: sum(change^2) for each of the gradients that it reaches; wgrad: the
        square of the gradient's relative error.

        What dgrad returns goes on into the gradients of all linears before it, and of the embedding.
        What wgrad returns is the whole gradient of a parameter. benchmarks/tune_order.py holds all three against
        measurements.
        """
        if self.gemm == "fprop":
            return self.weighted_error
        if self.gemm == "dgrad":
            return self.square_error * (self.upstream + 1)
        return self.square_error / self.square_reference if self.square_reference > 0 else 0.0


def seconds(row: GemmScore, recipe: Recipe | None, device: Hardware, sharing: int) -> float | None:
    """Return the time of a GEMM on ``device``, with its part of the quantization; None if the device cannot multiply
    so.

    Weights are quantized once per update and cost nothing. ``sharing``: how many linears read the input.
    """
    assert device.speed is not None
    sizes, dtype, gemm = (row.m, row.n, row.k), row.dtype, cast(GemmName, row.gemm)
    if recipe is None:
        return gemm_seconds(device.speed, *sizes, dtype)
    if not recipe.covers(gemm):
        return None
    operands = GEMM_OPERANDS[gemm]
    a, b = (device.quantizer(recipe, operand) for operand in operands)
    if device.obstacle(a, b, dtype) is not None:
        return None
    elements = (row.m * row.k, row.k * row.n)
    read = tuple(
        Operand(
            elements=size,
            layouts=frozenset({layout}),
            users=sharing if operand == "input" else 1,
            kept=operand == "weight",
        )
        for operand, layout, size in zip(operands, GEMM_LAYOUTS[gemm], elements, strict=True)
    )
    return gemm_seconds(device.speed, *sizes, dtype, a.scaling, read)


class Scoring(Backend):
    """A backend whose graphs run in high precision, and measure what ``candidates`` would change."""

    def __init__(self, candidates: Sequence[Recipe], target: Any) -> None:
        super().__init__(
            Policy(extends="default", default=candidates[0], min_speedup=0), compiler="eager", target=target
        )
        self.scores: Any = self.start("score", candidates=candidates)

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Compile one Dynamo graph when it is called: only then is it known that it measures."""
        return self.compiled(DynamoGraph(module, example_inputs), None)


def measure(
    model: nn.Module,
    batches: Iterable[Any],
    candidates: Sequence[Recipe],
    labels: Sequence[str],
    *,
    target: Any,
    loss: Loss | None,
    seed: int,
    resume: Path | None,
    progress: Callable[[Iterable[Any]], Iterable[Any]],
) -> tuple[list[GemmScore], Scoring]:
    """Measure the change that each candidate makes in each GEMM. The backend has the report on the graphs.

    Gradients of the model are as they were afterwards; so is torch's random state.
    """
    original = wrappers.original_module(model)
    kept = {name: p.grad for name, p in original.named_parameters()}
    original.zero_grad(set_to_none=True)  # else the first backward would add to them in place
    backend = Scoring(candidates, target)
    copy = adopt(uncompiled_copy(original, lambda x: x))
    backend.bind(copy)
    compiled = torch.compile(copy, backend=backend, dynamic=False)
    size = sum(p.numel() for p in original.parameters())
    of = {"model": f"{type(original).__name__} of {size} parameters", "recipes": list(labels), "seed": seed}
    done = _Done(resume, {"version": _VERSION, **of, "target": str(target)})
    count = 0
    try:
        for count, batch in enumerate(progress(batches), 1):
            # a batch that was measured before runs only if it is the first: its graphs say which sites there are
            if count > 1 and count <= len(done.batches):
                backend.scores.next_batch()
                continue
            expect_batch("tune", "batches", batch)
            with _seeded(seed + count):
                arguments = batch if isinstance(batch, (tuple, list)) else (batch,)
                output = compiled(**batch) if isinstance(batch, Mapping) else compiled(*arguments)
                _loss(output, batch, loss).backward()
            copy.zero_grad(set_to_none=True)
            if count > len(done.batches):
                done.add(backend.scores.batch(count - 1))
            backend.scores.next_batch()
    finally:
        for name, parameter in original.named_parameters():
            parameter.grad = kept[name]
    if count == 0:
        raise ConfigError("tune(batches=...) got no batches: it needs at least one, and an iterator gives them once.")
    return _summed(done.batches[:count], backend.report.gemms), backend


class _Done:
    """The batches that were measured, in a file if there is one."""

    def __init__(self, path: Path | None, head: dict[str, Any]) -> None:
        self._path, self._head = path, head
        self.batches: list[list[dict[str, Any]]] = []
        self._warned = False
        if path is None:
            return
        if not path.exists():
            if why := obstacle(path):
                raise ConfigError(f"tune(resume={str(path)!r}): {why}. Give the path of a file to write.")
            return
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            self.batches = saved.pop("batches")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"tune(resume={str(path)!r}): it is not a file of tune() ({error}).") from None
        for name, value in head.items():
            if saved.get(name) != value:
                raise ConfigError(
                    f"tune(resume={str(path)!r}): it was made with {name}={saved.get(name)!r}, not {value!r}. "
                    "Give the same arguments, or another file."
                )
        candidates = len(head["recipes"])
        if not all(_is_measured(row, candidates) for batch in _lists(self.batches) for row in _lists(batch)):
            raise ConfigError(f"tune(resume={str(path)!r}): it is damaged. It holds scores that are not numbers >= 0.")
        _log.info("tune: %d batches of %s are not measured again", len(self.batches), path)

    def add(self, batch: list[dict[str, Any]]) -> None:
        self.batches.append(batch)
        if self._path is None:
            return
        text = json.dumps({**self._head, "batches": self.batches})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._path, text, f"tune(resume={str(self._path)!r})")
        except (OSError, ConfigError) as error:  # the scores are worth more than their copy
            if not self._warned:
                _log.warning("%s tune goes on; if it is stopped, the batches from here on are measured again.", error)
            self._warned = True


def _lists(value: Any) -> list[Any]:
    """``value``; if it is not a list, one that holds no row."""
    return value if isinstance(value, list) else [None]


def _is_measured(row: Any, candidates: int) -> bool:
    """Return whether a row of a file is one of those that ``scores.batch`` makes."""
    if not isinstance(row, dict):
        return False
    numbers: list[Any] = [row.get(part) for part in ERROR_PARTS]
    return (
        all(isinstance(row.get(name), str) for name in ("site", "gemm", "group"))
        and row.get("candidate") in range(candidates)
        and all(type(x) in (int, float) and 0 <= x < math.inf for x in numbers)
    )


def _summed(batches: Sequence[Sequence[dict[str, Any]]], gemms: Sequence[GemmRecord]) -> list[GemmScore]:
    records = {(gemm.name, gemm.gemm): gemm for gemm in gemms}
    rows: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in (row for batch in batches for row in batch):
        rows.setdefault((row["site"], row["gemm"], row["candidate"]), []).append(row)
    groups: dict[str, str] = {}  # a module that is called twice is in the group of its first call
    order = {fqn: index for index, fqn in enumerate(dict.fromkeys(gemm.fqn for gemm in gemms))}  # of forward
    sums: list[GemmScore] = []
    for (site, gemm, candidate), measured in rows.items():
        record = records.get((site, gemm))
        if record is None:
            raise ConfigError(f"tune(): {site!r} was measured before, and is not in this model: give another file.")
        m, n, k = (size if isinstance(size, int) else 1 for size in (record.m, record.n, record.k))
        group = groups.setdefault(record.fqn, measured[0]["group"])
        sums.append(
            GemmScore(
                site=record.fqn,
                op=record.op,
                group=group,
                upstream=order.get(group, order[record.fqn]),
                gemm=gemm,
                candidate=candidate,
                m=m,
                n=n,
                k=k,
                dtype=_DTYPES[record.dtypes[2]],
                **{part: sum(row[part] for row in measured) for part in ERROR_PARTS},
            )
        )
    return sums


def _loss(output: Any, batch: Any, loss: Loss | None) -> Tensor:
    if loss is not None:
        value: Any = loss(output, batch)
        source = "loss(output, batch)"
    elif isinstance(output, Tensor):
        value, source = output, "the model"
    elif (value := getattr(output, "loss", None)) is not None:
        source = "the model's output.loss"
    else:
        value, source = (output[0] if isinstance(output, (tuple, list)) and output else None), "the model"
    if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
        raise ConfigError(
            f"tune(): {source} has no gradient: it is detached, or all parameters are frozen, which "
            "model.requires_grad_() undoes."
        )
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(
            f"tune(): {source} returns {what}, and not a loss, which is one number. Give "
            "loss=lambda output, batch: ..., or batches with labels, for which the model returns its own loss."
        )
    return value.reshape(())


@contextlib.contextmanager
def _seeded(seed: int) -> Generator[None]:
    """Dropout that is the same in each run of a batch."""
    kind = hardware.current_device().type
    gpus = () if kind == "cpu" else range(torch.accelerator.device_count())
    with torch.random.fork_rng(gpus, device_type=kind):
        torch.manual_seed(seed)
        yield
