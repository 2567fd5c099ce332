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
# by ranks and name: how the model is sharded, the recipe, settings
CASES: dict[int, dict[str, tuple[str, Any, dict[str, Any]]]] = {
    2: {
        "FSDP2, FP32 shards": ("fsdp", "delayed", {"bf16": True, "exports": True}),
        "tiles that shards cut, checkpointed": ("fsdp", "blockwise", {"checkpointed": True}),
        "rows that tensor parallelism cuts": ("tp", "rowwise", {}),
    },
    4: {
        "both": ("fsdp and tp", "tensorwise", {}),
        "tiles that all shards cut": ("fsdp", UE8M0, {}),
        "shards of unequal size": ("fsdp", "rowwise", {"sizes": (48, 90)}),
    },
}
EACH = [
    pytest.param(ranks, name, marks=pytest.mark.slow if ranks == 2 else pytest.mark.release)
    for ranks, cases in CASES.items()
    for name in cases
]
Found = Callable[[int, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results of each rank in one case; all cases with as many ranks run in one launch."""
    known: dict[int, list[dict[str, Any]]] = {}

    def of(ranks: int, name: str) -> list[dict[str, Any]]:
        if ranks not in known:
            calls = {name: (handed_over.run, case) for name, case in CASES[ranks].items()}
            folder = tmp_path_factory.mktemp(f"of{ranks}")
            known[ranks] = run_ranks(run_each, ranks, folder, calls, seconds=1100, collective_seconds=300)
        return [rank[name] for rank in known[ranks]]

    return of


@pytest.mark.parametrize(("ranks", "name"), EACH)
def test_each_rank_gets_the_bytes_of_one_process(ranks: int, name: str, found: Found) -> None:
    for rank in found(ranks, name):
        assert rank["differences"] == []
        assert rank["linears"] == 10


@pytest.mark.parametrize(("ranks", "name"), EACH)
def test_one_byte_per_number_is_sent(ranks: int, name: str, found: Found) -> None:
    """Beside them all other tensors, as they are, a few lines of text, and amaxes of what several ranks share."""
    for rank in found(ranks, name):
        share = 3 / 4 if name == "both" else 1 / ranks  # along one dim of the mesh, and then along the other
        others = rank["others"] * share + 8_000
        print(f"{ranks} ranks, {name}: {rank['sent']} bytes sent, for {rank['numbers']} numbers and {others} bytes")
        assert rank["sent"]["all_gather"] <= rank["numbers"] * share + others
        assert rank["sent"]["all_reduce"] <= rank["numbers"] / 100


@pytest.mark.parametrize(("ranks", "name"), EACH)
def test_memory_is_that_of_one_layer(ranks: int, name: str, found: Found) -> None:
    for rank in found(ranks, name):
        print(f"{ranks} ranks, {name}: at most {rank['memory']} bytes more, {rank['largest']} numbers in a weight")
        assert rank["memory"] < 2 * rank["numbers"] / 2 + 32_000  # of one of two layers, in bf16


@pytest.mark.slow
def test_the_first_rank_writes_the_folder_and_all_learn_whether_it_could(found: Found) -> None:
    for number, rank in enumerate(found(2, "FSDP2, FP32 shards")):
        assert rank["differences of the folder"] == []
        assert rank["files"] == ["out"]
        assert rank["again"].startswith("rank 0 failed, with CheckpointError: ") == (number > 0)
        assert "exists" in rank["again"]
