"""device: what all devices have in common; by itself, one that multiplies nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch

from fp8graph import Float8CurrentScaling, Float8RowwiseScaling, hardware, numerics
from fp8graph.hardware.device import Hardware, Rule
from fp8graph.recipes import Quantizer, Recipe
from helpers import in_one_test

E4M3, OTHER = torch.float8_e4m3fn, torch.float8_e4m3fnuz


@dataclass(frozen=True, kw_only=True)
class Odd(Hardware):
    """Has a type of its own, and wants even results."""

    def device_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return OTHER if dtype == E4M3 else dtype

    @property
    def rules(self) -> Mapping[str, Rule]:
        return {"tensor": lambda a, b, out: None if out == torch.float32 else f"it has no {out}"}


def quantizers(device: Hardware, recipe: Recipe) -> tuple[Quantizer, Quantizer]:
    return device.quantizer(recipe, "input"), device.quantizer(recipe, "weight")


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8RowwiseScaling()])
def test_a_device_without_a_vendor_multiplies_nothing_and_decodes(recipe: Recipe) -> None:
    unknown = hardware.of_device(torch.device("xpu"))
    a, b = (unknown.quantizer(recipe, operand) for operand in ("input", "weight"))
    assert str(unknown.obstacle(a, b, torch.bfloat16)).startswith("device 'xpu' has no FP8 GEMM")
    assert (unknown.alignment(a, b), unknown.default_recipe, unknown.speed) == ((1, 1, 1), "tensorwise", None)
    left, right = (
        numerics.quantize(torch.randn(16, 48), recipe, operand, "rowwise") for operand in ("input", "weight")
    )
    args = left.data, right.data, left.scale_inv, right.scale_inv, None, torch.float32, False
    got = Hardware.scaled_mm(*args, scaling=a.scaling)
    assert torch.equal(got, numerics.dequantize(left) @ numerics.dequantize(right).t())


def test_an_addend_is_added_to_the_result() -> None:
    """By a kernel of its own where the GEMM does not add."""
    a, b = (torch.randn(16, 48).to(E4M3) for _ in range(2))
    args, addend = (a, b, torch.tensor(0.5), torch.tensor(2.0), None, torch.float32, False), torch.randn(16, 16)
    for device in (Hardware, hardware.of_device(torch.device("cpu"))):
        assert not device.adds("tensor")
        assert torch.equal(device.scaled_mm(*args, addend=addend), addend + device.scaled_mm(*args))


def test_its_own_type_is_used_where_it_multiplies() -> None:
    """An operand that the device does not multiply is decoded, and has the recipe's type."""
    device = Odd(name="odd", scalings=frozenset({"tensor"}))
    assert [q.dtype for q in quantizers(device, Float8CurrentScaling())] == [OTHER, OTHER]
    assert [q.dtype for q in quantizers(device, Float8RowwiseScaling())] == [E4M3, E4M3]


def test_delayed_scaling_is_multiplied_by_the_gemm_of_tensors() -> None:
    device = Odd(name="odd", scalings=frozenset({"tensor"}))
    assert device.multiplies("delayed")
    assert not device.multiplies("row")


@in_one_test(
    ("scalings", "dtype", "reason"),
    [
        (frozenset({"tensor"}), torch.float32, None),
        (frozenset({"tensor"}), torch.bfloat16, "it has no torch.bfloat16"),
        (frozenset({"row"}), torch.float32, "odd has no FP8 GEMM"),
        (frozenset(), torch.float32, "odd has no FP8 GEMM"),
    ],
)
def test_obstacles(scalings: frozenset[str], dtype: torch.dtype, reason: str | None) -> None:
    device = Odd(name="odd", scalings=scalings)
    found = device.obstacle(*quantizers(device, Float8CurrentScaling()), dtype)
    assert found == reason or (reason is not None and str(found).startswith(reason))


def test_grouped_gemms_have_rules_of_their_own() -> None:
    device = Odd(name="odd", scalings=frozenset({"tensor"}), grouped=frozenset({"tensor"}))
    a, b = quantizers(device, Float8CurrentScaling())
    assert device.obstacle(a, b, torch.bfloat16, grouped=True) is None
    plain = Odd(name="odd", scalings=frozenset({"tensor"}))
    assert str(plain.obstacle(a, b, torch.float32, grouped=True)).startswith("odd has no grouped FP8 GEMM")


def test_a_device_without_a_vendor_has_the_name_of_its_type() -> None:
    assert Hardware.from_target("sm_90") is None
    assert not Hardware.runs(torch.device("cuda"))
    assert Hardware.of_device(torch.device("xpu")) == Hardware(name="device 'xpu'")
