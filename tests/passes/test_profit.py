"""profit: what pays alone, and together with those that it shares a quantization with."""

from __future__ import annotations

import dataclasses

from fp8graph.passes.assign.profit import Quantized, Uses, judge
from predicted import H200, REPLAYED, linear


def test_a_refused_gemm_pays_nothing() -> None:
    """fprop and dgrad would pass at first sight, with half of x and of dy paid by a wgrad that is refused."""
    choices = linear(1024, 2048, 1024, "tensor", REPLAYED)
    first = {name: c.seconds() / c.fp8_seconds(Uses(list(choices.values()))) for name, c in choices.items()}
    bar = 0.9 * first["dgrad"]
    assert first["wgrad"] < bar < first["dgrad"]
    alone = judge([choices["dgrad"]], bar)[choices["dgrad"]]
    assert alone < bar
    found = judge(list(choices.values()), bar)
    assert found[choices["dgrad"]] == alone
    assert found[choices["wgrad"]] == first["wgrad"]


def test_accepted_gemms_pass_together() -> None:
    for m in (256, 512, 1024, 2048):
        choices = linear(m, 2048, 2048, "tensor", REPLAYED)
        found = judge(list(choices.values()), 1.05)
        accepted = [choice for choice in choices.values() if found[choice] >= 1.05]
        uses = Uses(accepted)
        assert sum(c.seconds() for c in accepted) >= 1.05 * sum(c.fp8_seconds(uses) for c in accepted)


def test_a_bar_of_zero_refuses_nothing() -> None:
    choices = list(linear(1, 32, 32, "tensor", H200).values())
    uses = Uses(choices)
    assert judge(choices, 0) == {c: c.seconds() / c.fp8_seconds(uses) for c in choices}


def test_gemm_without_speed_runs_in_fp8_and_shares_the_cost() -> None:
    """A GEMM of a device whose speed is not known is never refused; it pays its part of a quantization."""
    fprop = linear(64, 1024, 1024, "tensor", REPLAYED)["fprop"]
    of_unknown = dataclasses.replace(fprop, speed=None)
    alone, shared = (judge(choices, 0)[fprop] for choices in ([fprop], [fprop, of_unknown]))
    assert alone < shared
    assert judge([fprop, of_unknown], shared) == {fprop: shared}
    refused = linear(1, 32, 32, "tensor", H200)["dgrad"]  # the others are asked again without it
    assert judge([fprop, of_unknown, refused], shared)[fprop] == shared


def test_readers_of_a_quantization_are_counted_with_their_layouts() -> None:
    """x is read by fprop and, columnwise, by wgrad; w by fprop and, columnwise, by dgrad."""
    choices = linear(64, 128, 256, "tensor", H200)
    both = Uses(list(choices.values())).operand(Quantized(key="x", elements=64 * 128))
    alone = Uses([choices["fprop"]]).operand(Quantized(key="w", elements=5, fused=False, kept=True))
    assert (both.users, both.layouts, both.elements) == (2, {"rowwise", "columnwise"}, 64 * 128)
    assert (alone.users, alone.layouts, alone.elements, alone.fused, alone.kept) == (1, {"rowwise"}, 5, False, True)
