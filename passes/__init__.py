"""The passes, one per file or folder. This list is the pipeline, and the only statement of its order.

A pass is a function ``(graph, compilation) -> None`` that takes a valid graph and leaves a valid one
(``fp8graph.ir.verify``). Beside one that few graphs need stands a function with the same arguments, which says whether
a graph does: it asks what users set, what `assign` decided, or what is in the graph. Beside one that takes inputs
stands a function that estimates their number from Dynamo's graph, before anything is traced. To add a pass: write
``passes/<name>.py`` with its docstring ``before -> after``, put it in the list, and give it a text test in
``tests/passes/``.
"""

if __name__ != "fp8graph.passes":
    raise ImportError(f"import fp8graph.passes, not {__name__}")

from collections.abc import Callable, Mapping, Sequence
from inspect import isfunction
from typing import Any, NamedTuple, TypedDict

from torch import fx

from fp8graph.ir.compilation import Compilation, GraphFacts
from fp8graph.ir.sites import Foreseen
from fp8graph.passes.account import account, has_other_products
from fp8graph.passes.accumulate_wgrad import MainGrads, accumulate_wgrad, accumulates, wanted_gradients
from fp8graph.passes.assign import assign
from fp8graph.passes.attention.find import find_attention, may_have_attention
from fp8graph.passes.attention.ops import active_implementation
from fp8graph.passes.attention.quantize import is_attention_quantized, quantize_attention
from fp8graph.passes.batch_invariance.fix_order import fix_order, is_batch_invariant, refuse_batches
from fp8graph.passes.batch_invariance.fix_sums import fix_sums, sums_on_gpu
from fp8graph.passes.cast_in_tiles import cast_in_tiles
from fp8graph.passes.connect_scales import connect_scales, has_state, wanted_pages
from fp8graph.passes.connect_scales.scaling_state import ScalingState
from fp8graph.passes.dequantize_backward import dequantize_backward, dequantizes
from fp8graph.passes.fold import fold, has_stored_weights
from fp8graph.passes.fuse_linears import are_fused, fuse_linears
from fp8graph.passes.fuse_stored_linears import fuse_stored_linears, may_be_joined, wanted_joins
from fp8graph.passes.gather_in_fp8 import gather_in_fp8, gathers
from fp8graph.passes.gather_weights import are_gathered, gather_weights
from fp8graph.passes.gather_weights.sent_weights import SentWeights
from fp8graph.passes.hoist_weights import hoist_weights, may_be_exported, may_keep_weights, note_weights, wanted_copies
from fp8graph.passes.hoist_weights.weight_cache import WeightCache
from fp8graph.passes.lower import lower
from fp8graph.passes.match import match
from fp8graph.passes.observe import is_observed, observe, wanted_statistics
from fp8graph.passes.observe.guard import Guarded, GuardMethods
from fp8graph.passes.observe.observation import Observation
from fp8graph.passes.observe.score import Scores, is_scored, score
from fp8graph.passes.observe.statistics import ObserveMethods, Observing
from fp8graph.passes.order_groups import has_groups, order_groups
from fp8graph.passes.order_scales import has_tiles, order_scales
from fp8graph.passes.prepare_fp4 import prepare_fp4, rotates_or_draws
from fp8graph.passes.quantize import quantize
from fp8graph.passes.recognize import has_fp8_inputs, recognize
from fp8graph.passes.route_in_fp8 import moves_rows, route_in_fp8
from fp8graph.passes.save_for_backward import has_backward, save_for_backward
from fp8graph.passes.share import share
from fp8graph.passes.share_sigmoid import share_sigmoid
from fp8graph.passes.split_decoding import is_split, join_decoding, multiplies_codes, split_decoding
from fp8graph.passes.store_once import store_once
from fp8graph.passes.unpack import has_hidden_matmuls, unpack
from fp8graph.passes.use_small_tiles import may_use_small_tiles, use_small_tiles, wanted_repeats
from fp8graph.passes.write import write
from fp8graph.runtime.stores import Starter, Store


