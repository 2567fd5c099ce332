"""The keys of compiled code: whatever changes our graphs changes torch's key, and the entry that it finds is whole."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd import autograd_cache

import fp8graph
from cache_state import NOT_VARIED, STATES, must_differ, read_by_torch
from fp8graph import Backend, Policy, Rule
from fp8graph.backend import compiling
from fp8graph.backend.compiling import _trace
from fp8graph.backend.inductor_passes import code_identity, run_eagerly
from fp8graph.compat import attention, torch_build
from fp8graph.ir.settings import Settings
from fp8graph.passes import JOINT_PIPELINE, LOWERING, WEIGHT_LOWERING
from helpers import ALL, MLP, eager_backend, first_fast
from test_layers import MODULES, imported, room


def test_the_list_holds_all_that_torchs_key_reads() -> None:
    """If this fails, torch reads something else: add it to ``STATES``, with a way to vary it."""
    known = {name for names, _ in STATES.values() for name in names.split()}
    known |= {name for names in NOT_VARIED.values() for name in names.split()}
    assert read_by_torch() - known == set()


@dataclass(frozen=True, eq=False)
class Run:
    key: str  # torch's, of the graph
    view: dict[str, Any]
    results: list[Tensor]

    def is_like(self, other: Run) -> bool:
        return self.view == other.view and all(map(torch.equal, self.results, other.results))


def run(
    state: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    policy: Policy = ALL,
    *,
    dynamic: bool = False,
    change: Callable[[torch.nn.Module], Any] = lambda _model: None,
    **options: Any,
) -> Run:
    """Compile a small MLP without generating code: torch computes its key, and nothing is found or kept under it."""
    compute, keys = autograd_cache.autograd_cache_key, list[str]()

    def noted(*args: Any, **kwargs: Any) -> Any:
        keys.append(compute(*args, **kwargs)[0])
        raise autograd_cache.BypassAOTAutogradCache("a test")

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(16, 32)
    change(model)
    backend = Backend(policy, **options)
    with pytest.MonkeyPatch.context() as patch, state():
        patch.setattr(autograd_cache, "autograd_cache_key", noted)
        patch.setattr(compiling, "compile_fx_inner", run_eagerly)
        y = torch.compile(model, backend=backend, dynamic=dynamic)(x)
        if y.requires_grad:
            y.float().square().sum().backward()
    (key,) = keys
    (view,) = backend.report.graphs
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return Run(key, view.to_dict() | {"policy": ""}, [y.detach(), *gradients])


@functools.cache
def first_run() -> Run:
    return run()


@first_fast("name", STATES)
def test_state_is_in_the_key_or_changes_nothing(name: str) -> None:
    names, state = STATES[name]
    first, varied, again = first_run(), run(state), run()
    assert again.key == first.key
    assert again.is_like(first)
    assert varied.key != first.key or not must_differ(names)
    assert varied.key != first.key or varied.is_like(first)


# A value other than the default for each option of ours that may decide about code.
OPTIONS: dict[str, dict[str, Any]] = {
    "strict": {"strict": True},
    "inductor_options": {"inductor_options": {"epilogue_fusion": False}},
    "target": {"target": "sm_90"},
    "cache_weights": {"cache_weights": False},
    "save": {"save": "memory"},
    "save_activations_in_fp8": {"save": "memory", "save_activations_in_fp8": True},
    "fuse_linears": {"fuse_linears": False},
    "accumulate_wgrad": {"accumulate_wgrad": True},
    "small_tiles": {"small_tiles": True},
    "batch_invariant": {"batch_invariant": True, "recipe": "rowwise"},
}
CHOICES: dict[str, dict[str, Any]] = {
    "rules": {"policy": Policy([Rule("up", None)], default="tensorwise", min_speedup=0)},
    "default": {"policy": Policy(default="rowwise", min_speedup=0)},
    "min_speedup": {"policy": Policy(default="tensorwise", min_speedup=1.5)},
    "extends": {"policy": Policy(extends="default", min_speedup=0)},
    "keep_heads": {"policy": Policy(default="tensorwise", min_speedup=0, keep_heads=True)},
}
OTHERS: dict[str, dict[str, Any]] = {
    "dynamic shapes": {"dynamic": True},
    "a region": {"state": lambda: fp8graph.autocast(recipe="rowwise")},
    "no region": {"state": lambda: fp8graph.autocast(enabled=False)},
}


# What our passes read of the CPU and the process, under the names by which they read it: its owner, another value.
MACHINE: dict[str, tuple[Any, Callable[[], Any]]] = {
    "torch_build.multiplies_bf16_on_cpu": (torch_build, lambda: not torch_build.multiplies_bf16_on_cpu()),
    "attention.active_implementation": (attention, lambda: "another"),
}
DECIDE = ("analysis", "hardware", "ir", "models", "numerics", "passes", "recipes")  # the rooms of what decides
# Not varied: a table of torch's, a check of names, and what an operator, or a call that adds to gradients, reads when
# the code runs.
NOT_DECIDING = {
    "select_decomp_table",
    "inductor.option_names",
    "random_bits.rank",
    "checkpointing.graph_task",
    "autograd.running_node",
    "autograd.uses_of_a_grad",
    "torch.is_grad_enabled",
    "inductor.rounds_between",  # an option of Inductor's
    "inductor.has_triton",  # without it, an error
}
STATE = re.compile(
    r"torch\.(is_(?!tensor)|are_|get_|backends\.|cuda\.|utils\.deterministic)|os\.(environ|getenv)|sys\.|platform\."
)


def keeps_tensors(node: ast.ClassDef) -> bool:
    """Whether it is a store or a slot."""
    return bool({"Store", "Slot"} & {ast.unparse(base) for base in node.bases})


def state_read_by(file: Path) -> Iterator[str]:
    """The functions without arguments that a file calls of ``fp8graph.compat``, and the state that it reads itself."""
    tree, compat = ast.parse(file.read_text(encoding="utf-8")), set[str]()
    tree.body = [node for node in tree.body if not (isinstance(node, ast.ClassDef) and keeps_tensors(node))]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fp8graph.compat"):
            compat |= {alias.name for alias in node.names}
        if isinstance(node, ast.Call) and not (node.args or node.keywords):
            name = ast.unparse(node.func)
            if (owner := name.split(".")[0]) in compat and not owner.isupper():  # but for our own tables
                yield f"{file.stem}.{name}" if name == "rank" else name
        if isinstance(node, ast.Attribute) and STATE.match(name := ast.unparse(node)):
            yield name


def test_all_that_our_passes_read_of_the_machine_is_varied() -> None:
    """If this fails, a decision depends on something else: add it to ``code_identity``, and here.

    Stores, which stand beside the passes, run when graphs are called: no pass imports theirs.
    """
    passes = [entry.run for entry in JOINT_PIPELINE] + [*LOWERING, *WEIGHT_LOWERING]
    found, pending = set[str](), {run.__module__.removeprefix("fp8graph.") for run in passes}
    while pending:
        found |= pending
        pending = {target for name in pending for target, _ in imported(name) if room(target) in DECIDE} - found
    read = {
        name
        for module in found
        for name in state_read_by(MODULES[module])
        # of a device, whose name and properties torch's key reads
        if not name.startswith("torch.cuda.") and name != "torch.get_device_module"
    }
    assert read == {*MACHINE} | NOT_DECIDING


@pytest.mark.parametrize("name", MACHINE)
def test_the_machine_is_in_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, other = MACHINE[name]
    value, first, weights = other(), first_run(), code_identity()
    monkeypatch.setattr(owner, name.split(".")[1], lambda: value)
    assert run().key != first.key
    assert weights != code_identity()  # in the key of all other code of ours


def test_every_option_of_ours_is_varied() -> None:
    assert {*OPTIONS} == {*Settings.names()} - {"compiler"}  # its graphs are not cached
    assert {*CHOICES} == {field.name for field in dataclasses.fields(Policy)}


@first_fast("name", [*OPTIONS, *CHOICES, *OTHERS])
def test_our_options_are_in_the_key(name: str) -> None:
    assert run(**(OPTIONS | CHOICES | OTHERS)[name]).key != first_run().key


def test_facts_about_parameters_are_in_the_key() -> None:
    """A gradient that has a hook is autograd's: code that adds it to a buffer would leave the hook without it."""

    def with_hook(model: torch.nn.Module) -> None:
        model.get_parameter("down.weight").register_hook(lambda gradient: gradient)

    plain, hooked = run(accumulate_wgrad=True), run(accumulate_wgrad=True, change=with_hook)
    assert hooked.view != plain.view
    assert hooked.key != plain.key


