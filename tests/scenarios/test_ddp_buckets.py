"""DDPOptimizer: Dynamo cuts the graph of a DistributedDataParallel into one per bucket of gradients.

The parts are to be one model: its names, its policy, its scaling state, its gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fp8graph import Backend, DelayedScaling, Fp8CoverageError, Policy, Rule, backend_of
from fp8graph.numerics import sqnr_db
from helpers import first_fast
from parallelism import Net

HIDDEN, INNER = 256, 1024  # each linear is a MiB: a bucket of its own, the least that torch allows
POLICY = Policy(
    [Rule("layers.0.down", "tensorwise"), Rule("layers.1.down", None), Rule("lm_head", None)],
    default=DelayedScaling(amax_history_len=4),
)
PARTS = 5  # of the split graph: the head is with the last layer, the first norm alone

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
    pytest.mark.usefixtures("process_group"),
]


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Trained:
    def __init__(
        self,
        split: bool,
        *,
        inside: bool = False,
        bind: bool = False,
        state: Any = None,
        policy: Policy = POLICY,
        **options: Any,
    ) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.net = Net(HIDDEN, INNER)
        settings: dict[str, Any] = {"compiler": "eager", **options}
        self.backend = Backend(policy, **settings)
        if bind:
            self.backend.bind(self.net)
        if state is not None:
            self.backend.load_state_dict(state)
        if inside:
            self.net.compile(backend=self.backend)
        wrapped: Any = DistributedDataParallel(self.net, bucket_cap_mb=1)
        self.model = wrapped if inside else torch.compile(wrapped, backend=self.backend)
        self.gradients: list[Tensor] = []
        with torch._dynamo.config.patch(optimize_ddp=split):
            for step in range(3):
                generator = torch.Generator().manual_seed(step)
                self.net.zero_grad()
                self.model(torch.randn(16, HIDDEN, generator=generator)).square().mean().backward()
            self.gradients = [p.grad for p in self.net.parameters() if p.grad is not None]

    @property
    def gemms(self) -> list[Any]:
        return sorted((g.name, g.gemm, str(g.recipe), g.reason) for g in self.backend.report.gemms)


@first_fast(  # any two of them in all four ways
    ("inside", "bind", "cache_weights"),
    [(False, False, "update"), (False, True, False), (True, False, False), (True, True, "update")],
)
def test_the_parts_are_one_model(inside: bool, bind: bool, cache_weights: Any) -> None:
    whole, parts = (Trained(split, inside=inside, bind=bind, cache_weights=cache_weights) for split in (False, True))
    assert [len(t.backend.report.graphs) for t in (whole, parts)] == [1, PARTS]
    assert parts.gemms == whole.gemms
    assert len(parts.gemms) == 3 * 5
    linears = {f"layers.{i}.{name}" for i in (0, 1) for name in ("up", "down")}
    assert {name for name, *_ in parts.gemms} == linears | {"lm_head"}
    assert sum(g.recipe is not None for g in parts.backend.report.gemms) == 9
    assert parts.backend.weights.quantized == whole.backend.weights.quantized == (3 if cache_weights else 0)
    before, after = whole.backend.state_dict(), parts.backend.state_dict()
    assert len(before) == 1 + 2 * 3 * 2  # two layers, three operands
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for expected, got in zip(whole.gradients, parts.gradients, strict=True):
        assert torch.equal(expected, got)
    parts.backend.report.check()


@pytest.mark.slow
def test_the_parts_find_the_scales_that_were_loaded() -> None:
    """Tracing the parts calls each on fake tensors: those must not take what waits for the layers."""
    state = Trained(split=False).backend.state_dict()
    whole, parts = (Trained(split, state=state) for split in (False, True))
    assert parts.backend.report.unused_state == []
    expected, got = whole.backend.state_dict(), parts.backend.state_dict()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.slow
def test_strict_mode_looks_at_all_parts_together() -> None:
    Trained(split=True, strict=True)
    with pytest.raises(Fp8CoverageError, match="layers.7"):
        Trained(split=True, strict=True, policy=Policy([Rule("layers.7.*", "tensorwise")], default="tensorwise"))


@pytest.mark.slow
def test_generated_code() -> None:
    """Each part's results have the strides that Inductor chose for them."""
    whole, parts = (Trained(split, compiler="inductor") for split in (False, True))
    assert len(parts.backend.report.graphs) == PARTS
    assert parts.gemms == whole.gemms
    assert parts.backend.state_dict().keys() == whole.backend.state_dict().keys()
    for expected, got in zip(whole.gradients, parts.gradients, strict=True):
        assert sqnr_db(expected, got) > 40


def test_a_bare_sequential_stays_in_eager_and_the_report_is_empty() -> None:
    """Dynamo compiles none of torch's own modules where DDP's hooks break the graph around them."""
    torch._dynamo.reset()
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(32, 32)))
    compiled = torch.compile(model, backend="fp8graph", options={"compiler": "eager"})
    compiled(torch.randn(16, 32)).sum().backward()
    report = backend_of(compiled).report
    assert report.gemms == []
    assert report.summary() == "no graph: the model has not been called yet, or Dynamo compiled nothing of it"