class Pass(NamedTuple):
    """An entry of the pipeline: a function that runs on the graphs which need it."""

    run: Callable[[fx.Graph, Compilation], None]
    needed: Callable[[fx.Graph, Compilation], bool] = lambda graph, compilation: True
    wants: Callable[[Callable[[], Sequence[Foreseen]], GraphFacts], int] = lambda foreseen, facts: 0  # see foresee
    again: str = ""  # the name of a second run
    reads: Callable[[], Any] = lambda: None  # the part of the process that decides, too: it is in the cache key

    @property
    def name(self) -> str:
        """The name of its stage in the report."""
        return self.again or self.run.__name__


# Runs on the joint forward + backward graph (or the forward graph of inference), before the partitioner.
JOINT_PIPELINE: tuple[Pass, ...] = (
    Pass(unpack, has_hidden_matmuls),
    Pass(recognize, has_fp8_inputs),
    Pass(split_decoding, multiplies_codes),
    Pass(match),
    Pass(assign),
    Pass(join_decoding, is_split),
    Pass(find_attention, may_have_attention, reads=active_implementation),
    Pass(account, has_other_products),
    Pass(refuse_batches, is_batch_invariant),
    Pass(score, is_scored),
    Pass(quantize),
    Pass(fold, has_stored_weights),
    Pass(share),
    Pass(dequantize_backward, dequantizes),
    Pass(route_in_fp8, moves_rows),
    Pass(share, moves_rows, again="share_tokens"),  # those that a shared expert reads may be those that are routed
    Pass(gather_in_fp8, gathers),
    Pass(fuse_linears, are_fused),
    Pass(fuse_stored_linears, may_be_joined, wants=wanted_joins),
    Pass(use_small_tiles, may_use_small_tiles, wants=wanted_repeats),
    Pass(prepare_fp4, rotates_or_draws),
    Pass(observe, is_observed, wants=wanted_statistics),
    Pass(gather_weights, are_gathered),
    Pass(order_groups, has_groups),
    Pass(order_scales, has_tiles),
    Pass(hoist_weights, may_keep_weights, wants=wanted_copies),
    Pass(note_weights, may_be_exported),
    Pass(connect_scales, has_state, wants=wanted_pages),
    Pass(accumulate_wgrad, accumulates, wants=wanted_gradients),
    Pass(save_for_backward, has_backward),
    Pass(quantize_attention, is_attention_quantized),
    Pass(fix_order, is_batch_invariant),
    Pass(fix_sums, sums_on_gpu),
)

# Runs on the forward graph and on the backward graph, after the partitioner: the dialect stays opaque to the
# min-cut, which therefore saves FP8 tensors as they are.
LOWERING: tuple[Callable[[fx.Graph], None], ...] = (cast_in_tiles, lower, share_sigmoid, store_once)

# Runs on a graph that quantizes weights and writes the results into their kept copies, all by Inductor's kernels.
WEIGHT_LOWERING: tuple[Callable[[fx.Graph], None], ...] = (
    *(run for run in LOWERING if run is not cast_in_tiles),
    write,
)

# Keep the tensors that graphs take because one of these passes wants them. A call asks them in this order.
STORES: tuple[type[Store], ...] = (
    SentWeights,
    ScalingState,
    WeightCache,
    MainGrads,
    Observation,
    Observing,
    Guarded,
    Scores,
)


class BackendMethods(
    ObserveMethods,
    GuardMethods,
    Starter,
):
    """The methods and properties that these passes add to a backend."""


# The functions among them: arguments of ``Backend`` with the same names, and tables of policy files, call them.
METHODS: tuple[str, ...] = tuple(
    name
    for kind in BackendMethods.__bases__
    for name, value in vars(kind).items()
    if kind is not Starter and isfunction(value)
)


class MethodArguments(TypedDict, total=False):
    """The arguments of ``Backend`` that call them, for editors and type checkers."""

    observe: Mapping[str, Any] | None
    guard: Mapping[str, Any] | None


__all__ = [
    "JOINT_PIPELINE", "LOWERING", "METHODS", "STORES", "WEIGHT_LOWERING", "BackendMethods", "MethodArguments", "Pass",
]  # fmt: skip