@pytest.mark.slow
def test_findings_that_were_not_kept_are_found_again() -> None:
    """The graph may have been compiled with more spare inputs than it takes."""
    model, backend = torch.nn.Sequential(MLP(), torch.nn.GELU(), torch.nn.Linear(32, 32)), eager_backend(ALL)
    torch.compile(model, backend=backend)(torch.randn(16, 32))
    ((graph,), (view,)) = [*backend.programs], backend.report.graphs
    (((situation, bound), variant),) = graph._variants.items()
    decisions, spares = graph._decisions(situation, bound), variant.spares + 2
    with graph._graph.tracing():
        joint = _trace(graph._graph, decisions, bound.names, spares, backend.stopwatch)
    again = dataclasses.replace(variant, findings=joint.findings, view=joint.view(view.name))
    assert again.under(decisions, graph._graph.parameters(bound.names)).view.gemms == view.gemms
    assert joint.findings.places == variant.findings.places
    assert joint.inputs == view.inputs
    assert len(view.module.graph.find_nodes(op="placeholder")) == len(view.inputs)


@pytest.mark.slow
@pytest.mark.usefixtures("empty_cache")
def test_autocast_in_another_dtype_leaves_the_entry_as_it_was() -> None:
    """The copy of the weight was made by the other graph once, and 541 of these numbers were others."""

    def under(dtype: torch.dtype) -> tuple[Tensor, tuple[str, ...], int]:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model, x = torch.nn.Linear(32, 64, bias=False), torch.randn(32, 32)
        backend = Backend(Policy(default="tensorwise"))
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
            y = torch.compile(model, backend=backend)(x)
        (gemm,) = backend.report.gemms
        return y, gemm.dtypes, counters["aot_autograd"]["autograd_cache_hit"]

    (first, dtypes, _), (other, *_), (again, same, hits) = map(under, (torch.bfloat16, torch.float16, torch.bfloat16))
    assert (other.dtype, hits) == (torch.float16, 1)
    assert dtypes == same == ("e4m3", "e4m3", "bf16")
    assert torch.equal(first, again)
