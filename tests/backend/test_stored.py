"""The findings in torch's compile cache: with their graphs they come back as they were, or not at all."""

from __future__ import annotations

import hashlib
import logging
import pickle
import random
import zlib
from typing import Any

import pytest
import torch

from fp8graph import Policy
from fp8graph.backend import stored
from fp8graph.ir.compilation import Findings
from fp8graph.passes.connect_scales import PageLayout
from fp8graph.passes.hoist_weights import CachedWeight
from fp8graph.report import GraphView
from helpers import MLP, eager_backend, graph_text

Entry = tuple[GraphView, Findings]


def found(recipe: str = "delayed") -> Entry:
    """Copies of joined weights, and pages."""
    backend = eager_backend(Policy(default=recipe, min_speedup=0), cache_weights="update")
    torch.compile(MLP(128, 256), backend=backend)(torch.randn(16, 128, requires_grad=True))
    ((program,),) = [list(backend.programs)]
    ((_, variant),) = program._variants.items()
    return variant.view, variant.findings


def described(findings: Findings) -> list[Any]:
    weights = [
        (
            *(graph_text(graph) for graph in (weight.quantizing, weight.recording)),
            *(weight.name, weight.parameters, weight.signature, weight.layouts, weight.outputs, weight.extra_inputs),
        )
        for weight in findings.of(CachedWeight)
    ]
    return [*weights, findings.of(PageLayout), [(x.shape, x.stride(), x.dtype) for x in findings.stand_ins()]]


def dumped(entry: Entry) -> bytes:
    content = stored.dumped(*entry)
    assert content is not None
    return content


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_dumped_findings_are_loaded(recipe: str) -> None:
    view, findings = found(recipe)
    again = stored.loaded(dumped((view, findings)))
    assert again is not None
    assert len(findings.of(CachedWeight)) == (3 if recipe == "blockwise" else 2)  # emulated, they are not joined
    assert described(again[1]) == described(findings)
    assert again[0].to_dict() == view.to_dict()


def test_damaged_bytes_are_not_even_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped bit may name another weight, and nothing else would notice."""
    content = dumped(found())
    read: list[Any] = []  # not an error: whatever reading raises means that the graph is traced again
    monkeypatch.setattr(pickle, "loads", read.append)
    monkeypatch.setattr(zlib, "decompress", read.append)
    generator = random.Random(0)
    for bit in [*range(512), *generator.sample(range(len(content) * 8), 2000)]:  # the checksum's own bits, and others
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        assert stored.loaded(bytes(damaged)) is None, bit
    for length in (0, 1, 31, 32, 33, len(content) // 2, len(content) - 1):
        assert stored.loaded(content[:length]) is None, length
    assert read == []


def with_its_checksum(packed: bytes) -> bytes:
    return hashlib.sha256(packed).digest() + packed


class Raises:
    """Something that does not come back: unpickling it raises an error."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return raising, (self.error,)


def raising(error: type[Exception]) -> Any:
    raise error("from the pickle")


def of_a_class_that_is_gone(pickled: bytes) -> bytes:
    return pickled.replace(b"fp8graph.ir.compilation", b"fp8graph.ir.compilatiom")


def without_the_report(pickled: bytes) -> bytes:
    return pickle.dumps(({}, None))


def something_else(pickled: bytes) -> bytes:
    return pickle.dumps(3)


def no_pickle(pickled: bytes) -> bytes:
    return b"not pickled"


OTHERS = (of_a_class_that_is_gone, without_the_report, something_else, no_pickle)
ERRORS = (MemoryError, OverflowError, AssertionError, RuntimeError, OSError)


@pytest.mark.parametrize("change", [*OTHERS, *ERRORS])
def test_entries_of_another_version_are_not_loaded(change: Any, caplog: pytest.LogCaptureFixture) -> None:
    pickled = zlib.decompress(dumped(found())[32:])
    changed = pickle.dumps(Raises(change)) if change in ERRORS else change(pickled)
    assert changed != pickled
    with caplog.at_level(logging.DEBUG, "fp8graph"):
        assert stored.loaded(with_its_checksum(zlib.compress(changed))) is None
    assert "the graph is traced again" in caplog.text


def test_findings_that_cannot_be_pickled_are_not_cached(caplog: pytest.LogCaptureFixture) -> None:
    view, findings = found()
    object.__setattr__(findings, "sites", (lambda: None,))
    with caplog.at_level(logging.DEBUG, "fp8graph"):
        assert stored.dumped(view, findings) is None
    assert "are not cached" in caplog.text
