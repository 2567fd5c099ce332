"""torch_build: what this build of torch has."""

from __future__ import annotations

import pytest
import torch

from fp8graph.compat import torch_build
from helpers import in_one_test


@pytest.mark.parametrize("built", ["cuda", "xpu", None])
def test_a_gpu_that_is_only_a_name_is_meta(built: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = None if built is None else torch.device(built)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    for kind in ("cuda", "xpu"):
        device = torch.device(kind, 1)
        assert torch_build.traceable(device) == (device if kind == built else torch.device("meta"))
    for other in ("cpu", "meta"):
        assert torch_build.traceable(torch.device(other)) == torch.device(other)


@in_one_test(
    ("version", "numbers"), [("12.9", (12, 9)), ("7.2.53211-e1a6bc5663", (7, 2)), ("13.0", (13, 0)), (None, None)]
)
def test_versions_of_toolkits(version: str | None, numbers: tuple[int, int] | None) -> None:
    assert torch_build._numbers(version) == numbers
