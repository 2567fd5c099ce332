"""tune: a policy chosen by measurement, on small models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import ConfigError, Float8CurrentScaling, Policy, hardware, tune
from helpers import in_one_test
from tiny_models import causal_lm


class Wide(nn.Module):
    """Linears large enough for FP8 to pay, one of which quantizes badly: a few numbers of its input are huge."""

    def __init__(self, size: int = 256, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(layers)).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x * self.outliers(x) if index == 1 else x))
        return x.float().square().mean()

    @staticmethod
    def outliers(x: Tensor) -> Tensor:
        factor = torch.ones_like(x)
        factor[:1, :4] = 3e4
        return factor


@pytest.fixture
def target(tmp_path: Path) -> str:
    """An H100 whose kernels start at once: the models are small."""
    speed = hardware.from_target("sm_90").speed
    assert speed is not None
    values = {**asdict(replace(speed, launch=1e-12, host_launch=0.0, bandwidth=1e15)), "rates": dict(speed.rates)}
    path = tmp_path / "target.json"
    path.write_text(json.dumps({"target": "sm_90", "speed": values}))
    return str(path)


def batches(count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(256, 256, generator=generator).bfloat16() for _ in range(count)]


def test_the_budget_spares_the_layer_with_outliers(target: str) -> None:
    torch.manual_seed(0)
    found = tune(Wide(), batches(), recipes=["tensorwise"], target=target, budget=0.5)
    assert found.chosen.error <= 0.5
    assert found.chosen.speedup > 1.1
    policy = found.policy.over(Policy())
    spared = [policy.resolve(f"layers.{index}", "linear").recipes["fprop"] is None for index in range(3)]
    assert spared == [False, True, False]


def test_budgets_buy_speed(target: str) -> None:
    torch.manual_seed(0)
    model = Wide()
    found = [tune(model, batches(), recipes=["tensorwise"], target=target, budget=b) for b in (0.0, 0.3, 1.0)]
    assert [f.chosen.speedup for f in found] == sorted(f.chosen.speedup for f in found)
    assert found[0].chosen.speedup == 1.0
    assert found[0].policy.default is None
    assert found[2].chosen == found[2].uniform["tensorwise"]
    assert found[2].policy.default == "tensorwise"
    assert found[2].chosen.error == pytest.approx(1.0)
    curve = found[1].curve
    assert (curve[0].error, curve[0].speedup) == (0.0, 1.0)
    assert curve[-1].error == pytest.approx(1.0)


def test_a_speed_may_be_asked_for(target: str) -> None:
    torch.manual_seed(0)
    model = Wide()
    found = tune(model, batches(), recipes=["tensorwise"], target=target, min_speedup=1.3)
    assert 1.3 <= found.chosen.speedup < 1.6
    assert found.chosen.error < 1
    with pytest.raises(ConfigError, match=r"min_speedup=4\): the fastest policy is predicted to be 1\.\d+ times"):
        tune(model, batches(1), recipes=["tensorwise"], target=target, min_speedup=4)


def test_of_two_equally_fast_recipes_the_better_one(target: str) -> None:
    torch.manual_seed(0)
    e4m3 = Float8CurrentScaling(fp8_format="E4M3")  # pyright: ignore[reportArgumentType]
    found = tune(Wide(layers=1), batches(), recipes=["tensorwise", e4m3], target=target, budget=1.0)
    policy = found.policy.over(Policy())
    assert policy.resolve("layers.0", "linear").recipes["wgrad"] == e4m3  # gradients of one size: precision wins


@pytest.mark.slow
def test_a_llama_decides_by_groups_and_the_policy_loads(tmp_path: Path, target: str) -> None:
    torch.manual_seed(0)
    model = causal_lm("Llama")(2)
    ids = torch.randint(0, 256, (2, 32))
    found = tune(model, [{"input_ids": ids, "labels": ids}], recipes=["tensorwise", "rowwise"], target=target)
    groups = {score.site.rpartition(".")[2]: score.group.rpartition(".")[2] for score in found.scores}
    assert groups == dict.fromkeys(("q_proj", "k_proj", "v_proj"), "q_proj") | {
        "o_proj": "o_proj",
        "gate_proj": "gate_proj",
        "up_proj": "gate_proj",
        "down_proj": "down_proj",
    }
    assert "lm_head" not in {score.site for score in found.scores}  # the default policy keeps it
    found.save(tmp_path / "policy.toml")
    loaded = Policy.load(tmp_path / "policy.toml")
    assert loaded.identity() == found.policy.identity()
    text = str(found)
    assert "everywhere" in text
    assert "model.layers.0.self_attn.q_proj fprop: tensorwise" in text


@pytest.mark.slow
def test_chosen_recipes_run(target: str) -> None:
    torch.manual_seed(0)
    model = causal_lm("Llama")(2).bfloat16()
    ids = torch.randint(0, 256, (2, 32))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    found = tune(model, [batch], recipes=["tensorwise", "rowwise"], target=target, budget=0.4)
    report = fp8graph.explain(model, **batch, policy=found.policy, target="sm_90")  # here launches count: FP8 is slower
    runs = {(gemm.fqn, gemm.gemm): gemm.recipe for gemm in report.gemms if gemm.op == "linear"}
    policy = found.policy.over(Policy())
    for fqn, gemm in {(score.site, score.gemm) for score in found.scores}:
        recipe = policy.resolve(fqn, "linear").recipes[gemm]  # pyright: ignore[reportArgumentType]
        assert runs[fqn, gemm] == (recipe.name if recipe is not None else None)
    assert {"tensorwise", None} <= set(runs.values()) or {"rowwise", None} <= set(runs.values())


def test_a_module_that_is_called_twice_is_decided_once(target: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return (self.gate(x) * self.up(torch.tanh(self.up(x)))).square().mean()

    torch.manual_seed(0)
    found = tune(Twice(), [torch.randn(64, 64)], recipes=["tensorwise"], target=target)
    assert {score.site: score.group for score in found.scores} == {"up": "gate", "gate": "gate"}


def test_the_model_is_left_as_it_was(target: str) -> None:
    torch.manual_seed(0)
    model = Wide()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    random = torch.get_rng_state()
    tune(model, batches(), recipes=["tensorwise"], target=target)
    assert torch.equal(random, torch.get_rng_state())
    for name, p in model.named_parameters():
        assert torch.equal(p, weights[name])
        assert p.grad is not None
        assert (p.grad == 7.0).all()


@pytest.mark.slow
def test_tune_resumes(tmp_path: Path, target: str) -> None:
    torch.manual_seed(0)
    model, path = Wide(), tmp_path / "measured.json"

    def stopped() -> Iterator[Tensor]:
        yield batches(3)[0]
        yield batches(3)[1]
        raise KeyboardInterrupt

    settings: dict[str, Any] = {"recipes": ["tensorwise"], "target": target, "resume": path}
    with pytest.raises(KeyboardInterrupt):
        tune(model, stopped(), **settings)
    assert len(json.loads(path.read_text())["batches"]) == 2
    resumed = tune(model, batches(3), **settings)
    whole = tune(model, batches(3), recipes=["tensorwise"], target=target)
    assert resumed.scores == whole.scores
    with pytest.raises(ConfigError, match="it was made with recipes="):
        tune(model, batches(3), recipes=["rowwise"], target=target, resume=path)
    fewer = tune(model, batches(1), **settings)  # of the file, only what was asked for counts
    assert fewer.scores == tune(model, batches(1), recipes=["tensorwise"], target=target).scores
    with pytest.raises(ConfigError, match="it was made with model="):
        tune(Wide(layers=2), batches(3), **settings)
    path.write_text("nonsense")
    with pytest.raises(ConfigError, match=r"it is not a file of tune\(\)"):
        tune(model, batches(3), **settings)


def test_delayed_is_measured_with_scales_of_the_tensor(target: str) -> None:
    torch.manual_seed(0)
    found = tune(Wide(layers=1), batches(1), recipes=["tensorwise", "delayed"], target=target)
    errors = [{s.gemm: s.measured for s in found.scores if s.recipe == name} for name in ("tensorwise", "delayed")]
    assert errors[0] == errors[1]


@in_one_test(
    ("arguments", "message"),
    [
        ({"budget": 1.5}, r"budget=1.5\): budget must be a number from 0 to 1"),
        ({"budget": True}, "budget must be a number"),
        ({"budget": 0.3, "min_speedup": 1.2}, "two goals; give one of them"),
        ({"min_speedup": 0}, r"min_speedup=0\): min_speedup must be a number above 0"),
        ({"recipes": "tensorwise"}, "give a list of recipes"),
        ({"recipes": [None]}, "high precision is always a candidate"),
        ({"target": "cpu"}, r"target='cpu'\): its speed is not known"),
        ({"batches": []}, "got no batches"),
        ({"batches": {"x": torch.zeros(1)}}, r"this is one batch. Write \[batch\]"),
        ({"loss": lambda output, batch: output.detach()}, r"loss\(output, batch\) has no gradient: it is detached, or"),  # pyright: ignore
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    data = arguments.pop("batches", batches(1))
    settings: dict[str, Any] = {"recipes": ["tensorwise"], **arguments}
    with pytest.raises(ConfigError, match=message):
        tune(Wide(layers=1), data, **settings)


def test_a_model_without_a_loss() -> None:
    with pytest.raises(ConfigError, match=r"the model returns a tensor \[256, 64\], and not a loss"):
        tune(nn.Linear(256, 64).bfloat16(), batches(1), recipes=["tensorwise"])


def test_a_frozen_model() -> None:
    with pytest.raises(
        ConfigError, match=r"the model has no gradient: .* or all parameters are frozen, which model\.r"
    ):
        tune(Wide(layers=1).requires_grad_(False), batches(1), recipes=["tensorwise"])


def test_without_a_gpu_the_target_is_said() -> None:
    found = tune(Wide(layers=1), batches(1))
    assert found.target == "sm_90"
    assert {score.recipe for score in found.scores} == {"tensorwise", "rowwise", "blockwise"}


def test_a_progress_bar(capsys: pytest.CaptureFixture[str], target: str) -> None:
    tune(Wide(layers=1), batches(1), recipes=["tensorwise"], target=target, progress=True)
    assert "measuring" in capsys.readouterr().err
