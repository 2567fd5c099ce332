"""quantized_state and export of models that are sharded over ranks: what one process writes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import fp8graph
import handed_over
from ranks import run_each, run_ranks

pytestmark = pytest.mark.skipif(not handed_over.dist.is_gloo_available(), reason="ranks are joined by gloo")

UE8M0 = fp8graph.Float8BlockScaling(scale_format="ue8m0")
# by ranks, mark and name: how the model is sharded, the recipe, settings
CASES: dict[tuple[int, str], dict[str, tuple[str, Any, dict[str, Any]]]] = {
    (2, "slow"): {
        "FSDP2, FP32 shards": ("fsdp", "delayed", {"bf16": True, "exports": True}),
        "tiles that shards cut, checkpointed": ("fsdp", "blockwise", {"checkpointed": True}),
        "rows that tensor parallelism cuts": ("tp", "rowwise", {}),
        "generated code": ("fsdp", "blockwise", {"compiler": "inductor", "layers": 1, "steps": 1}),
    },
    (4, "slow"): {
        "both": ("fsdp and tp", "tensorwise", {"sizes": (128, 192)}),
    },
    (4, "release"): {
        "tiles that all shards cut": ("fsdp", UE8M0, {}),
        "shards of unequal size": ("fsdp", "rowwise", {"sizes": (48, 90)}),
    },
}
CALLS: dict[tuple[int, str], dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    launch: {name: (handed_over.run, case) for name, case in cases.items()} for launch, cases in CASES.items()
}
CALLS[2, "slow"]["refusals"] = (handed_over.refusals, ())
CALLS[2, "slow"]["experts"] = (handed_over.of_experts, ("blockwise",))
EACH = [
    pytest.param(ranks, name, marks=getattr(pytest.mark, mark))
    for (ranks, mark), cases in CASES.items()
    for name in cases
]
Found = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results of each rank in one case; all cases with as many ranks and the same mark run in one launch."""
    known: dict[str, list[dict[str, Any]]] = {}

    def of(name: str) -> list[dict[str, Any]]:
        if name not in known:
            ((ranks, calls),) = ((ranks, calls) for (ranks, _), calls in CALLS.items() if name in calls)
            made = run_ranks(
                run_each, ranks, tmp_path_factory.mktemp("ranks"), calls, seconds=1100, collective_seconds=300
            )
            known.update({name: [rank[name] for rank in made] for name in calls})
        return known[name]

    return of


@pytest.mark.parametrize(("ranks", "name"), EACH)
def test_each_rank_gets_the_bytes_of_one_process(ranks: int, name: str, found: Found) -> None:
    for rank in found(name):
        assert rank["differences"] == []
        assert rank["linears"] == 5 * rank["layers"]


@pytest.mark.parametrize(("ranks", "name"), EACH)
def test_one_byte_per_number_is_sent(ranks: int, name: str, found: Found) -> None:
    """Beside them all other tensors, as they are, a few lines of text, and amaxes of what several ranks share."""
    for rank in found(name):
        share = 3 / 4 if name == "both" else 1 / ranks  # along one dim of the mesh, and then along the other
        others = rank["others"] * share + 8_000
        print(f"{ranks} ranks, {name}: {rank['sent']} bytes sent, for {rank['numbers']} numbers and {others} bytes")
        assert rank["sent"]["all_gather"] <= rank["numbers"] * share + others
        assert rank["sent"]["all_reduce"] <= rank["numbers"] / 100


@pytest.mark.parametrize(("ranks", "name"), EACH)
def test_memory_is_that_of_one_layer(ranks: int, name: str, found: Found) -> None:
    for rank in found(name):
        print(f"{ranks} ranks, {name}: at most {rank['memory']} bytes more, {rank['largest']} numbers in a weight")
        assert rank["memory"] < 2 * rank["numbers"] / rank["layers"] + 32_000  # of one layer, in bf16


@pytest.mark.slow
def test_the_first_rank_writes_the_folder_and_all_learn_whether_it_could(found: Found) -> None:
    for number, rank in enumerate(found("FSDP2, FP32 shards")):
        assert rank["differences of the folder"] == []
        assert rank["files"] == ["out"]
        assert rank["again"].startswith("rank 0 failed, with CheckpointError: ") == (number > 0)
        assert "exists" in rank["again"]


@pytest.mark.parametrize(("ranks", "name"), EACH)
def test_shards_of_all_ranks_are_the_gathered_tensors(ranks: int, name: str, found: Found) -> None:
    for rank in found(name):
        assert rank["shards"]["wrong"] == []
        assert rank["shards"]["missing"] == []


@pytest.mark.parametrize(("ranks", "name"), EACH)
def test_shards_send_no_weights(ranks: int, name: str, found: Found) -> None:
    """A few lines of text are gathered, and amaxes reduced; a rank has its share of the bytes and what all have."""
    for rank in found(name):
        shards, whole = rank["shards"], rank["numbers"] + rank["others"]
        print(f"{ranks} ranks, {name}: {shards['sent']} bytes sent for {shards['bytes']} of {whole} bytes")
        assert shards["sent"]["all_gather"] <= 8_000
        assert shards["sent"]["all_reduce"] <= rank["numbers"] / 100
        assert shards["bytes"] < 0.7 * whole


@pytest.mark.slow
def test_experts_are_handed_over_by_the_rank_that_has_them(found: Found) -> None:
    for rank in found("experts"):
        assert rank["differences"] == []
        assert sum("experts" in name for name in rank["tensors"]) == 2 * 3 * 4
        assert (rank["shards"]["wrong"], rank["shards"]["missing"]) == ([], [])
        assert rank["shards"]["sent"]["all_gather"] <= 8_000


@pytest.mark.slow
@pytest.mark.parametrize("call", ["quantized_state", "quantized_shards"])
def test_an_error_before_the_first_tensor_is_raised_on_all_ranks(call: str, found: Found) -> None:
    """None waits for a tensor of another: each rank is asked again after each error, and all hand over."""
    first, second = (
        {k.removesuffix(f", {call}"): v for k, v in rank.items() if call in k} for rank in found("refusals")
    )
    assert first["format"] == second["format"]
    assert "-format='compressed-tensors'\n+format='modelopt'" in first["format"]
    assert "-no calibration\n+calibration" in first["calibration on one rank"]
    assert "-no more batches of calibration=\n+a batch of" in first["number of batches"]
    for case, text in {
        "calibration": "this is one batch",
        "batches": "batch must be a dict, a tuple or a tensor",
        "state_dict": "the disk of this rank is full",
    }.items():
        assert text in second[case]
        assert first[case] == f"rank 1 failed, with ConfigError: {second[case]}"
    assert first["scales"] == second["scales"]
    assert first["scales"].startswith("the ranks have different scales of layers.0.q.weight, which is sharded")
    assert first["pairs"] == second["pairs"]
    if call == "quantized_shards":
        reason = "shards cut tiles that share a scale, or bytes of two numbers (nvfp4)"
        assert f"layers.0.up.weight cannot be handed over in shards: {reason}" in first["pairs"]
