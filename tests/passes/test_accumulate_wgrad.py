"""accumulate_wgrad: before and after, and the text of every refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8graph import Policy, Rule
from fp8graph.report import GraphView
from helpers import ALL, around, view_of


def view(module: nn.Module, x: Tensor, policy: Any = ALL, **settings: Any) -> GraphView:
    """Under autocast: the weights are FP32, wgrad's results bf16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return view_of(module, x, policy=policy, **{"accumulate_wgrad": True, **settings})


def x(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("wgrad", "copy", "return"))]


def refused(found: GraphView) -> dict[str, str]:
    return {r.fqn: r.reason for r in found.refusals if r.what == "FP32 gradient"}


def test_wgrad_is_added_to_an_input() -> None:
    found = view(nn.Linear(32, 48, bias=False), x(16, 32))
    given = "grad_output_columnwise, input_columnwise_1, grad_output_scale_inv, input_scale_inv, bias=None"
    before, after = around(found, "accumulate_wgrad")
    assert lines(before) == [
        f"wgrad: bf16[48, 32] = fp8graph.scaled_mm({given}, out_dtype=bf16, use_fast_accum=False)",
        "return fprop, convert_element_type_9, convert_element_type_8, None",
    ]
    assert lines(after) == [
        f"wgrad: f32[48, 32] = fp8graph.scaled_mm({given}, out_dtype=f32, use_fast_accum=False, addend=primals_3)",
        "copy__default: f32[48, 32] = aten.copy_(primals_3, wgrad)",
        "return fprop, None, convert_element_type_8, None",
    ]
    assert refused(found) == {}
    (wgrad,) = [gemm for gemm in found.gemms if gemm.gemm == "wgrad"]
    assert wgrad.dtypes[2] == "fp32"
    assert "added to an FP32 gradient: 16 bytes moved for each number, 20 through autograd" in wgrad.reason


def test_weights_that_are_multiplied_as_one_have_gradients_of_their_own() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(32, 48, bias=False), nn.Linear(32, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.gate(x), self.up(x)], -1)

    found = view(Two(), x(16, 32), fuse_linears=True)
    assert [line.split(" = ")[0] for line in lines(found.stages["accumulate_wgrad"])] == [
        "wgrad_part: e5m2[64, 16]",
        "wgrad_1_part: e5m2[48, 16]",
        "wgrad: f32[64, 32]",
        "wgrad_1: f32[48, 32]",
        "copy__default: f32[64, 32]",
        "copy__default_1: f32[48, 32]",
        "return cat, None, convert_element_type_18, None, None, None",
    ]
    assert sum(" one GEMM with " in gemm.reason for gemm in found.gemms if gemm.gemm == "wgrad") == 0
    assert sum(" one GEMM with " in gemm.reason for gemm in found.gemms if gemm.gemm == "dgrad") == 2
    assert refused(found) == {}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.a(x))


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 48))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class StoredTransposed(Transposed):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.t().contiguous())


def hooked() -> nn.Module:
    module = nn.Linear(32, 48, bias=False)
    module.weight.register_post_accumulate_grad_hook(lambda _: None)
    return module


def with_main_grad(dtype: torch.dtype) -> nn.Module:
    module = nn.Linear(32, 48, bias=False)
    module.weight.main_grad = torch.zeros(48, 32, dtype=dtype)  # pyright: ignore[reportAttributeAccessIssue]
    return module


@pytest.mark.parametrize(
    ("module", "policy", "reason"),
    [
        (Tied(), ALL, "its wgrad is not its gradient yet: add"),
        (StoredTransposed(), ALL, "it is stored transposed"),
        (hooked(), ALL, "hooks wait for its gradient"),
        (
            nn.Linear(32, 48, bias=False, dtype=torch.bfloat16),
            ALL,
            "its .grad is bfloat16, and it has no main_grad in FP32",
        ),
        (with_main_grad(torch.bfloat16), ALL, "its main_grad is no contiguous FP32 tensor of its shape"),
        (nn.Linear(40, 48, bias=False), ALL, "its wgrad is not its gradient yet: slice"),  # padded to 48 columns
        (nn.Linear(32, 48, bias=False), Policy(default="blockwise"), "its wgrad is emulated"),
    ],
)
def test_gradients_left_to_autograd_have_a_reason(module: nn.Module, policy: Any, reason: str) -> None:
    found = view(module, x(16, module.in_features if isinstance(module, nn.Linear) else 32), policy)
    (text,) = set(refused(found).values())
    assert text.startswith(reason)
    assert "addend" not in found.after


@pytest.mark.parametrize("module", [Transposed(), nn.Linear(32, 40, bias=False)])  # dy is padded, not dw
def test_a_gradient_has_the_weights_shape(module: nn.Module) -> None:
    found = view(module, x(16, 32))
    assert refused(found) == {}
    assert "out_dtype=f32, use_fast_accum=False, addend=primals_3" in found.after


def test_wgrads_in_high_precision_stay() -> None:
    found = view(nn.Linear(32, 48, bias=False), x(16, 32), Policy([Rule("*", "tensorwise", wgrad=None)]))
    assert refused(found) == {}
    assert "addend" not in found.after


def test_nothing_changes_without_the_setting_or_in_inference() -> None:
    assert "addend" not in view(nn.Linear(32, 48), x(16, 32), accumulate_wgrad=False).after
    with torch.no_grad():
        assert "addend" not in view(nn.Linear(32, 48), x(16, 32)).after
