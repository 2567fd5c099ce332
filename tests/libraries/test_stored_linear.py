"""StoredLinear: a linear that keeps its weight as it is stored, compiled and in eager."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8graph
from fp8graph.compat.fsdp import original_class
from fp8graph.libraries.stored_linear import StoredLinear, StoredWeight
from fp8graph.numerics import sqnr_db
from helpers import same_bits

N, K = 256, 384


def layer(bias: bool = False, **settings: object) -> StoredLinear:
    random = torch.Generator().manual_seed(0)
    data = (torch.randn(N, K, generator=random) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale_inv = torch.rand(N // 128, K // 128, generator=random) / 1000
    weight = StoredWeight(data=data, scale_inv=scale_inv, scaling="block", block=[128, 128], **settings)  # pyright: ignore[reportArgumentType]
    return StoredLinear(weight, nn.Parameter(torch.randn(N, dtype=torch.bfloat16, generator=random)) if bias else None)


def numbers(module: StoredLinear) -> torch.Tensor:
    scale = module.weight_scale_inv.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return module.weight.double() * scale


@pytest.mark.parametrize("bias", [False, True])
def test_stored_linear_dequantizes_in_eager_and_multiplies_when_compiled(bias: bool) -> None:
    module, x = layer(bias), torch.randn(32, K, dtype=torch.bfloat16, requires_grad=True)
    exact = nn.functional.linear(x.double(), numbers(module), module.bias.double() if bias else None)
    assert sqnr_db(exact.detach(), module(x).detach()) > 45
    fp8graph.compile(module, compiler="eager", fullgraph=True)
    y = module(x)
    y.backward(dy := torch.randn_like(y))
    assert {gemm.recipe for gemm in fp8graph.backend_of(module).report.gemms} == {"blockwise"}
    assert 27 < sqnr_db(exact.detach(), y.detach()) < 45
    assert x.grad is not None
    assert sqnr_db(dy.double() @ numbers(module), x.grad) > 25
    assert module.weight.grad is None
    if bias:
        assert module.bias.grad is not None
        assert torch.equal(module.bias.grad, dy.sum(0))


def _pickled(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled])
def test_copies(copied: Callable[[nn.Module], nn.Module]) -> None:
    module = layer(activations="static", input_scale_inv=torch.tensor(0.02))
    x = torch.randn(4, K, dtype=torch.bfloat16)
    assert same_bits([module(x)], [copied(module)(x)])
    assert list(module.state_dict()) == ["weight", "weight_scale_inv", "input_scale_inv"]


def test_repr_of_stored_linear() -> None:
    assert repr(layer(bias=True)) == "StoredLinear(384, 256, block 128x128, activations=dynamic, bias=True)"


def test_a_static_scale_clips_inputs() -> None:
    data = (torch.randn(N, K) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    one = StoredWeight(
        data=data,
        scale_inv=torch.tensor(0.001),
        scaling="tensor",
        block=[],
        activations="static",
        input_scale_inv=torch.tensor(0.001),
    )
    module = fp8graph.compile(StoredLinear(one), compiler="eager", fullgraph=True)
    x = torch.randn(32, K).bfloat16()
    expected = nn.functional.linear(x.double().clamp(-0.448, 0.448), data.double() * 0.001)
    with torch.no_grad():
        assert sqnr_db(expected, module(x)) > 25


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
@pytest.mark.parametrize("adopted", [True, False])
@pytest.mark.usefixtures("group_of_two")
def test_fsdp2_gathers_codes_as_they_are_once_adopted(adopted: bool) -> None:
    """One of two ranks; the other is made up. libraries/test_adapters_on_ranks.py has both."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module, policy = layer(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    sharded: Any = fully_shard(module, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    assert type(module) is not StoredLinear
    assert original_class(module) is original_class(layer()) is StoredLinear
    if adopted:
        fp8graph.adopt(module)
    sharded.unshard()
    assert module.weight.shape == (N, K)
    assert module.weight.dtype == (torch.float8_e4m3fn if adopted else torch.bfloat16)
    if not adopted:
        with pytest.raises(fp8graph.ConfigError, match=r"arrives in torch\.bfloat16: FSDP2 has cast its codes"):
            StoredLinear.forward(module, torch.randn(16, K, dtype=torch.bfloat16))
