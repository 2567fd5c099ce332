"""Names of recipes are looked up once, at the door: no later registration, order of calls or process changes a number.

The doors: a policy's names when a backend gets it, that of a region around compiled code when the region is entered,
those of regions inside compiled code when Dynamo's graph is first seen.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fp8graph
from decided import (
    INNER,
    NAME,
    POLICY,
    Call,
    Decisions,
    Enter,
    Leave,
    Linear,
    Operation,
    Optimize,
    Register,
    RuleOf,
    SetPolicy,
    assert_decided,
    programs,
)
from fp8graph import Backend, Float8CurrentScaling, NVFP4BlockScaling, Policy, Rule, autocast, register_recipe
from fp8graph.models.general import families_of
from fp8graph.passes import STORES
from fp8graph.passes.observe.guard import Guarded
from helpers import NONE, Counting, eager_backend, first_fast, first_slow, same_bits, step

ROOT: Final = Path(__file__).parents[2]
A: Final = Float8CurrentScaling()
B: Final = Float8CurrentScaling(power_2_scale=True)
X: Final = 3 * torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
_expected: Final[dict[tuple[str, int], list[Tensor]]] = {}


def compile_linear(backend: Any, inner: str | None = None) -> Any:
    torch.manual_seed(0)
    model = Linear(inner)
    if isinstance(backend, Backend):
        backend.bind(model)
    return torch.compile(model, backend=backend, dynamic=False)


def run(model: Any, rows: int = 32) -> list[Tensor]:
    """Return the output and the gradients."""
    return step(model, X[:rows].clone().requires_grad_(), parameters=model.parameters())


def meaning(model: Any, rows: int = 32) -> str:
    """Run ``model``; return the recipes, of "A" and "B", with which it may have run."""
    got = run(model, rows)
    return "".join(name for name in "AB" if same_bits(got, _expected[name, rows]))


@pytest.fixture(autouse=True)
def meanings(fresh: None) -> None:
    """Compute the results of each recipe, in backends that get it as an object; register A under the name."""
    for name, recipe in (("A", A), ("B", B)) if not _expected else ():
        for rows in (16, 32):
            _expected[name, rows] = run(compile_linear(eager_backend(Policy(default=recipe))), rows)
            torch._dynamo.reset()
    register_recipe(NAME, A)


# --- the names of a policy


def from_file(folder: Path) -> Backend:
    path = folder / "policy.toml"
    path.write_text(f'default = "{NAME}"\n')
    return eager_backend(str(path))


def set_later(_: Path) -> Backend:
    backend = eager_backend(NONE)
    backend.set_policy(Policy(default=NAME))
    return backend


WAYS: Final[dict[str, Callable[[Path], Backend]]] = {
    "default": lambda _: eager_backend(Policy(default=NAME)),
    "set_policy": set_later,
    "rule": lambda _: eager_backend(Policy([Rule("up", NAME)], default=None)),
    "a rule's GEMMs": lambda _: eager_backend(Policy([Rule("*", None, fprop=NAME, dgrad=NAME, wgrad=NAME)])),
    "recipe": lambda _: eager_backend(None, recipe=NAME),
    "the extended default": lambda _: eager_backend(Policy(extends="default", default=NAME)),
    "a dict": lambda _: eager_backend({"default": NAME}),
    "a file": from_file,
}


@first_fast("way", WAYS)
def test_a_policy_keeps_the_recipes_that_its_names_had_when_it_was_given(way: str, tmp_path: Path) -> None:
    backend = WAYS[way](tmp_path)
    register_recipe(NAME, B)
    model = compile_linear(backend)
    assert meaning(model) == "A"
    assert meaning(model, rows=16) == "A"  # another graph


def test_a_policy_that_is_set_again_has_the_new_meaning() -> None:
    policy = Policy(default=NAME)
    backend = eager_backend(policy)
    model = compile_linear(backend)
    assert meaning(model) == "A"
    register_recipe(NAME, B)
    assert meaning(model) == "A"
    backend.set_policy(policy)
    assert meaning(model) == "B"
    assert meaning(model, rows=16) == "B"


def test_a_schedule_keeps_the_recipes_for_its_later_steps() -> None:
    backend = eager_backend(Policy([Rule("*", NAME, steps=(1, None))], default=None))
    model = compile_linear(backend)
    register_recipe(NAME, B)
    assert meaning(model) == ""  # in high precision
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    assert meaning(model) == "A"


class OfFamily(Linear):
    """A linear of a family that adds to the default policy."""

    __module__ = "timm.models.of_test_decisions"


def test_the_policy_of_a_family_that_is_met_later_keeps_the_recipes() -> None:
    assert families_of([OfFamily]) == ["timm"]
    backend = eager_backend(Policy(extends="default", default=NAME))
    assert meaning(compile_linear(backend)) == "A"
    register_recipe(NAME, B)
    torch.manual_seed(0)
    assert meaning(torch.compile(OfFamily(), backend=backend)) == "A"


def test_a_guards_rule_leaves_the_other_recipes_as_they_were() -> None:
    backend = eager_backend(Policy([Rule("*", NAME, steps=(0, 9))], default=None))
    register_recipe(NAME, B)
    backend.store(Guarded).apply([(Rule("down", None), "of a test")])
    assert meaning(compile_linear(backend)) == "A"


def test_a_backend_that_was_pickled_keeps_the_recipes() -> None:
    backend = eager_backend(Policy(default=NAME))
    register_recipe(NAME, B)
    assert meaning(compile_linear(pickle.loads(pickle.dumps(backend)))) == "A"  # noqa: S301


def test_a_model_keeps_the_recipe_that_it_was_compiled_with() -> None:
    torch.manual_seed(0)
    model = Linear()
    fp8graph.compile(model, recipe=NAME, compiler="eager")
    register_recipe(NAME, B)
    assert meaning(model) == "A"


# --- regions around compiled code


def test_a_region_has_the_meaning_at_its_entry() -> None:
    """Entered again it has the new one, and calls that were prepared under the old one are prepared anew."""
    model = compile_linear(eager_backend(NONE))
    for name, recipe in (("A", A), ("B", B), ("A", A), ("B", B)):
        register_recipe(NAME, recipe)
        for _ in range(2):
            with autocast(recipe=NAME):
                assert meaning(model) == name


def test_a_region_keeps_its_meaning_until_it_is_left() -> None:
    model = compile_linear(eager_backend(NONE))
    with autocast(recipe=NAME):
        register_recipe(NAME, B)
        assert meaning(model) == "A"
        with autocast(recipe=NAME):
            assert meaning(model) == "B"
            assert meaning(model, rows=16) == "B"
        assert meaning(model) == "A"
        assert meaning(model, rows=16) == "A"


def test_a_region_object_has_the_meaning_at_each_entry() -> None:
    model, region = compile_linear(eager_backend(NONE)), autocast(recipe=NAME)
    with region:
        assert meaning(model) == "A"
    register_recipe(NAME, B)
    with region:
        assert meaning(model) == "B"


def test_a_name_and_its_recipe_share_code() -> None:
    backend = Counting(NONE, cache_weights=False)
    model = compile_linear(backend)
    for recipe in (NAME, A):
        with autocast(recipe=recipe):
            assert meaning(model) == "A"
    assert len(backend.generated) == 2  # forward and backward


FORWARDS: Final[dict[str, Callable[[Any, Tensor], Any]]] = {
    "plain": lambda model, x: model(x),
    "reentrant": lambda model, x: checkpoint(model, x, use_reentrant=True),
    "not reentrant": lambda model, x: checkpoint(model, x, use_reentrant=False),
}


@pytest.mark.parametrize("forward", FORWARDS)
def test_backward_has_the_meaning_of_its_forward(forward: str) -> None:
    model = compile_linear(eager_backend(NONE))
    x = X.clone().requires_grad_()
    with autocast(recipe=NAME):
        y = FORWARDS[forward](model, x)
    register_recipe(NAME, B)
    with autocast(recipe=NAME):
        (y * torch.linspace(-1.0, 1.0, y.numel()).reshape(y.shape)).sum().backward()
    got: list[Any] = [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]
    assert same_bits(got, _expected["A", 32])


# --- regions inside compiled code


def test_a_region_in_a_graph_has_the_meaning_when_the_graph_is_first_seen() -> None:
    """All variants of the graph keep it; the graph of another shape is seen later."""
    backend = eager_backend(NONE)
    model = compile_linear(backend, inner=NAME)
    assert meaning(model) == "A"
    register_recipe(NAME, B)
    assert meaning(model) == "A"
    backend.set_policy(Policy([Rule("nothing", None, optional=True)], default="rowwise"))
    assert meaning(model) == "A"
    with autocast(recipe="rowwise"):
        assert meaning(model) == "A"
    assert meaning(model, rows=16) == "B"
    assert meaning(model) == "A"


def test_layers_that_share_a_graph_share_the_meaning_of_its_regions() -> None:
    layers = nn.ModuleList()
    for _ in range(2):
        torch.manual_seed(0)
        layers.append(Linear(NAME))
    backend = eager_backend(Policy([Rule("0.*", "rowwise"), Rule("1.*", None)]))  # a variant each
    backend.bind(layers)
    for layer, recipe in zip(layers, (A, B), strict=True):
        register_recipe(NAME, recipe)
        layer.compile(backend=backend, dynamic=False)
        assert meaning(layer) == "A"


# --- orders of calls


class Sub(nn.Module):
    """A block: a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.up(x))


