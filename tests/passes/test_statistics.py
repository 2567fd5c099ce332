"""Statistics that observed graphs return, against their definitions, however the model runs."""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from fp8graph import Backend, DelayedScaling, Float8CurrentScaling, Policy, Rule, numerics
from fp8graph.errors import ConfigError
from fp8graph.recipes import LAYOUTS, resolve_recipe
from helpers import ALL, MLP, RECIPES, first_fast, first_slow, in_one_test, rounding_to_nearest, same_bits, step
from ranks import run_ranks


class Layer(nn.Module):
    """One linear: torch does not compile a module of its own by itself."""

    def __init__(self, rows: int = 80, columns: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


Found = dict[tuple[str, str, str, str, str], float]  # (site, operand, layout, recipe, stat) -> value


def found(statistics: Iterable[Any], at: int = 0) -> Found:
    return {(r.site, r.operand, r.layout, r.recipe, r.stat): r.value for r in statistics if r.step == at}


def observed(module: nn.Module, x: Tensor, policy: Any = ALL, compiler: Any = "eager", **asked: Any) -> Any:
    """The backend and the statistics of one step."""
    torch._dynamo.reset()
    backend = Backend(policy, compiler=compiler)
    statistics = backend.observe(every=1, **asked)
    step(torch.compile(module, backend=backend), x, parameters=module.parameters())
    return backend, statistics


def data(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()


def check_linear(values: Found, name: str, tensors: dict[str, Tensor], recipe: Any, rel: float = 1e-5) -> None:
    """Each tensor and both copies of each operand against ``numerics.statistics``, which FP64 oracles check."""
    for tensor, x in tensors.items():
        for stat, value in numerics.statistics(x).items():
            assert values[name, tensor, "", "", stat] == pytest.approx(value, rel=rel, abs=1e-7), (tensor, stat)
    resolved = resolve_recipe(recipe)
    assert resolved is not None
    for operand in ("input", "weight", "grad_output"):
        for layout in LAYOUTS:
            wanted = numerics.statistics(tensors[operand], resolved, operand, layout)  # pyright: ignore[reportArgumentType]
            for stat, value in wanted.items():
                if stat not in numerics.statistics(tensors[operand]):
                    key = name, operand, layout, resolved.name, stat
                    assert values[key] == pytest.approx(value, rel=10 * rel, abs=1e-5), key


def linear_and_tensors(rows: int = 48) -> tuple[Layer, Tensor]:
    torch.manual_seed(0)
    return Layer(), data(rows, 64).requires_grad_()


def tensors_of(linear: Layer, x: Tensor, out: Tensor) -> dict[str, Tensor]:
    """The operands and results of one step. ``helpers.step`` sends back a ramp."""
    assert x.grad is not None
    assert linear.weight.grad is not None
    dy = torch.linspace(-1.0, 1.0, out.numel()).reshape(out.shape).to(out.dtype)
    grads = {"dgrad": x.grad, "wgrad": linear.weight.grad}
    return {"input": x.detach(), "weight": linear.weight.detach(), "grad_output": dy, "output": out, **grads}


@first_fast("recipe", RECIPES, others=pytest.mark.release)
@first_fast("how", ["plain", "checkpoint", "reentrant", pytest.param("inductor", marks=pytest.mark.release)])
def test_every_recipe(recipe: str, how: str) -> None:
    """All operands, both layouts and all results of one linear, with sizes that are padded."""
    generated = how == "inductor"  # it measures what its kernels hold: FP32 numbers, unless it rounds as eager does
    if generated and recipe in ("blockwise", "mxfp8") and torch.__version__ < "2.13":
        pytest.skip("torch 2.11 writes C++ that does not compile where a row of one tile is padded")
    torch._dynamo.reset()
    chosen = rounding_to_nearest(recipe)  # statistics do not know the seed
    linear, x = linear_and_tensors(rows=40)
    options: Any = {"compiler": "inductor", "inductor_options": {"emulate_precision_casts": True}} if generated else {}
    settings: dict[str, Any] = {"compiler": "eager", **options}
    backend = Backend(Policy(default=chosen, min_speedup=0), **settings)
    statistics = backend.observe(every=1)
    compiled: Any = torch.compile(linear, backend=backend)

    def run(x: Tensor) -> Any:
        return (
            checkpoint(compiled, x, use_reentrant=how == "reentrant")
            if how in ("checkpoint", "reentrant")
            else compiled(x)
        )

    out, *_ = step(run, x, parameters=linear.parameters())
    values = found(statistics)
    check_linear(values, "linear", tensors_of(linear, x, out), chosen, rel=1e-4 if generated else 1e-5)
    assert all(math.isfinite(value) for value in values.values())


def test_a_dynamic_size() -> None:
    torch._dynamo.reset()
    linear, x = linear_and_tensors()
    backend = Backend(Policy(default="mxfp8", min_speedup=0), compiler="eager")
    statistics = backend.observe(every=1)
    compiled = torch.compile(linear, backend=backend, dynamic=True)
    for at, rows in enumerate((48, 96)):
        x = data(rows, 64).requires_grad_()
        out, *_ = step(compiled, x, parameters=linear.parameters())
        check_linear(found(statistics, at), "linear", tensors_of(linear, x, out), "mxfp8")
        statistics.step()


def test_micro_batches_are_merged_and_weights_are_not() -> None:
    torch._dynamo.reset()
    linear, _ = linear_and_tensors()
    backend = Backend(ALL, compiler="eager")
    statistics, x = backend.observe(every=1), data(96, 64)
    compiled = torch.compile(linear, backend=backend)
    for part in x.split(48):
        compiled(part).float().square().sum().backward()
    values = found(statistics)
    for operand, whole in (("input", x), ("weight", linear.weight.detach())):
        for stat, value in numerics.statistics(whole).items():
            assert values["linear", operand, "", "", stat] == pytest.approx(value, rel=1e-5), (operand, stat)


@first_slow("compiler", ["eager", "inductor"])
def test_other_steps_run_what_they_ran(compiler: Any) -> None:
    """Bit for bit, with the same graphs and as many of them; and observed steps train in the same way."""
    losses: dict[int, list[Tensor]] = {}
    graphs: dict[int, Any] = {}
    for every in (0, 1, 3):
        torch._dynamo.reset()
        torch.manual_seed(0)
        # one graph: with "auto" the first step has another
        recipe = DelayedScaling(initial_scale="one")
        model, backend = MLP(), Backend(Policy(default=recipe, min_speedup=0), compiler=compiler)
        if every:
            backend.observe(every=every, what_if=["mxfp8"])
        compiled = torch.compile(model, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses[every] = []
        for _ in range(5):
            loss = compiled(data(16, 32).float()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[every].append(loss.detach())
        losses[every] += [p.detach().clone() for p in model.parameters()]
        graphs[every] = [(view.before, view.stages, view.after) for view in backend.report.graphs]
    assert graphs[0] == graphs[1] == graphs[3]
    if compiler == "eager":
        assert same_bits(losses[1], losses[0])
        assert same_bits(losses[3], losses[0])
    else:  # an observed step may round the tensors that it measures in other places
        for got, wanted in zip(losses[3], losses[0], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-4)


@first_fast(
    "settings",
    [
        {"save": "memory"},
        {"save": "memory", "save_activations_in_fp8": True},
        {"fuse_linears": False},
        {"cache_weights": False},
        {"accumulate_wgrad": True},
    ],
    ids=str,
)
@first_fast("recipe", ["tensorwise", "delayed", "mxfp8"])
def test_observed_steps_train_as_others_do(recipe: str, settings: dict[str, Any]) -> None:
    """Bit for bit, whatever is kept for backward."""
    trained: list[list[Tensor]] = []
    for every in (0, 1):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, backend = MLP(), Backend(Policy(default=recipe, min_speedup=0), compiler="eager", **settings)
        statistics: Any = backend.observe(every=1) if every else []
        compiled, optimizer = torch.compile(model, backend=backend), torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            for part in data(32, 32).float().split(16):
                compiled(part).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([p.detach() for p in model.parameters()])
        if every:
            operands = {r.operand for r in statistics}
            assert ("wgrad" in operands) != settings.get("accumulate_wgrad", False)
            assert operands >= {"input", "weight", "grad_output", "output", "dgrad"}
    assert same_bits(*trained)


def test_nothing_is_compiled_before_it_is_asked_for() -> None:
    torch._dynamo.reset()
    linear, x = linear_and_tensors()
    backend = Backend(ALL, compiler="eager")
    statistics = backend.observe(start=10)
    step(torch.compile(linear, backend=backend), x, parameters=linear.parameters())
    (program,) = backend.programs
    assert [situation.conditions for situation, _ in program._variants] == [()]
    assert list(statistics) == []


def test_steps_that_ask() -> None:
    torch._dynamo.reset()
    linear, x = linear_and_tensors()
    backend = Backend(ALL, compiler="eager")
    statistics = backend.observe(every=2, start=1, end=6, stats="cur_amax")
    compiled, optimizer = torch.compile(linear, backend=backend), torch.optim.SGD(linear.parameters(), 0.1)
    for _ in range(8):
        compiled(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sorted({r.step for r in statistics}) == [1, 3, 5]
    assert {r.stat for r in statistics} == {"cur_amax"}
    assert backend.state_dict()["fp8graph.step"].item() == 8
    statistics.stop()
    compiled(x)
    assert sorted({r.step for r in statistics}) == [1, 3, 5]


def test_layers_and_what_if() -> None:
    """A head that stays in high precision: what would mxfp8 make of it?"""
    torch.manual_seed(0)
    model, x = MLP(), data(16, 32).float()
    policy = Policy([Rule("down", None)], default="tensorwise", min_speedup=0)
    backend, statistics = observed(model, x, policy, what_if=["mxfp8", "tensorwise"], layers=["do*"])
    values = found(statistics)
    assert {site for site, *_ in values} == {"down"}
    assert {(layout, recipe) for _, _, layout, recipe, _ in values} == {
        ("", ""),
        ("rowwise", "mxfp8"),
        ("rowwise", "tensorwise"),
    }
    assert all(r.what_if == bool(r.recipe) for r in statistics)
    for recipe in ("mxfp8", "tensorwise"):
        resolved = resolve_recipe(recipe)
        wanted = numerics.statistics(model.down.weight.detach(), resolved, "weight")["sqnr"]
        assert values["down", "weight", "rowwise", recipe, "sqnr"] == pytest.approx(wanted, rel=1e-4)
    assert {g.fqn for g in backend.report.gemms} == {"gate", "up", "down"}


def test_linears_that_are_one_gemm_have_one_operand_and_results_of_their_own() -> None:
    torch.manual_seed(0)
    model, x = MLP(), data(16, 32).float()
    _, statistics = observed(model, x)
    values = found(statistics)
    for name in ("gate", "up"):
        weights = torch.cat([model.gate.weight, model.up.weight]).detach()
        assert values[name, "weight", "", "", "l1_norm"] == pytest.approx(weights.abs().sum().item(), rel=1e-5)
        grad: Any = model.get_submodule(name).weight.grad
        assert values[name, "wgrad", "", "", "l2_norm"] == pytest.approx(grad.norm().item(), rel=1e-4)


def test_layers_one_by_one_share_code_and_keep_their_names() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(32, 32) for _ in range(3)))
    backend = Backend(ALL, compiler="eager")
    backend.bind(model)
    for layer in model:
        layer.compile(backend=backend)
    statistics = backend.observe(every=1, layers=["0.*", "2.*"])
    model(data(16, 32)).sum().backward()
    values = found(statistics)
    assert {site for site, *_ in values} == {"0.linear", "2.linear"}
    for name in ("0.linear", "2.linear"):
        weight: Any = model.get_submodule(name).weight
        assert values[name, "weight", "", "", "max"] == weight.max().item()


def test_evaluation_does_not_mix_with_training_and_inference_is_measured() -> None:
    torch._dynamo.reset()
    linear, x = linear_and_tensors()
    backend = Backend(ALL, compiler="eager")
    statistics = backend.observe(every=1)
    compiled = torch.compile(linear, backend=backend)
    with torch.no_grad():
        compiled(x)
        assert found(statistics)["linear", "input", "", "", "max"] == x.max().item()
        statistics.step()
        compiled(2 * x)
    assert found(statistics, 1)["linear", "input", "", "", "max"] == 2 * x.max().item()
    statistics.step()
    with torch.no_grad():
        compiled(4 * x)  # nobody knows yet that the model is trained
    compiled(x).sum().backward()
    with torch.no_grad():
        compiled(8 * x)
    assert found(statistics, 2)["linear", "input", "", "", "max"] == x.max().item()


def test_a_backward_that_never_comes() -> None:
    torch._dynamo.reset()
    linear, x = linear_and_tensors()
    backend = Backend(ALL, compiler="eager")
    statistics = backend.observe(every=1)
    torch.compile(linear, backend=backend)(x)
    assert {r.operand for r in statistics} == {"input", "weight", "output"}


@in_one_test(
    ("asked", "message"),
    [
        ({"every": 0}, r"observe\(every=0\): expected a whole number of steps >= 1\."),
        ({"start": -1}, r"observe\(start=-1\): expected a whole number of steps >= 0\."),
        ({"start": 5, "end": 4}, r"observe\(end=4\): expected a whole number of steps >= 5\."),
        ({"stats": "underflow%"}, r"knows no statistic 'underflow%'\. Did you mean 'underflows%'\?"),
        ({"what_if": ["delayed"]}, r"observe\(what_if=\['delayed'\]\): its scales come from earlier steps"),
        ({"what_if": ["fp7"]}, "fp7"),
        ({"what_if": [Float8CurrentScaling(hadamard_qk=True)]}, "hadamard_qk=True is for attention alone"),
    ],
)
def test_wrong_arguments(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Backend(ALL, compiler="eager").observe(**asked)


def test_json_lines(tmp_path: Path) -> None:
    linear, x = linear_and_tensors()
    _, statistics = observed(linear, x, stats=["sqnr", "max"])
    statistics.to_jsonl(tmp_path / "s.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert len(lines) == len(list(statistics)) > 0
    assert lines[0].keys() == {"step", "site", "operand", "layout", "recipe", "what_if", "stat", "value"}
    assert {line["stat"] for line in lines} == {"sqnr", "max"}


def test_tensorboard_and_weights_and_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = MLP(), data(16, 32).float()
    _, statistics = observed(model, x, stats="underflows%")
    scalars: list[Any] = []
    statistics.to_tensorboard(types.SimpleNamespace(add_scalar=lambda *args: scalars.append(args)))
    assert [name for name, _, _ in scalars if "down/grad" in name] == [
        f"down/grad_output_underflows%/tensorwise/{layout}" for layout in LAYOUTS
    ]
    logged: list[dict[str, float]] = []
    run = types.SimpleNamespace(log=logged.append)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=run))
    statistics.to_wandb()
    assert logged == [{**{name: value for name, value, _ in scalars}, "fp8graph/step": 0}]
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=None))
    with pytest.raises(ConfigError, match=r"call wandb.init\(\) first"):
        statistics.to_wandb()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        statistics.to_wandb()


def _rank(rank: int) -> Any:
    linear, _ = linear_and_tensors()
    x = data(96, 64).split(48)[rank]
    backend = Backend(ALL, compiler="eager")
    statistics = backend.observe(every=1)
    optimizer = torch.optim.SGD(linear.parameters(), 0.1)
    compiled = torch.compile(torch.nn.parallel.DistributedDataParallel(linear), backend=backend)
    compiled(x).float().square().sum().backward()
    optimizer.step()
    before = found(statistics)
    statistics.reduce()
    statistics.reduce()  # nothing is merged twice
    torch.distributed.barrier()
    return before, found(statistics)


@pytest.mark.slow
def test_ranks_are_merged_when_all_of_them_ask(tmp_path: Path) -> None:
    (own, both), (_, same) = run_ranks(_rank, 2, tmp_path)
    x, (linear, _) = data(96, 64), linear_and_tensors()
    assert both == pytest.approx(same, nan_ok=True)
    (name,) = {site for site, *_ in both}
    for stat, value in numerics.statistics(x).items():
        assert both[name, "input", "", "", stat] == pytest.approx(value, rel=1e-5), stat
    assert own[name, "input", "", "", "l1_norm"] < 0.6 * both[name, "input", "", "", "l1_norm"]
    wanted = numerics.statistics(linear.weight.detach())
    assert both[name, "weight", "", "", "l1_norm"] == pytest.approx(wanted["l1_norm"], rel=1e-5)


def _sharded(rank: int, recipe: str) -> Any:
    """FSDP2: on observed steps, the weights are read in high precision, too."""
    trained: list[list[Tensor]] = []
    names: set[str] = set()
    for every in (0, 2):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(MLP(64, 128), MLP(64, 128)).bfloat16()
        backend = Backend(Policy(default=recipe, min_speedup=0), compiler="eager")
        backend.bind(model)
        for layer in model:
            fully_shard(layer)
            layer.compile(backend=backend)
        fully_shard(model)
        statistics: Any = backend.observe(every=every) if every else []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for part in data(4 * 64, 64).split(64):
            model(part.split(32)[rank]).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([p.to_local().detach().clone() for p in model.parameters()])  # pyright: ignore[reportAttributeAccessIssue]
        names |= {f"{r.step} {r.site} {r.operand}" for r in statistics}
    assert same_bits(*trained)
    return names


@first_slow("recipe", ["tensorwise", "mxfp8"])  # gathered in FP8, and in bf16
def test_shards(tmp_path: Path, recipe: str) -> None:
    first, second = run_ranks(_sharded, 2, tmp_path, recipe)
    assert first == second
    assert {name.split()[0] for name in first} == {"0", "2"}
    assert {f"2 1.{name} weight" for name in ("gate", "up", "down")} <= first


def test_the_page_has_the_report_and_the_statistics(tmp_path: Path) -> None:
    _, statistics = observed(Layer(), data(16, 64))
    statistics.to_html(tmp_path / "page.html", losses=[1.25])
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '"losses":[[0,1.25]]' in text
    assert '"sites":["linear"]' in text
    assert '"operand":"grad_output","layout":"columnwise","recipe":"tensorwise"' in text
    assert '"site":"linear"' in text  # the table of GEMMs
