"""FSDP2 gathers weights in FP8: the numbers of gathering them in high precision, and half the bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8graph import Float8CurrentScaling, Float8RowwiseScaling, MXFP8BlockScaling
from helpers import first_slow
from ranks import run_each, run_ranks

pytestmark = [
    pytest.mark.timeout(1200),  # all that runs on so many ranks, on a busy machine
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
]
LARGE = {"sizes": (512, 512)}  # tiles of 128 rows for four ranks
CASES: dict[int, dict[str, tuple[Any, dict[str, Any]]]] = {
    2: {
        "dequantized": (Float8CurrentScaling(backward_override="dequantized"), {}),
        "tensorwise": ("tensorwise", {}),
        "blockwise": ("blockwise", {}),
        "delayed": ("delayed", {}),
        "delayed, not resharded": ("delayed", {"reshard": False}),
        "delayed, checkpointed": ("delayed", {"checkpointed": True}),
        "delayed, loaded": ("delayed", {"event": "load"}),
        "delayed, assigned": ("delayed", {"event": "assign"}),
        "delayed, moved": ("delayed", {"event": "move"}),
        "delayed, accumulated": ("delayed", {"accumulated": True}),
        "delayed, kept": ("delayed", {"accumulated": True, "keeps": True}),
        "unseen": ("tensorwise", {"event": "unseen"}),
        "delayed, unseen": ("delayed", {"event": "unseen"}),
        "delayed, compiled step": ("delayed", {"compiled_step": True}),
        "delayed, generated": ("delayed", {"compiler": "inductor"}),
        "not resharded": ("blockwise", {"reshard": False}),
        "gathered together": ("tensorwise", {"together": True}),
        "in FP32": ("tensorwise", {"param_dtype": None}),
        "checkpointed": ("tensorwise", {"checkpointed": True}),
        "accumulated": ("tensorwise", {"accumulated": True}),
        "loaded": ("tensorwise", {"event": "load"}),
        "assigned": ("tensorwise", {"event": "assign"}),
        "another policy": ("tensorwise", {"event": "policy"}),
        "another backend": ("tensorwise", {"event": "another backend"}),
        "generated": ("tensorwise", {"compiler": "inductor"}),
        "regions": ("tensorwise", {"regions": True}),
        "offloaded": ("tensorwise", {"offload": True}),
        "rowwise": ("rowwise", {}),
        "rowwise, dequantized": (Float8RowwiseScaling(backward_override="dequantized"), {}),
        "rowwise, not resharded": ("rowwise", {"reshard": False}),
        "rowwise, kept later": ("rowwise", {"event": "keep"}),
        "rowwise, accumulated": ("rowwise", {"accumulated": True}),
        "rowwise, checkpointed": ("rowwise", {"checkpointed": True}),
        "rowwise, generated": ("rowwise", {"compiler": "inductor"}),
        "mxfp8": ("mxfp8", {}),
        "mxfp8, 32x32 weights": (MXFP8BlockScaling(enable_2d_quantization=True), {}),
        "mxfp8, checkpointed": ("mxfp8", {"checkpointed": True}),
        "mxfp8, generated": ("mxfp8", {"compiler": "inductor"}),
    },
    4: {
        "tensorwise": ("tensorwise", LARGE),
        "blockwise": ("blockwise", LARGE),
        "delayed": ("delayed", LARGE),
        "delayed, replicas": ("delayed", {"mesh": (2, 2)}),
        "replicas": ("tensorwise", {"mesh": (2, 2)}),
        "tiles cut": ("blockwise", {}),
        "to fewer ranks": ("tensorwise", {"reshard": 2}),
    },
}
# what a release shows of more settings, and of more ranks
MORE = {
    *((2, f"delayed, {how}") for how in ("not resharded", "loaded", "assigned", "unseen", "generated")),
    *((2, how) for how in ("unseen", "gathered together", "checkpointed", "accumulated", "assigned", "generated")),
    *((2, how) for how in ("not resharded", "in FP32", "loaded", "regions", "another backend")),
    *((2, f"rowwise, {how}") for how in ("dequantized", "accumulated", "generated")),
    *((2, f"mxfp8, {how}") for how in ("checkpointed", "generated")),
    *((2, how) for how in ("delayed, checkpointed", "delayed, compiled step")),
    *((4, name) for name in CASES[4]),
}
# what stays in high precision, with the reason
LEFT = {
    "offloaded": "its shards are on the CPU (CPUOffloadPolicy)",
    "rowwise, not resharded": "one gather serves both directions, and its two layouts in FP8 are as many bytes",
    "to fewer ranks": "it is resharded to fewer ranks after forward (reshard_after_forward=<int>), which takes no FP8",
}


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], list[Any]]:
    """Of a case, by rank: what it found with gathers in high precision, and with gathers in FP8."""
    import sent

    @functools.cache
    def run(ranks: int, more: bool) -> list[dict[str, Any]]:
        """The cases of a release, or all others, in one start of the ranks."""
        cases = CASES[ranks].items()
        calls = {name: (sent.both, case) for name, case in cases if ((ranks, name) in MORE) == more}
        return run_ranks(run_each, ranks, tmp_path_factory.mktemp(f"of{ranks}"), calls, seconds=1100)

    def found(ranks: int, name: str) -> list[Any]:
        return [rank[name] for rank in run(ranks, (ranks, name) in MORE)]

    return found


def case(ranks: int, name: str) -> Any:
    return pytest.param(ranks, name, marks=pytest.mark.release if (ranks, name) in MORE else pytest.mark.slow)


def parameters(ranks: int, name: str) -> tuple[int, int]:
    """The counts of numbers that a rank sends for one gather of all layers: of matrices, of the rest."""
    _, settings = CASES[ranks][name]
    hidden, inner = settings.get("sizes", (256, 512))
    ranks = settings.get("mesh", (ranks,))[-1]
    return 2 * 3 * hidden * inner // ranks, 2 * 3 * hidden // ranks


@pytest.mark.parametrize(
    ("ranks", "name"),
    [case(ranks, name) for ranks, cases in CASES.items() for name in cases if name != "delayed, kept"],
)
def test_the_numbers_of_gathers_in_high_precision(ranks: int, name: str, of_ranks: Any) -> None:
    for expected, found in of_ranks(ranks, name):
        assert found["losses"] == expected["losses"]
        # a compiled step leaves its amaxes to the next forward for training; before gathers in FP8, they are recorded
        committed = not CASES[ranks][name][1].get("compiled_step")
        assert found["evaluated"] == expected["evaluated"] or not committed
        for kind in ("gradients", "weights", *(["state"] if committed else [])):
            assert found[kind].keys() == expected[kind].keys()
            assert all(torch.equal(found[kind][key], tensor) for key, tensor in expected[kind].items())
        assert found["dtypes"] == {"torch.float32"}  # of the state dict


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        *(case(2, name) for name in ("in FP32", "rowwise", "mxfp8", "mxfp8, 32x32 weights")),
        *(case(ranks, name) for ranks in (2, 4) for name in ("tensorwise", "blockwise", "delayed")),
    ],
)
def test_one_byte_for_each_number(ranks: int, name: str, of_ranks: Any) -> None:
    matrices, rest = parameters(ranks, name)
    width = 4 if name == "in FP32" else 2
    hidden, inner = CASES[ranks][name][1].get("sizes", (256, 512))
    scales = {
        "blockwise": 4 * matrices // 128**2,
        "mxfp8": matrices // 32,
        "mxfp8, 32x32 weights": matrices // 32**2,
        "rowwise": 4 * 2 * (2 * inner + hidden) // ranks,
    }.get(name, 0)
    if name.startswith("mxfp8"):
        page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
        assert f"{1 + scales / matrices:.3f} bytes per number" in " ".join(page.split())
    for expected, found in of_ranks(ranks, name):
        whole, in_fp8 = (matrices + rest) * width, matrices + rest * width + scales
        # how often a step gathers all layers: FSDP2's own count, the same for both
        gathers = {sent / whole for sent in expected["bytes"][1:]}
        assert gathers == {2.5}
        assert {sent / in_fp8 for sent in found["bytes"][1:]} == gathers
        assert found["bytes"][0] == expected["bytes"][0]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.release)])
def test_rows_are_quantized_in_each_forward(ranks: int, of_ranks: Any) -> None:
    for _, found in of_ranks(ranks, "tensorwise"):
        assert found["quantized"] == 2 * 3 * (3 + 4)  # layers, matrices; forwards of training in FP8, of evaluation
        assert not found["reasons"]
        assert found["gemms"] == 2 * 3 * 3 + 2 * 3  # of training and of evaluation


@pytest.mark.release
def test_regions_are_the_layers(of_ranks: Any) -> None:
    """``fp8graph.compile(model, regions="auto")`` after ``fully_shard`` is the loop over layers."""
    for (_, by_hand), (_, at_once) in zip(of_ranks(2, "tensorwise"), of_ranks(2, "regions"), strict=True):
        for key in ("losses", "evaluated", "bytes", "gemms", "quantized", "reasons"):
            assert at_once[key] == by_hand[key], key


@pytest.mark.slow
def test_copies_that_are_kept_over_micro_batches_keep_the_scales_of_an_update(of_ranks: Any) -> None:
    """In high precision, a weight is quantized again for the second backward, with the scale after the first."""
    for expected, found in of_ranks(2, "delayed, kept"):
        assert found["quantized"] == 2 * 3 * 4
        assert found["losses"][:3] == expected["losses"][:3] != expected["losses"][3:]
        assert found["losses"] == pytest.approx(expected["losses"], rel=0.005)
    for _, found in of_ranks(2, "delayed, accumulated"):
        assert found["quantized"] == 2 * 3 * (3 * 2 + 4)


@pytest.mark.slow
def test_whole_weights_share_one_placeholder(of_ranks: Any) -> None:
    for _, found in of_ranks(2, "tensorwise"):
        assert found["nan"] == 256 * 512


@pytest.mark.parametrize(
    ("ranks", "name"), [case(2, "offloaded"), case(2, "rowwise, not resharded"), case(4, "to fewer ranks")]
)
def test_weights_sent_in_high_precision_have_a_reason(ranks: int, name: str, of_ranks: Any) -> None:
    for expected, found in of_ranks(ranks, name):
        assert found["bytes"] == expected["bytes"]
        assert len(found["reasons"]) in (2 * 2, 2 * 3)  # where gate and up are not emulated, they are multiplied as one
        for reason in found["reasons"].values():
            assert reason.startswith(f"FSDP2 gathers it for each use, in high precision: {LEFT[name]}")


@pytest.mark.slow
def test_a_backend_keeps_no_model_alive(of_ranks: Any) -> None:
    for _, found in of_ranks(2, "tensorwise"):
        assert found["freed"]


@pytest.mark.release
def test_another_backend_takes_over(of_ranks: Any) -> None:
    for expected, found in of_ranks(2, "another backend"):
        saved = [a - b for a, b in zip(expected["bytes"], found["bytes"], strict=True)]
        assert saved[1] > 0
        assert saved[3] > 0  # the third step gathered both: the last one the other backend's numbers


@pytest.mark.release
def test_shards_that_cut_tiles(of_ranks: Any) -> None:
    for expected, found in of_ranks(4, "tiles cut"):
        assert expected["bytes"][1] > found["bytes"][1]  # up and gate: 128 rows on each rank; down: 64
        assert "shards of 64 rows are not a multiple of the 128-row tile" in found["reasons"]["layers.1.down"]


@pytest.mark.slow
def test_another_policy_brings_back_what_it_reads(of_ranks: Any) -> None:
    matrices, _ = parameters(2, "another policy")
    for expected, found in of_ranks(2, "another policy"):
        saved = [a - b for a, b in zip(expected["bytes"], found["bytes"], strict=True)]
        assert saved[1] > saved[3] > 0  # down is sent in high precision, gate and up are not
        assert saved[0] == 0 < matrices


@first_slow("recipe", ["delayed", "tensorwise"])
def test_layers_share_code(recipe: str, tmp_path: Path) -> None:
    """Layers compiled one by one: forward and backward, before and after weights come in FP8."""
    import sent

    for counts, names in run_ranks(sent.generations, 2, tmp_path, recipe, 5):
        assert counts == [2, 4, 4]
        assert names == [f"layers.{i}.{name}" for i in range(5) for name in ("gate", "up", "down")]


@first_slow("recipe", ["delayed", "tensorwise"])
def test_memory_of_a_layer_while_it_runs(recipe: str, tmp_path: Path) -> None:
    """One byte for each number in forward; in backward, fprop's and dgrad's. Evaluation came first, and is as wide.

    What stands for whole parameters, as large as the largest, is counted in each layer: 2/3 of a byte here.
    """
    import sent

    calls = {in_fp8: (sent.peaks, (recipe, in_fp8)) for in_fp8 in (False, True)}
    for found in run_ranks(run_each, 2, tmp_path, calls):
        # bf16 and FP8 of the widest; backward: and the gradients, in bf16
        assert found[False] == pytest.approx([2 + 2 / 3, 2 + 2 / 3, 4 + 2 / 3], abs=0.1)
        assert found[True] == pytest.approx([1 + 2 / 3, 1 + 2 / 3, 3 + 1 / 3], abs=0.12)