class Stack(nn.Module):
    """Blocks one behind another."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sub() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Stacks(nn.Module):
    """Three stacks of one class, called in some order."""

    def __init__(self, order: Sequence[str]) -> None:
        super().__init__()
        self.first, self.rest, self.order = Stack(), nn.ModuleList([Stack(), Stack()]), order

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = self.get_submodule(name)(x)
        return x


def in_high_precision(model: nn.Module) -> set[str]:
    """Run ``model``; return the layers that it leaves in high precision."""
    model(torch.randn(32, 32)).sum().backward()
    return {gemm.fqn for gemm in fp8graph.backend_of(model).report.gemms if gemm.recipe is None}


@first_fast("order", [("first", "rest.0", "rest.1"), ("rest.0", "rest.1", "first")])
def test_the_last_blocks_are_the_same_whatever_is_called_first(order: Sequence[str]) -> None:
    """The stacks share a graph. That of two blocks, "rest", is too short to have some in high precision."""
    model = Stacks(order)
    fp8graph.compile(model, recipe="nvfp4", regions=["Stack"], compiler="eager")
    assert in_high_precision(model) == {"first.layers.3.up"}


def layer_by_layer(model: Stack) -> None:
    backend = eager_backend(None, recipe="nvfp4")
    backend.bind(model)
    for layer in reversed(model.layers):
        layer.compile(backend=backend)
    for layer in (model.layers[-1], model.layers[0]):
        layer(torch.randn(32, 32))  # before the model


BY: Final[dict[str, Callable[[Stack], Any]]] = {
    "whole": lambda model: fp8graph.compile(model, recipe="nvfp4", compiler="eager"),
    "regions": lambda model: fp8graph.compile(model, recipe="nvfp4", regions="auto", compiler="eager"),
    "layer by layer": layer_by_layer,
}


@pytest.mark.parametrize("by", BY)
@first_fast(("blocks", "last"), [(4, [3]), (13, [11, 12]), (3, [])])
def test_the_last_blocks_of_a_bound_model_do_not_depend_on_the_way_of_compiling(
    by: str, blocks: int, last: list[int]
) -> None:
    """15 % of all blocks, rounded to the nearest number."""
    model = Stack(blocks)
    BY[by](model)
    assert in_high_precision(model) == {f"layers.{number}.up" for number in last}


@pytest.mark.parametrize("whole", [True, False])
def test_models_of_one_backend_have_last_blocks_each(whole: bool) -> None:
    """Whichever was bound first, and although their layers have the same names."""
    small, large, x = Stack(4), Stack(13), torch.randn(32, 32)
    backend = eager_backend(None, recipe="nvfp4")
    backend.bind(small)
    for part in [small] if whole else small.layers:
        part.compile(backend=backend)
    with torch.no_grad():
        first = small(x)
        backend.bind(large)
        assert same_bits([small(x)], [first])
        torch._dynamo.reset()
        assert same_bits([small(x)], [first])
    assert in_high_precision(small) == {"layers.3.up"}


def test_a_recipe_with_a_name_has_its_last_blocks_too() -> None:
    register_recipe(NAME, NVFP4BlockScaling())
    model = Stack()
    fp8graph.compile(model, recipe=NAME, regions="auto", compiler="eager")
    assert in_high_precision(model) == {"layers.3.up"}


class Two(nn.Module):
    """Layers ``a`` and ``b``, called in some order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.a, self.b, self.order = Sub(), Sub(), order

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = getattr(self, name)(x)
        return x


