"""The patches that pretend a GPU while code is generated, and are undone after."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo import device_interface
from torch._inductor.graph import GraphLowering

from fp8graph import offline
from generated import kernels_of_mlp

pytestmark = pytest.mark.skipif(not offline.available(), reason="triton is not installed")


@pytest.mark.slow
def test_nothing_stays_replaced() -> None:
    before = torch.cuda.get_device_properties, GraphLowering.compile_to_module  # pyright: ignore
    interface = device_interface.get_interface_for_device("cuda")
    kernels_of_mlp(training=False)
    assert before == (torch.cuda.get_device_properties, GraphLowering.compile_to_module)  # pyright: ignore
    assert device_interface.get_interface_for_device("cuda") is interface
    x = torch.randn(16, 32)
    model = nn.Linear(32, 48)
    torch.testing.assert_close(torch.compile(model, backend="inductor")(x), model(x))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what is pretended")
def test_the_replacement_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete the replacement of compile_to_module from ``offline`` when this fails: torch can do without it."""
    patch_object = mock.patch.object

    def all_but_one(target: Any, name: str, new: Any) -> Any:
        return contextlib.nullcontext() if name == "compile_to_module" else patch_object(target, name, new)

    monkeypatch.setattr(mock.patch, "object", all_but_one)
    with pytest.raises(Exception, match="NVIDIA|CUDA|cuda|Unsupported"):
        kernels_of_mlp()
