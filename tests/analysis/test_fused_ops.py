"""Ops of torch that multiply inside: the report names them, and what to use in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import Policy, Rule
from helpers import ALL, eager_backend

ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, dim_feedforward=128, batch_first=True), 2).eval()


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixes = nn.Bilinear(64, 64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixes(x, x)


def report_of(model: nn.Module, policy: Any = ALL) -> fp8graph.Report:
    torch._dynamo.reset()
    backend = eager_backend(policy)
    with torch.no_grad():
        torch.compile(model, backend=backend)(torch.randn(2, 16, 64))
    return backend.report


def test_the_fast_path_of_an_encoder_and_the_way_around_it() -> None:
    report = report_of(ENCODER)
    assert not report.gemms
    assert [(r.what, r.fqn) for r in report.refusals] == [("FP8", "layers.0"), ("FP8", "layers.1")]
    assert "torch.backends.mha.set_fastpath_enabled(False)" in str(report)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        report = report_of(ENCODER)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    linears = [gemm.recipe for gemm in report.gemms if gemm.op == "linear"]
    assert linears == ["tensorwise"] * 8
    assert not any(refusal.what == "FP8" for refusal in report.refusals)


def test_a_bilinear_layer() -> None:
    (refusal,) = report_of(Bilinear()).refusals
    assert refusal.fqn == "mixes"
    assert refusal.reason.startswith("aten._trilinear multiplies by weights inside one op of torch: ")


def test_an_lstm() -> None:
    """Dynamo traces it if told to (else its frame is in the report); of GRUs and plain RNNs torch makes linears."""
    config: Any = torch._dynamo.config
    with config.patch(allow_rnn=True):
        (refusal,) = report_of(nn.LSTM(64, 64)).refusals
    assert refusal.reason.startswith("aten.mkldnn_rnn_layer multiplies by weights inside one op of torch: nn.LSTMCell")


@pytest.mark.parametrize("policy", [Policy(default=None), Policy([Rule("layers.*", None)])])
def test_nothing_is_said_of_what_nobody_wants_in_fp8(policy: Policy) -> None:
    assert not report_of(ENCODER, policy).refusals