POLICIES: Final = {
    "a rule and the default": Policy([Rule("a.*", "tensorwise", optional=True)], default="tensorwise"),
    "two rules": Policy([Rule("a.*", "tensorwise"), Rule("b.*", A)]),
    "high precision": Policy([Rule("a.*", None, optional=True)], default=None),
    "one GEMM": Policy([Rule(f"{name}.*", "tensorwise", dgrad=None) for name in "ab"]),
}


def explain(policy: Policy, order: str, *, backends: int = 1) -> dict[Any, Any]:
    """Return the reasons of all GEMMs of layers that are compiled one by one, with as many backends."""
    torch._dynamo.reset()
    model, made = Two(order), [eager_backend(policy) for _ in range(backends)]
    for backend in made:
        backend.bind(model)
    for layer, backend in zip((model.a, model.b), made * (3 - backends), strict=True):
        layer.compile(backend=backend)
    model(torch.randn(32, 32, requires_grad=True)).sum().backward()
    gemms = [gemm for backend in made for gemm in backend.report.gemms]
    return {(gemm.fqn, gemm.gemm): (gemm.reason, gemm.recipe, gemm.rule) for gemm in gemms}


@first_fast("policy", POLICIES)
def test_the_reasons_do_not_depend_on_the_order_of_calls(policy: str) -> None:
    alone = explain(POLICIES[policy], "ab", backends=2)
    assert explain(POLICIES[policy], "ab") == alone
    assert explain(POLICIES[policy], "ba") == alone


