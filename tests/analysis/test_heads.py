"""heads: which linears are output heads by what the graph does with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8graph
from fp8graph.analysis.heads import LOGITS, LOSS, TIED
from helpers import ALL

IDS = torch.randint(0, 96, (2, 8))


class Model(nn.Module):
    """An embedding, a linear, and a head by the name of ``out``, whose logits ``after`` takes."""

    def __init__(self, after: Any = None, *, tied: bool = False, outputs: int = 96, embedding: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(96, 32) if embedding else nn.Linear(32, 32)
        self.body = nn.Linear(32, 32)
        self.out = nn.Linear(32, outputs, bias=False)
        self.after = after
        if tied:
            self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Any:
        logits = self.out(functional.silu(self.body(self.table(x))))
        return logits if self.after is None else self.after(logits)


def cross_entropy(logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), IDS.flatten() % logits.shape[-1])


def softcap(logits: Tensor) -> Tensor:
    return torch.tanh(logits / 30) * 30


def kept(module: nn.Module, x: Tensor, *, training: bool = True, **settings: Any) -> dict[str, str]:
    """The linears that the default policy leaves alone, with the reason."""
    report = fp8graph.explain(module, x, training=training, **settings)
    return {g.fqn: g.reason for g in report.gemms if g.recipe is None and g.op == "linear"}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("model", "why"),
    [
        pytest.param(Model(tied=True), TIED, id="tied"),
        pytest.param(Model(lambda y: functional.silu(y).sum(), tied=True), TIED, id="tied, with something behind it"),
        pytest.param(Model(cross_entropy), LOSS, id="loss"),
        pytest.param(Model(cross_entropy, outputs=7), LOSS, id="classes"),
        pytest.param(Model(lambda y: cross_entropy(softcap(y))), LOSS, id="soft cap and loss"),
        pytest.param(Model(lambda y: functional.log_softmax(y[:, -1], -1)), LOSS, id="log_softmax of the last row"),
        pytest.param(Model(), LOGITS, id="logits"),
        pytest.param(Model(lambda y: softcap(y[:, -1:]).float()), LOGITS, id="logits of the last row"),
    ],
)
def test_heads_and_why(model: Model, why: str, training: bool) -> None:
    found = kept(model, IDS, training=training)
    assert found == {"out": f"output head: {why}"}


@pytest.mark.parametrize(
    ("model", "x"),
    [
        pytest.param(Model(outputs=64), IDS, id="not the vocabulary's size"),
        pytest.param(Model(functional.silu), IDS, id="something behind it"),
        pytest.param(
            Model(lambda y: functional.softmax(y, -1) @ y.mT, embedding=False), torch.randn(2, 8, 32), id="attention"
        ),
        pytest.param(Model(lambda y: functional.mse_loss(y, y.detach() + 1)), IDS, id="regression"),
        pytest.param(Model(embedding=False), torch.randn(2, 8, 32), id="the last linear of a block"),
        pytest.param(nn.Linear(32, 96), torch.randn(8, 32), id="a linear"),
        pytest.param(
            nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)), torch.randn(8, 32), id="Sequential"
        ),
    ],
)  # fmt: skip
def test_no_heads(model: nn.Module, x: Tensor) -> None:
    assert kept(model, x) == {}


def test_a_policy_of_ones_own_decides_by_itself() -> None:
    assert kept(Model(tied=True), IDS, policy=ALL) == {}


def test_a_rule_that_names_a_head_wins() -> None:
    policy = fp8graph.Policy([fp8graph.Rule("out", "rowwise")], min_speedup=0, keep_heads=True)
    assert kept(Model(tied=True), IDS, policy=policy) == {}


def test_a_head_under_autocast_is_a_head() -> None:
    """bf16 copies of the weight lie between the parameter and the matmul."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(cross_entropy, tied=True)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.model(x)

    assert kept(Cast(), IDS) == {"model.out": f"output head: {TIED}"}
