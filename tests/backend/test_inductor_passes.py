"""inductor_passes: what Inductor calls, what names it in torch's caches, and how it fails."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import fp8graph
from fp8graph.backend import inductor_passes
from fp8graph.backend.inductor_passes import JointPass, LowerPass, Stopwatch, hash_of, source_hash
from fp8graph.compat.inductor import CustomGraphPass
from fp8graph.passes import Pass
from fp8graph.recipes.policy import Policy
from helpers import ALL, MLP, eager_backend, facts_of, in_one_test

ROOT = Path(__file__).parents[2]


class Users(CustomGraphPass):
    """A pass of the user's."""

    def __init__(self, name: str | None) -> None:
        self.name = name

    def __call__(self, graph: fx.Graph) -> None:
        graph.placeholder("seen")

    def uuid(self) -> Any:
        return self.name


def joint(identity: str | None, first: Any = None) -> JointPass:
    return JointPass(facts_of(Policy()), identity, first=first)


def test_code_is_named_by_all_that_decides_it() -> None:
    names = [
        joint("a").uuid(),
        joint("b").uuid(),
        joint("a", Users("x")).uuid(),
        joint("a", [Users("x"), Users("y")]).uuid(),
        LowerPass("a").uuid(),
        LowerPass("a", passes=()).uuid(),
    ]
    assert len(set(names)) == len(names)
    assert joint("a", Users("x")).uuid() == joint("a", [Users("x")]).uuid()


@in_one_test(
    ("identity", "first"), [(None, None), ("a", lambda graph: None), ("a", Users(None)), ("a", [Users("x"), print])]
)
def test_code_of_what_has_no_name_is_not_kept(identity: Any, first: Any) -> None:
    assert joint(identity, first).uuid() is None


def test_the_users_pass_runs_before_the_lowering() -> None:
    graph, watch = fx.Graph(), Stopwatch()
    LowerPass("a", Users("x"), watch, passes=())(graph)
    assert [node.name for node in graph.nodes] == ["seen"]
    assert 0 < watch.seconds < 1


def test_a_failing_lowering_is_named() -> None:
    def broken(_: fx.Graph) -> None:
        raise KeyError("lost")

    with pytest.raises(fp8graph.Fp8GraphError, match="internal error in pass 'broken': KeyError: 'lost'"):
        LowerPass("a", passes=(broken,))(fx.Graph())


def test_the_hash_is_of_this_package() -> None:
    assert source_hash() == hash_of(ROOT / "fp8graph")


def test_a_failing_pass_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some exceptions of fake tensors would otherwise be a silent graph break."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    def broken(_graph: Any, _compilation: Any) -> None:
        raise DataDependentOutputException(torch.ops.aten.item.default)

    monkeypatch.setattr(inductor_passes, "JOINT_PIPELINE", (*inductor_passes.JOINT_PIPELINE, Pass(broken)))
    with pytest.raises(fp8graph.Fp8GraphError, match="internal error in pass 'broken'.*Please report this"):
        torch.compile(MLP(), backend=eager_backend(ALL))(torch.randn(2, 32))


def test_users_inductor_passes_run_first() -> None:
    seen: list[int] = []
    backend = fp8graph.Backend(
        ALL,
        compiler="eager",
        inductor_options={"joint_custom_pre_pass": lambda graph: seen.append(len(graph.nodes))},
    )
    torch.compile(MLP(), backend=backend)(torch.randn(4, 32))
    assert len(seen) == 1


def test_every_folder_of_the_product_is_in_the_key_of_compiled_code(tmp_path: Path) -> None:
    """Code that was compiled by another version of any file is stale."""
    package = tmp_path / "fp8graph"
    shutil.copytree(ROOT / "fp8graph", package, ignore=shutil.ignore_patterns("__pycache__"))  # links become folders
    files = {file.parent: file for file in sorted(package.rglob("*.py"))}  # one of each folder
    assert {"passes", "models", "ir", "numerics/scalings"} <= {str(folder.relative_to(package)) for folder in files}
    hashes = {hash_of(package)}
    for file in files.values():
        file.write_bytes(file.read_bytes() + b"\n")
        hashes.add(hash_of(package))
    (package / "ir" / "nodes.py").rename(package / "ir" / "renamed.py")
    assert len({*hashes, hash_of(package)}) == len(files) + 2


def test_a_stage_has_the_text_of_graphs_that_did_not_need_it() -> None:
    """Of a higher-order op: its body is a graph of its own, which other passes change."""
    joint = JointPass(facts_of(Policy()), None)
    joint._texts = [{"": "a", "match": "b", "share": "c"}, {"": "d", "match": "e", "fold": "f"}]
    assert joint.before == "a\n\nd"
    assert joint.stages == {"match": "b\n\ne", "fold": "b\n\nf", "share": "c\n\nf"}