def decides(*, schedule: bool = False) -> str:
    """Return the text that a rank compares, under a policy of names."""
    rules = [Rule("*.up", NAME, steps=(2, None) if schedule else None), Rule("*", None, wgrad=NAME)]
    return eager_backend(Policy(rules, default=NAME)).decides(training=True)


@pytest.mark.parametrize("schedule", [False, True])
def test_ranks_compare_recipes_and_not_their_names(schedule: bool) -> None:
    texts: list[str] = []
    for recipe in (A, B, A):
        register_recipe(NAME, recipe)
        texts.append(decides(schedule=schedule))
    assert texts[0] != texts[1]
    assert texts[0] == texts[2]


def test_a_rank_with_a_name_agrees_with_one_with_its_recipe() -> None:
    texts = [eager_backend(Policy([Rule("*", r)], default=r)).decides(training=True) for r in (NAME, A)]
    assert texts[0] == texts[1]


# --- processes with one compile cache

# Runs a linear in each way; prints the recipes that it may have run with, and the number of hits, as JSON.
PROCESS: Final = """
import contextlib, hashlib, json, sys, uuid
import torch
import torch._inductor.async_compile
from torch._dynamo.utils import counters
import fp8graph
from fp8graph import Backend, Float8CurrentScaling, Policy, Rule, autocast
from decided import NAME, Linear

RECIPES = {"A": Float8CurrentScaling(), "B": Float8CurrentScaling(power_2_scale=True)}
torch.set_num_threads(1)
x = 3 * torch.randn(32, 64, generator=torch.Generator().manual_seed(1))

def run(policy, inner=None, *, region=None, then=None, **settings):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model, backend = Linear(inner), Backend(policy, cache_weights=False, **settings)
    backend.bind(model)
    if then is not None:
        fp8graph.register_recipe(NAME, RECIPES[then])
    with torch.no_grad(), contextlib.nullcontext() if region is None else autocast(recipe=region):
        y = torch.compile(model, backend=backend)(x)
    digest = hashlib.sha256(y.numpy().tobytes()).hexdigest()
    return digest, counters["aot_autograd"]["autograd_cache_hit"]

with torch.compiler.config.patch(cache_key_tag=str(uuid.uuid4())):  # nothing is in the cache
    expected = {name: run(Policy(default=recipe))[0] for name, recipe in RECIPES.items()}
for where, name, *then in json.load(sys.stdin):
    fp8graph.register_recipe(NAME, RECIPES.get(name))
    if where == "around":
        digest, hits = run(Policy(default=None), region=NAME)
    elif where == "inside":
        digest, hits = run(Policy(default=None), NAME)
    elif where == "policy":
        digest, hits = run(Policy(default=NAME), then=then[0] if then else None)
    elif where == "object":
        digest, hits = run(Policy(default=RECIPES[name]))
    elif where == "no layer":
        digest, hits = run(Policy([Rule("nothing.*", "rowwise", optional=True)], default=NAME))
    else:  # no code is run: there is no such device
        torch._inductor.async_compile.AsyncCompile.cpp_pybinding = lambda *args: lambda *xs: None
        torch._inductor.config.compile_threads = 1
        _, hits = run(Policy(default=NAME, min_speedup=0), target=where)
        digest = expected[name]
    print(json.dumps(["".join(name for name in RECIPES if expected[name] == digest), hits]))
"""


