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


@pytest.mark.slow
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


def test_a_later_policy_decides_about_its_row() -> None:
    """The linear runs the same code under both: what is said of other layers is not part of it."""
    backend, model = eager_backend(Policy([Rule("mixes", None)])), nn.Sequential(nn.Linear(64, 64), Bilinear())
    run, x = torch.compile(model, backend=backend), torch.randn(2, 16, 64)
    with torch.no_grad():
        run(x)
        assert [refusal.fqn for refusal in backend.report.refusals] == ["1.mixes"]
        for policy, fqns in ((Policy([Rule("1.mixes", None)]), []), (Policy(), ["1.mixes"])):
            backend.set_policy(policy)
            run(x)
            assert [refusal.fqn for refusal in backend.report.refusals] == fqns
    (graph,) = backend.programs
    assert len(graph._compiled) == 1


def test_a_matmul_with_another_result_dtype() -> None:
    """torch has it on GPUs, without gradients."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(64, 64, dtype=torch.bfloat16, device="meta"))

        def forward(self, x: Tensor) -> Tensor:
            return torch.mm(x, self.weight, out_dtype=torch.float32)

    x = torch.randn(16, 64, dtype=torch.bfloat16, device="meta")
    (refusal,) = fp8graph.explain(Wide(), x, policy=ALL, training=False).refusals
    assert refusal.reason.startswith("aten.mm with out_dtype= stays in high precision")


def test_an_lstm() -> None:
    """Dynamo traces it if told to (else its frame is in the report); of GRUs and plain RNNs torch makes linears."""
    config: Any = torch._dynamo.config
    with config.patch(allow_rnn=True):
        (refusal,) = report_of(nn.LSTM(64, 64)).refusals
    assert refusal.reason.startswith("aten.mkldnn_rnn_layer multiplies by weights inside one op of torch: nn.LSTMCell")


@torch.library.custom_op("fp8graph_tests::times_weight", mutates_args=())
def times_weight(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


@times_weight.register_fake
def _shape(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[0])


@torch.library.custom_op("fp8graph_tests::scaled_by", mutates_args=())
def scaled_by(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


@torch.library.custom_op("fp8graph_tests::times_weight_into", mutates_args=("y",))
def times_weight_into(y: Tensor, x: Tensor, w: Tensor) -> None:
    y.copy_(x @ w.t())


times_weight.register_autograd(lambda ctx, dy: (dy, dy.flatten(0, 1).t() @ dy.flatten(0, 1)))
scaled_by.register_fake(lambda x, scale: torch.empty_like(x))


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        x = times_weight(x, self.inner.weight.bfloat16().float())
        return x if torch.is_grad_enabled() else scaled_by(x, self.scale)


@pytest.mark.parametrize("training", [False, True])
def test_an_op_of_another_library_that_reads_a_weight(*, training: bool) -> None:
    """Nobody knows what it computes; one that reads a vector, or activations, multiplies by no weight."""
    backend = eager_backend(ALL)
    with torch.set_grad_enabled(training):
        torch.compile(Opaque(), backend=backend)(torch.randn(2, 16, 64))
    (refusal,) = backend.report.refusals
    assert refusal.reason.startswith("fp8graph_tests.times_weight reads a parameter with two or more dims, and is no")


def test_an_op_of_another_library_that_writes_to_its_argument() -> None:
    class Into(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.empty_like(x)
            times_weight_into(y, x, self.weight)
            return y

    (refusal,) = report_of(Into()).refusals
    assert refusal.reason.startswith("fp8graph_tests.times_weight_into reads a parameter")


@pytest.mark.parametrize("policy", [Policy(default=None), Policy([Rule("layers.*", None)])])
def test_nothing_is_said_of_what_nobody_wants_in_fp8(policy: Policy) -> None:
    assert not report_of(ENCODER, policy).refusals
