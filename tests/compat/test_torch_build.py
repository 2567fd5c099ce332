"""torch_build: what this build of torch has."""

from __future__ import annotations

import pytest
import torch

from fp8graph.compat import torch_build


@pytest.mark.parametrize(("cuda_is_built", "stand_in"), [(True, "cuda:1"), (False, "meta")])
def test_a_cuda_device_that_is_only_a_name_is_meta(
    cuda_is_built: bool, stand_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: cuda_is_built)
    assert torch_build.without_cuda(torch.device("cuda:1")) == torch.device(stand_in)
    for other in ("cpu", "meta", "xpu"):
        assert torch_build.without_cuda(torch.device(other)) == torch.device(other)


@pytest.mark.parametrize(
    ("version", "numbers"), [("12.9", (12, 9)), ("7.2.53211-e1a6bc5663", (7, 2)), ("13.0", (13, 0)), (None, None)]
)
def test_versions_of_toolkits(version: str | None, numbers: tuple[int, int] | None) -> None:
    assert torch_build._numbers(version) == numbers