def in_a_process(cache: Path, seed: int, steps: Sequence[Sequence[str]]) -> list[tuple[str, int]]:
    """Return the recipes that each step may have run with, and whether its code was in the cache."""
    environment = os.environ | {
        "PYTHONHASHSEED": str(seed),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests" / "support"])),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROCESS],
        input=json.dumps(steps),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()[-len(steps) :]]


@pytest.mark.slow
def test_processes_with_one_cache_have_the_recipes_of_their_own_names(tmp_path: Path) -> None:
    cold = {
        ("policy", "A", "B"): ("A", 0),
        ("around", "A"): ("A", 0),
        ("inside", "A"): ("A", 0),
        ("sm_100", "A"): ("A", 0),
    }
    warm = {
        ("policy", "A"): ("A", 1),
        ("policy", "B"): ("B", 0),
        ("object", "A"): ("A", 1),
        ("no layer", "A"): ("A", 1),
        ("around", "A"): ("A", 1),
        ("around", "B"): ("B", 0),
        ("inside", "A"): ("A", 1),
        ("inside", "B"): ("B", 0),
        ("sm_100", "A"): ("A", 1),
    }
    got = [
        dict(zip(steps, in_a_process(tmp_path, seed, [*steps]), strict=True)) for seed, steps in ((1, cold), (2, warm))
    ]
    assert got == [cold, warm]


# --- a policy for each step


def count_slots(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets an entry whenever a store makes the extra inputs of a call."""
    made: list[str] = []

    def noting(kind: Any) -> Any:
        original = kind.slot

        def slot(self: Any, *args: Any) -> Any:
            made.append(kind.name)
            return original(self, *args)

        return slot

    for kind in STORES:
        monkeypatch.setattr(kind, "slot", noting(kind))
    return made


SCHEDULE: Final = Policy([Rule("*", None, steps=(0, 2)), Rule("nothing", "rowwise", steps=(9, 12))], default="delayed")


@first_fast("name", [NAME, "delayed"])
def test_a_policy_that_is_set_again_prepares_no_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_slots(monkeypatch)
    policy = Policy([Rule("*", None, steps=(0, 2))], default=name)
    backend = eager_backend(policy.at_step(5), cache_weights=True)
    model = compile_linear(backend)

    def steps(policies: Sequence[Policy]) -> list[str]:
        del made[:]
        for policy in policies:
            backend.set_policy(policy)
            with torch.no_grad():
                model(X)
        return list(made)

    run(model)
    run(model)
    assert steps([policy.at_step(5)] * 2)
    assert steps([policy.at_step(5 + i) for i in range(20)]) == []


def test_a_schedule_whose_rules_match_no_layer_compiles_nothing_again() -> None:
    rules = [Rule("nothing", "rowwise", steps=(1, 3)), Rule("nothing.*", None, steps=(2, None), optional=True)]
    backend = Counting(Policy(rules, default="tensorwise"), cache_weights=False)
    model = compile_linear(backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run(model)
    before = backend.pass_seconds, len(backend.generated), dict(counters["aot_autograd"]), dict(counters["stats"])
    policies: set[int] = set()
    for _ in range(4):
        optimizer.step()
        assert meaning(model) == "A"
        policies.add(len(backend.policy.rules))
    assert policies == {1, 2}  # it has moved
    now = backend.pass_seconds, len(backend.generated), dict(counters["aot_autograd"]), dict(counters["stats"])
    assert now[:3] == before[:3]
    assert now[3]["unique_graphs"] == before[3]["unique_graphs"]


def test_one_layer_of_a_schedule_is_compiled_again_alone() -> None:
    model = Two("ab")
    backend = Counting(Policy([Rule("b.*", "rowwise", steps=(1, None))], default="tensorwise"), cache_weights=False)
    backend.bind(model)
    generated: list[int] = []
    for layer in (model.a, model.b):
        layer.compile(backend=backend)
    for _ in range(3):
        model(torch.randn(32, 32, requires_grad=True)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        generated.append(len(backend.generated))
    assert generated == [2, 4, 4]  # forward and backward of both, then those of b


# --- sequences of operations


_alone: Final[dict[Decisions, list[Tensor]]] = {}
SEQUENCES: Final[dict[str, list[Operation]]] = {
    "another shape": [
        SetPolicy(default="first"),
        Call("a", 16),
        Register("first", 1),
        Call("a", 16),
        Call("a", 32),
    ],
    "a region in a graph that another layer ran first": [
        SetPolicy(default="first"),
        Call("b", 32),
        Register(INNER, 1),
        Call("a", 32),
    ],
    "a later step of a schedule": [
        SetPolicy(default="first", rules=(RuleOf("*", "second", since=2),)),
        Optimize(),
        Call("a", 16),
        Register("second", 0),
        Optimize(),
        Call("a", 16),
    ],
    "regions in regions": [
        SetPolicy(default=None),
        Enter("second"),
        Register("second", 2),
        Call("whole", 16),
        Enter("second"),
        Call("whole", 16),
        Enter(POLICY),
        Call("a", 16),
        Leave(),
        Leave(),
        Call("whole", 16),
    ],
    "a policy that is set again at each step": [
        SetPolicy(default="first", rules=(RuleOf("b.up", "second", since=1),), at=0),
        Call("whole", 16),
        Register("second", 2),
        SetPolicy(default="first", rules=(RuleOf("b.up", "second", since=1),), at=1),
        Call("whole", 16),
        SetPolicy(default="first", rules=(RuleOf("b.up", "second", since=1),), at=0),
        Call("b", 16),
    ],
}


@first_fast("case", SEQUENCES)
def test_calls_run_as_they_do_alone(case: str) -> None:
    assert_decided(SEQUENCES[case], _alone)


@first_slow("part", range(12))
def test_calls_of_random_sequences_run_as_they_do_alone(part: int) -> None:
    @seed(part)
    @settings(
        max_examples=12,
        deadline=None,
        database=None,
        derandomize=True,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
        phases=(Phase.generate, Phase.shrink),
    )
    @given(operations=programs())
    def run_all(operations: list[Operation]) -> None:
        assert_decided(operations, _alone)

    run_all()


class InBody(nn.Module):
    """A checkpointed function with a linear in a region, and a product without any parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.core = nn.Linear(32, 32, bias=False), Core()

    def forward(self, x: Tensor) -> Tensor:
        def body(y: Tensor) -> Tensor:
            with autocast(recipe="rowwise"):
                z = self.up(y).relu()
            return self.core(z)

        return checkpoint(body, self.up(x), use_reentrant=False)


class Core(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.t()


def test_bodies_of_higher_order_ops_are_seen() -> None:
    """Their regions have recipes, and the names of their sites are in the key of torch's cache."""
    backend = eager_backend(Policy([Rule("core", "tensorwise", op="matmul")], default="tensorwise"))
    torch.compile(InBody(), backend=backend)(torch.randn(32, 32)).sum().backward()
    recipes = {(gemm.fqn, gemm.index): gemm.recipe for gemm in backend.report.gemms if gemm.gemm == "fprop"}
    assert recipes == {("up", 0): "tensorwise", ("up", 1): "rowwise", ("core", 0): "tensorwise"}
    (graph,) = backend.programs
    assert {fqn for fqn, _ in recipes} <= {*graph._graph.possible_names(())}


def test_a_policy_that_is_used_again_and_again_is_kept() -> None:
    """Calls that are bound already count as uses."""
    policies = [Policy([Rule("0", recipe)]) for recipe in ("rowwise", "tensorwise", "blockwise", "mxfp8", None)]
    backend, model = eager_backend(None), nn.Sequential(nn.Linear(32, 32))
    run, x = torch.compile(model, backend=backend), torch.randn(32, 32)
    for policy in policies[1:]:
        for each in (policies[0], policy):
            backend.set_policy(each)
            run(x)
    before = backend.pass_seconds
    backend.set_policy(policies[0])
    run(x)
    assert backend.pass_seconds == before
    (graph,) = backend.programs
    assert len(list(graph.calls())) == 1  # of the policy that is in force


def test_a_policy_that_comes_back_after_many_others_has_its_rows_once() -> None:
    backend, model = eager_backend(Policy()), nn.Sequential(nn.Linear(32, 32))
    run, x = torch.compile(model, backend=backend), torch.randn(32, 32)
    run(x)
    rows = len(backend.report.gemms)
    for number in range(40):
        backend.set_policy(Policy([Rule(f"no{number}", None)]))
    backend.set_policy(Policy())
    run(x)
    assert len(backend.report.gemms) == rows


def test_a_guards_rules_stay_when_a_name_is_registered_again() -> None:
    register_recipe(NAME, A)
    backend = Backend(Policy([Rule("head", NAME)], default="tensorwise"), guard={"apply": True})
    backend.store(Guarded).apply([(Rule("a", "rowwise"), "guard: a is rowwise")])
    for _ in range(2):
        assert backend.report.guard == ["guard: a is rowwise"]
        assert "fp8graph.guard" in backend.state_dict()
        register_recipe(NAME, B)


def test_a_pickled_backend_takes_the_recipes_of_its_names_along() -> None:
    """In the process that loads it the name may mean something else."""
    register_recipe(NAME, A)
    content = pickle.dumps(Backend(Policy([Rule("up", NAME)], default="rowwise")))
    register_recipe(NAME, B)
    policy = pickle.loads(content).policy
    assert (policy.rules[0].recipe, policy.default) == (A, "rowwise")
